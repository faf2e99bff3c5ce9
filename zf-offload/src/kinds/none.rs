//! Everything stays on the device.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::registry::{Build, BuildContext};
use zf_core::stage::{HostPool, Offload, OffloadPolicy, Site};
use zf_core::{Error, Result, slots};

/// Settings of `none`: none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NoneConfig {}

impl Offload for NoneConfig {
    fn policy(&self) -> Option<OffloadPolicy> {
        None
    }

    fn open(&self, _site: Site) -> Result<Box<dyn HostPool>> {
        Err(Error::Engine("nothing leaves the device".into()))
    }
}

impl Build<slots::Offload> for NoneConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Arc<dyn Offload>> {
        Ok(Arc::new(self))
    }
}

zf_core::register!(slots::Offload, "none", NoneConfig, "masters and optimizer states stay on the device", "");
