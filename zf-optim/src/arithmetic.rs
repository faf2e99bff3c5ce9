//! Arithmetic that gives the same bits everywhere.

use tch::Tensor;
use zf_core::Result;

/// The correctly rounded square root of float32 `x`, in the memory of `out`.
///
/// On the CPU libtorch leaves square roots to a vector library that is off by one unit in a few of a million. The root in
/// float64, rounded, is right even then: the root of a float32 is no closer than 2^-51 of itself to a point halfway
/// between two float32 numbers, and the library errs by about 2^-53. CUDA's own float32 root is correctly rounded.
pub(crate) fn square_root(x: &Tensor, out: &Tensor) -> Result<Tensor> {
    if x.device() != tch::Device::Cpu {
        return Ok(x.f_sqrt_out(out)?);
    }
    let mut out = out.shallow_clone();
    out.f_copy_(&x.f_to_kind(tch::Kind::Double)?.f_sqrt_()?)?;
    Ok(out)
}

/// `base^exponent` by repeated squaring: within a few units in the last place, and the same everywhere, which the
/// platform's `pow` is not.
pub(crate) fn power(base: f64, exponent: u64) -> f64 {
    let (mut result, mut square, mut rest) = (1.0, base, exponent);
    while rest > 0 {
        if rest & 1 == 1 {
            result *= square;
        }
        square *= square;
        rest >>= 1;
    }
    result
}
