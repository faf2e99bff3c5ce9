//! Columns that change their tier, with all their state.
//!
//! A column that becomes chosen takes a pending update first (flush), or brings the gradient of it along and applies it when it
//! would have become visible (late). Nothing is zeroed and nothing is rounded; counts stay where they are.

use std::ops::Range;
use std::time::{Duration, Instant};

use crossbeam_channel::bounded;
use tch::{Kind, Tensor};
use zf_sys::heap::{Category, tag};

use super::columns::total;
use super::device_part::DevicePart;
use super::split::Split;
use super::{Late, Offloading, Submitted};
use crate::engine::core::Core;
use crate::engine::flat::{int, narrow};
use crate::stage::{Arrived, Hyper, Link, Promotion, Transfer, Way};
use crate::{Error, Result};

/// How long the link may take for a move.
const PATIENCE: Duration = Duration::from_secs(600);

/// Ranges in column order, by flat buffer.
type Ranges = Vec<(usize, Vec<Range<usize>>)>;

impl Offloading {
    /// Makes `sets` (by flat, slot and column) the columns on the device.
    pub(super) fn move_columns(&mut self, core: &Core, sets: Vec<Option<Vec<Vec<bool>>>>) -> Result<()> {
        let (mut up, mut down): (Ranges, Ranges) = (Vec::new(), Vec::new());
        let mut changed = Vec::new();
        for (index, (part, set)) in self.parts.iter().zip(&sets).enumerate() {
            let (Some(part), Some(set)) = (part, set) else { continue };
            let (split, before) = (&part.split, &part.split.chosen);
            if before == set {
                continue;
            }
            changed.push(index);
            let demoted = split.columns.ranges(|slot, column| before[slot][column] && !set[slot][column]);
            let promoted = split.columns.ranges(|slot, column| !before[slot][column] && set[slot][column]);
            up.extend((!demoted.is_empty()).then_some((index, demoted)));
            down.extend((!promoted.is_empty()).then_some((index, promoted)));
        }
        if changed.is_empty() {
            return Ok(());
        }
        let _span = core.trace.span(crate::trace::Lane::Compute, "move columns");
        let late = self.held && self.policy.promotion == Promotion::Late;
        // The gradients of a pending update have to be on their way before anybody waits for it.
        self.outbox.pack_all_of(None, &mut *self.pool, &self.link, &core.trace)?;
        let started = Instant::now();
        let wait = (!down.is_empty()).then(|| core.trace.wait("wait", "the host to hand columns over"));
        // Taken before those that go up are announced, so that the two ways do not wait for each other.
        let taken = (!down.is_empty()).then(|| self.pool.take(&down, late)).transpose()?;
        if !up.is_empty() {
            self.send_up(up)?;
        }
        let mut arrived = Vec::new();
        if let Some(taken) = taken {
            self.withdraw(&taken.withdrawn)?;
            let values = bring_down(&*self.link, taken.values, core.device())?;
            let mut columns = Incoming { values, ranges: down, at: 0 };
            while let Some(next) = columns.next()? {
                arrived.push(next);
            }
            self.waited += started.elapsed();
        }
        drop(wait);
        let mut arrived = arrived.into_iter().peekable();
        for index in changed {
            let Some(set) = sets[index].clone() else { continue };
            let here = arrived.next_if(|(flat, ..)| *flat == index);
            let (ranges, values) = here.map(|(_, ranges, values)| (ranges, values)).unwrap_or_default();
            self.settle_in(core, index, set, &ranges, values, late)?;
        }
        Ok(())
    }

    /// Elements whose update was not made when they were taken: their parameters will not arrive.
    fn withdraw(&mut self, withdrawn: &[usize]) -> Result<()> {
        for (index, withdrawn) in withdrawn.iter().enumerate() {
            let expected = &mut self.pending.as_mut().unwrap_or(&mut self.arriving).elements[index];
            *expected = expected.checked_sub(*withdrawn).ok_or_else(|| {
                Error::Engine(format!(
                    "the host withdrew {withdrawn} parameters of buffer {index}, more than were to come"
                ))
            })?;
        }
        Ok(())
    }

    /// Sends the states of columns on the device to the host.
    fn send_up(&mut self, elements: Ranges) -> Result<()> {
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

    /// Rebuilds one flat's device part with the columns of `set`, of which those of `promoted` have just arrived: `values` by
    /// array, and last their pending gradients if `late`.
    fn settle_in(
        &mut self,
        core: &Core,
        index: usize,
        set: Vec<Vec<bool>>,
        promoted: &[Range<usize>],
        mut values: Vec<Tensor>,
        late: bool,
    ) -> Result<()> {
        let Some(part) = &mut self.parts[index] else { return Ok(()) };
        let arrays = part.device.arrays.len();
        let grads = values.split_off(arrays.min(values.len())).pop();
        let split = &mut part.split;
        if let Some(submitted) = self.submitted.as_ref().filter(|_| late) {
            let before = split.chosen.clone();
            let new = |slot: usize, column: usize| set[slot][column] && !before[slot][column];
            part.late.extend(Late::new(split, submitted, index, &new, promoted, grads.as_ref())?);
        }
        let kept = split.columns.ranges(|slot, column| split.chosen[slot][column] && set[slot][column]);
        let old = std::mem::replace(&mut part.device, DevicePart { arrays: Vec::new() });
        let kept_values = (0..arrays).map(|array| old.array(split, &kept, array)).collect::<Result<Vec<_>>>()?;
        drop(old);
        split.chosen = set;
        split.resolve();
        let device = DevicePart::new(split, arrays, core.device())?;
        for (ranges, values) in [(&kept[..], &kept_values), (promoted, &values)] {
            for (array, values) in device.arrays.iter().zip(values) {
                let mut at = 0;
                for place in split.places(ranges) {
                    let len = place.len();
                    narrow(array, place)?.f_copy_(&narrow(values, at..at + len)?)?;
                    at += len;
                }
            }
        }
        part.device = device;
        tch::no_grad(|| part.device.publish(&core.flats[index], &part.split, promoted))
    }

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

/// Brings values from host memory to the device.
fn bring_down(link: &dyn Link, from: Tensor, device: tch::Device) -> Result<Tensor> {
    let _tag = tag(Category::Buffers);
    let to = Tensor::f_empty([int(from.numel())?], (Kind::Float, device))?;
    let (sender, receiver) = bounded(1);
    let done = Box::new(move |result: Result<Arrived>| {
        // Whoever waits may have given up.
        let _ = sender.send(result.map(|arrived| arrived.to));
    });
    link.issue(Transfer { way: Way::ToDevice, from, to, label: "columns".into(), moves: true, done })?;
    receiver
        .recv_timeout(PATIENCE)
        .map_err(|_| Error::Engine(format!("the link did not bring columns within {} s", PATIENCE.as_secs())))?
}

/// States that came down in one tensor: array by array, and within each by flat buffer.
struct Incoming {
    values: Tensor,
    ranges: Ranges,
    at: usize,
}

impl Incoming {
    /// The next flat buffer: index, ranges, values by array.
    fn next(&mut self) -> Result<Option<(usize, Vec<Range<usize>>, Vec<Tensor>)>> {
        let all: usize = self.ranges.iter().map(|(_, ranges)| total(ranges)).sum();
        let before: usize = self.ranges[..self.at].iter().map(|(_, ranges)| total(ranges)).sum();
        let Some((index, ranges)) = self.ranges.get(self.at) else { return Ok(None) };
        self.at += 1;
        let arrays = self.values.numel() / all.max(1);
        let own = |array: usize| narrow(&self.values, array * all + before..array * all + before + total(ranges));
        Ok(Some((*index, ranges.clone(), (0..arrays).map(own).collect::<Result<_>>()?)))
    }
}

impl Late {
    /// The pending update of the columns `new` of one flat, of which `grads` has the elements `ranges` of this rank. They
    /// are counted when it is applied.
    fn new(
        split: &mut Split,
        submitted: &Submitted,
        index: usize,
        new: &dyn Fn(usize, usize) -> bool,
        ranges: &[Range<usize>],
        grads: Option<&Tensor>,
    ) -> Result<Option<Self>> {
        let touched = &submitted.touched[index];
        let column = |slot: usize| (0..split.chosen[slot].len()).map(move |column| touched[slot] && new(slot, column));
        let columns: Vec<Vec<bool>> = (0..split.chosen.len()).map(|slot| column(slot).collect()).collect();
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
