//! The engine as a model's forward pass sees it.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tch::{Device, Kind, Tensor};

use super::core::{Shared, lock};
use crate::model::{Context, Noise, Params, UnitFn};
use crate::{Error, Result};

/// Names and tensors of each unit's parameters, in the order of the unit's spec.
#[derive(Debug, Default)]
pub(crate) struct UnitParams {
    pub(crate) unit: String,
    pub(crate) root: bool,
    pub(crate) names: Vec<String>,
    pub(crate) tensors: Vec<Tensor>,
}

/// One forward pass of one rank.
pub(crate) struct Forward<'a> {
    shared: &'a Shared,
    units: &'a [UnitParams],
    noise: Noise,
    kind: Kind,
    device: Device,
    training: bool,
    trail: RefCell<Trail>,
    waited: Cell<Duration>,
}

/// Which units ran or were skipped, in order.
#[derive(Debug, Default)]
struct Trail {
    seen: Vec<bool>,
    hash: u64,
    /// Whether any unit that ran has a trained parameter.
    trained: bool,
}

impl<'a> Forward<'a> {
    pub(crate) fn new(
        shared: &'a Shared,
        units: &'a [UnitParams],
        noise: Noise,
        kind: Kind,
        device: Device,
        training: bool,
    ) -> Self {
        let trail = RefCell::new(Trail { seen: vec![false; units.len()], ..Trail::default() });
        Self { shared, units, noise, kind, device, training, trail, waited: Cell::new(Duration::ZERO) }
    }

    /// A hash of the units run and skipped, in order, and the time spent waiting for parameters.
    pub(crate) fn finish(self) -> (u64, Duration) {
        (self.trail.into_inner().hash, self.waited.get())
    }

    /// Has a unit that is freed between its passes gathered again when its backward begins: when the gradient of the first
    /// of its outputs is known. Returns the outputs and whether a backward will come.
    ///
    /// Every output gets a node of its own in autograd's graph: that of a unit that hands an input on would be the unit
    /// before's, whose backward would seem to begin first. Where anything up to here is trained, every output is attached,
    /// also on a rank that happens to use none of it: all ranks gather the same units in the same order.
    fn announce_backward(&self, unit: usize, outputs: Vec<Tensor>) -> Result<(Vec<Tensor>, bool)> {
        if !self.training || !lock(self.shared).residency.comes_and_goes(unit) {
            return Ok((outputs, false));
        }
        let (mut returns, trained) = (false, self.trail.borrow().trained);
        let mut announce = |output: Tensor| {
            let output = match output.requires_grad() {
                true => output.f_view_as(&output)?,
                false if trained && output.is_floating_point() => output.f_detach()?.f_set_requires_grad(true)?,
                false => return Ok(output),
            };
            let shared = Arc::downgrade(self.shared);
            let enter = move || match shared.upgrade() {
                Some(shared) => lock(&shared).enter_backward(unit).map_err(|error| error.to_string()),
                None => Err("a backward pass ran after its engine was dropped".into()),
            };
            zf_sys::autograd::on_output_grad(&output, Box::new(enter))?;
            returns = true;
            Ok::<_, Error>(output)
        };
        let outputs = outputs.into_iter().map(&mut announce).collect::<Result<Vec<_>>>()?;
        Ok((outputs, returns))
    }

    fn note(&self, unit: usize, skipped: bool) -> Result<&'a UnitParams> {
        let units = self.units;
        let params = units.get(unit).ok_or_else(|| {
            Error::Engine(format!("the model ran unit number {unit}, but it declares {} units", units.len()))
        })?;
        let mut trail = self.trail.borrow_mut();
        let again = std::mem::replace(&mut trail.seen[unit], true);
        if again && (skipped || !params.root) {
            return Err(Error::Engine(format!(
                "the model ran unit `{}` twice in one forward pass; declare it a root unit",
                params.unit
            )));
        }
        trail.trained |= !skipped && params.tensors.iter().any(Tensor::requires_grad);
        let event = (unit as u64) << 1 | u64::from(skipped);
        trail.hash = (trail.hash ^ event).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29).wrapping_add(1);
        Ok(params)
    }
}

impl Context for Forward<'_> {
    fn run(&self, unit: usize, inputs: &[Tensor], f: UnitFn) -> Result<Vec<Tensor>> {
        let params = self.note(unit, false)?;
        let start = Instant::now();
        lock(self.shared).enter_forward(unit)?;
        self.waited.set(self.waited.get() + start.elapsed());
        let outputs = f(&Params::new(&params.names, &params.tensors), inputs).map_err(|error| {
            let error = error.context(format!("unit `{}`", params.unit));
            Error::Plugin(error)
        })?;
        let (outputs, returns) = self.announce_backward(unit, outputs)?;
        lock(self.shared).leave_forward(unit, returns)?;
        Ok(outputs)
    }

    fn skip(&self, unit: usize) -> Result<()> {
        self.note(unit, true)?;
        lock(self.shared).skip_forward(unit)
    }

    fn training(&self) -> bool {
        self.training
    }

    fn noise(&self) -> Noise {
        self.noise
    }

    fn dtype(&self) -> Kind {
        self.kind
    }

    fn device(&self) -> Device {
        self.device
    }
}
