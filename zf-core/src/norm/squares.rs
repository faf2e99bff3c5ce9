//! Sums of squares at the speed of memory.

use super::{Kernel, Level};

/// A sum of squares, and how many elements were left out of it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SquareSum {
    /// Sum of the squares of the finite elements.
    pub sum: f64,
    /// Elements that are infinite or not a number.
    pub nonfinite: u64,
}

impl SquareSum {
    /// The sum over both.
    pub fn merge(self, other: Self) -> Self {
        Self { sum: self.sum + other.sum, nonfinite: self.nonfinite + other.nonfinite }
    }
}

/// The sum of the squares of `values` in float64, with the count of non-finite elements.
///
/// The order of additions is fixed: element i goes to lane i mod 16, and the lanes are added pairwise. So one slice
/// always gives the same bits, on every processor; another split of the same elements may not (see
/// [`super::ExactSum`]). A square of a float32 is exact in float64, so each lane makes one rounding per element.
pub fn square_sum(values: &[f32]) -> SquareSum {
    let sum = Level::detect().run(Finite { values });
    // What is not finite makes the whole sum so, and only then is it worth while to look at each element.
    if sum.is_finite() { SquareSum { sum, nonfinite: 0 } } else { Level::detect().run(Squares { values }) }
}

/// The sum over all elements, in the same order as [`Squares`] and without looking for non-finite ones.
struct Finite<'a> {
    values: &'a [f32],
}

impl Kernel for Finite<'_> {
    type Output = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        let mut sums = [0f64; LANES];
        let (blocks, rest) = self.values.as_chunks::<LANES>();
        for block in blocks {
            prefetch(block);
            for lane in 0..LANES {
                let x = f64::from(block[lane]);
                sums[lane] += x * x;
            }
        }
        for (sum, &x) in sums.iter_mut().zip(rest) {
            *sum += f64::from(x) * f64::from(x);
        }
        pairwise(sums)
    }
}

/// Asks for memory some way ahead of `block`: one stream of loads alone does not use all the bandwidth of a core.
#[inline(always)]
fn prefetch(block: &[f32; LANES]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let ahead = block.as_ptr().wrapping_add(64 * LANES);
        // SAFETY: a prefetch is a hint, which faults for no address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead.cast()) };
    }
}

/// Adds the lanes pairwise.
#[inline(always)]
fn pairwise(mut sums: [f64; LANES]) -> f64 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
        width /= 2;
    }
    sums[0]
}

struct Squares<'a> {
    values: &'a [f32],
}

impl Kernel for Squares<'_> {
    type Output = SquareSum;

    #[inline(always)]
    fn run(self) -> SquareSum {
        let mut lanes = Lanes::new();
        let (blocks, rest) = self.values.as_chunks::<LANES>();
        // A lane's 32-bit count cannot overflow within a stretch.
        for stretch in blocks.chunks(1 << 30) {
            for block in stretch {
                lanes.add(block);
            }
            lanes.carry();
        }
        lanes.add_rest(rest);
        lanes.finish()
    }
}

/// Lanes of partial sums: enough for four 512-bit vectors in flight.
pub(super) const LANES: usize = 16;

/// Partial sums of squares, one a lane.
pub(super) struct Lanes {
    sums: [f64; LANES],
    counts: [u32; LANES],
    nonfinite: u64,
}

impl Lanes {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self { sums: [0.0; LANES], counts: [0; LANES], nonfinite: 0 }
    }

    /// Adds one element to each lane. At most 2^32 - 1 times between two calls of [`Lanes::carry`].
    #[inline(always)]
    pub(super) fn add(&mut self, block: &[f32; LANES]) {
        for ((sum, count), &x) in self.sums.iter_mut().zip(&mut self.counts).zip(block) {
            // All bits of the exponent set: infinite or not a number.
            let bits = x.to_bits();
            let special = (bits & 0x7f80_0000) == 0x7f80_0000;
            let x = f64::from(f32::from_bits(if special { 0 } else { bits }));
            *sum += x * x;
            *count += u32::from(special);
        }
    }

    /// Adds fewer than [`LANES`] elements, from lane 0 on.
    #[inline(always)]
    pub(super) fn add_rest(&mut self, rest: &[f32]) {
        let mut block = [0.0; LANES];
        block[..rest.len()].copy_from_slice(rest);
        self.add(&block);
        self.carry();
    }

    /// Moves the lanes' counts into the long one.
    #[inline(always)]
    pub(super) fn carry(&mut self) {
        for count in &mut self.counts {
            self.nonfinite += u64::from(*count);
            *count = 0;
        }
    }

    #[inline(always)]
    pub(super) fn finish(self) -> SquareSum {
        SquareSum { sum: pairwise(self.sums), nonfinite: self.nonfinite }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(n: usize) -> Vec<f32> {
        let mut state = 1u64;
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
                (state >> 40) as f32 / (1 << 20) as f32 - 8.0
            })
            .collect()
    }

    #[test]
    fn agrees_with_a_plain_sum_at_every_short_length() {
        for n in 0..70 {
            let v = values(n);
            let plain: f64 = v.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            let found = square_sum(&v);
            assert!((found.sum - plain).abs() <= 1e-12 * plain, "{n}");
            assert_eq!(found.nonfinite, 0);
        }
    }

    #[test]
    fn all_levels_give_the_same_bits() {
        let v = values(100_003);
        let expected = Level::Portable.run(Squares { values: &v });
        for level in Level::available() {
            let found = level.run(Squares { values: &v });
            assert_eq!(found.sum.to_bits(), expected.sum.to_bits(), "{level:?}");
        }
    }

    #[test]
    fn counts_what_is_not_finite_and_leaves_it_out() {
        let mut v = values(67);
        let clean = square_sum(&v);
        for (place, bad) in [(0, f32::NAN), (15, f32::INFINITY), (66, f32::NEG_INFINITY)] {
            v[place] = bad;
        }
        let found = square_sum(&v);
        assert_eq!(found.nonfinite, 3);
        assert!(found.sum < clean.sum && found.sum.is_finite());
    }

    #[test]
    fn squares_of_the_largest_and_smallest_do_not_overflow_or_vanish() {
        let max = f64::from(f32::MAX);
        assert_eq!(square_sum(&[f32::MAX; 4]).sum, 4.0 * max * max);
        let tiny = f64::from(f32::from_bits(1));
        assert_eq!(square_sum(&[f32::from_bits(1)]).sum, tiny * tiny);
    }
}
