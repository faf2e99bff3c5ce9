//! Who owns which part of parameters, gradients and optimizer states.

use crate::Result;
use crate::layout::{DType, Layout};
use crate::mesh::Mesh;
use crate::model::UnitSpec;

/// A pure function from parameter shapes and mesh to a [`Layout`]: no tensors, no ranks asked, the same answer on every
/// rank.
pub trait Partitioner: Send + Sync {
    /// The layout for `units` in `dtype` on `mesh`.
    ///
    /// # Errors
    /// Scopes that break size(O) >= size(G) >= size(P), sizes that do not divide the mesh.
    fn layout(&self, units: &[UnitSpec], dtype: DType, mesh: &Mesh) -> Result<Layout>;

    /// The size of a reduction bucket in bytes of the gradient's type. Changes neither ownership nor bits.
    fn bucket_bytes(&self) -> usize {
        25 << 20
    }
}
