//! The sections of a run file that belong to no stage.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::bandwidth::Bandwidth;
use crate::bytes::ByteSize;
use crate::layout::DType;
use crate::loss_scale::LossScaleConfig;
use crate::registry::Choice;
use crate::slots;

mod scale;

/// `[run]`: how long, in which batches, in which precision.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RunSection {
    /// Optimizer steps of the run. Exactly one of `steps`, `epochs` and `tokens` is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Passes over the training data, also parts of one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epochs: Option<f64>,
    /// Tokens to train on, rounded up to whole steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
    /// Sequences per optimizer step, over all ranks and micro-batches.
    pub global_batch: usize,
    /// Sequences that a rank runs at once.
    pub micro_batch: usize,
    /// Type of parameters and compute: "float32", "bfloat16" or "float16"; master and moments are float32.
    pub dtype: DType,
    /// Key of everything random: initial weights, order of the data, dropout.
    pub seed: u64,
    /// Fixed order of additions: the same bits for every partitioner and rank count.
    pub exact: bool,
    /// Gradient norm above which gradients are scaled down; 0: off.
    pub clip: f64,
    /// What is done with a parameter that no rank used in a step: "skip" it, or update it with "zeros".
    pub unused: Unused,
    /// Loss scale of float16: "dynamic", a fixed number, or a table of the dynamic scale's settings.
    #[serde(deserialize_with = "scale::read")]
    #[schemars(schema_with = "scale::schema")]
    pub loss_scale: LossScaleConfig,
    /// When checkpoints are written and which are kept.
    pub checkpoint: CheckpointSettings,
    /// When the validation loss is measured.
    pub validate: ValidateSettings,
}

impl Default for RunSection {
    fn default() -> Self {
        Self {
            steps: None,
            epochs: None,
            tokens: None,
            global_batch: 16,
            micro_batch: 4,
            dtype: DType::Float32,
            seed: 1,
            exact: false,
            clip: 1.0,
            unused: Unused::Skip,
            loss_scale: LossScaleConfig::default(),
            checkpoint: CheckpointSettings::default(),
            validate: ValidateSettings::default(),
        }
    }
}

/// What is done with a parameter that no rank used in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Unused {
    /// It is left alone: no decay, no moments, no count.
    Skip,
    /// It is updated with a gradient of zeros, as a dense optimizer would.
    Zeros,
}

/// `run.checkpoint`: when checkpoints are written and which are kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointSettings {
    /// Steps between two checkpoints; 0: only at the end.
    pub every: u64,
    /// How many of the newest are kept.
    pub keep: usize,
    /// Whether the one with the lowest validation loss is kept beside them.
    pub best: bool,
    /// Whether files are written beside the training instead of pausing it.
    #[serde(rename = "async")]
    pub asynchronous: bool,
}

impl Default for CheckpointSettings {
    fn default() -> Self {
        Self { every: 100, keep: 3, best: true, asynchronous: true }
    }
}

/// `run.validate`: when the validation loss is measured, where the data has a validation part.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ValidateSettings {
    /// Steps between two measurements, 0: only at the end. Without it about ten times a run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every: Option<u64>,
    /// At most so many sequences. Without it all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sequences: Option<u64>,
}

/// `[device]`: where ranks compute.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DeviceSection {
    /// "cpu", "cuda" (with a CUDA libtorch), "auto": cuda where there is one, or "emulated": a CPU with limited memory.
    pub kind: DeviceKind,
    /// Operator threads a rank.
    pub threads: usize,
    /// Bytes of each rank's emulated device, for all its tensors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<ByteSize>,
    /// The link between device and host, for offload: { bandwidth = "4GB/s", latency = "10us" } on an emulated device, or
    /// { kind = "direct" }. Without it copies take the time they take.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link: Option<Choice<slots::Link>>,
}

impl Default for DeviceSection {
    fn default() -> Self {
        Self { kind: DeviceKind::Auto, threads: 1, memory: None, link: None }
    }
}

/// The device that ranks compute on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// CUDA where there is one, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// CUDA devices, one a rank.
    Cuda,
    /// The CPU, with memory of a fixed size for each rank.
    Emulated,
}

/// `[host]`: what host work may use, for offload.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct HostSection {
    /// Cores that workers are bound to. Without it those that are left beside the devices' own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cores: Option<Vec<usize>>,
    /// Threads that update each rank's part. Without it one a core.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Bytes a second that each rank's workers read and write at most, such as "2GB/s": the memory of a slower host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Bandwidth>,
}

/// `[reduce]`: when and in which type gradients are summed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ReduceSection {
    /// "boundary": once a step; "micro-batch": after each micro-batch; "auto": what the partitioner and exact mode need.
    pub when: ReduceWhen,
    /// Type of accumulated gradients: "float32", or that of the "model".
    pub accumulate: Accumulate,
}

impl Default for ReduceSection {
    fn default() -> Self {
        Self { when: ReduceWhen::Auto, accumulate: Accumulate::Float32 }
    }
}

/// When gradients are summed over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ReduceWhen {
    /// At the boundary where gradients are whole on every rank, after each micro-batch otherwise and in exact mode.
    Auto,
    /// Once a step.
    Boundary,
    /// After each micro-batch.
    MicroBatch,
}

/// Type of accumulated gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Accumulate {
    /// float32, whatever the parameters are.
    Float32,
    /// The parameters' own type.
    Model,
}

/// `[log]`: what is written beside the metrics.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LogSection {
    /// Steps between two lines of `metrics.jsonl`.
    pub every: u64,
    /// Whether TensorBoard events are written.
    pub tensorboard: bool,
    /// Whether `trace.json` (Perfetto, chrome://tracing) is written.
    pub trace: bool,
}

impl Default for LogSection {
    fn default() -> Self {
        Self { every: 1, tensorboard: true, trace: true }
    }
}
