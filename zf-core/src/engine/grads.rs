//! Where the gradients of one flat buffer accumulate.

use std::ops::Range;

use tch::{Device, Kind, Tensor};
use zf_sys::heap::{Category, retag, tag};

use super::flat::{int, local_offset, narrow};
use super::reduction::Reduction;
use crate::layout::Flat;
use crate::norm::{SquareSum, square_sum};
use crate::{Error, Result};

/// Where gradients accumulate over the micro-batches of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GradPlan {
    /// There is one rank: they stay where autograd makes them and are given back after the update.
    Loose,
    /// In a full-size buffer, summed over ranks in the last micro-batch.
    Boundary,
    /// Each micro-batch is added into the accumulators of what this rank holds, see [`super::reduction`].
    Each,
}

impl GradPlan {
    /// Whether every micro-batch is reduced by itself.
    pub(crate) fn is_each(self) -> bool {
        matches!(self, Self::Each)
    }
}

/// The accumulated gradients of one flat on one rank.
#[derive(Debug)]
pub(crate) enum Grads {
    /// By slot, with the sum of squares where it was taken while the gradient was still in the cache.
    Loose { kind: Kind, device: Device, slots: Vec<Option<Tensor>>, squares: Vec<Option<SquareSum>> },
    /// Element e of the flat lies at e.
    Full(Tensor),
    /// The elements this rank holds, one range after the other.
    Held(Tensor),
}

impl Grads {
    /// Empty accumulators for a flat of which this rank holds the ranges `held`, in the type `kind`.
    pub(crate) fn new(plan: GradPlan, spec: &Flat, held: &[Range<usize>], kind: Kind, device: Device) -> Result<Self> {
        let _tag = tag(Category::Gradients);
        let zeros = |numel: usize, kind| Ok::<_, Error>(Tensor::f_zeros([int(numel)?], (kind, device))?);
        Ok(match plan {
            GradPlan::Loose => {
                let (slots, squares) = spec.slots.iter().map(|_| (None, None)).unzip();
                Self::Loose { kind, device, slots, squares }
            }
            GradPlan::Boundary => Self::Full(zeros(spec.numel, kind)?),
            GradPlan::Each => Self::Held(zeros(held.iter().map(ExactSizeIterator::len).sum(), kind)?),
        })
    }

    /// Takes the gradient of a slot for this step, or adds to it where there is one already (`again`). `last` says
    /// that no more is to come.
    pub(crate) fn take(&mut self, spec: &Flat, slot: usize, grad: &Tensor, again: bool, last: bool) -> Result<()> {
        match self {
            Self::Loose { kind, slots, squares, device } => {
                let sum = match slots[slot].take().filter(|_| again) {
                    Some(mut sum) => sum.f_add_(grad)?,
                    None => {
                        let grad = grad.f_to_kind(*kind)?.f_contiguous()?;
                        retag(&grad, Category::Gradients)?;
                        grad
                    }
                };
                let now = last && *kind == Kind::Float && !device.is_cuda();
                squares[slot] = now.then(|| squares_of(&sum)).transpose()?;
                slots[slot] = Some(sum);
            }
            Self::Full(buffer) => store(buffer, spec, slot, grad, again)?,
            Self::Held(_) => return Err(Error::Engine("a gradient came before it was reduced".into())),
        }
        Ok(())
    }

    /// The buffer of what this rank holds, one range after the other.
    pub(crate) fn held(&self) -> Result<&Tensor> {
        match self {
            Self::Full(buffer) | Self::Held(buffer) => Ok(buffer),
            Self::Loose { .. } => Err(Error::Engine("loose gradients have no buffer".into())),
        }
    }

    /// The full-size buffer.
    pub(crate) fn buffer(&self) -> Result<&Tensor> {
        match self {
            Self::Full(buffer) => Ok(buffer),
            _ => Err(Error::Engine("this rank holds no full-size gradient".into())),
        }
    }

    /// The accumulated gradient of elements `range`, which lie in one slot or in one range of `held`. Zeros where a slot
    /// had none.
    pub(crate) fn range(&self, spec: &Flat, held: &[Range<usize>], range: &Range<usize>) -> Result<Tensor> {
        match self {
            Self::Full(buffer) => narrow(buffer, range.clone()),
            Self::Held(buffer) => {
                let start = local_offset(held, range)?;
                narrow(buffer, start..start + range.len())
            }
            Self::Loose { kind, device, slots, .. } => {
                let holds =
                    |slot: &crate::layout::Slot| slot.offset <= range.start && range.end <= slot.offset + slot.numel;
                let index = spec.slots.iter().position(holds);
                let index = index.ok_or_else(|| Error::Engine(format!("no parameter holds elements {range:?}")))?;
                let start = range.start - spec.slots[index].offset;
                match &slots[index] {
                    Some(grad) => narrow(&grad.f_view([-1])?, start..start + range.len()),
                    None => Ok(Tensor::f_zeros([int(range.len())?], (*kind, *device))?),
                }
            }
        }
    }

    /// All of which this rank has the final sum (`summed`), in a few 1-D tensors.
    pub(crate) fn summed(&self, spec: &Flat, reduction: &Reduction) -> Result<Vec<Tensor>> {
        match self {
            Self::Loose { slots, .. } => slots.iter().flatten().map(|grad| Ok(grad.f_view([-1])?)).collect(),
            _ => reduction.summed.iter().map(|range| self.range(spec, &reduction.held, range)).collect(),
        }
    }

    /// Sum of squares of all of which this rank has the final sum.
    pub(crate) fn square_sum(&self, spec: &Flat, reduction: &Reduction) -> Result<SquareSum> {
        let mut sum = SquareSum::default();
        if let Self::Loose { slots, squares, .. } = self {
            for (grad, known) in slots.iter().zip(squares) {
                sum = match (known, grad) {
                    (Some(known), _) => sum.merge(*known),
                    (None, Some(grad)) => sum.merge(squares_of(grad)?),
                    (None, None) => sum,
                };
            }
        } else {
            for grad in self.summed(spec, reduction)? {
                sum = sum.merge(squares_of(&grad)?);
            }
        }
        Ok(sum)
    }

    /// Gives loose gradients back: no step is under way, and the next forward pass needs the memory.
    pub(crate) fn clear(&mut self) {
        if let Self::Loose { slots, squares, .. } = self {
            slots.fill_with(|| None);
            squares.fill(None);
        }
    }

    /// Lets go of loose gradients that somebody else keeps from now on. Their squares stay for the norm.
    pub(crate) fn depart(&mut self) {
        if let Self::Loose { slots, squares, .. } = self {
            slots.iter_mut().zip(squares).filter(|(_, known)| known.is_some()).for_each(|(slot, _)| *slot = None);
        }
    }
}

fn squares_of(grad: &Tensor) -> Result<SquareSum> {
    let grad = grad.f_to_kind(Kind::Float)?.f_to_device(Device::Cpu)?.f_view([-1])?;
    Ok(square_sum(zf_sys::storage::slice::<f32>(&grad)?))
}

/// Copies or adds the gradient of a slot into a buffer of the flat's size.
pub(crate) fn store(buffer: &Tensor, spec: &Flat, slot: usize, grad: &Tensor, again: bool) -> Result<()> {
    let slot = &spec.slots[slot];
    let mut target = narrow(buffer, slot.offset..slot.offset + slot.numel)?.f_view(slot.shape.as_slice())?;
    if again {
        let _ = target.f_add_(grad)?;
    } else {
        target.f_copy_(grad)?;
    }
    Ok(())
}
