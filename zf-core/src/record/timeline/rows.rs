//! From the spans of a lane, which nest and overlap, to a row of rectangles side by side.

use std::collections::BTreeSet;
use std::ops::Range;

use super::Span;
use crate::trace::Lane;

/// Half a nanosecond: the clock has no shorter times, rounding in the file has.
const NOTHING: f64 = 5e-10;

/// Time with one label, or of several short spans beside each other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Segment {
    pub(super) start: f64,
    pub(super) end: f64,
    /// The label of the longest part.
    pub(super) label: usize,
    /// Parts with other labels.
    pub(super) more: usize,
    longest: f64,
}

impl Segment {
    fn new(start: f64, end: f64, label: usize) -> Self {
        Self { start, end, label, more: 0, longest: end - start }
    }
}

/// What `lane` did within `window`, without overlaps and in order: at each moment the span that began last. `spans` are
/// in the order of their beginnings.
pub(super) fn flatten(spans: &[Span], lane: Lane, window: Range<f64>) -> Vec<Segment> {
    let inside: Vec<Span> = spans[..spans.partition_point(|span| span.start < window.end)]
        .iter()
        .filter(|span| span.lane == lane)
        .map(|span| Span { start: span.start.max(window.start), end: span.end.min(window.end), ..*span })
        .filter(|span| span.start < span.end)
        .collect();
    // Where one ends and another begins, the end comes first.
    let mut turns: Vec<(f64, bool, usize)> = Vec::with_capacity(2 * inside.len());
    for (index, span) in inside.iter().enumerate() {
        turns.extend([(span.start, true, index), (span.end, false, index)]);
    }
    turns.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let (mut open, mut since, mut row) = (BTreeSet::<usize>::new(), window.start, Vec::<Segment>::new());
    for (time, begins, index) in turns {
        if let Some(&top) = open.last()
            && time - since > NOTHING
        {
            row.push(Segment::new(since, time, inside[top].label));
        }
        since = time;
        if begins {
            open.insert(index)
        } else {
            open.remove(&index)
        };
    }
    row
}

/// `row` without the time that `others` take. Both are without overlaps and in order.
pub(super) fn without(row: &[Segment], others: &[Segment]) -> Vec<Segment> {
    let (mut rest, mut next) = (Vec::with_capacity(row.len()), 0);
    for segment in row {
        let mut start = segment.start;
        while others.get(next).is_some_and(|other| other.end <= start) {
            next += 1;
        }
        for other in others[next..].iter().take_while(|other| other.start < segment.end) {
            if start < other.start {
                rest.push(Segment::new(start, other.start, segment.label));
            }
            start = start.max(other.end);
        }
        if start < segment.end {
            rest.push(Segment::new(start, segment.end, segment.label));
        }
    }
    rest
}

/// `row` with what is less than `distance` apart drawn as one, if it is the same or one of both is shorter than that.
pub(super) fn merge(row: &[Segment], distance: f64) -> Vec<Segment> {
    let short = |segment: &Segment| segment.end - segment.start < distance;
    let mut merged: Vec<Segment> = Vec::new();
    for &segment in row {
        match merged.last_mut() {
            Some(last)
                if segment.start - last.end < distance
                    && (segment.label == last.label || short(last) || short(&segment)) =>
            {
                last.end = segment.end;
                if segment.label == last.label {
                    last.longest += segment.longest;
                } else {
                    last.more += 1;
                    if last.longest < segment.longest {
                        (last.label, last.longest) = (segment.label, segment.longest);
                    }
                }
            }
            _ => merged.push(segment),
        }
    }
    merged
}
