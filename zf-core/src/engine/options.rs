//! What an engine is made of, and how it is to run.

use std::sync::Arc;

use crate::config::{Accumulate, HostSection, ReduceWhen, Unused};
use crate::layout::DType;
use crate::loss_scale::LossScaleConfig;
use crate::stage::{Links, Offload, OffloadPolicy, Optimizer, Partitioner, Schedule, Selector};
use crate::trace::Trace;

/// The stages of one engine. They hold no state, so that all ranks share them.
#[derive(Clone)]
pub struct Stages {
    /// Who owns what.
    pub partitioner: Arc<dyn Partitioner>,
    /// The update rule.
    pub optimizer: Arc<dyn Optimizer>,
    /// The learning rate over time.
    pub schedule: Arc<dyn Schedule>,
    /// What keeps masters and states off the device; none: they stay.
    pub offload: Option<OffloadStages>,
}

/// The stages of an offload.
#[derive(Debug, Clone)]
pub struct OffloadStages {
    /// Which states leave the device, and when they are updated.
    pub offload: Arc<dyn Offload>,
    /// Which columns stay, where the offload keeps chosen ones.
    pub selector: Arc<dyn Selector>,
    /// The links between devices and host.
    pub links: Arc<dyn Links>,
}

impl Stages {
    /// What the engine has to know of the offload, if there is one.
    pub fn offload_policy(&self) -> Option<OffloadPolicy> {
        self.offload.as_ref().and_then(|stages| stages.offload.policy())
    }
}

impl std::fmt::Debug for Stages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Stages")
    }
}

/// How an engine runs.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Type of parameters and compute; masters and moments are float32.
    pub dtype: DType,
    /// Where parameters live.
    pub device: tch::Device,
    /// Key of everything random.
    pub seed: u64,
    /// Fixed order of additions: the same bits for every partitioner, bucket size and number of ranks.
    pub exact: bool,
    /// Gradient norm above which gradients are scaled down; 0 is off.
    pub clip: f64,
    /// Loss scale in float16.
    pub loss_scale: LossScaleConfig,
    /// When gradients are summed over ranks.
    pub reduce_when: ReduceWhen,
    /// Type of accumulated gradients.
    pub accumulate: Accumulate,
    /// Parameters that nothing used.
    pub unused: Unused,
    /// Micro-batches that a rank runs in a step, at least 1.
    pub accumulation: usize,
    /// Sequences of a micro-batch times their length: what a loss sum is divided by for backward.
    pub micro_batch_tokens: u64,
    /// Updates of the whole run, for the schedule.
    pub total_steps: u64,
    /// Consecutive ranks that share a machine; 0: all.
    pub ranks_per_node: usize,
    /// What host workers may use.
    pub host: HostSection,
    /// Cores for host work; empty: any.
    pub host_cores: Vec<usize>,
    /// Where an offload may make files.
    pub folder: std::path::PathBuf,
    /// Records what this rank does when.
    pub trace: Trace,
}

impl EngineOptions {
    /// Defaults for a run of `total_steps` updates with one micro-batch of `micro_batch_tokens` a step.
    pub fn new(dtype: DType, micro_batch_tokens: u64, total_steps: u64) -> Self {
        Self {
            dtype,
            device: tch::Device::Cpu,
            seed: 1,
            exact: false,
            clip: 1.0,
            loss_scale: LossScaleConfig::default(),
            reduce_when: ReduceWhen::Auto,
            accumulate: Accumulate::Float32,
            unused: Unused::Skip,
            accumulation: 1,
            micro_batch_tokens,
            total_steps,
            ranks_per_node: 0,
            host: HostSection::default(),
            host_cores: Vec::new(),
            folder: std::env::temp_dir(),
            trace: Trace::new(0, 0),
        }
    }
}
