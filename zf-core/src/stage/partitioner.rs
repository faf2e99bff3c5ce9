//! Who owns which part of parameters, gradients and optimizer states.

use crate::Result;
use crate::layout::{DType, Layout};
use crate::mesh::Mesh;
use crate::model::UnitSpec;
use crate::stage::Needs;

/// A pure function from parameter shapes and mesh to a [`Layout`]: no tensors, no ranks asked, the same answer on every
/// rank.
pub trait Partitioner: Send + Sync {
    /// The layout for `units` in `dtype` on `mesh`, for an update rule that needs to see `needs`: with
    /// [`Needs::Matrices`] no parameter's optimizer state may be split.
    ///
    /// # Errors
    /// Scopes that break size(O) >= size(G) >= size(P), sizes that do not divide the mesh.
    fn layout(&self, units: &[UnitSpec], dtype: DType, mesh: &Mesh, needs: Needs) -> Result<Layout>;

    /// How tensors travel on `mesh`, one that [`Partitioner::layout`] accepts. Changes neither ownership nor bits.
    fn transfers(&self, _mesh: &Mesh) -> Transfers {
        Transfers::default()
    }
}

/// How parameters and gradients travel between owners and users. Nothing here changes ownership or bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfers {
    /// The size of a bucket in bytes of the travelling type: so much goes in one collective.
    pub bucket_bytes: usize,
    /// Units gathered ahead of the one that runs, where parameters are sharded.
    pub prefetch: usize,
    /// Units gathered at once at most, root units aside; at least 1.
    pub max_live_units: usize,
    /// What happens to gathered parameters between forward and backward.
    pub reshard: Reshard,
}

impl Default for Transfers {
    fn default() -> Self {
        Self { bucket_bytes: 25_000_000, prefetch: 1, max_live_units: 2, reshard: Reshard::Shard }
    }
}

/// What happens to a unit's gathered parameters after its forward pass (FSDP's `reshard_after_forward`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reshard {
    /// They are freed, and gathered again for backward.
    Shard,
    /// They stay until their backward: less traffic, more memory. Every unit is live then.
    Keep,
    /// Groups of so many consecutive ranks keep one copy between them, from which they gather for backward (the secondary
    /// shard of ZeRO++'s hpZ).
    Group(usize),
}
