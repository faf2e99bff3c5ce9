//! Where an update writes the rounded parameter.

use half::{bf16, f16};
use zf_core::norm::{bf16_from_f32, f16_from_f32};

/// A parameter's type, rounded from its float32 master. `()` where the master is the parameter.
pub(crate) trait Round: Sized {
    /// Rounds to nearest even.
    fn round(x: f32) -> Self;
}

impl Round for () {
    #[inline(always)]
    fn round(_: f32) {}
}

impl Round for bf16 {
    #[inline(always)]
    fn round(x: f32) -> Self {
        bf16_from_f32(x)
    }
}

impl Round for f16 {
    #[inline(always)]
    fn round(x: f32) -> Self {
        f16_from_f32(x)
    }
}
