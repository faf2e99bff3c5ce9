//! The loop of one rank.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;

use zf_sys::heap::Refusal;

use super::measure::Meter;
use super::observer::Observer;
use super::save::Saver;
use super::{RunPlan, Training};
use crate::checkpoint::{Best, step_path};
use crate::config::ReduceWhen;
use crate::data::{Order, OrderKind, Split, Turn, assemble};
use crate::device::{self, Situation};
use crate::engine::{Engine, Rank, panic_text as text};
use crate::mesh::Mesh;
use crate::record::Summary;
use crate::stage::{Needs, ParametersOn};
use crate::trace::{DEFAULT_EVENTS, Lane, Trace};
use crate::{Error, Result};

/// What a rank's thread holds while it trains.
pub(crate) struct Loop<'a> {
    pub(crate) training: &'a Training,
    pub(crate) plan: &'a RunPlan,
    pub(crate) engine: Engine,
    pub(crate) rank: usize,
    pub(crate) world: usize,
    pub(crate) model_identity: String,
    order: Order,
}

/// How a rank ended.
pub(crate) struct Outcome {
    pub(crate) summary: Summary,
    pub(crate) interrupted: bool,
    pub(crate) trace: Trace,
}

/// Trains on one rank. `observer` is told by rank 0 alone.
pub(crate) fn run(
    training: &Training,
    plan: &RunPlan,
    attempt: &str,
    observer: &Mutex<&mut dyn Observer>,
    rank: Rank,
) -> Result<Outcome> {
    let (index, world, heap) = (rank.rank, rank.world, rank.heap.clone());
    let step = Cell::new(training.resume.as_ref().map_or(0, |resume| resume.meta().step));
    let full = |error: Error| match device::explain(error, &heap, |refusal| situation(training, plan, world, refusal)) {
        error @ Error::OutOfMemory(_) => Error::At { rank: index, step: step.get(), source: Box::new(error) },
        error => error,
    };
    match catch_unwind(AssertUnwindSafe(|| train(training, plan, attempt, observer, rank, &step))) {
        Ok(result) => result.map_err(full),
        // A model that calls operators by their panicking forms runs out of memory in a panic.
        Err(panic) => match full(Error::Engine(text(&*panic))) {
            Error::Engine(_) => resume_unwind(panic),
            error => Err(error),
        },
    }
}

/// What the run uses, for advice on a full device.
fn situation(training: &Training, plan: &RunPlan, world: usize, refusal: &Refusal) -> Result<Situation> {
    let stages = &training.stages;
    let node = if plan.options.ranks_per_node == 0 { world } else { plan.options.ranks_per_node };
    let mesh = Mesh::data(world)?.with_node(node)?;
    let units = training.model.model.units();
    let layout = stages.partitioner.layout(&units, plan.options.dtype, &mesh, stages.optimizer.needs())?;
    Ok(Situation {
        asked: (refusal.asked, refusal.category),
        live: refusal.live,
        fragmented: refusal.is_fragmentation(),
        world,
        split: device::Split::of(&layout),
        dtype: plan.options.dtype,
        accumulate: plan.options.accumulate,
        accumulate_free: !plan.options.exact && plan.options.reduce_when != ReduceWhen::MicroBatch,
        micro_batch: training.run.micro_batch,
        sequence_length: training.data.dataset.sequence_length(),
        keeps: stages.offload_policy().map(|policy| policy.keeps),
        parameters: stages.offload_policy().map_or(ParametersOn::Device, |policy| policy.parameters),
        offloadable: stages.optimizer.needs() == Needs::Elements,
    })
}

fn train(
    training: &Training,
    plan: &RunPlan,
    attempt: &str,
    observer: &Mutex<&mut dyn Observer>,
    rank: Rank,
    step: &Cell<u64>,
) -> Result<Outcome> {
    let Rank { rank, world, transport, heap } = rank;
    let local = training.fabric.local_ranks().iter().position(|&local| local == rank);
    if let Some(core) = local.and_then(|local| *training.cores.device.get(local)?) {
        crate::cores::pin_current_thread(&[core])?;
    }
    let starting = zf_sys::heap::phase("start");
    let model = training.model.model.clone();
    let weights = &*training.model.weights;
    let trace = Trace::new(rank, if training.log.trace { DEFAULT_EVENTS } else { 0 });
    let mut options = plan.options.clone();
    options.trace = trace.clone();
    let mut engine = Engine::new(model, training.stages.clone(), options, transport, weights)?;
    let model_identity = super::measure::model_identity(&engine.layout());
    let (mut best, mut resumed) = (None, Vec::new());
    if let Some(resume) = &training.resume {
        resume.check(training, &model_identity)?;
        resumed = engine.import(resume, resume.progress()?)?;
        best = resume.meta().best;
        // Going back would leave a run folder whose summary is of later steps than its metrics.
        if engine.steps() > plan.steps {
            return Err(Error::Config(format!(
                "the checkpoint to resume from is of step {}, beyond the {} steps of this run; raise `run.steps` or take an \
                 earlier checkpoint",
                engine.steps(),
                plan.steps
            )));
        }
        if rank == 0 {
            crate::checkpoint::set_aside_after(&training.folder.join("checkpoints"), engine.steps())?;
        }
    }
    let order = Order::new(training.data.dataset.len(Split::Train), training.run.seed, training.data.order);
    let mut run = Loop { training, plan, engine, rank, world, model_identity, order };
    let mut saver = Saver::new(training, rank, attempt)?;
    let mut meter = Meter::new(&run, heap)?;
    let tell = |f: &mut dyn FnMut(&mut dyn Observer)| {
        if rank == 0 {
            f(&mut **observer.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        }
    };
    let mut notes = meter.notes(&run);
    notes.extend(resumed);
    notes.extend(training.resume.iter().flat_map(|resume| resume.changes(&training.resolved)));
    tell(&mut |o| o.start(run.engine.steps(), plan.steps, &notes));

    drop(starting);
    let mut interrupted = false;
    while run.engine.steps() < plan.steps && !interrupted {
        if training.stop.requested() {
            run.engine.request_stop();
        }
        step.set(run.engine.steps());
        let report = run.step()?;
        interrupted = report.stop && run.engine.steps() < plan.steps;
        let done = run.engine.steps();
        if done == plan.steps {
            run.engine.drain()?;
        }
        let validation = {
            let _span = trace.span(Lane::Compute, "validation");
            // Also when told to stop: a resumed run does not come back to this step.
            run.validate()?
        };
        let improved =
            validation.is_some_and(|loss| loss.is_finite() && best.is_none_or(|b: Best| loss < b.validation_loss));
        if let Some(loss) = validation.filter(|_| improved) {
            best = Some(Best { step: done, validation_loss: loss });
        }
        trace.counter("live bytes", meter.live_bytes());
        if let Some(record) = meter.step(&run, &report, validation)? {
            tell(&mut |o| o.step(&record));
        }
        let policy = &training.run.checkpoint;
        let due = policy.every > 0 && done.is_multiple_of(policy.every);
        if due || interrupted || done == plan.steps || (policy.best && improved) {
            let span = trace.span(Lane::Checkpoint, "checkpoint");
            saver.save(&mut run, if policy.best { best } else { None })?;
            drop(span);
            tell(&mut |o| o.checkpoint(done));
        }
    }
    // A run that had nothing to do, resumed from another folder's end, still leaves one here. The ranks decide alike: it
    // appears only when each has handed in its part.
    if saver.last().is_none() && !step_path(&training.folder.join("checkpoints"), run.engine.steps()).exists() {
        if !interrupted {
            run.engine.drain()?;
        }
        saver.save(&mut run, if training.run.checkpoint.best { best } else { None })?;
    }
    saver.finish()?;
    let summary = meter.finish(&mut run, best)?;
    tell(&mut |o| o.end(&summary));
    Ok(Outcome { summary, interrupted, trace })
}

impl Loop<'_> {
    fn step(&mut self) -> Result<crate::engine::StepReport> {
        let turns = self.plan.batches.turns(self.engine.steps(), self.rank);
        let (dataset, order, device) = (&*self.training.data.dataset, &self.order, self.plan.options.device);
        self.engine.step(&mut |turn| assemble(dataset, order, Split::Train, &turns[turn], device))
    }

    /// The mean validation loss, where it is due and there is validation data.
    fn validate(&mut self) -> Result<Option<f64>> {
        let (done, every) = (self.engine.steps(), self.plan.validate_every);
        let due = done == self.plan.steps || (every > 0 && done.is_multiple_of(every));
        if !due || self.plan.validation == 0 {
            return Ok(None);
        }
        let (dataset, device) = (&*self.training.data.dataset, self.plan.options.device);
        let order = Order::new(dataset.len(Split::Validation), 0, OrderKind::Sequential);
        let (micro, total) = (self.plan.batches.micro_batch(), self.plan.validation);
        let (rank, world) = (self.rank as u64, self.world as u64);
        let (loss, tokens) = self.engine.evaluate(&mut |turn| {
            let index = turn as u64 * world + rank;
            let first = index * micro;
            if first >= total {
                return Ok(None);
            }
            let sequences = (first..total.min(first + micro)).collect();
            let turn = Turn { index, first_position: first, sequences };
            assemble(dataset, &order, Split::Validation, &turn, device).map(Some)
        })?;
        if tokens == 0 {
            return Err(Error::Input("the validation data has no target token".into()));
        }
        Ok(Some(loss / tokens as f64))
    }
}
