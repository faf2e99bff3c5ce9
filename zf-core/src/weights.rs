//! Where initial values of parameters come from.

use tch::Tensor;

use crate::Result;
use crate::model::ParamSpec;

/// A source of initial values, asked for one parameter at a time so that no rank ever holds more than one whole tensor
/// beside its own state.
pub trait Weights: Send + Sync {
    /// The values of `spec`, on the CPU, of its shape, in the precision of the source (float32, float16 or bfloat16):
    /// masters start from unrounded values.
    ///
    /// # Errors
    /// Missing or wrongly shaped tensors, naming them and the file.
    fn load(&self, spec: &ParamSpec) -> Result<Tensor>;
}
