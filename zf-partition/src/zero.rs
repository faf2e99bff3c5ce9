//! The ZeRO family of partitioners.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::layout::{DType, Layout, Placement};
use zf_core::mesh::Mesh;
use zf_core::model::UnitSpec;
use zf_core::registry::{Build, BuildContext, setting};
use zf_core::slots;
use zf_core::stage::{Needs, Partitioner, Transfers};
use zf_core::{Error, Result};

use crate::bytes::ByteSize;
use crate::scope::{Scopes, Sizes};

/// Settings of the partitioner `zero`: a ZeRO stage, or the three scopes that a stage stands for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ZeroConfig {
    /// ZeRO stage: 0 splits nothing, 1 the optimizer states, 2 also the gradients, 3 also the parameters. 1 where neither
    /// this nor `scope` is given. Stages 2 and 3 are not in this version.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 3))]
    pub stage: Option<u8>,
    /// Instead of a stage: over how many ranks parameters (`p`), gradients (`g`) and optimizer states (`o`) are split,
    /// each 1, "world", "node" or a number. size(o) >= size(g) >= size(p), each dividing the next and the ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scope: Option<Scopes>,
    /// Size of a reduction bucket, in bytes of the gradient's type. Changes neither ownership nor bits.
    pub bucket: ByteSize,
}

impl Default for ZeroConfig {
    fn default() -> Self {
        Self { stage: None, scope: None, bucket: ByteSize(25_000_000) }
    }
}

impl ZeroConfig {
    /// A stage with default settings.
    pub fn stage(stage: u8) -> Self {
        Self { stage: Some(stage), ..Self::default() }
    }

    /// The partitioner.
    ///
    /// # Errors
    /// Both stage and scope, a stage that does not exist or is not in this version, a bucket of no bytes. Errors carry the
    /// key, for the run file's line.
    pub fn partitioner(&self) -> anyhow::Result<Zero> {
        let scopes = match (self.stage, self.scope) {
            (Some(_), Some(_)) => {
                return Err(setting("scope", "stage and scope say the same thing; give one of them"));
            }
            (None, Some(scopes)) => scopes,
            (stage, None) => {
                let stage = stage.unwrap_or(1);
                Scopes::of_stage(stage)
                    .ok_or_else(|| setting("stage", format!("must be 0, 1, 2 or 3, found {stage}")))?
            }
        };
        if let Some(stage @ (2 | 3)) = self.stage {
            return Err(setting("stage", format!("stage {stage} is not in this version; use 0 or 1")));
        }
        let bucket = usize::try_from(self.bucket.0).unwrap_or(usize::MAX);
        if bucket == 0 {
            return Err(setting("bucket", "must be at least 1 byte, found 0"));
        }
        Ok(Zero { scopes, bucket })
    }
}

impl Build<slots::Partition> for ZeroConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Arc<dyn Partitioner>> {
        Ok(Arc::new(self.partitioner()?))
    }
}

zf_core::register!(
    slots::Partition,
    "zero",
    ZeroConfig,
    "ZeRO: optimizer states (stage 1) split evenly over the ranks, or nothing (stage 0)",
    "stage = 1"
);

/// Even shards over groups of ranks, of three sizes for parameters, gradients and optimizer states.
#[derive(Debug, Clone, PartialEq)]
pub struct Zero {
    scopes: Scopes,
    bucket: usize,
}

/// Elements that a shard is a multiple of: 64 bytes of float32.
const ALIGNMENT: usize = 16;

impl Partitioner for Zero {
    /// Every flat buffer is padded to a multiple of 16 elements a rank, whatever the scopes: so a float32 shard starts at
    /// a multiple of 64 bytes (a cache line, libtorch's own alignment, and one AVX-512 vector), two ranks never write the
    /// same cache line, and stages with the same number of ranks share one layout, padding included.
    fn layout(&self, units: &[UnitSpec], dtype: DType, mesh: &Mesh, _needs: Needs) -> Result<Layout> {
        let sizes = self.scopes.sizes(mesh)?;
        supported(&sizes, mesh)?;
        let place = |numel: usize, size: usize| {
            if size == 1 { Ok(Placement::replicated(numel)) } else { Placement::even(numel, size) }
        };
        let multiple = mesh.size("data") * ALIGNMENT;
        Layout::pack(units, dtype, mesh, multiple, |_, numel| {
            Ok([place(numel, sizes.p)?, place(numel, sizes.g)?, place(numel, sizes.o)?])
        })
    }

    fn transfers(&self) -> Transfers {
        Transfers { bucket_bytes: self.bucket, ..Transfers::default() }
    }
}

/// The one place that knows what the engine cannot do yet: split parameters or gradients, and split optimizer states over
/// a part of the ranks.
fn supported(sizes: &Sizes, mesh: &Mesh) -> Result<()> {
    let data = mesh.size("data");
    let Sizes { p, g, o } = *sizes;
    if p == 1 && g == 1 && (o == 1 || o == data) {
        return Ok(());
    }
    Err(Error::Config(format!(
        "partition.scope: this version splits optimizer states over all ranks or not at all, and neither gradients nor \
         parameters: use p = 1, g = 1 and o = 1 or \"world\"; found p = {p}, g = {g}, o = {o} on {data} data-parallel ranks"
    )))
}
