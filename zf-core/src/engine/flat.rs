//! One flat buffer of one rank: parameters, accumulated gradients, masters and optimizer states.

use std::ops::Range;

use tch::{Device, Kind, Tensor};
use zf_sys::heap::{Category, tag};

use super::grads::{GradPlan, Grads};
use super::host::Host;
use super::party;
use super::reduction::{Reduction, When};
use crate::config::Accumulate;
use crate::layout::{Flat, Slot};
use crate::{Error, Result};

/// A range of a parameter within a list of element ranges.
#[derive(Debug, Clone)]
pub(crate) struct Segment {
    /// Index of the slot in the flat buffer.
    pub(crate) slot: usize,
    /// Elements of the flat buffer.
    pub(crate) range: Range<usize>,
}

/// Buffers of one flat on one rank.
#[derive(Debug)]
pub(crate) struct FlatState {
    pub(crate) spec: Flat,
    /// How its gradients are summed.
    pub(crate) reduction: Reduction,
    /// The element ranges whose states this rank owns.
    pub(crate) owned: Vec<Range<usize>>,
    /// The element ranges whose parameters this rank keeps.
    pub(crate) kept: Vec<Range<usize>>,
    /// Kept parameters in the model's type, one range after the other.
    pub(crate) home: Tensor,
    /// All parameters, `[numel]`: the same as `home` where this rank keeps everything on the device; else memory that is
    /// there only while the unit is gathered.
    pub(crate) params: Tensor,
    /// Whether they are not the same.
    apart: bool,
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
    /// Allocates all buffers, zeroed. Without `states` masters and states are kept elsewhere; with a `host` parameters
    /// lie there.
    pub(crate) fn new(
        spec: &Flat,
        [rank, world]: [usize; 2],
        (when, plan): (When, GradPlan),
        accumulate: Accumulate,
        states: Option<usize>,
        host: Option<&Host>,
        device: Device,
    ) -> Result<Self> {
        party::check(spec, world)?;
        let reduction = Reduction::new(spec, rank, world, when)?;
        let (owned, kept) = (party::ranges(&spec.optim, rank), party::ranges(&spec.params, rank));
        let len = |ranges: &[Range<usize>]| ranges.iter().map(ExactSizeIterator::len).sum();
        let zeros = |category, numel: usize, kind| {
            let _tag = tag(category);
            Tensor::f_zeros([int(numel)?], (kind, device)).map_err(Error::from)
        };
        let home = match host {
            Some(host) => host.zeros(Category::Parameters, len(&kept), spec.dtype.kind())?,
            None => zeros(Category::Parameters, len(&kept), spec.dtype.kind())?,
        };
        let apart = host.is_some() || spec.params.group() > 1;
        let params = match apart {
            false => home.shallow_clone(),
            true => zeros(Category::Buffers, spec.numel, spec.dtype.kind())?,
        };
        let leaves = spec.slots.iter().map(|slot| leaf(&params, slot, spec.trainable)).collect::<Result<Vec<_>>>()?;
        let (mut grads, mut master, mut optim) = (None, None, Vec::new());
        if spec.trainable {
            let kind = match accumulate {
                Accumulate::Float32 => Kind::Float,
                Accumulate::Model => spec.dtype.kind(),
            };
            grads = Some(Grads::new(plan, spec, &reduction.held, kind, device)?);
            if spec.dtype.kind() != Kind::Float && states.is_some() {
                master = Some(zeros(Category::Optimizer, len(&owned), Kind::Float)?);
            }
            optim = (0..states.unwrap_or(0))
                .map(|_| zeros(Category::Optimizer, len(&owned), Kind::Float))
                .collect::<Result<Vec<_>>>()?;
        }
        let counts = vec![0; spec.slots.len()];
        let spec = spec.clone();
        let state =
            Self { spec, reduction, owned, kept, home, params, apart, leaves, grads, master, states: optim, counts };
        state.release()?;
        Ok(state)
    }

    /// Makes room for gathered parameters. Their values are undefined until a gather has filled them.
    pub(crate) fn make_room(&self) -> Result<()> {
        if self.apart {
            let _tag = tag(Category::Buffers);
            let bytes = self.spec.numel * self.spec.dtype.size();
            zf_sys::storage::resize_bytes(&self.params, bytes)?;
        }
        Ok(())
    }

    /// Gives the memory of gathered parameters back; views of it stay valid for the next time.
    pub(crate) fn release(&self) -> Result<()> {
        if self.apart {
            zf_sys::storage::resize_bytes(&self.params, 0)?;
        }
        Ok(())
    }

    /// Where forward and backward run.
    pub(crate) fn device(&self) -> Device {
        self.params.device()
    }

    /// The accumulated gradients.
    pub(crate) fn grads(&self) -> Result<&Grads> {
        self.grads.as_ref().ok_or_else(|| Error::Engine("a frozen parameter has no gradient".into()))
    }

    /// The accumulated gradient of elements `range`, within a slot or a range whose accumulator this rank holds.
    pub(crate) fn grad(&self, range: &Range<usize>) -> Result<Tensor> {
        self.grads()?.range(&self.spec, &self.reduction.held, range)
    }

    /// The parameters of elements `range`, which this rank keeps.
    pub(crate) fn param(&self, range: &Range<usize>) -> Result<Tensor> {
        let start = local_offset(&self.kept, range)?;
        narrow(&self.home, start..start + range.len())
    }

    /// The float32 masters of elements `range`, which this rank owns.
    pub(crate) fn master(&self, range: &Range<usize>) -> Result<Tensor> {
        match &self.master {
            None => self.param(range),
            Some(master) => {
                let start = local_offset(&self.owned, range)?;
                narrow(master, start..start + range.len())
            }
        }
    }

    /// Optimizer state number `index` of elements `range`, which this rank owns.
    pub(crate) fn state(&self, index: usize, range: &Range<usize>) -> Result<Tensor> {
        let start = local_offset(&self.owned, range)?;
        narrow(&self.states[index], start..start + range.len())
    }

    /// Books one more update of the chosen slots.
    pub(crate) fn count(&mut self, chosen: &[bool]) {
        for (count, _) in self.counts.iter_mut().zip(chosen).filter(|(_, chosen)| **chosen) {
            *count += 1;
        }
    }

    /// Whether masters are buffers of their own beside rounded parameters.
    pub(crate) fn has_master(&self) -> bool {
        self.master.is_some()
    }

    /// The parts of slots within `ranges` of the flat buffer, by element.
    pub(crate) fn segments(&self, ranges: &[Range<usize>]) -> Vec<Segment> {
        let mut segments = Vec::new();
        for range in ranges {
            for (slot, spec) in self.spec.slots.iter().enumerate() {
                let range = range.start.max(spec.offset)..range.end.min(spec.offset + spec.numel);
                if range.start < range.end {
                    segments.push(Segment { slot, range });
                }
            }
        }
        segments
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
    if range.is_empty() {
        return Ok(0);
    }
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
