//! States off the device by logical element.

use std::collections::BTreeMap;
use std::ops::Range;

use tch::{Kind, Tensor};
use zf_sys::storage::slice;

use super::columns::Block;
use super::pack::{gather, scatter};
use super::saved::{PENDING, SUMS, VISIBLE};
use super::{Offloading, Part};
use crate::engine::flat::{FlatState, int, narrow};
use crate::stage::HostPool;
use crate::{Error, Result};

/// Copies elements `range` (of the flat buffer, within one block) of a rule's state into a tensor of the host, float32.
pub(super) fn rows(
    pool: &mut dyn HostPool,
    part: &Part,
    index: usize,
    state: usize,
    range: &Range<usize>,
) -> Result<Tensor> {
    let (at, block) = block_of(part, range)?;
    let mut values = vec![0f32; block.range.len()];
    pool.read(index, 1 + state, block.first..block.first + block.range.len(), &mut values)?;
    read_rows(part, at, 1 + state, values, range)
}

/// The block that holds elements `range` of the flat buffer.
fn block_of<'a>(part: &'a Part, range: &Range<usize>) -> Result<(usize, &'a Block)> {
    let mut blocks = part.split.columns.blocks.iter().enumerate();
    blocks
        .find(|(_, block)| block.range.start <= range.start && range.end <= block.range.end)
        .ok_or_else(|| Error::Engine(format!("elements {range:?} are not owned here")))
}

/// Elements in the flat buffer's order from the host's values of a whole block in column order, with what is on the device in
/// its place.
fn read_rows(part: &Part, at: usize, array: usize, values: Vec<f32>, range: &Range<usize>) -> Result<Tensor> {
    let block = &part.split.columns.blocks[at];
    let whole = block.first..block.first + block.range.len();
    let mut values = Tensor::f_from_slice(&values)?;
    let here: Vec<Range<usize>> = within(&part.split.device, &whole);
    let device = part.device.array(&part.split, &here, array)?.f_to_device(tch::Device::Cpu)?;
    let mut from = 0;
    for range in &here {
        let place = range.start - whole.start..range.end - whole.start;
        narrow(&values, place)?.f_copy_(&narrow(&device, from..from + range.len())?)?;
        from += range.len();
    }
    if !block.in_order() {
        let rows = Tensor::f_empty([int(block.range.len())?], (Kind::Float, tch::Device::Cpu))?;
        scatter(&part.split.columns, &[whole], &values, &|_| Ok(rows.shallow_clone()))?;
        values = rows;
    }
    narrow(&values, range.start - block.range.start..range.end - block.range.start)
}

/// The parts of `ranges` within `whole`.
fn within(ranges: &[Range<usize>], whole: &Range<usize>) -> Vec<Range<usize>> {
    let first = ranges.partition_point(|range| range.end <= whole.start);
    let parts = ranges[first..].iter().take_while(|range| range.start < whole.end);
    parts.map(|range| range.start.max(whole.start)..range.end.min(whole.end)).collect()
}

impl Offloading {
    /// Whether the states of a flat buffer are here rather than with the flat buffer.
    pub(crate) fn holds(&self, flat: usize) -> bool {
        self.parts[flat].is_some()
    }

    /// The rule's states.
    pub(crate) fn states(&self) -> usize {
        self.optimizer.state().len()
    }

    /// Elements `range` of an array (0: masters, then the states) in the flat buffer's order, in host memory.
    pub(crate) fn read(&mut self, index: usize, array: usize, range: &Range<usize>) -> Result<Tensor> {
        let part = self.parts[index].as_ref().ok_or_else(|| Error::Engine("a frozen buffer has no states".into()))?;
        let (at, block) = block_of(part, range)?;
        let mut values = vec![0f32; block.range.len()];
        self.pool.read(index, array, block.first..block.first + block.range.len(), &mut values)?;
        read_rows(part, at, array, values, range)
    }

    /// Replaces elements `range`, which are all that this rank owns of a parameter in one piece.
    pub(crate) fn write(&mut self, index: usize, array: usize, range: &Range<usize>, values: &Tensor) -> Result<()> {
        let part = self.parts[index].as_ref().ok_or_else(|| Error::Engine("a frozen buffer has no states".into()))?;
        let (at, block) = block_of(part, range)?;
        if block.range != *range {
            return Err(Error::Engine(format!("elements {range:?} are not all of {:?}", block.range)));
        }
        let ordered = in_column_order(part, at, values)?;
        let whole = block.first..block.first + block.range.len();
        for here in within(&part.split.device, &whole) {
            let place = part.split.places(std::slice::from_ref(&here)).next().unwrap_or(0..0);
            let values = narrow(&ordered, here.start - whole.start..here.end - whole.start)?;
            narrow(&part.device.arrays[array], place)?.f_copy_(&values)?;
        }
        self.pool.write(index, array, whole, slice::<f32>(&ordered)?)
    }

    /// Waits until what was submitted is made, without making it visible.
    pub(crate) fn settle(&mut self, trace: &crate::trace::Trace) -> Result<()> {
        self.outbox.pack_all_of(None, &mut *self.pool, &self.link, trace)?;
        self.pool.settle()
    }

    /// By name, the updates of each column, where they differ; and of every parameter the most.
    pub(crate) fn counts(&self, flats: &[FlatState]) -> (BTreeMap<String, u64>, BTreeMap<String, Vec<u64>>) {
        let (mut most, mut each) = (BTreeMap::new(), BTreeMap::new());
        for (part, flat) in self.parts.iter().zip(flats) {
            let Some(part) = part else { continue };
            for (slot, counts) in flat.spec.slots.iter().zip(&part.split.counts) {
                most.insert(slot.name.clone(), counts.iter().copied().max().unwrap_or(0));
                if counts.windows(2).any(|pair| pair[0] != pair[1]) {
                    each.insert(slot.name.clone(), counts.clone());
                }
            }
        }
        (most, each)
    }

    /// Sets the updates of all columns of a parameter.
    pub(crate) fn set_count(&mut self, flat: usize, slot: usize, count: u64) {
        if let Some(part) = &mut self.parts[flat] {
            part.split.counts[slot].fill(count);
        }
    }

    /// Elements `range` of one of the tensors of [`Offloading::further`], in the flat buffer's order.
    pub(crate) fn read_further(
        &mut self,
        flat: &FlatState,
        index: usize,
        kind: &str,
        range: &Range<usize>,
    ) -> Result<Tensor> {
        if kind == VISIBLE {
            return Ok(flat.param(range)?.f_to_kind(Kind::Float)?);
        }
        let window = self.clock.window;
        let part = self.parts[index].as_ref().ok_or_else(|| Error::Engine("a frozen buffer has no window".into()))?;
        let (_, block) = block_of(part, range)?;
        let whole = block.first..block.first + block.range.len();
        let mut ordered = vec![0f32; whole.len()];
        let mut put = |range: &Range<usize>, values: &[f32]| {
            ordered[range.start - whole.start..range.end - whole.start].copy_from_slice(values);
        };
        if kind == PENDING && !self.held {
            for late in &part.late {
                let Some(grads) = &late.grads else { continue };
                let grads = grads.f_to_device(tch::Device::Cpu)?;
                copy_parts(&late.ranges, slice::<f32>(&grads)?, &whole, &mut put);
            }
        } else if let Some(sums) = part.sums.as_ref().filter(|_| kind == SUMS) {
            let sums = sums.f_to_device(tch::Device::Cpu)?;
            copy_parts(&part.split.host, slice::<f32>(&sums)?, &whole, &mut put);
        } else {
            let (window, landings) = if kind == SUMS { (window, self.outbox.pieces()) } else { (window - 1, 0) };
            let sums = self.pool.sums(window, landings, index)?;
            for range in within(&part.split.host, &whole) {
                put(&range, &sums[range.clone()]);
            }
        }
        let mut values = Tensor::f_from_slice(&ordered)?;
        if !block.in_order() {
            let rows = Tensor::f_empty([int(whole.len())?], (Kind::Float, tch::Device::Cpu))?;
            scatter(&part.split.columns, std::slice::from_ref(&whole), &values, &|_| Ok(rows.shallow_clone()))?;
            values = rows;
        }
        narrow(&values, range.start - block.range.start..range.end - block.range.start)
    }
}

/// Calls `put` with the parts of packed values that lie within `whole`.
fn copy_parts(
    ranges: &[Range<usize>],
    values: &[f32],
    whole: &Range<usize>,
    put: &mut dyn FnMut(&Range<usize>, &[f32]),
) {
    let mut at = 0;
    for range in ranges {
        let part = range.start.max(whole.start)..range.end.min(whole.end);
        if !part.is_empty() {
            let from = at + part.start - range.start;
            put(&part, &values[from..from + part.len()]);
        }
        at += range.len();
    }
}

/// Values of a whole block, from the flat buffer's order into column order, in host memory.
pub(super) fn in_column_order(part: &Part, at: usize, values: &Tensor) -> Result<Tensor> {
    let block = &part.split.columns.blocks[at];
    let values = values.f_to_device(tch::Device::Cpu)?.f_to_kind(Kind::Float)?.f_contiguous()?;
    let ordered = Tensor::f_empty([int(block.range.len())?], (Kind::Float, tch::Device::Cpu))?;
    let whole = block.first..block.first + block.range.len();
    gather(&part.split.columns, &[whole], &|_| Ok(values.shallow_clone()), &ordered)?;
    Ok(ordered)
}
