//! Root-mean-square normalisation.

use tch::{Kind, TchError, Tensor};

/// RMSNorm (Zhang and Sennrich, 2019) over the last dimension: `x / sqrt(mean(x^2) + eps) * weight`.
///
/// Computed in float32, then rounded to the type of `x` before the multiplication by `weight`, as Hugging Face's
/// `LlamaRMSNorm` does.
///
/// # Errors
/// Shapes that do not fit.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor, TchError> {
    let kind = x.kind();
    let wide = x.f_to_kind(Kind::Float)?;
    let mean = wide.f_pow_tensor_scalar(2)?.f_mean_dim([-1i64].as_slice(), true, None)?;
    let scale = mean.f_add_scalar(eps)?.f_rsqrt()?;
    wide.f_mul(&scale)?.f_to_kind(kind)?.f_mul(weight)
}
