//! Copies between a flat buffer's own order and column order.

use std::ops::Range;

use half::{bf16, f16};
use tch::{Kind, Tensor};
use zf_sys::storage::{Scalar, slice, slice_mut};

use super::columns::{Block, Columns};
use crate::engine::flat::narrow;
use crate::norm::{bf16_from_f32, f32_from_bf16, f32_from_f16};
use crate::{Error, Result};

/// The elements of each block, by its index, in the order of the flat buffer, 1-D.
pub(crate) type Rows<'a> = dyn Fn(usize) -> Result<Tensor> + 'a;

/// Collects `ranges` (column order) one after the other into `target`, float32 or bfloat16.
pub(crate) fn gather(columns: &Columns, ranges: &[Range<usize>], rows: &Rows<'_>, target: &Tensor) -> Result<()> {
    if target.device().is_cuda() {
        let mut at = 0;
        for (index, part) in columns.by_block(ranges) {
            let source = rows(index)?;
            let values = source.f_index_select(0, &places(&columns.blocks[index], &part, &source)?)?;
            narrow(target, at..at + part.len())?.f_copy_(&values)?;
            at += part.len();
        }
        return Ok(());
    }
    match target.kind() {
        Kind::Float => collect(columns, ranges, rows, target, |x| x, f32_from_bf16, f32_from_f16),
        Kind::BFloat16 => {
            collect(columns, ranges, rows, target, bf16_from_f32, |x| x, |x| bf16_from_f32(f32_from_f16(x)))
        }
        kind => Err(Error::Engine(format!("gradients cannot travel as {kind:?}"))),
    }
}

/// Puts `values`, of `ranges` in column order one after the other, into the rows of the blocks, which have the same type.
pub(crate) fn scatter(columns: &Columns, ranges: &[Range<usize>], values: &Tensor, rows: &Rows<'_>) -> Result<()> {
    if values.device().is_cuda() {
        let mut at = 0;
        for (index, part) in columns.by_block(ranges) {
            let mut target = rows(index)?;
            let places = places(&columns.blocks[index], &part, &target)?;
            let values = narrow(values, at..at + part.len())?;
            let _ = tch::no_grad(|| target.f_index_copy_(0, &places, &values))?;
            at += part.len();
        }
        return Ok(());
    }
    match values.kind() {
        Kind::Float => spread::<f32>(columns, ranges, values, rows),
        Kind::BFloat16 => spread::<bf16>(columns, ranges, values, rows),
        Kind::Half => spread::<f16>(columns, ranges, values, rows),
        kind => Err(Error::Engine(format!("parameters of type {kind:?} cannot be updated"))),
    }
}

/// Where ranges lie that are put one after the other.
pub(crate) fn packed(ranges: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut end = 0;
    let place = |range: &Range<usize>| {
        end += range.len();
        end - range.len()..end
    };
    ranges.iter().map(place).collect()
}

/// Copies the elements at `places` of a 1-D float32 tensor to `others` of another, pair by pair of the same length.
pub(crate) fn copy_places(from: &Tensor, places: &[Range<usize>], to: &Tensor, others: &[Range<usize>]) -> Result<()> {
    if to.device().is_cuda() {
        let values = from.f_index_select(0, &indices(places.iter().cloned().flatten(), from)?)?;
        let places = indices(others.iter().cloned().flatten(), to)?;
        let _ = tch::no_grad(|| to.shallow_clone().f_index_copy_(0, &places, &values))?;
        return Ok(());
    }
    let from = slice::<f32>(from)?;
    // SAFETY: both are different memory of this rank's own, which only its thread uses.
    let to = unsafe { slice_mut::<f32>(to)? };
    for (place, other) in places.iter().zip(others) {
        to[other.clone()].copy_from_slice(&from[place.clone()]);
    }
    Ok(())
}

/// Indices on the device of `like`.
fn indices(places: impl Iterator<Item = usize>, like: &Tensor) -> Result<Tensor> {
    let places: Vec<i64> = places.map(|place| i64::try_from(place).unwrap_or(i64::MAX)).collect();
    Ok(Tensor::f_from_slice(&places)?.f_to_device(like.device())?)
}

/// Keeps the rows of the block that was visited last.
struct Visit<'a> {
    rows: &'a Rows<'a>,
    last: Option<(usize, Tensor)>,
}

impl Visit<'_> {
    fn rows(&mut self, index: usize) -> Result<&Tensor> {
        if self.last.as_ref().is_none_or(|(last, _)| *last != index) {
            self.last = Some((index, (self.rows)(index)?));
        }
        self.last.as_ref().map(|(_, rows)| rows).ok_or_else(|| Error::Engine("no rows".into()))
    }
}

fn collect<T: Scalar>(
    columns: &Columns,
    ranges: &[Range<usize>],
    rows: &Rows<'_>,
    target: &Tensor,
    from_f32: impl Fn(f32) -> T + Copy,
    from_bf16: impl Fn(bf16) -> T + Copy,
    from_f16: impl Fn(f16) -> T + Copy,
) -> Result<()> {
    // SAFETY: `target` is a staging buffer or a temporary of the caller, which nothing else reads or writes meanwhile.
    let mut out = unsafe { slice_mut::<T>(target)? };
    let mut visit = Visit { rows, last: None };
    for (index, part) in columns.by_block(ranges) {
        let (here, rest) = out.split_at_mut(part.len());
        let (source, block) = (visit.rows(index)?, &columns.blocks[index]);
        match source.kind() {
            Kind::Float => block.gather(&part, slice::<f32>(source)?, here, from_f32),
            Kind::BFloat16 => block.gather(&part, slice::<bf16>(source)?, here, from_bf16),
            Kind::Half => block.gather(&part, slice::<f16>(source)?, here, from_f16),
            kind => return Err(Error::Engine(format!("gradients of type {kind:?} cannot be sent"))),
        }
        out = rest;
    }
    Ok(())
}

fn spread<T: Scalar>(columns: &Columns, ranges: &[Range<usize>], values: &Tensor, rows: &Rows<'_>) -> Result<()> {
    let mut values = slice::<T>(values)?;
    let mut visit = Visit { rows, last: None };
    for (index, part) in columns.by_block(ranges) {
        let (here, rest) = values.split_at(part.len());
        // SAFETY: the rows are parameters, written between the last backward of a step and the next forward by the rank's
        // own thread while no collective on them is in flight, or a temporary of the caller.
        let target = unsafe { slice_mut::<T>(visit.rows(index)?)? };
        columns.blocks[index].scatter(&part, here, target, |x| x);
        values = rest;
    }
    Ok(())
}

/// The elements of the block that `range` names, as indices on the device of `like`.
fn places(block: &Block, range: &Range<usize>, like: &Tensor) -> Result<Tensor> {
    let own: Vec<i64> = (0..i64::try_from(block.range.len()).unwrap_or(i64::MAX)).collect();
    let mut places = vec![0i64; range.len()];
    block.gather(range, &own, &mut places, |x| x);
    Ok(Tensor::f_from_slice(&places)?.f_to_device(like.device())?)
}
