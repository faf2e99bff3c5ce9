//! What `[offload]` chooses: `none`, `host` (ZeRO-Offload) and `zenflow`.

mod host;
mod none;
mod zenflow;

pub use host::HostConfig;
pub use none::NoneConfig;
pub use zenflow::{IntervalConfig, LearningRate, ZenflowConfig};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::Result;
use zf_core::bytes::ByteSize;
use zf_core::stage::{HostPool, Offload, OffloadPolicy, Site, Tier, TierBytes};

use crate::tier::{FileSettings, FileTier, MemoryTier};
use crate::worker::Worker;

/// Where masters and states lie that are not on the device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TierKind {
    /// In host memory.
    #[default]
    Host,
    /// In files of the run folder.
    File,
}

/// A policy with the place where its states lie.
#[derive(Debug)]
struct Placed {
    policy: OffloadPolicy,
    tier: TierKind,
}

impl Offload for Placed {
    fn policy(&self) -> Option<OffloadPolicy> {
        Some(self.policy.clone())
    }

    fn tier_bytes(&self, lens: &[usize], arrays: usize) -> TierBytes {
        let in_memory = TierBytes::in_memory(lens, arrays);
        match self.tier {
            TierKind::Host => in_memory,
            // The default pool is large enough for any buffers.
            TierKind::File => FileTier::needs(lens, arrays, &FileSettings::default()).unwrap_or(in_memory),
        }
    }

    fn open(&self, site: Site) -> Result<Box<dyn HostPool>> {
        let arrays = 1 + site.optimizer.state().len();
        let (tier, notes): (Box<dyn Tier>, Vec<String>) = {
            let _host = site.heap.enter();
            match self.tier {
                TierKind::Host => (Box::new(MemoryTier::new(&site.lens, arrays)?), Vec::new()),
                TierKind::File => {
                    let folder = site.folder.join("states");
                    let tier = FileTier::new(&folder, &site.lens, arrays, &FileSettings::default())?;
                    let notes = tier.notes().to_vec();
                    (Box::new(tier), notes)
                }
            }
        };
        Ok(Box::new(Worker::start(site, tier, self.policy.buffers)?.with_notes(notes)))
    }
}

/// The size of a staging buffer where nothing else is said.
const fn buffer() -> ByteSize {
    ByteSize(8 << 20)
}

/// Staging buffers each way where nothing else is said.
const fn buffers() -> usize {
    4
}

/// Checks what both kinds have.
fn check_buffers(buffer: ByteSize, buffers: usize) -> anyhow::Result<()> {
    if buffer.0 < 64 {
        return Err(zf_core::registry::setting("buffer", format!("at least 64 bytes, found {buffer}")));
    }
    if !(2..=1024).contains(&buffers) {
        return Err(zf_core::registry::setting("buffers", format!("from 2 to 1024, found {buffers}")));
    }
    Ok(())
}
