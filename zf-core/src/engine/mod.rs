//! The engine: a model's units in flat buffers, run, reduced, updated and published as the stages say.

mod agree;
mod buckets;
mod context;
mod core;
mod flat;
mod grads;
mod host;
mod launch;
mod offload;
mod options;
mod party;
mod reduce;
mod reduction;
mod residency;
mod state;
mod step;
mod store;
mod tensor_sums;
mod update;

pub(crate) use launch::text as panic_text;
pub use launch::{Rank, run_ranks, run_ranks_on};
pub(crate) use offload::Shape;
pub use offload::{OffloadReport, Saved};
pub use options::{EngineOptions, OffloadStages, Stages};
pub use state::{Progress, StateSource};
pub use step::StepReport;

use std::sync::{Arc, Mutex};

use tch::Tensor;

use self::context::UnitParams;
use self::core::{Core, Shared, lock};
use self::flat::FlatState;
use self::grads::GradPlan;
use self::host::Host;
use self::offload::Offloading;
use self::reduce::Reducing;
use self::reduction::When;
use self::store::Store;
use self::update::{SlotHyper, check_groups, slot_hyper};
use crate::config::{Accumulate, ReduceWhen};
use crate::layout::{DType, Layout};
use crate::loss_scale::LossScaler;
use crate::mesh::Mesh;
use crate::model::{Model, UnitSpec};
use crate::stage::{CommBytes, HostWork, ParametersOn, Traffic, Transport};
use crate::weights::Weights;
use crate::{Error, Result};

/// One rank's engine.
pub struct Engine {
    shared: Shared,
    model: Arc<dyn Model>,
    specs: Vec<UnitSpec>,
    stages: Stages,
    options: EngineOptions,
    units: Vec<UnitParams>,
    hypers: Vec<Vec<SlotHyper>>,
    scaler: Option<LossScaler>,
    step: u64,
    updates: u64,
    skipped_in_a_row: u32,
    stop_requested: bool,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("step", &self.step).field("updates", &self.updates).finish_non_exhaustive()
    }
}

/// What survives a change of stages.
pub(crate) struct Parts {
    model: Arc<dyn Model>,
    options: EngineOptions,
}

impl Engine {
    /// Builds the engine of one rank and fills it with initial `weights`. All ranks must build theirs at the same time.
    ///
    /// # Errors
    /// Stages that do not fit the model, the mesh or exact mode; missing weights.
    pub fn new(
        model: Arc<dyn Model>,
        stages: Stages,
        options: EngineOptions,
        transport: Box<dyn Transport>,
        weights: &dyn Weights,
    ) -> Result<Self> {
        let engine = Self::assemble(Parts { model, options }, stages, transport)?;
        {
            let core = &mut *lock(&engine.shared);
            let mut store = Store { flats: &core.flats, offload: core.offload.as_mut() };
            tch::no_grad(|| state::load_weights(&mut store, &engine.specs, weights))?;
        }
        Ok(engine)
    }

    /// Builds an engine with all state zero.
    pub(crate) fn assemble(parts: Parts, stages: Stages, mut transport: Box<dyn Transport>) -> Result<Self> {
        let Parts { model, options } = parts;
        transport.record(&options.trace);
        check(&options)?;
        let mut specs = model.units();
        let base = stages.optimizer.base();
        check_groups(base, specs.iter().flat_map(|unit| &unit.params).map(|spec| spec.name.as_str()))?;
        for spec in specs.iter_mut().flat_map(|unit| &mut unit.params) {
            let rule = base.groups.iter().find(|rule| rule.matches(&spec.name));
            spec.trainable &= !rule.is_some_and(|rule| rule.frozen);
        }
        let (rank, world) = (transport.rank(), transport.world());
        let node = if options.ranks_per_node == 0 { world } else { options.ranks_per_node };
        let mesh = Mesh::data(world)?.with_node(node)?;
        let layout = stages.partitioner.layout(&specs, options.dtype, &mesh, stages.optimizer.needs())?;
        if !layout.flats.iter().any(|flat| flat.trainable && flat.used() > 0) {
            return Err(Error::Config("nothing to train: every parameter is frozen".into()));
        }
        let sums @ (_, plan) = grad_plan(&options, &layout);
        let states = stages.optimizer.state().len();
        let host = Host::open(&stages, &options, &*transport)?;
        if let Some(policy) = stages.offload_policy() {
            policy.suits(&layout)?;
        }
        // Where parameters lie with the host.
        let home = host.clone().filter(|host| host.parameters == ParametersOn::Host);
        let flats = layout
            .flats
            .iter()
            .map(|flat| {
                let states = host.is_none().then_some(states);
                FlatState::new(flat, [rank, world], sums, options.accumulate, states, home.as_ref(), options.device)
            })
            .collect::<Result<Vec<_>>>()?;
        let hypers = layout
            .flats
            .iter()
            .map(|flat| flat.slots.iter().map(|slot| slot_hyper(base, &slot.name, &slot.shape)).collect())
            .collect();
        let units = unit_params(&layout, &specs, &flats);
        let scaler =
            (options.dtype == DType::Float16).then(|| LossScaler::new(options.loss_scale.clone())).transpose()?;
        let transfers = stages.partitioner.transfers(&mesh);
        let reducing = Reducing::new(&layout, plan);
        let offload = Offloading::open(host, &stages, &options, &layout, &flats, &*transport)?;
        let mut core = Core::new(layout, transport, flats, reducing, transfers, home, options.trace.clone())?;
        core.offload = offload;
        let shared = Arc::new(Mutex::new(core));
        install_hooks(&shared)?;
        Ok(Self {
            shared,
            model,
            specs,
            stages,
            options,
            units,
            hypers,
            scaler,
            step: 0,
            updates: 0,
            skipped_in_a_row: 0,
            stop_requested: false,
        })
    }

    /// The layout, equal on all ranks.
    pub fn layout(&self) -> Layout {
        lock(&self.shared).layout.clone()
    }

    /// Steps taken, skipped ones included: the number of the next step.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Updates made.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Has the next step report, on all ranks alike, that this rank was asked to stop.
    pub fn request_stop(&mut self) {
        self.stop_requested = true;
    }

    /// What crossed the link between device and host, with the seconds that each way was busy.
    pub fn link_traffic(&self) -> Traffic {
        lock(&self.shared).offload.as_ref().map(Offloading::traffic).unwrap_or_default()
    }

    /// What host workers did.
    pub fn host_work(&self) -> HostWork {
        lock(&self.shared).offload.as_ref().map(Offloading::work).unwrap_or_default()
    }

    /// What a person should know of an offload at the start.
    pub fn offload_notes(&self) -> Vec<String> {
        lock(&self.shared).offload.as_ref().map(Offloading::notes).unwrap_or_default()
    }

    /// Updates since the end of an offload's warm-up, by which its decisions are numbered.
    pub fn offload_updates(&self) -> u64 {
        lock(&self.shared).offload.as_ref().map_or(0, Offloading::updates)
    }

    /// The heap of host memory, where an offload has one.
    pub fn host_heap(&self) -> Option<zf_sys::heap::Heap> {
        lock(&self.shared).offload.as_ref().map(|offload| offload.heap().clone())
    }

    /// Makes all updates visible that an offload has pending, and updates with what a window has so far: for the end of a
    /// run. All ranks must call it.
    ///
    /// # Errors
    /// Those of the offload and of the transport.
    pub fn drain(&mut self) -> Result<()> {
        let drained = {
            let core = &mut *lock(&self.shared);
            core.with_offload(|offload, core| offload.drain(core)).map(drop)
        };
        drained.map_err(|error| self.fail(self.step, error))
    }

    /// The options it runs with.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// The scale of the loss in the next backward; 1 but in float16.
    pub fn loss_scale(&self) -> f64 {
        self.scaler.as_ref().map_or(1.0, LossScaler::scale)
    }

    /// Bytes exchanged since the start.
    pub fn comm_bytes(&self) -> CommBytes {
        lock(&self.shared).transport.bytes()
    }

    /// The values of a parameter in the model's type, as this rank sees them. Waits for the last update. Where parameters
    /// are sharded they are gathered: then all ranks must call this.
    ///
    /// # Errors
    /// An unknown name; the transport's errors.
    pub fn parameter(&mut self, name: &str) -> Result<Tensor> {
        lock(&self.shared).values(name)
    }

    /// The most sharded units that were gathered at once so far, root units aside.
    pub fn peak_live_units(&self) -> usize {
        lock(&self.shared).residency.peak()
    }

    /// A small message to and from all ranks.
    ///
    /// # Errors
    /// Those of the transport.
    pub fn exchange(&mut self, label: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        lock(&self.shared).transport.exchange(label, bytes)
    }

    /// Adds rank and step to an error and tells the other ranks, so that none waits for this one.
    fn fail(&self, step: u64, error: Error) -> Error {
        let core = lock(&self.shared);
        let rank = core.transport.rank();
        core.transport.abort(&error.to_string());
        Error::At { rank, step, source: Box::new(error) }
    }

    /// Takes the engine apart. What is left of its flats are parameters, masters and states.
    pub(crate) fn into_parts(self) -> Result<(Parts, Box<dyn Transport>, Vec<FlatState>, Option<Offloading>)> {
        let parts = Parts { model: self.model.clone(), options: self.options.clone() };
        let core = &mut *lock(&self.shared);
        core.wait_all_published()?;
        core.clear_hooks();
        let mut flats = std::mem::take(&mut core.flats);
        flats.iter_mut().for_each(|flat| flat.grads = None);
        let transport = std::mem::replace(&mut core.transport, Box::new(Disconnected));
        Ok((parts, transport, flats, core.offload.take()))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        lock(&self.shared).clear_hooks();
    }
}

impl Core {
    /// Hooks hold a way back to the shared state that holds the parameters that hold the hooks.
    fn clear_hooks(&self) {
        for leaf in self.flats.iter().flat_map(|flat| &flat.leaves) {
            // A leaf without a hook has none to clear.
            let _ = zf_sys::autograd::clear_grad_hook(leaf);
        }
    }
}

/// Refuses options that contradict each other or the stages.
fn check(options: &EngineOptions) -> Result<()> {
    if options.accumulation == 0 || options.micro_batch_tokens == 0 {
        return Err(Error::Config("a step needs at least one micro-batch of at least one token".into()));
    }
    if options.exact && options.reduce_when == ReduceWhen::Boundary {
        return Err(Error::Config(
            "exact mode reduces each micro-batch by itself; `reduce.when = \"boundary\"` would add in another order"
                .into(),
        ));
    }
    if options.exact && options.accumulate == Accumulate::Model {
        return Err(Error::Config(
            "exact mode accumulates in float32; `reduce.accumulate = \"model\"` would round as often as ranks add"
                .into(),
        ));
    }
    Ok(())
}

/// When gradients are summed over ranks, and where they accumulate meanwhile. At the boundary where every rank holds all
/// gradients anyway, after each micro-batch where they are sharded and in exact mode.
fn grad_plan(options: &EngineOptions, layout: &Layout) -> (When, GradPlan) {
    let sharded = layout.flats.iter().any(|flat| flat.grads.group() > 1);
    let each = match options.reduce_when {
        ReduceWhen::Auto => options.exact || sharded,
        ReduceWhen::MicroBatch => true,
        ReduceWhen::Boundary => false,
    };
    match (each, options.exact || !sharded) {
        (false, _) if layout.mesh.world() == 1 => (When::Boundary, GradPlan::Loose),
        (false, _) => (When::Boundary, GradPlan::Boundary),
        (true, true) => (When::EachInOrder, GradPlan::Each),
        (true, false) => (When::Each, GradPlan::Each),
    }
}

fn unit_params(layout: &Layout, specs: &[UnitSpec], flats: &[FlatState]) -> Vec<UnitParams> {
    let mut units = Vec::new();
    for (unit, spec) in layout.units.iter().zip(specs) {
        let mut params = UnitParams { unit: unit.name.clone(), root: unit.root, ..UnitParams::default() };
        let mut places: Vec<(usize, &Tensor)> = unit
            .flats
            .iter()
            .flat_map(|&flat| flats[flat].spec.slots.iter().zip(&flats[flat].leaves))
            .map(|(slot, leaf)| (slot.index, leaf))
            .collect();
        places.sort_by_key(|(index, _)| *index);
        params.names = spec.params.iter().map(|param| param.name.clone()).collect();
        params.tensors = places.into_iter().map(|(_, leaf)| leaf.shallow_clone()).collect();
        units.push(params);
    }
    units
}

/// Has every trainable parameter report when its gradient is complete.
fn install_hooks(shared: &Shared) -> Result<()> {
    let core = lock(shared);
    for (flat, state) in core.flats.iter().enumerate().filter(|(_, state)| state.spec.trainable) {
        for (slot, leaf) in state.leaves.iter().enumerate() {
            let weak = Arc::downgrade(shared);
            let ready = move || match weak.upgrade() {
                Some(shared) => lock(&shared).gradient_ready(flat, slot).map_err(|error| error.to_string()),
                None => Err("a gradient arrived after its engine was dropped".into()),
            };
            zf_sys::autograd::on_grad_accumulated(leaf, Box::new(ready))?;
        }
    }
    Ok(())
}

/// The transport of an engine that was taken apart.
struct Disconnected;

impl Transport for Disconnected {
    fn rank(&self) -> usize {
        0
    }

    fn world(&self) -> usize {
        1
    }

    fn issue(&mut self, _request: crate::stage::Request) -> Result<crate::stage::Ticket> {
        Err(Error::comm("this engine was taken apart"))
    }

    fn bytes(&self) -> CommBytes {
        CommBytes::default()
    }

    fn abort(&self, _reason: &str) {}
}
