//! A whole training run: engines on all ranks, data, validation, metrics, checkpoints, resumption.

mod measure;
mod observer;
mod rank;
mod resume;
mod save;

pub use observer::{Observer, Silent};
pub use resume::{Resume, open_window};

use std::fs::TryLockError;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::checkpoint::new_attempt;
use crate::config::{DeviceKind, DeviceSection, HostSection, LogSection, ReduceSection, RunSection};
use crate::cores::Cores;
use crate::data::{BatchPlan, Split};
use crate::engine::{EngineOptions, Stages, run_ranks_on};
use crate::record::Summary;
use crate::registry::{DataBundle, ModelBundle};
use crate::stage::Fabric;
use crate::trace::write_traces;
use crate::{Error, Result};

/// A request to stop after the present step, with a checkpoint; for signal handlers.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Asks for it.
    pub fn request(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Whether it was asked for.
    pub fn requested(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// The flag itself, for `signal_hook::flag::register`.
    pub fn flag(&self) -> Arc<AtomicBool> {
        self.0.clone()
    }
}

/// Everything a run is made of. The same types serve a run file and a program of one's own.
pub struct Training {
    /// How long, in which batches and precision.
    pub run: RunSection,
    /// Where ranks compute.
    pub device: DeviceSection,
    /// What host work may use.
    pub host: HostSection,
    /// Which cores devices and host work are bound to; by default none.
    pub cores: Cores,
    /// When and how gradients are summed.
    pub reduce: ReduceSection,
    /// What is written beside the metrics.
    pub log: LogSection,
    /// The stages of the engine.
    pub stages: Stages,
    /// What connects the ranks.
    pub fabric: Arc<dyn Fabric>,
    /// The model and its initial values.
    pub model: ModelBundle,
    /// The data and its order.
    pub data: DataBundle,
    /// The run folder, made if it does not exist.
    pub folder: PathBuf,
    /// The resolved run file, kept in the run folder and in checkpoints.
    pub resolved: String,
    /// The command line, for the summary.
    pub command: Vec<String>,
    /// The checkpoint to go on from.
    pub resume: Option<Resume>,
    /// Asked between steps.
    pub stop: Stop,
}

impl std::fmt::Debug for Training {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Training").field("run", &self.run).field("folder", &self.folder).finish_non_exhaustive()
    }
}

impl Training {
    /// Runs to the end, or to a requested stop, and returns the summary that also stands in the run folder.
    ///
    /// # Errors
    /// [`Error::Config`] and [`Error::Input`] before the first step; [`Error::Interrupted`] after a requested stop;
    /// else what failed, with rank and step.
    pub fn run(&self, observer: &mut dyn Observer) -> Result<Summary> {
        let plan = self.plan()?;
        let _alone = if self.fabric.leads() { Some(self.occupy()?) } else { None };
        let attempt = self.fabric.agree(new_attempt().into_bytes())?;
        let attempt =
            String::from_utf8(attempt).map_err(|_| Error::comm("rank 0 sent a garbled name of this start"))?;
        let observer = Mutex::new(observer);
        let body = |rank| rank::run(self, &plan, &attempt, &observer, rank);
        let outcomes = run_ranks_on(&self.fabric, self.device.threads, self.device.memory, body)?;
        if self.log.trace {
            let traces: Vec<_> = outcomes.iter().map(|outcome| outcome.trace.clone()).collect();
            write_traces(&self.folder.join(self.trace_name()), &traces)?;
        }
        let outcome = outcomes.into_iter().next().ok_or_else(|| Error::Config("this process runs no rank".into()))?;
        if outcome.interrupted { Err(Error::Interrupted) } else { Ok(outcome.summary) }
    }

    /// The file of this process's trace: `trace.json`, or with the number of its first rank where rank 0 is elsewhere.
    fn trace_name(&self) -> String {
        match self.fabric.local_ranks().first() {
            Some(&rank) if rank > 0 => format!("trace.rank-{rank}.json"),
            _ => "trace.json".into(),
        }
    }

    /// Makes the run folder and keeps other runs out of it while the returned handle lives: two would write the same
    /// metrics and delete each other's checkpoints. The system lets go of the lock of a killed run.
    fn occupy(&self) -> Result<std::fs::File> {
        let folder = &self.folder;
        let io = |error| Error::io(folder, error);
        std::fs::create_dir_all(folder).map_err(io)?;
        let handle = std::fs::File::open(folder).map_err(io)?;
        match handle.try_lock() {
            Err(TryLockError::WouldBlock) => Err(Error::Config(format!(
                "{}: another run is writing to this folder; wait for it, or name another folder",
                folder.display()
            ))),
            // Some network file systems lock no folders; there the user has to take care.
            Ok(()) | Err(TryLockError::Error(_)) => Ok(handle),
        }
    }

    /// What can be known before ranks start.
    fn plan(&self) -> Result<RunPlan> {
        let RunSection { global_batch, micro_batch, exact, .. } = self.run;
        let batches = BatchPlan::new(global_batch, micro_batch, self.fabric.world(), exact)?;
        let dataset = &*self.data.dataset;
        let length = dataset.sequence_length();
        if dataset.is_empty(Split::Train) {
            return Err(Error::Input("the data has no training sequence".into()));
        }
        if let Some(limit) = self.model.model.max_length().filter(|&limit| limit < length) {
            return Err(Error::Config(format!(
                "`data.sequence_length` = {length} is longer than the {limit} positions of the model \
                 (`max_position_embeddings`, or its sliding window where that is shorter)"
            )));
        }
        if self.device.threads == 0 || (exact && self.device.threads != 1) {
            return Err(Error::Config(format!(
                "`device.threads` = {}: {}",
                self.device.threads,
                if exact { "exact mode computes with one operator thread a rank" } else { "at least 1" }
            )));
        }
        let tokens = (global_batch * length) as u64;
        let steps = self.steps(tokens)?;
        let mut options = EngineOptions::new(self.run.dtype, (micro_batch * length) as u64, steps);
        options.device = self.device()?;
        options.seed = self.run.seed;
        options.exact = exact;
        options.clip = self.run.clip;
        options.loss_scale = self.run.loss_scale.clone();
        options.reduce_when = self.reduce.when;
        options.accumulate = self.reduce.accumulate;
        options.unused = self.run.unused;
        options.ranks_per_node = self.fabric.ranks_per_node();
        options.host = self.host.clone();
        options.host_cores = self.cores.host.clone();
        options.folder.clone_from(&self.folder);
        options.accumulation = usize::try_from(batches.accumulation()).unwrap_or(usize::MAX);
        let validation = dataset.len(Split::Validation);
        let validation = self.run.validate.sequences.map_or(validation, |limit| validation.min(limit));
        let every = self.run.validate.every.unwrap_or_else(|| steps.div_ceil(10));
        Ok(RunPlan { batches, steps, options, validation, validate_every: every })
    }

    /// Steps of the whole run.
    fn steps(&self, tokens: u64) -> Result<u64> {
        let sequences = self.data.dataset.len(Split::Train) as f64;
        match (self.run.steps, self.run.epochs, self.run.tokens) {
            (Some(steps), None, None) => Ok(steps),
            (None, Some(epochs), None) if epochs >= 0.0 => {
                Ok((epochs * sequences / self.run.global_batch as f64).ceil() as u64)
            }
            (None, None, Some(wanted)) => Ok(wanted.div_ceil(tokens.max(1))),
            _ => Err(Error::Config(
                "say how long the run is with exactly one of `run.steps`, `run.epochs` and `run.tokens`".into(),
            )),
        }
    }

    fn device(&self) -> Result<tch::Device> {
        let emulated = self.device.kind == DeviceKind::Emulated;
        if emulated != self.device.memory.is_some() {
            return Err(Error::Config(
                "`device.memory` is given where, and only where, `device.kind` is \"emulated\"".into(),
            ));
        }
        match self.device.kind {
            DeviceKind::Cpu => Ok(tch::Device::Cpu),
            DeviceKind::Auto if !tch::Cuda::is_available() => Ok(tch::Device::Cpu),
            DeviceKind::Auto | DeviceKind::Cuda if tch::Cuda::is_available() && self.fabric.world() == 1 => {
                Ok(tch::Device::Cuda(0))
            }
            DeviceKind::Auto => Ok(tch::Device::Cpu),
            DeviceKind::Cuda => Err(Error::Config(
                "`device.kind = \"cuda\"` needs a CUDA libtorch and, in this version, `transport.ranks = 1`: the `threads` \
                 transport moves host memory"
                    .into(),
            )),
            DeviceKind::Emulated => Ok(tch::Device::Cpu),
        }
    }
}

/// What all ranks know before they start.
#[derive(Debug)]
pub(crate) struct RunPlan {
    pub(crate) batches: BatchPlan,
    pub(crate) steps: u64,
    pub(crate) options: EngineOptions,
    /// Validation sequences used.
    pub(crate) validation: u64,
    /// Steps between validations; 0: only at the end.
    pub(crate) validate_every: u64,
}
