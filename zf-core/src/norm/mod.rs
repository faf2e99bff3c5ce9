//! Passes over float32 buffers that every step makes: accumulating gradients, sums of squares, clipping.
//!
//! All passes exist in one form, a plain loop, which [`Level::run`] compiles for several instruction sets and chooses at
//! run time. No pass uses fused multiply-add or reorders additions, so every instruction set gives the same bits.
//!
//! Two sums of squares serve two purposes. [`square_sum`] is as fast as memory and deterministic for a given slice, but
//! its bits depend on where slices end. [`ExactSum`] is an integer, so that any split over ranks, any order of additions
//! and any order of merging give the same bytes; exact mode sends one of these per rank and needs no other message.

mod accumulate;
mod convert;
mod exact;
mod level;
mod squares;
mod wide;

pub use accumulate::{Source, accumulate, add_and_square, assign};
pub use convert::{bf16_from_f32, f16_from_f32, f32_from_bf16, f32_from_f16};
pub use exact::ExactSum;
pub use level::{Kernel, Level};
pub use squares::{SquareSum, square_sum};

/// The factor on the gradient that limits its global L2 norm to `max`: `min(1, max / (norm + 1e-6))`, as
/// `torch.nn.utils.clip_grad_norm_`.
///
/// `max` 0 means no clipping, as in the run file. A norm that is infinite or not a number belongs to a skipped step; it
/// gives 0 or NaN here, never a factor that would hide it.
pub fn clip_coefficient(norm: f64, max: f64) -> f64 {
    if max == 0.0 {
        return 1.0;
    }
    let coefficient = max / (norm + 1e-6);
    // `f64::min` would turn NaN into 1.
    if coefficient > 1.0 { 1.0 } else { coefficient }
}

#[cfg(test)]
mod tests {
    use super::clip_coefficient;

    #[test]
    fn clips_only_above_the_limit() {
        assert_eq!(clip_coefficient(0.0, 1.0), 1.0);
        assert_eq!(clip_coefficient(0.5, 1.0), 1.0);
        assert_eq!(clip_coefficient(4.0, 1.0), 1.0 / (4.0 + 1e-6));
        // At the limit itself the 1e-6 already scales a little, as in PyTorch.
        assert_eq!(clip_coefficient(1.0, 1.0), 1.0 / (1.0 + 1e-6));
        assert_eq!(clip_coefficient(1e9, 0.0), 1.0);
    }

    #[test]
    fn does_not_hide_a_norm_that_is_no_number() {
        assert!(clip_coefficient(f64::NAN, 1.0).is_nan());
        assert_eq!(clip_coefficient(f64::INFINITY, 1.0), 0.0);
    }
}
