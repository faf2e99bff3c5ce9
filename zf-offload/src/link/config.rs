//! The settings of links, which open one for each rank's device.

use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Device;
use zf_core::bandwidth::Bandwidth;
use zf_core::registry::{Build, BuildContext};
use zf_core::slots;
use zf_core::stage::{Link, Links};
use zf_core::trace::Trace;
use zf_core::{Error, Result};

use super::{CudaLink, DirectLink, EmulatedLink, direct, emulated};

/// Settings of the link `emulated`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EmulatedConfig {
    /// Bytes a second in each direction: `"4GB/s"`.
    pub bandwidth: Bandwidth,
    /// The time until the first byte of a transfer arrives: `"10us"`.
    #[serde(default = "latency", with = "zf_core::duration")]
    #[schemars(with = "String")]
    pub latency: Duration,
}

/// About what a copy over PCIe takes to begin.
fn latency() -> Duration {
    Duration::from_micros(10)
}

impl Links for EmulatedConfig {
    fn open(&self, _rank: usize, device: Device, cores: &[usize], trace: &Trace) -> Result<Arc<dyn Link>> {
        on_cpu(emulated::NAME, device)?;
        Ok(Arc::new(EmulatedLink::new(self.bandwidth, self.latency, cores, trace)?))
    }
}

impl Build<slots::Link> for EmulatedConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Arc<dyn Links>> {
        Ok(Arc::new(self))
    }
}

zf_core::register!(
    slots::Link,
    "emulated",
    EmulatedConfig,
    "real copies on threads of their own, full duplex, that take latency + bytes / bandwidth",
    "[device]\nkind = \"emulated\"\nmemory = \"512MiB\"\nlink = { kind = \"emulated\", bandwidth = \"4GB/s\", latency = \"10us\" }"
);

/// Settings of the link `direct`: none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DirectConfig {}

impl Links for DirectConfig {
    fn open(&self, _rank: usize, device: Device, _cores: &[usize], trace: &Trace) -> Result<Arc<dyn Link>> {
        on_cpu(direct::NAME, device)?;
        Ok(Arc::new(DirectLink::new(trace)))
    }
}

impl Build<slots::Link> for DirectConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Arc<dyn Links>> {
        Ok(Arc::new(self))
    }
}

zf_core::register!(
    slots::Link,
    "direct",
    DirectConfig,
    "copies at once on the rank's own thread, as fast as memory allows",
    "[device]\nlink = { kind = \"direct\" }"
);

/// Settings of the link `cuda`: none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CudaConfig {}

impl Links for CudaConfig {
    fn open(&self, _rank: usize, device: Device, cores: &[usize], trace: &Trace) -> Result<Arc<dyn Link>> {
        Ok(Arc::new(CudaLink::new(device, cores, trace)?))
    }
}

impl Build<slots::Link> for CudaConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Arc<dyn Links>> {
        Ok(Arc::new(self))
    }
}

zf_core::register!(
    slots::Link,
    "cuda",
    CudaConfig,
    "copies through pinned memory on streams beside the computation",
    "[device]\nkind = \"cuda\"\nlink = { kind = \"cuda\" }"
);

/// Whatever link suits the device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Natural;

impl Links for Natural {
    fn open(&self, rank: usize, device: Device, cores: &[usize], trace: &Trace) -> Result<Arc<dyn Link>> {
        match device {
            Device::Cuda(_) => CudaConfig::default().open(rank, device, cores, trace),
            _ => DirectConfig::default().open(rank, device, cores, trace),
        }
    }
}

fn on_cpu(stage: &'static str, device: Device) -> Result<()> {
    if device == Device::Cpu {
        return Ok(());
    }
    Err(Error::Config(format!(
        "`device.link`: the link `{stage}` needs a device in this machine's memory (`device.kind = \"cpu\"` or \"emulated\"), found \
         {device:?}; use the link `cuda`, or leave it out"
    )))
}
