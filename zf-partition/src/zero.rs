//! The ZeRO family of partitioners.

use std::sync::{Arc, Once};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::Result;
use zf_core::layout::{DType, Layout, Placement};
use zf_core::mesh::Mesh;
use zf_core::model::{ParamSpec, UnitSpec};
use zf_core::registry::{Build, BuildContext, setting};
use zf_core::slots;
use zf_core::stage::{Needs, Partitioner, Reshard, Transfers};

use crate::bytes::ByteSize;
use crate::nest;
use crate::reshard::ReshardAfterForward;
use crate::scope::{Scope, Scopes};

/// Settings of the partitioner `zero`: a ZeRO stage, or the three scopes that a stage stands for, and how tensors travel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(extend("x-exclusive" = [["stage", "scope"]]))]
pub struct ZeroConfig {
    /// ZeRO stage: 0 splits nothing, 1 the optimizer states, 2 also the gradients, 3 also the parameters. 1 where neither
    /// this nor `scope` is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 3))]
    pub stage: Option<u8>,
    /// Instead of a stage: over how many ranks parameters (`p`), gradients (`g`) and optimizer states (`o`) are split,
    /// each 1, "world", "node" or a number. size(o) >= size(g) >= size(p), each dividing the next and the ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scope: Option<Scopes>,
    /// Size of a bucket, in bytes of the travelling type. Changes neither ownership nor bits.
    pub bucket: ByteSize,
    /// Where parameters are split: units gathered ahead of the one that computes; 0 gathers each when it is needed.
    /// Never more than `max_live_units` leaves room for.
    pub prefetch: usize,
    /// Where parameters are split: units of fewer elements, all parameters of the unit together, keep theirs whole on
    /// every rank (their gradients and optimizer states are split all the same). 0 splits all.
    pub persist_below: usize,
    /// Where parameters are split: units gathered at once at most, at least 1.
    #[schemars(range(min = 1))]
    pub max_live_units: usize,
    /// Where parameters are split: whether they are freed after forward and gathered again for backward (`true`), stay
    /// (`false`), or stay split over fewer ranks, "node" or a number that divides size(p).
    pub reshard_after_forward: ReshardAfterForward,
}

impl Default for ZeroConfig {
    fn default() -> Self {
        Self {
            stage: None,
            scope: None,
            bucket: ByteSize(25_000_000),
            prefetch: 1,
            persist_below: 0,
            max_live_units: 2,
            reshard_after_forward: ReshardAfterForward::Free,
        }
    }
}

impl ZeroConfig {
    /// A stage with default settings.
    pub fn stage(stage: u8) -> Self {
        Self { stage: Some(stage), ..Self::default() }
    }

    /// Scopes with default settings.
    pub fn scope(scope: Scopes) -> Self {
        Self { scope: Some(scope), ..Self::default() }
    }

    /// The partitioner.
    ///
    /// # Errors
    /// Both stage and scope, a stage that does not exist, a bucket of no bytes, no unit that may be live. Errors carry the
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
        let bucket = usize::try_from(self.bucket.0).unwrap_or(usize::MAX);
        if bucket == 0 {
            return Err(setting("bucket", "must be at least 1 byte, found 0"));
        }
        if self.max_live_units == 0 {
            return Err(setting("max_live_units", "must be at least 1, the unit that computes, found 0"));
        }
        Ok(Zero {
            scopes,
            persist_below: self.persist_below,
            transfers: Transfers {
                bucket_bytes: bucket,
                prefetch: self.prefetch,
                max_live_units: self.max_live_units,
                reshard: Reshard::Shard,
            },
            reshard: self.reshard_after_forward,
        })
    }

    /// The keys that were changed although every rank holds all parameters, so that they do nothing.
    fn idle(&self, scopes: &Scopes) -> Vec<&'static str> {
        let plain = Self::default();
        let changed = [
            ("prefetch", self.prefetch != plain.prefetch),
            ("persist_below", self.persist_below != plain.persist_below),
            ("max_live_units", self.max_live_units != plain.max_live_units),
            ("reshard_after_forward", self.reshard_after_forward != plain.reshard_after_forward),
        ];
        let idle = changed.into_iter().filter(|(_, changed)| *changed && scopes.p == Scope::Ranks(1));
        idle.map(|(key, _)| key).collect()
    }
}

impl Build<slots::Partition> for ZeroConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Arc<dyn Partitioner>> {
        let zero = self.partitioner()?;
        for key in self.idle(&zero.scopes) {
            tracing::warn!(
                "partition.{key} has no effect: every rank holds all parameters (stages 0 to 2, or scope p = 1)"
            );
        }
        Ok(Arc::new(zero))
    }
}

zf_core::register!(
    slots::Partition,
    "zero",
    ZeroConfig,
    "ZeRO: optimizer states (stage 1), gradients (2) and parameters (3) split evenly over the ranks, or over groups of them",
    "stage = 1"
);

/// Even shards over groups of ranks, of three sizes for parameters, gradients and optimizer states.
#[derive(Debug, Clone, PartialEq)]
pub struct Zero {
    scopes: Scopes,
    persist_below: usize,
    transfers: Transfers,
    reshard: ReshardAfterForward,
}

/// Elements that a shard is a multiple of: 64 bytes of float32.
const ALIGNMENT: usize = 16;

impl Partitioner for Zero {
    /// Shards are equal, and what a rank updates lies within what it reduces, and that within what it holds. Under
    /// [`Needs::Matrices`] trained parameters are whole instead, balanced over the ranks by size.
    ///
    /// Every flat buffer is padded to a multiple of 16 elements a rank, whatever the scopes: so a float32 shard starts at
    /// a multiple of 64 bytes (a cache line, libtorch's own alignment, and one AVX-512 vector), two ranks never write the
    /// same cache line, and stages with the same number of ranks share one layout, padding included.
    fn layout(&self, units: &[UnitSpec], dtype: DType, mesh: &Mesh, needs: Needs) -> Result<Layout> {
        let sizes = self.scopes.sizes(mesh)?;
        self.reshard.resolve(sizes.p, mesh)?;
        if self.scopes.names_node() && mesh.node() == mesh.world() && mesh.world() > 1 {
            // Every rank asks for its layout, and all of them mean the same.
            static SAID: Once = Once::new();
            SAID.call_once(|| {
                tracing::warn!(
                    "partition.scope: \"node\" means all {} ranks here, as \"world\" does; transport.ranks_per_node says how \
                     many share a machine",
                    mesh.world()
                );
            });
        }
        let multiple = mesh.size("data") * ALIGNMENT;
        let mut layout = Layout::pack(units, dtype, mesh, multiple, |unit, numel| {
            let [params, grads, optim] = nest::even(numel, sizes)?;
            let stays = unit.params.iter().map(ParamSpec::numel).sum::<usize>() < self.persist_below;
            Ok([if stays { Placement::replicated(numel) } else { params }, grads, optim])
        })?;
        if needs == Needs::Matrices {
            nest::whole(&mut layout, sizes)?;
        }
        Ok(layout)
    }

    fn transfers(&self, mesh: &Mesh) -> Transfers {
        let resolved = self.scopes.sizes(mesh).and_then(|sizes| self.reshard.resolve(sizes.p, mesh));
        // A mesh that `layout` refuses has no transfers.
        Transfers { reshard: resolved.unwrap_or(Reshard::Shard), ..self.transfers }
    }
}
