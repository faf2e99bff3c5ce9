//! How much an element matters. The engine sums the values of a column over shards and ranks.

mod adam;
mod l1;
mod l2;
mod weight_gradient;

use zf_core::norm::{Kernel, Level};

pub use adam::{Adam, AdamConfig};
pub use l1::L1;
pub use l2::L2;
pub use weight_gradient::WeightGradient;

/// `x`, and the largest float32 in place of infinity: the value of a finite element must be finite. NaN stays.
#[inline(always)]
fn finite(x: f32) -> f32 {
    // `f32::min` would turn NaN into a number.
    if x > f32::MAX { f32::MAX } else { x }
}

/// Writes `f` of each element, with the vector instructions of this processor.
fn each(x: &[f32], out: &mut [f32], f: impl Fn(f32) -> f32) {
    Level::detect().run(Each { x, out, f });
}

/// Writes `f` of each pair of elements, with the vector instructions of this processor.
fn each_pair(x: &[f32], y: &[f32], out: &mut [f32], f: impl Fn(f32, f32) -> f32) {
    Level::detect().run(EachPair { x, y, out, f });
}

struct Each<'a, F> {
    x: &'a [f32],
    out: &'a mut [f32],
    f: F,
}

impl<F: Fn(f32) -> f32> Kernel for Each<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (out, &x) in self.out.iter_mut().zip(self.x) {
            *out = (self.f)(x);
        }
    }
}

struct EachPair<'a, F> {
    x: &'a [f32],
    y: &'a [f32],
    out: &'a mut [f32],
    f: F,
}

impl<F: Fn(f32, f32) -> f32> Kernel for EachPair<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for ((out, &x), &y) in self.out.iter_mut().zip(self.x).zip(self.y) {
            *out = (self.f)(x, y);
        }
    }
}

#[cfg(test)]
mod tests;
