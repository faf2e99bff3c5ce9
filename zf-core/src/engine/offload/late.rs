//! Updates of columns that were promoted before they saw them (`promotion = "late"`).

use std::ops::Range;

use tch::Tensor;

use super::Offloading;
use super::split::Split;
use super::window::Submitted;
use crate::Result;
use crate::engine::core::Core;
use crate::engine::flat::narrow;
use crate::stage::Hyper;

/// A pending update of columns that are on the device by now.
pub(super) struct Late {
    /// By slot and column: whether it is one of them; the same on all ranks.
    pub(super) columns: Vec<Vec<bool>>,
    /// This rank's elements of them, in column order.
    pub(super) ranges: Vec<Range<usize>>,
    /// Their summed gradients.
    pub(super) grads: Option<Tensor>,
    /// The numbers of the update, of this flat alone.
    pub(super) numbers: Submitted,
}

impl Late {
    /// The pending update of the columns `new` (by slot) of one flat, of which `grads` has the elements `ranges` of this rank.
    /// They are counted when it is applied.
    pub(super) fn new(
        split: &mut Split,
        submitted: &Submitted,
        index: usize,
        new: Vec<Vec<bool>>,
        ranges: &[Range<usize>],
        grads: Option<&Tensor>,
    ) -> Result<Option<Self>> {
        let touched = &submitted.touched[index];
        let mut columns = new;
        columns.iter_mut().zip(touched).filter(|(_, touched)| !**touched).for_each(|(new, _)| new.fill(false));
        if !columns.iter().flatten().any(|&late| late) {
            return Ok(None);
        }
        let (mut own, mut pieces, mut at) = (Vec::new(), Vec::new(), 0);
        for (block, range) in split.columns.by_block(ranges) {
            let here = at..at + range.len();
            at = here.end;
            if let Some(grads) = grads.filter(|_| touched[split.columns.blocks[block].slot]) {
                pieces.push(narrow(grads, here)?);
                own.push(range);
            }
        }
        let grads = if pieces.is_empty() { None } else { Some(Tensor::f_cat(&pieces, 0)?) };
        let numbers = Submitted { touched: Vec::new(), hypers: vec![submitted.hypers[index].clone()], ..*submitted };
        let late = Self { columns, ranges: own, grads, numbers };
        late.count(split, -1);
        Ok(Some(late))
    }

    fn count(&self, split: &mut Split, by: i64) {
        for (counts, late) in split.counts.iter_mut().zip(&self.columns) {
            for (count, _) in counts.iter_mut().zip(late).filter(|(_, late)| **late) {
                *count = count.saturating_add_signed(by);
            }
        }
    }

    /// Which of the elements, one after the other, are updated alike.
    fn alike(&self, split: &Split) -> Vec<(usize, Hyper)> {
        let mut alike: Vec<(usize, Hyper)> = Vec::new();
        for (block, range) in split.columns.by_block(&self.ranges) {
            let block = &split.columns.blocks[block];
            let mut at = range.start;
            while at < range.end {
                let column = block.column_of(at);
                let end = block.column(column).end.min(range.end);
                let hyper = self.numbers.hyper(0, block.slot, split.counts[block.slot][column]);
                match alike.last_mut() {
                    Some((len, same)) if *same == hyper => *len += end - at,
                    _ => alike.push((end - at, hyper)),
                }
                at = end;
            }
        }
        alike
    }
}

impl Offloading {
    /// Applies pending updates of columns that moved to the device, now that they become visible.
    pub(super) fn apply_late(&mut self, index: usize, core: &Core) -> Result<()> {
        let Some(part) = &mut self.parts[index] else { return Ok(()) };
        for late in std::mem::take(&mut part.late) {
            late.count(&mut part.split, 1);
            let alike = late.alike(&part.split);
            if let Some(grads) = &late.grads {
                let flat = &core.flats[index];
                let elements = (&late.ranges[..], &alike[..]);
                tch::no_grad(|| part.device.update(flat, &part.split, &*self.optimizer, elements, grads))?;
            }
        }
        Ok(())
    }
}
