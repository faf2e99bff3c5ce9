//! Columns that change their tier, with all their state.
//!
//! A column that becomes chosen takes a pending update first (flush), or brings the gradient of it along and applies it when it
//! would have become visible (late). Nothing is zeroed and nothing is rounded; counts stay where they are.

use std::ops::Range;

use tch::{Kind, Tensor};
use zf_sys::heap::{Category, tag};

use super::Offloading;
use super::columns::total;
use super::late::Late;
use crate::engine::core::Core;
use crate::stage::{Arrived, Promotion, Transfer, Way};
use crate::{Error, Result};

/// What changes in one flat buffer.
struct Move {
    flat: usize,
    /// By slot and column: what is to be on the device.
    set: Vec<Vec<bool>>,
    /// By slot and column: what becomes chosen; the same on all ranks, as `set`.
    promoted: Vec<Vec<bool>>,
    /// This rank's elements of what becomes chosen, in column order.
    down: Vec<Range<usize>>,
    /// And of what no longer is.
    up: Vec<Range<usize>>,
}

impl Offloading {
    /// Makes `sets` (by flat, slot and column) the columns on the device. States of promoted columns are on the way when this
    /// returns.
    pub(super) fn move_columns(&mut self, core: &Core, sets: Vec<Option<Vec<Vec<bool>>>>) -> Result<()> {
        let moves: Vec<Move> =
            sets.into_iter().enumerate().filter_map(|(flat, set)| self.between(flat, set?)).collect();
        if moves.is_empty() {
            return Ok(());
        }
        let _span = core.trace.span(crate::trace::Lane::Compute, "move columns");
        let late = self.held && self.policy.promotion == Promotion::Late;
        // Asked for before those that go up are announced, so that the two ways do not wait for each other.
        for change in &moves {
            self.ask_for(core, change.flat, &change.down, late)?;
        }
        self.send_up(moves.iter().map(|change| (change.flat, change.up.clone())).collect())?;
        for change in &moves {
            self.rearrange(core, change)?;
        }
        // The update that the pending gradients belong to may begin only when they are here.
        for Move { flat, promoted, down, .. } in moves.into_iter().filter(|_| late) {
            let grads = self.receive_columns(core, flat)?;
            let (Some(part), Some(submitted)) = (&mut self.parts[flat], &self.submitted) else { continue };
            part.late.extend(Late::new(&mut part.split, submitted, flat, promoted, &down, grads.as_ref())?);
        }
        Ok(())
    }

    /// What changes if `set` becomes a flat buffer's choice; none where nothing does.
    fn between(&self, flat: usize, set: Vec<Vec<bool>>) -> Option<Move> {
        let split = &self.parts[flat].as_ref()?.split;
        let before = &split.chosen;
        if *before == set {
            return None;
        }
        let new =
            |(set, before): (&Vec<bool>, &Vec<bool>)| set.iter().zip(before).map(|(set, was)| *set && !was).collect();
        let promoted: Vec<Vec<bool>> = set.iter().zip(before).map(new).collect();
        let down = split.columns.ranges(|slot, column| promoted[slot][column]);
        let up = split.columns.ranges(|slot, column| before[slot][column] && !set[slot][column]);
        Some(Move { flat, set, promoted, down, up })
    }

    /// Sends the states of columns on the device to the host.
    fn send_up(&mut self, mut elements: Vec<(usize, Vec<Range<usize>>)>) -> Result<()> {
        elements.retain(|(_, ranges)| !ranges.is_empty());
        if elements.is_empty() {
            return Ok(());
        }
        let _tag = tag(Category::Buffers);
        let mut pieces = Vec::new();
        for array in 0..1 + self.optimizer.state().len() {
            for (index, ranges) in &elements {
                let part = self.parts[*index]
                    .as_ref()
                    .ok_or_else(|| Error::Engine("a frozen buffer has no columns".into()))?;
                pieces.push(part.device.array(&part.split, ranges, array)?);
            }
        }
        let from = Tensor::f_cat(&pieces, 0)?;
        let to = {
            let _host = self.heap.enter();
            self.link.host_memory(from.numel(), Kind::Float)?
        };
        let take = self.pool.give(elements)?;
        let done = Box::new(move |result: Result<Arrived>| take(result.map(|arrived| arrived.to)));
        self.link.issue(Transfer { way: Way::ToHost, from, to, label: "columns".into(), moves: true, done })
    }

    /// Gives the columns of the new choice their places on the device. Those that were there keep their states.
    fn rearrange(&mut self, core: &Core, change: &Move) -> Result<()> {
        let Move { flat, set, promoted, down, .. } = change;
        let Some(part) = &mut self.parts[*flat] else { return Ok(()) };
        let split = &mut part.split;
        let kept = split.columns.ranges(|slot, column| split.chosen[slot][column] && set[slot][column]);
        let from: Vec<Range<usize>> = split.places(&kept).collect();
        split.chosen.clone_from(set);
        split.resolve();
        let to: Vec<Range<usize>> = split.places(&kept).collect();
        part.device.rearrange(split.device_len(), &from, &to, core.device())?;
        debug_assert_eq!(total(down) + total(&kept), split.device_len());
        self.arriving.anywhere[*flat] |= promoted.iter().flatten().any(|&promoted| promoted);
        Ok(())
    }
}
