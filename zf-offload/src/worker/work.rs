//! What is left of an update.

use std::collections::VecDeque;
use std::ops::Range;

use zf_core::stage::HostPart;

/// The parts of an update that are not made yet, in order.
#[derive(Debug, Default)]
pub(super) struct Work {
    parts: VecDeque<HostPart>,
}

impl Work {
    pub(super) fn new(parts: Vec<HostPart>) -> Self {
        Self { parts: parts.into() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Takes the next parts, all of one buffer and at most `limit` elements from the first to the last.
    pub(super) fn next(&mut self, limit: usize) -> Vec<HostPart> {
        let mut taken: Vec<HostPart> = Vec::new();
        while let Some(part) = self.parts.front_mut() {
            let start = taken.first().map_or(part.range.start, |first| first.range.start);
            let other = taken.first().is_some_and(|first| first.buffer != part.buffer);
            let ahead = taken.last().is_some_and(|last| last.range.end > part.range.start);
            let room = limit.max(1).saturating_sub(part.range.start.saturating_sub(start));
            if other || ahead || room == 0 {
                break;
            }
            if part.range.len() > room {
                let cut = part.range.start + room;
                taken.push(HostPart { range: part.range.start..cut, ..part.clone() });
                part.range.start = cut;
                break;
            }
            taken.extend(self.parts.pop_front());
        }
        taken
    }

    /// Takes the parts within `ranges` (ascending) of a buffer out, wherever they stand.
    pub(super) fn withdraw(&mut self, buffer: usize, ranges: &[Range<usize>]) -> Vec<HostPart> {
        let (mut taken, mut left) = (Vec::new(), VecDeque::with_capacity(self.parts.len()));
        for part in self.parts.drain(..) {
            if part.buffer != buffer {
                left.push_back(part);
                continue;
            }
            let mut rest = part.range.clone();
            let first = ranges.partition_point(|range| range.end <= rest.start);
            for range in ranges[first..].iter().take_while(|range| range.start < part.range.end) {
                let (start, end) = (range.start.max(rest.start), range.end.min(rest.end));
                if rest.start < start {
                    left.push_back(HostPart { range: rest.start..start, ..part.clone() });
                }
                taken.push(HostPart { range: start..end, ..part.clone() });
                rest.start = end;
            }
            if !rest.is_empty() {
                left.push_back(HostPart { range: rest, ..part });
            }
        }
        self.parts = left;
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn part(buffer: usize, range: Range<usize>) -> HostPart {
        HostPart { buffer, range, hyper: None }
    }

    #[test]
    fn parts_come_in_order_and_within_the_limit() {
        let mut work = Work::new(vec![part(0, 0..10), part(0, 12..14), part(0, 20..21), part(1, 0..3)]);
        assert_eq!(work.next(4), [part(0, 0..4)]);
        assert_eq!(work.next(9), [part(0, 4..10), part(0, 12..13)]);
        assert_eq!(work.next(100), [part(0, 13..14), part(0, 20..21)]);
        assert_eq!(work.next(100), [part(1, 0..3)]);
        assert!(work.is_empty() && work.next(5).is_empty());
    }

    proptest! {
        #[test]
        fn what_is_withdrawn_and_what_is_left_are_all(
            parts in prop::collection::vec((0usize..2, 0usize..40, 1usize..9), 0..12),
            mut cuts in prop::collection::vec((0usize..60, 1usize..9), 0..6),
        ) {
            let parts: Vec<HostPart> = parts.iter().map(|&(b, start, len)| part(b, start..start + len)).collect();
            cuts.sort_unstable();
            let mut ranges: Vec<Range<usize>> = Vec::new();
            for (start, len) in cuts {
                let start = start.max(ranges.last().map_or(0, |last| last.end));
                ranges.push(start..start + len);
            }
            let mut work = Work::new(parts.clone());
            let taken = work.withdraw(1, &ranges);
            let elements = |parts: &[HostPart]| -> Vec<(usize, usize)> {
                parts.iter().flat_map(|p| p.range.clone().map(|e| (p.buffer, e))).collect()
            };
            let inside = |&(b, e): &(usize, usize)| b == 1 && ranges.iter().any(|range| range.contains(&e));
            let left: Vec<HostPart> = work.parts.into_iter().collect();
            let (wanted_in, wanted_out): (Vec<_>, Vec<_>) = elements(&parts).into_iter().partition(inside);
            prop_assert_eq!(elements(&taken), wanted_in);
            prop_assert_eq!(elements(&left), wanted_out);
        }
    }
}
