//! ZeRO-Offload (Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", 2021): masters and optimizer states in
//! host memory, updated there between backward and the next forward.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::bytes::ByteSize;
use zf_core::registry::{Build, BuildContext};
use zf_core::slots;
use zf_core::stage::{AccumulateOn, Interval, Keeps, Offload, OffloadPolicy, ParametersOn, Promotion, Wire};

use super::{Placed, TierKind, buffer, buffers, check_buffers};

/// Settings of ZeRO-Offload. Gradients go to the host while backward goes on; the update begins as soon as the norm is known, in
/// the order in which the next forward pass needs parameters, which come back under it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct HostConfig {
    /// Where the states lie: "host" memory, or a "file".
    pub tier: TierKind,
    /// Types on the link: those of the "model" (gradients in bfloat16 where it has 16 bits), or "float32", which exact mode always
    /// takes for gradients.
    pub wire: Wire,
    /// Where parameters lie: on the "device", or with the "host", from where those of a unit come before each of its passes. The
    /// device then holds the parameters of a few units, the gradients, and the activations.
    pub parameters: ParametersOn,
    /// Bytes of a staging buffer on the device, and of its counterpart in host memory.
    pub buffer: ByteSize,
    /// Staging buffers each way.
    pub buffers: usize,
}

impl Default for HostConfig {
    fn default() -> Self {
        Self {
            tier: TierKind::Host,
            wire: Wire::Model,
            parameters: ParametersOn::Device,
            buffer: buffer(),
            buffers: buffers(),
        }
    }
}

impl HostConfig {
    /// The stage.
    ///
    /// # Errors
    /// Sizes out of range, with the key.
    pub fn offload(self) -> anyhow::Result<Arc<dyn Offload>> {
        check_buffers(self.buffer, self.buffers)?;
        Ok(Arc::new(Placed {
            policy: OffloadPolicy {
                keeps: Keeps::Nothing,
                interval: Interval::Fixed(1),
                asynchronous: false,
                promotion: Promotion::Flush,
                warmup: 0,
                wire: self.wire,
                accumulate: AccumulateOn::Host,
                parameters: self.parameters,
                buffer_bytes: usize::try_from(self.buffer.0)?,
                buffers: self.buffers,
                mean_lr: false,
                fold: false,
            },
            tier: self.tier,
        }))
    }
}

impl Build<slots::Offload> for HostConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Arc<dyn Offload>> {
        self.offload()
    }
}

zf_core::register!(
    slots::Offload,
    "host",
    HostConfig,
    "ZeRO-Offload: masters and optimizer states with the host, which updates after every backward",
    "tier = \"host\"\nwire = \"model\"\nparameters = \"device\""
);
