//! Masters and states of the columns that are on the device, and their update.

use std::ops::Range;

use half::{bf16, f16};
use tch::{Kind, Tensor};
use zf_sys::heap::{Category, tag};
use zf_sys::storage::{slice, slice_mut};

use super::columns::total;
use super::pack::{copy_places, gather, packed, scatter};
use super::split::Split;
use crate::engine::flat::{FlatState, int, narrow};
use crate::layout::DType;
use crate::stage::{HostSlice, Hyper, Optimizer, Out, TensorSlice};
use crate::{Error, Result};

/// The states of one flat buffer's columns on the device.
#[derive(Debug)]
pub(crate) struct DevicePart {
    /// Masters, then the rule's states: float32, the elements of [`Split::device`] one after the other.
    pub(crate) arrays: Vec<Tensor>,
}

/// The gradients of `ranges` (column order) in float32.
pub(crate) fn gradients(flat: &FlatState, split: &Split, ranges: &[Range<usize>]) -> Result<Tensor> {
    let _tag = tag(Category::Buffers);
    let grads = Tensor::f_empty([int(total(ranges))?], (Kind::Float, flat.device()))?;
    let rows = |block: usize| flat.grad(&split.columns.blocks[block].range);
    gather(&split.columns, ranges, &rows, &grads)?;
    Ok(grads)
}

/// Writes parameters: `values` of the model's type, of `ranges` in column order, one after the other.
pub(crate) fn write_parameters(
    flat: &FlatState,
    split: &Split,
    ranges: &[Range<usize>],
    values: &Tensor,
) -> Result<()> {
    scatter(&split.columns, ranges, values, &|block| flat.param(&split.columns.blocks[block].range))
}

impl DevicePart {
    /// Zeros.
    pub(crate) fn new(split: &Split, arrays: usize, device: tch::Device) -> Result<Self> {
        let _tag = tag(Category::Optimizer);
        let len = int(split.device_len())?;
        let zeros = |_| Tensor::f_zeros([len], (Kind::Float, device)).map_err(Error::from);
        Ok(Self { arrays: (0..arrays).map(zeros).collect::<Result<_>>()? })
    }

    /// Makes room for `len` elements: those at `from` go to `to`, pair by pair of the same length, the others are zero.
    pub(crate) fn rearrange(
        &mut self,
        len: usize,
        from: &[Range<usize>],
        to: &[Range<usize>],
        device: tch::Device,
    ) -> Result<()> {
        let _tag = tag(Category::Optimizer);
        for array in &mut self.arrays {
            let new = Tensor::f_zeros([int(len)?], (Kind::Float, device))?;
            copy_places(array, from, &new, to)?;
            *array = new;
        }
        Ok(())
    }

    /// Replaces the elements `ranges` (column order, on the device) of one array.
    pub(crate) fn put(&self, split: &Split, ranges: &[Range<usize>], array: usize, values: &Tensor) -> Result<()> {
        let places: Vec<Range<usize>> = split.places(ranges).collect();
        copy_places(values, &packed(&places), &self.arrays[array], &places)
    }

    /// Applies the rule to the elements `ranges` (column order) of `split.device` and writes the parameters. `parts` says how
    /// many of them one after the other are updated alike, `grads` are their gradients.
    pub(crate) fn update(
        &self,
        flat: &FlatState,
        split: &Split,
        optimizer: &dyn Optimizer,
        (ranges, parts): (&[Range<usize>], &[(usize, Hyper)]),
        grads: &Tensor,
    ) -> Result<()> {
        let rounds = flat.spec.dtype != DType::Float32;
        let out = {
            let _tag = tag(Category::Buffers);
            Tensor::f_empty([int(total(ranges))?], (flat.spec.dtype.kind(), flat.device()))?
        };
        // Neighbours of one kind are one call of the rule.
        let mut places: Vec<Range<usize>> = Vec::new();
        split.places(ranges).for_each(|place| super::columns::push(&mut places, place));
        let mut at = 0;
        let mut places = places.into_iter();
        let mut place = places.next().unwrap_or(0..0);
        for (len, hyper) in parts {
            let mut left = *len;
            while left > 0 {
                let len = left.min(place.len());
                if len == 0 {
                    place =
                        places.next().ok_or_else(|| Error::Engine("columns to update are not on the device".into()))?;
                    continue;
                }
                let own = place.start..place.start + len;
                let (grad, out) = (narrow(grads, at..at + len)?, narrow(&out, at..at + len)?);
                let arrays = self.arrays.iter().map(|array| narrow(array, own.clone())).collect::<Result<Vec<_>>>()?;
                apply(optimizer, hyper, &arrays, &grad, rounds.then_some(&out))?;
                if !rounds {
                    out.shallow_clone().f_copy_(&arrays[0])?;
                }
                (place.start, at, left) = (place.start + len, at + len, left - len);
            }
        }
        write_parameters(flat, split, ranges, &out)
    }

    /// Writes the parameters of `ranges` (column order, on the device) from their masters.
    pub(crate) fn publish(&self, flat: &FlatState, split: &Split, ranges: &[Range<usize>]) -> Result<()> {
        let masters = self.array(split, ranges, 0)?;
        write_parameters(flat, split, ranges, &masters.f_to_kind(flat.spec.dtype.kind())?)
    }

    /// The elements `ranges` (column order, on the device) of one array, one after the other.
    pub(crate) fn array(&self, split: &Split, ranges: &[Range<usize>], array: usize) -> Result<Tensor> {
        let array = &self.arrays[array];
        let places: Vec<Range<usize>> = split.places(ranges).collect();
        let values = Tensor::f_empty([int(total(&places))?], (Kind::Float, array.device()))?;
        copy_places(array, &places, &values, &packed(&places))?;
        Ok(values)
    }
}

/// Hands the rule the elements of one part.
fn apply(
    optimizer: &dyn Optimizer,
    hyper: &Hyper,
    arrays: &[Tensor],
    grad: &Tensor,
    out: Option<&Tensor>,
) -> Result<()> {
    let (master, states) = arrays.split_first().ok_or_else(|| Error::Engine("there is no master".into()))?;
    if grad.device().is_cuda() {
        let slice = TensorSlice { master, grad, state: states, out, sums: &[], shape: &[] };
        return tch::no_grad(|| optimizer.apply_tensor(&slice, hyper));
    }
    // SAFETY: the arrays and `out` are different memory of this rank's own, which only its thread uses.
    let mut slice = unsafe {
        HostSlice {
            master: slice_mut::<f32>(master)?,
            grad: slice::<f32>(grad)?,
            state: states.iter().map(|state| slice_mut::<f32>(state)).collect::<zf_sys::Result<_>>()?,
            out: match out {
                Some(out) if out.kind() == Kind::BFloat16 => Out::Bf16(slice_mut::<bf16>(out)?),
                Some(out) => Out::F16(slice_mut::<f16>(out)?),
                None => Out::None,
            },
            sums: &[],
            shape: &[],
        }
    };
    optimizer.apply(&mut slice, hyper)
}
