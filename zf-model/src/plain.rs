//! A context without an engine: parameters are ordinary leaf tensors, and a unit's closure simply runs.
//!
//! It is what a plain `tch` training loop would do, so it serves as the reference in tests and the yardstick in
//! benchmarks, and runs a model where nothing is trained.

use tch::{Device, Kind, Tensor};
use zf_core::model::{Context, Model, Noise, ParamSpec, Params, UnitFn};
use zf_core::weights::Weights;
use zf_core::{Error, Result};

/// One unit's parameters.
#[derive(Debug)]
struct PlainUnit {
    specs: Vec<ParamSpec>,
    names: Vec<String>,
    tensors: Vec<Tensor>,
}

/// All parameters of a model as leaf tensors.
#[derive(Debug)]
pub struct PlainContext {
    units: Vec<PlainUnit>,
    dtype: Kind,
    device: Device,
    /// Whether dropout applies.
    pub training: bool,
    /// The key of randomness; set the step before each forward pass if the model uses dropout.
    pub noise: Noise,
}

impl PlainContext {
    /// Loads every parameter of `model` from `weights`, one at a time, rounds it to `dtype` and moves it to `device`.
    /// Trainable ones require a gradient.
    ///
    /// # Errors
    /// Those of `weights`, and of libtorch.
    pub fn new(model: &dyn Model, weights: &dyn Weights, dtype: Kind, device: Device) -> Result<Self> {
        let mut units = Vec::new();
        for unit in model.units() {
            let tensors = unit
                .params
                .iter()
                .map(|spec| {
                    // A copy even where nothing changes: weights may hand out a shared tensor.
                    let tensor = weights.load(spec)?.f_to_device(device)?.f_to_dtype(dtype, false, true)?;
                    Ok(tensor.f_set_requires_grad(spec.trainable)?)
                })
                .collect::<Result<Vec<_>>>()?;
            let names = unit.params.iter().map(|spec| spec.name.clone()).collect();
            units.push(PlainUnit { specs: unit.params, names, tensors });
        }
        Ok(Self { units, dtype, device, training: true, noise: Noise { seed: 0, step: 0 } })
    }

    /// Every parameter in the order of the units, tied ones once.
    pub fn parameters(&self) -> impl Iterator<Item = (&ParamSpec, &Tensor)> {
        self.units.iter().flat_map(|unit| unit.specs.iter().zip(&unit.tensors))
    }
}

impl Context for PlainContext {
    fn run(&self, unit: usize, inputs: &[Tensor], f: UnitFn) -> Result<Vec<Tensor>> {
        let found = self.units.get(unit).ok_or_else(|| unknown(unit, self.units.len()))?;
        Ok(f(&Params::new(&found.names, &found.tensors), inputs)?)
    }

    fn skip(&self, unit: usize) -> Result<()> {
        if unit < self.units.len() { Ok(()) } else { Err(unknown(unit, self.units.len())) }
    }

    fn training(&self) -> bool {
        self.training
    }

    fn noise(&self) -> Noise {
        self.noise
    }

    fn dtype(&self) -> Kind {
        self.dtype
    }

    fn device(&self) -> Device {
        self.device
    }
}

fn unknown(unit: usize, count: usize) -> Error {
    Error::Engine(format!("the model asked for unit number {unit}; it has {count}, counted from 0"))
}
