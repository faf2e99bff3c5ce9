//! One line of `metrics.jsonl`.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::stage::CommBytes;

/// What is known of one step. Numbers are written as the shortest text that reads back as the same number. JSON has no
/// infinities and no NaN: they are written as `null` and read as NaN.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Number of the step, from 0.
    pub step: u64,
    /// Mean loss over the step's target tokens.
    #[serde(with = "number")]
    pub loss: f64,
    /// Learning rate of the first group, schedule included.
    #[serde(with = "number")]
    pub lr: f64,
    /// Norm of the gradient of all parameters, before clipping.
    #[serde(with = "number")]
    pub grad_norm: f64,
    /// Target tokens of all ranks.
    pub tokens: u64,
    /// Target tokens of all ranks a second.
    #[serde(with = "number")]
    pub tokens_per_second: f64,
    /// 10^12 floating-point operations a second and rank, by the model's own count.
    #[serde(with = "number")]
    pub tflops: f64,
    /// Whether the update was left out because of a gradient that is not finite.
    pub skipped: bool,
    /// The scale of the loss in this step's backward, in float16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Mean validation loss, in steps that measured it.
    pub validation_loss: Option<f64>,
    /// By how many steps the oldest update that this step did not see yet is late.
    pub staleness: u64,
    /// Part of the chosen columns that changed, in steps that chose.
    pub turnover: Option<f64>,
    /// Steps in the window of updates that this step belongs to, with an offload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<u64>,
    /// Where the time went, on rank 0.
    pub seconds: Seconds,
    /// What a ring would send, rank 0, this step.
    pub comm_bytes: CommBytes,
    /// What crossed the link between device and host, rank 0, this step.
    pub link_bytes: LinkBytes,
    /// Memory of rank 0.
    pub memory: Memory,
}

/// Seconds of one step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Seconds {
    /// The whole step.
    pub step: f64,
    /// Forward passes.
    pub forward: f64,
    /// Backward passes.
    pub backward: f64,
    /// The update.
    pub update: f64,
    /// This rank's own copying.
    pub comm: f64,
    /// The device had nothing to do: waiting for the host, the link or other ranks.
    pub stall: f64,
    /// Host workers, beside the rest.
    pub host: f64,
}

/// Bytes that crossed the link between device and host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkBytes {
    /// Gradients and activations, from the device.
    pub to_host: u64,
    /// Parameters and activations, to the device.
    pub to_device: u64,
    /// Columns that changed their tier, both ways.
    pub moves: u64,
}

/// Bytes held: the peak since the last line, and the categories at that peak.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Most bytes on the device at any moment since the last line.
    pub device_peak: u64,
    /// Bytes on the device now.
    pub device_live: u64,
    /// Bytes of the host tier now.
    pub host_live: u64,
    /// Bytes of the file tier now.
    pub file_live: u64,
    /// Parameters at the peak.
    pub parameters: u64,
    /// Gradients at the peak.
    pub gradients: u64,
    /// Masters and moments at the peak.
    pub optimizer: u64,
    /// Activations at the peak.
    pub activations: u64,
    /// Gather, reduction and staging buffers at the peak.
    pub buffers: u64,
}

/// A number that JSON may not be able to hold.
pub(super) mod number {
    use super::*;

    pub(in crate::record) fn serialize<S: Serializer>(value: &f64, s: S) -> Result<S::Ok, S::Error> {
        // serde_json itself writes null for what is not finite.
        value.serialize(s)
    }

    pub(in crate::record) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<f64, D::Error> {
        Ok(Option::deserialize(d)?.unwrap_or(f64::NAN))
    }
}
