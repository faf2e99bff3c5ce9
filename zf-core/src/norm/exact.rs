//! Sums that depend on neither order nor shards.

use super::wide::{LIMBS, Wide};
use crate::{Error, Result};

/// An exact sum of float64 numbers, among them squares of float32 numbers: a superaccumulator (Kulisch, "Computer
/// Arithmetic and Validity", chapter 8), one wide integer in units of 2^-1074.
///
/// Integer addition is associative, so the same addends in any order, on any number of ranks, merged in any order, give
/// the same [`ExactSum::to_bytes`], and [`ExactSum::value`] is rounded once. The sum leaves out addends that are infinite
/// or not a number and counts them. It holds 2^77 of the largest addends, and 2^64 - 1 of those left out.
///
/// ```
/// use zf_core::norm::ExactSum;
/// let gradient = [0.1f32, -3e-20, 7e18, 0.25];
/// let mut whole = ExactSum::new();
/// whole.add_squares(&gradient);
/// let (mut left, mut right) = (ExactSum::new(), ExactSum::new());
/// right.add_squares(&gradient[1..]);
/// left.add_squares(&gradient[..1]);
/// right.merge(&left);
/// assert_eq!(whole.to_bytes(), right.to_bytes());
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExactSum {
    total: Wide,
    nonfinite: u64,
}

impl Default for ExactSum {
    fn default() -> Self {
        Self::new()
    }
}

/// Bits of a float64's fraction.
const FRACTION: u32 = 52;

/// Position of 2^0 in units of 2^-1074.
const ONE: usize = 1074;

impl ExactSum {
    /// Length of [`ExactSum::to_bytes`].
    pub const BYTES: usize = 8 * (LIMBS + 1);

    /// Zero.
    pub fn new() -> Self {
        Self { total: Wide::ZERO, nonfinite: 0 }
    }

    /// Adds the square of every element.
    pub fn add_squares(&mut self, values: &[f32]) {
        // Float32 of exponent field e is `m * 2^(max(e, 1) - 150)` with a 24-bit integer m. Squares m^2 of one e share
        // their unit, so they are added up as integers by e. They are below 2^48: 2^16 of them fit in 64 bits. Two banks
        // keep runs of one exponent from waiting for their own store.
        for stretch in values.chunks(2 << 16) {
            let mut banks = [[0u64; 256]; 2];
            let (pairs, rest) = stretch.as_chunks::<2>();
            for pair in pairs {
                for (bank, x) in banks.iter_mut().zip(pair) {
                    self.nonfinite += add_square(bank, *x);
                }
            }
            for x in rest {
                self.nonfinite += add_square(&mut banks[0], *x);
            }
            for (e, (&a, &b)) in banks[0].iter().zip(&banks[1]).enumerate() {
                let sum = u128::from(a) + u128::from(b);
                if sum != 0 {
                    let bit = ONE + 2 * e.max(1) - 300;
                    self.total.add_shifted(sum, bit, false);
                }
            }
        }
    }

    /// Adds one number (a loss, a column's sum).
    pub fn add_f64(&mut self, x: f64) {
        let bits = x.to_bits();
        let exponent = ((bits >> FRACTION) & 0x7ff) as usize;
        let fraction = bits & ((1 << FRACTION) - 1);
        if exponent == 0x7ff {
            self.nonfinite += 1;
            return;
        }
        let integer = if exponent == 0 { fraction } else { fraction | 1 << FRACTION };
        self.total.add_shifted(u128::from(integer), exponent.max(1) - 1, x < 0.0);
    }

    /// Adds another sum.
    pub fn merge(&mut self, other: &Self) {
        self.total.add(&other.total);
        self.nonfinite += other.nonfinite;
    }

    /// Addends that were infinite or not a number.
    pub fn nonfinite(&self) -> u64 {
        self.nonfinite
    }

    /// The sum of the finite addends, rounded once to the nearest float64, ties to even; infinite beyond the largest.
    pub fn value(&self) -> f64 {
        let magnitude = self.total.magnitude();
        let Some(highest) = magnitude.highest_bit() else {
            return 0.0;
        };
        let rounded = if highest <= FRACTION as usize {
            // Up to 53 bits in units of 2^-1074: the bits of the float64 itself, subnormal or in the lowest binade.
            f64::from_bits(magnitude.bits_from(0))
        } else {
            let lowest = highest - FRACTION as usize;
            let integer = magnitude.bits_from(lowest) & ((2 << FRACTION) - 1);
            let half = magnitude.bits_from(lowest - 1) & 1 == 1;
            let up = half && (integer & 1 == 1 || magnitude.any_below(lowest - 1));
            // The implicit bit adds the 1 that turns `lowest` into the exponent field; a carry out of the fraction moves
            // to the next exponent by itself.
            let bits = ((lowest as u64) << FRACTION) + integer + u64::from(up);
            if bits >= f64::INFINITY.to_bits() { f64::INFINITY } else { f64::from_bits(bits) }
        };
        if self.total.is_negative() { -rounded } else { rounded }
    }

    /// The message form: the integer's limbs and the count, little-endian. Equal sums have equal bytes.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let words = self.total.0.iter().chain(std::iter::once(&self.nonfinite));
        for (target, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *target = word.to_le_bytes();
        }
        bytes
    }

    /// Reads [`ExactSum::to_bytes`].
    ///
    /// # Errors
    /// When there are not exactly [`ExactSum::BYTES`] bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let (words, rest) = bytes.as_chunks::<8>();
        if words.len() != LIMBS + 1 || !rest.is_empty() {
            return Err(Error::comm(format!(
                "an exact sum has {} bytes, found {}; do all ranks run the same version?",
                Self::BYTES,
                bytes.len()
            )));
        }
        let mut sum = Self::new();
        for (target, word) in sum.total.0.iter_mut().zip(words) {
            *target = u64::from_le_bytes(*word);
        }
        sum.nonfinite = u64::from_le_bytes(words[LIMBS]);
        Ok(sum)
    }
}

/// Adds the square of `x` in units of its exponent's square, or returns 1 where it is not finite.
#[inline(always)]
fn add_square(bank: &mut [u64; 256], x: f32) -> u64 {
    let bits = x.to_bits();
    let exponent = ((bits >> 23) & 0xff) as usize;
    let fraction = u64::from(bits & 0x7f_ffff);
    let normal = u64::from(exponent != 0) << 23;
    let finite = u64::from(exponent != 0xff);
    let integer = (fraction | normal) * finite;
    bank[exponent] += integer * integer;
    1 - finite
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn squares(values: &[f32]) -> ExactSum {
        let mut sum = ExactSum::new();
        sum.add_squares(values);
        sum
    }

    /// Any bits: subnormals, infinities and NaN among them.
    fn any_floats() -> impl Strategy<Value = Vec<f32>> {
        prop::collection::vec(any::<u32>().prop_map(f32::from_bits), 0..300)
    }

    proptest! {
        #[test]
        fn any_split_and_order_give_the_same_bytes(
            values in any_floats(),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..5),
            seed in any::<u64>(),
        ) {
            let whole = squares(&values);
            let mut shuffled = values.clone();
            let mut state = seed;
            for i in (1..shuffled.len()).rev() {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
                shuffled.swap(i, (state >> 33) as usize % (i + 1));
            }
            let mut ends: Vec<usize> = cuts.iter().map(|c| c.index(values.len() + 1)).collect();
            ends.push(values.len());
            ends.sort_unstable();
            let mut parts = Vec::new();
            let mut start = 0;
            for end in ends {
                parts.push(squares(&shuffled[start..end]));
                start = end;
            }
            let mut merged = ExactSum::new();
            for part in parts.iter().rev() {
                merged.merge(&ExactSum::from_bytes(&part.to_bytes()).unwrap());
            }
            prop_assert_eq!(whole.to_bytes(), merged.to_bytes());
        }

        #[test]
        fn squares_are_those_of_float64(values in any_floats()) {
            let mut one_by_one = ExactSum::new();
            for &x in &values {
                one_by_one.add_f64(f64::from(x) * f64::from(x));
            }
            prop_assert_eq!(squares(&values).to_bytes(), one_by_one.to_bytes());
        }

        #[test]
        fn one_number_comes_back(bits in any::<u64>()) {
            let x = f64::from_bits(bits);
            let mut sum = ExactSum::new();
            sum.add_f64(x);
            if x.is_finite() {
                prop_assert_eq!(sum.value(), x);
                prop_assert_eq!(sum.nonfinite(), 0);
            } else {
                prop_assert_eq!(sum.value(), 0.0);
                prop_assert_eq!(sum.nonfinite(), 1);
            }
        }

        #[test]
        fn two_numbers_are_rounded_as_the_processor_does(a in any::<u64>(), near in -60i64..60) {
            // The second number lies within 60 binades of the first, so that both matter.
            let a = f64::from_bits(a);
            let exponent = ((a.to_bits() >> 52) & 0x7ff) as i64;
            let b = f64::from_bits(
                a.to_bits().rotate_left(7) & !(0x7ff << 52)
                    | ((exponent + near).clamp(0, 0x7fe) as u64) << 52,
            );
            prop_assume!(a.is_finite());
            let mut sum = ExactSum::new();
            sum.add_f64(a);
            sum.add_f64(b);
            prop_assert_eq!(sum.value(), a + b);
        }
    }

    #[test]
    fn nothing_is_lost_between_the_largest_and_the_smallest() {
        let mut sum = ExactSum::new();
        for x in [1e308, 5e-324, 1e308, -1e308, -1e308] {
            sum.add_f64(x);
        }
        assert_eq!(sum.value(), 5e-324);
        sum.add_f64(-1e-323);
        assert_eq!(sum.value(), -5e-324);
    }

    #[test]
    fn beyond_the_largest_it_is_infinite() {
        let mut sum = ExactSum::new();
        sum.add_f64(f64::MAX);
        sum.add_f64(f64::MAX);
        assert_eq!(sum.value(), f64::INFINITY);
        sum.add_f64(-f64::MAX);
        assert_eq!(sum.value(), f64::MAX);
    }

    #[test]
    fn many_equal_large_squares_do_not_overflow_a_bank() {
        // The largest integer square, more often than a bank holds without being emptied.
        let x = f32::from_bits(0x3fff_ffff);
        let n = (2 << 16) + 3;
        let found = squares(&vec![x; n]).value();
        let square = f64::from(x) * f64::from(x);
        let integer = (square / 2f64.powi(-46)) as u128 * n as u128;
        assert_eq!(found, integer as f64 * 2f64.powi(-46));
    }

    #[test]
    fn refuses_another_length() {
        let message = ExactSum::from_bytes(&[0; 88]).unwrap_err().to_string();
        assert!(message.contains("280 bytes, found 88"), "{message}");
    }
}
