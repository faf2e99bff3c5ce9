//! ZenFlow (Ren et al., "ZenFlow: Enabling Stall-Free Offloading Training via Asynchronous Updates", 2025): important columns are
//! updated on the device in every step; the gradients of the others are added up and applied by the host beside the next steps.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use zf_core::bytes::ByteSize;
use zf_core::registry::{Build, BuildContext, setting};
use zf_core::slots;
use zf_core::stage::{AccumulateOn, Decision, Interval, Keeps, Offload, OffloadPolicy, ParametersOn, Promotion, Wire};

use super::{Placed, TierKind, buffer, buffers, check_buffers};

/// Settings of ZenFlow.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ZenflowConfig {
    /// Where the states lie that are not on the device: "host" memory, or a "file".
    pub tier: TierKind,
    /// Steps whose gradients make one update of the host's part (S): a number, "auto", or { replay = "FILE" } with the decisions of
    /// an earlier run (its `decisions.jsonl`).
    pub update_interval: IntervalConfig,
    /// Whether an update of the host's part becomes visible one window later, so that nobody waits for it, instead of at once.
    pub asynchronous: bool,
    /// When a column that becomes chosen sees a pending update: "flush", before anything else, or "late", when it would have become
    /// visible.
    pub promotion: Promotion,
    /// Steps at the start in which the host updates all columns, each visible at once.
    pub warmup: u64,
    /// Types on the link: those of the "model" (gradients in bfloat16 where it has 16 bits), or "float32", which exact mode always
    /// takes for gradients.
    pub wire: Wire,
    /// Where gradients are added up over a window: on the "host", on the "device" (less traffic, more memory), or "auto".
    pub accumulate: AccumulateOn,
    /// The learning rate of a window's update: that of its "last" step, or the "mean".
    pub learning_rate: LearningRate,
    /// Whether weights of three and more dimensions are chosen from too, as matrices of their first dimension by the rest. Otherwise
    /// they stay on the device, as those of one dimension do.
    pub fold: bool,
    /// Bytes of a staging buffer on the device, and of its counterpart in host memory.
    pub buffer: ByteSize,
    /// Staging buffers each way.
    pub buffers: usize,
    /// No longer interval than this, where it is automatic.
    pub max_interval: u64,
    /// Whether an automatic interval also ends before the mean absolute accumulated gradient of columns that are not chosen reaches
    /// the running mean of those that are, both per element.
    pub gradient_rule: bool,
}

impl Default for ZenflowConfig {
    fn default() -> Self {
        Self {
            tier: TierKind::Host,
            update_interval: IntervalConfig::Fixed(4),
            asynchronous: true,
            promotion: Promotion::Flush,
            warmup: 0,
            wire: Wire::Model,
            accumulate: AccumulateOn::Auto,
            learning_rate: LearningRate::Last,
            fold: false,
            buffer: buffer(),
            buffers: buffers(),
            max_interval: 16,
            gradient_rule: true,
        }
    }
}

/// The learning rate of a window's update.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LearningRate {
    /// That of the window's last step.
    #[default]
    Last,
    /// The mean over its steps.
    Mean,
}

/// Steps of a window.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a number of steps, \"auto\", or { replay = \"FILE\" }")]
pub enum IntervalConfig {
    /// So many.
    Fixed(u64),
    /// The word "auto".
    Auto(Auto),
    /// What an earlier run decided.
    Replay {
        /// Its file of decisions.
        replay: PathBuf,
    },
}

/// The word "auto".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Auto {
    /// Decided while running.
    Auto,
}

impl JsonSchema for IntervalConfig {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Interval".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "anyOf": [
                { "type": "integer", "minimum": 1 },
                { "const": "auto" },
                { "type": "object", "properties": { "replay": { "type": "string", "format": "path" } }, "required": ["replay"],
                  "additionalProperties": false }
            ]
        })
    }
}

impl IntervalConfig {
    fn interval(&self, (at_most, gradient_rule): (u64, bool), cx: &BuildContext) -> anyhow::Result<Interval> {
        Ok(match self {
            Self::Fixed(0) => return Err(setting("update_interval", "at least 1, found 0")),
            Self::Fixed(interval) => Interval::Fixed(*interval),
            Self::Auto(_) => Interval::Auto { at_most, gradient_rule },
            Self::Replay { replay } => Interval::Replay(decisions(&cx.path(replay))?),
        })
    }
}

/// Reads the decisions of an earlier run, one JSON object a line.
fn decisions(path: &Path) -> anyhow::Result<Vec<Decision>> {
    let refuse = |what: String| setting("update_interval", format!("{}: {what}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| refuse(error.to_string()))?;
    let line = |(number, line): (usize, &str)| {
        serde_json::from_str(line).map_err(|error| refuse(format!("line {}: expected a decision: {error}", number + 1)))
    };
    text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(line).collect()
}

impl ZenflowConfig {
    /// The stage.
    ///
    /// # Errors
    /// The first setting out of range, with its key; decisions that cannot be read.
    pub fn offload(self, cx: &BuildContext) -> anyhow::Result<Arc<dyn Offload>> {
        check_buffers(self.buffer, self.buffers)?;
        if self.max_interval == 0 {
            return Err(setting("max_interval", "at least 1, found 0"));
        }
        Ok(Arc::new(Placed {
            policy: OffloadPolicy {
                keeps: Keeps::Chosen,
                interval: self.update_interval.interval((self.max_interval, self.gradient_rule), cx)?,
                asynchronous: self.asynchronous,
                promotion: self.promotion,
                warmup: self.warmup,
                wire: self.wire,
                accumulate: self.accumulate,
                parameters: ParametersOn::Device,
                buffer_bytes: usize::try_from(self.buffer.0)?,
                buffers: self.buffers,
                mean_lr: self.learning_rate == LearningRate::Mean,
                fold: self.fold,
            },
            tier: self.tier,
        }))
    }
}

impl Build<slots::Offload> for ZenflowConfig {
    fn build(self, cx: &BuildContext) -> anyhow::Result<Arc<dyn Offload>> {
        self.offload(cx)
    }
}

zf_core::register!(
    slots::Offload,
    "zenflow",
    ZenflowConfig,
    "ZenFlow: chosen columns are updated on the device at once, the others by the host beside the next steps",
    "update_interval = 4\nasynchronous = true\npromotion = \"flush\""
);
