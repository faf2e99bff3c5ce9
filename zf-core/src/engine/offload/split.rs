//! Which columns of one flat buffer are on the device and which with the host, and how often each was updated.

use std::ops::Range;
use std::sync::Arc;

use super::columns::{Columns, Shape, push, total};
use crate::engine::flat::FlatState;
use crate::stage::{Axis, Hyper, Keeps};

/// The split of one flat buffer on one rank. What is said of columns is the same on all ranks.
#[derive(Debug)]
pub(crate) struct Split {
    /// The owned elements in column order.
    pub(crate) columns: Arc<Columns>,
    /// By slot.
    pub(crate) shapes: Vec<Shape>,
    /// By slot and column: on the device.
    pub(crate) chosen: Vec<Vec<bool>>,
    /// By slot and column: updates made.
    pub(crate) counts: Vec<Vec<u64>>,
    /// Owned elements of columns on the device, in column order.
    pub(crate) device: Vec<Range<usize>>,
    /// Owned elements of the others.
    pub(crate) host: Vec<Range<usize>>,
}

impl Split {
    /// All columns with the host; with [`Keeps::Chosen`] what has no columns is on the device.
    pub(crate) fn new(flat: &FlatState, keeps: Keeps, axis: Axis, fold: bool) -> Self {
        let slots = &flat.spec.slots;
        let shape = |slot| if keeps == Keeps::Nothing { Shape::Whole } else { Shape::of(slot, axis, fold) };
        let shapes: Vec<Shape> = slots.iter().map(shape).collect();
        let owned = flat.segments(&flat.owned);
        let columns = Columns::new(slots, &shapes, owned.into_iter().map(|segment| (segment.slot, segment.range)));
        let count = |(shape, slot): (&Shape, &crate::layout::Slot)| shape.count(slot.numel);
        let sizes: Vec<usize> = shapes.iter().zip(slots).map(count).collect();
        let stays = |shape: &Shape| keeps == Keeps::Chosen && !shape.has_columns();
        let chosen = shapes.iter().zip(&sizes).map(|(shape, &size)| vec![stays(shape); size]).collect();
        let counts = sizes.iter().map(|&size| vec![0; size]).collect();
        let columns = Arc::new(columns);
        let mut split = Self { columns, shapes, chosen, counts, device: Vec::new(), host: Vec::new() };
        split.resolve();
        split
    }

    /// Reads the ranges off the chosen columns.
    pub(crate) fn resolve(&mut self) {
        self.device = self.columns.ranges(|slot, column| self.chosen[slot][column]);
        self.host = self.columns.ranges(|slot, column| !self.chosen[slot][column]);
    }

    /// Elements on the device.
    pub(crate) fn device_len(&self) -> usize {
        total(&self.device)
    }

    /// The columns of a slot that are on the device, ascending.
    pub(crate) fn chosen_columns(&self, slot: usize) -> Vec<u32> {
        let chosen = self.chosen[slot].iter().enumerate().filter(|(_, chosen)| **chosen);
        chosen.filter_map(|(column, _)| u32::try_from(column).ok()).collect()
    }

    /// The host's elements of wanted slots that are updated alike, in column order. `hyper` gives the numbers for a slot and
    /// a count.
    pub(crate) fn host_alike(
        &self,
        wanted: impl Fn(usize) -> bool,
        hyper: impl Fn(usize, u64) -> Hyper,
    ) -> Vec<(Range<usize>, Hyper)> {
        let mut parts: Vec<(Range<usize>, Hyper)> = Vec::new();
        self.walk(false, wanted, hyper, |range, hyper| match parts.last_mut() {
            Some((last, same)) if last.end == range.start && *same == hyper => last.end = range.end,
            _ => parts.push((range, hyper)),
        });
        parts
    }

    /// The device's elements of wanted slots of which `here` is true, in column order, and which of them are updated alike,
    /// counted among these elements.
    pub(crate) fn device_alike(
        &self,
        wanted: impl Fn(usize) -> bool,
        here: impl Fn(&Range<usize>) -> bool,
        hyper: impl Fn(usize, u64) -> Hyper,
    ) -> (Vec<Range<usize>>, Vec<(usize, Hyper)>) {
        let (mut ranges, mut parts): (Vec<Range<usize>>, Vec<(usize, Hyper)>) = (Vec::new(), Vec::new());
        self.walk(true, wanted, hyper, |range, hyper| {
            if !here(&range) {
                return;
            }
            match parts.last_mut() {
                Some((len, same)) if *same == hyper => *len += range.len(),
                _ => parts.push((range.len(), hyper)),
            }
            push(&mut ranges, range);
        });
        (ranges, parts)
    }

    /// Calls `f` with each column of the device's or the host's part that this rank owns elements of.
    fn walk(
        &self,
        device: bool,
        wanted: impl Fn(usize) -> bool,
        hyper: impl Fn(usize, u64) -> Hyper,
        mut f: impl FnMut(Range<usize>, Hyper),
    ) {
        for block in self.columns.blocks.iter().filter(|block| wanted(block.slot)) {
            for column in block.columns().filter(|&column| self.chosen[block.slot][column] == device) {
                let range = block.column(column);
                if !range.is_empty() {
                    f(range, hyper(block.slot, self.counts[block.slot][column]));
                }
            }
        }
    }

    /// Where elements of the device's part lie among all of it: `ranges` of column order, each within one of
    /// [`Split::device`].
    pub(crate) fn places<'a>(&'a self, ranges: &'a [Range<usize>]) -> impl Iterator<Item = Range<usize>> + 'a {
        let (mut index, mut before) = (0, 0);
        ranges.iter().map(move |range| {
            while self.device.get(index).is_some_and(|own| own.end <= range.start) {
                before += self.device[index].len();
                index += 1;
            }
            let start = before + self.device.get(index).map_or(0, |own| range.start - own.start);
            start..start + range.len()
        })
    }

    /// Books an update of all columns of the wanted slots that are on the device, or of the others.
    pub(crate) fn count(&mut self, device: bool, wanted: impl Fn(usize) -> bool) {
        for (slot, (counts, chosen)) in self.counts.iter_mut().zip(&self.chosen).enumerate() {
            if wanted(slot) {
                counts
                    .iter_mut()
                    .zip(chosen)
                    .filter(|(_, chosen)| **chosen == device)
                    .for_each(|(count, _)| *count += 1);
            }
        }
    }

    /// Whether a column of the wanted slots lies with the host of any rank.
    pub(crate) fn any_with_host(&self, wanted: impl Fn(usize) -> bool) -> bool {
        self.chosen.iter().enumerate().any(|(slot, chosen)| wanted(slot) && chosen.contains(&false))
    }

    /// The host's elements of the wanted slots.
    pub(crate) fn host_of(&self, wanted: impl Fn(usize) -> bool) -> Vec<Range<usize>> {
        self.columns.ranges(|slot, column| wanted(slot) && !self.chosen[slot][column])
    }

    /// The parts of `ranges` that lie with the host, and where among the elements of `ranges` each begins.
    pub(crate) fn still_with_host(&self, ranges: &[Range<usize>]) -> Vec<(Range<usize>, usize)> {
        let (mut parts, mut at) = (Vec::new(), 0);
        for range in ranges {
            let first = self.host.partition_point(|host| host.end <= range.start);
            for host in self.host[first..].iter().take_while(|host| host.start < range.end) {
                let part = host.start.max(range.start)..host.end.min(range.end);
                parts.push((part.clone(), at + part.start - range.start));
            }
            at += range.len();
        }
        parts
    }
}
