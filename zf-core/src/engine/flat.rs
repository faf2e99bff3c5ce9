//! One flat buffer of one rank: parameters, accumulated gradients, masters and optimizer states.

use std::ops::Range;

use tch::{Device, Kind, Tensor};
use zf_sys::heap::{Category, tag};

use super::grads::{GradPlan, Grads};
use crate::layout::{Flat, Placement, Slot};
use crate::{Error, Result};

/// A range of a parameter that this rank updates.
#[derive(Debug, Clone)]
pub(crate) struct Segment {
    /// Index of the slot in the flat buffer.
    pub(crate) slot: usize,
    /// Elements of the flat buffer.
    pub(crate) range: Range<usize>,
    /// The same elements in this rank's optimizer state.
    pub(crate) local: Range<usize>,
}

/// Buffers of one flat on one rank.
#[derive(Debug)]
pub(crate) struct FlatState {
    pub(crate) spec: Flat,
    /// Who sums which gradients: every element exactly once over all ranks.
    pub(crate) reduction: Placement,
    /// The element ranges this rank sums.
    pub(crate) reduced: Vec<Range<usize>>,
    /// The element ranges whose states this rank owns.
    pub(crate) owned: Vec<Range<usize>>,
    /// Parameters, `[numel]` in the model's type.
    pub(crate) params: Tensor,
    /// Views of `params`, one a slot, leaves of autograd if trainable.
    pub(crate) leaves: Vec<Tensor>,
    /// Accumulated gradients; `None` for frozen parameters.
    pub(crate) grads: Option<Grads>,
    /// float32 masters of the owned elements; `None` where the parameter is its own master.
    master: Option<Tensor>,
    /// Optimizer states of the owned elements, float32.
    pub(crate) states: Vec<Tensor>,
    /// Updates made to each slot.
    pub(crate) counts: Vec<u64>,
}

impl FlatState {
    /// Allocates all buffers, zeroed, for `rank` of `world`.
    pub(crate) fn new(
        spec: &Flat,
        rank: usize,
        world: usize,
        plan: GradPlan,
        states: usize,
        device: Device,
    ) -> Result<Self> {
        let reduction = spec.reduction(world)?;
        let reduced: Vec<_> = reduction.ranges(reduction.member(rank)).collect();
        let owned: Vec<_> = spec.optim.ranges(spec.optim.member(rank)).collect();
        let zeros = |category, numel: usize, kind| {
            let _tag = tag(category);
            Tensor::f_zeros([int(numel)?], (kind, device)).map_err(Error::from)
        };
        let params = zeros(Category::Parameters, spec.numel, spec.dtype.kind())?;
        let leaves = spec.slots.iter().map(|slot| leaf(&params, slot, spec.trainable)).collect::<Result<Vec<_>>>()?;
        let owned_len = owned.iter().map(ExactSizeIterator::len).sum();
        let (mut grads, mut master, mut optim) = (None, None, Vec::new());
        if spec.trainable {
            grads = Some(Grads::new(plan, spec, &reduced, device)?);
            if spec.dtype.kind() != Kind::Float {
                master = Some(zeros(Category::Optimizer, owned_len, Kind::Float)?);
            }
            optim =
                (0..states).map(|_| zeros(Category::Optimizer, owned_len, Kind::Float)).collect::<Result<Vec<_>>>()?;
        }
        Ok(Self {
            spec: spec.clone(),
            reduction,
            reduced,
            owned,
            params,
            leaves,
            grads,
            master,
            states: optim,
            counts: vec![0; spec.slots.len()],
        })
    }

    /// The accumulated gradients.
    pub(crate) fn grads(&self) -> Result<&Grads> {
        self.grads.as_ref().ok_or_else(|| Error::Engine("a frozen parameter has no gradient".into()))
    }

    /// The accumulated gradient of elements `range`, within a slot or a range that this rank sums.
    pub(crate) fn grad(&self, range: &Range<usize>) -> Result<Tensor> {
        self.grads()?.range(&self.spec, &self.reduced, range)
    }

    /// The float32 masters of elements `range`, which this rank owns.
    pub(crate) fn master(&self, range: &Range<usize>) -> Result<Tensor> {
        match &self.master {
            None => narrow(&self.params, range.clone()),
            Some(master) => {
                let start = local_offset(&self.owned, range)?;
                narrow(master, start..start + range.len())
            }
        }
    }

    /// Whether masters are buffers of their own beside rounded parameters.
    pub(crate) fn has_master(&self) -> bool {
        self.master.is_some()
    }

    /// The parts of slots within `ranges` of the flat buffer, by element.
    pub(crate) fn segments(&self, ranges: &[Range<usize>]) -> Vec<Segment> {
        let mut segments = Vec::new();
        let mut local = 0;
        for range in ranges {
            for (slot, spec) in self.spec.slots.iter().enumerate() {
                let start = range.start.max(spec.offset);
                let end = range.end.min(spec.offset + spec.numel);
                if start < end {
                    let first = local + (start - range.start);
                    segments.push(Segment { slot, range: start..end, local: first..first + (end - start) });
                }
            }
            local += range.len();
        }
        segments
    }
}

impl Flat {
    /// The placement by which gradients are summed over `world` ranks: that of the optimizer states where they are
    /// sharded over all ranks, else equal parts.
    pub(crate) fn reduction(&self, world: usize) -> Result<Placement> {
        if self.optim.group() == world { Ok(self.optim.clone()) } else { Placement::even(self.numel, world) }
    }
}

/// Elements `range` of a 1-D tensor.
pub(crate) fn narrow(tensor: &Tensor, range: Range<usize>) -> Result<Tensor> {
    Ok(tensor.f_narrow(0, int(range.start)?, int(range.len())?)?)
}

/// A size as libtorch counts.
pub(crate) fn int(size: usize) -> Result<i64> {
    i64::try_from(size).map_err(|_| Error::Engine(format!("{size} elements are more than libtorch can count")))
}

/// The offset of `range` in the concatenation of `ranges`, one of which holds it.
pub(crate) fn local_offset(ranges: &[Range<usize>], range: &Range<usize>) -> Result<usize> {
    let mut local = 0;
    for owned in ranges {
        if owned.start <= range.start && range.end <= owned.end {
            return Ok(local + range.start - owned.start);
        }
        local += owned.len();
    }
    Err(Error::Engine(format!("elements {}..{} are not owned here", range.start, range.end)))
}

/// A parameter as a view of the flat buffer. It has its own version counter, so that writing the buffer between steps
/// does not disturb autograd; that nobody writes it within a step is the engine's first invariant.
fn leaf(params: &Tensor, slot: &Slot, trainable: bool) -> Result<Tensor> {
    let view = narrow(params, slot.offset..slot.offset + slot.numel)?.f_view(slot.shape.as_slice())?;
    let alias = zf_sys::autograd::variable_data(&view)?;
    Ok(if trainable { alias.f_set_requires_grad(true)? } else { alias })
}
