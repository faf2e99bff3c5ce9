//! The numbers that kernels add, and the type they are added in.

/// A type that sums and maxima are formed in.
pub(crate) trait Accumulator: Copy {
    const ZERO: Self;
    fn add(self, other: Self) -> Self;
    /// The larger one; for floating point NaN if either is NaN.
    fn max(self, other: Self) -> Self;
}

/// An element in memory. Conversions have no branches that would keep loops over them from being vectorised.
pub(crate) trait Element: Copy {
    type Acc: Accumulator;
    fn widen(self) -> Self::Acc;
    /// Rounds to nearest, ties to even.
    fn narrow(acc: Self::Acc) -> Self;
}

/// A bfloat16 by its bits.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Bf16(pub(crate) u16);

/// An IEEE float16 by its bits.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct F16(pub(crate) u16);

macro_rules! float {
    ($($t:ty),*) => {$(
        impl Accumulator for $t {
            const ZERO: Self = 0.0;
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                if other > self || other.is_nan() { other } else { self }
            }
        }
    )*};
}

macro_rules! integer {
    ($($t:ty),*) => {$(
        impl Accumulator for $t {
            const ZERO: Self = 0;
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                if other > self { other } else { self }
            }
        }
    )*};
}

macro_rules! own {
    ($($t:ty),*) => {$(
        impl Element for $t {
            type Acc = $t;
            #[inline(always)]
            fn widen(self) -> $t {
                self
            }
            #[inline(always)]
            fn narrow(acc: $t) -> $t {
                acc
            }
        }
    )*};
}

float!(f32, f64);
integer!(i64, u8);
own!(f32, f64, i64, u8);

impl Element for Bf16 {
    type Acc = f32;

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    #[inline(always)]
    fn narrow(acc: f32) -> Self {
        let bits = acc.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet = (bits >> 16) | 0x40;
        let is_nan = (bits & 0x7fff_ffff) > 0x7f80_0000;
        Self((if is_nan { quiet } else { rounded }) as u16)
    }
}

impl Element for F16 {
    type Acc = f32;

    #[inline(always)]
    fn widen(self) -> f32 {
        // 2^112 moves the exponent from float16's bias to float32's, and is exact for subnormal numbers too.
        const SHIFT: f32 = f32::from_bits(0x7780_0000);
        let bits = u32::from(self.0);
        let magnitude = bits & 0x7fff;
        let moved = (f32::from_bits(magnitude << 13) * SHIFT).to_bits();
        let special = if magnitude >= 0x7c00 { 0x7f80_0000 } else { 0 };
        f32::from_bits(moved | special | ((bits & 0x8000) << 16))
    }

    #[inline(always)]
    fn narrow(acc: f32) -> Self {
        // The sum of a small number and this one has the small number's rounded bits at its end.
        const ALIGN: u32 = ((127 - 15) + (23 - 10) + 1) << 23;
        const OVERFLOW: u32 = (127 + 16) << 23;
        const SMALLEST_NORMAL: u32 = (127 - 14) << 23;
        let bits = acc.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let small = (f32::from_bits(magnitude) + f32::from_bits(ALIGN)).to_bits().wrapping_sub(ALIGN);
        let odd = (magnitude >> 13) & 1;
        let normal = magnitude.wrapping_add(0xc800_0fff).wrapping_add(odd) >> 13;
        let special = if magnitude > 0x7f80_0000 { 0x7e00 } else { 0x7c00 };
        let finite = if magnitude < SMALLEST_NORMAL { small } else { normal };
        let result = if magnitude >= OVERFLOW { special } else { finite };
        Self((result | ((bits >> 16) & 0x8000)) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> impl Iterator<Item = f32> {
        // Every exponent with mantissas around the places where 16-bit types round.
        (0..=u16::MAX).flat_map(|high| {
            [0, 1, 0x0fff, 0x1000, 0x1001, 0x2000, 0x3000, 0x7fff, 0x8000, 0x8001, 0xffff]
                .map(|low| f32::from_bits(u32::from(high) << 16 | low))
        })
    }

    #[test]
    fn every_16_bit_pattern_widens_like_the_half_crate() {
        for bits in 0..=u16::MAX {
            let (bf16, f16) = (half::bf16::from_bits(bits).to_f32(), half::f16::from_bits(bits).to_f32());
            let (our_bf16, our_f16) = (Bf16(bits).widen(), F16(bits).widen());
            assert!(our_bf16.to_bits() == bf16.to_bits() || (bf16.is_nan() && our_bf16.is_nan()), "{bits:#x}");
            assert!(our_f16.to_bits() == f16.to_bits() || (f16.is_nan() && our_f16.is_nan()), "{bits:#x}");
        }
    }

    #[test]
    fn floats_round_like_the_half_crate() {
        for value in samples() {
            let (bf16, f16) = (Bf16::narrow(value).0, F16::narrow(value).0);
            if value.is_nan() {
                assert!(half::bf16::from_bits(bf16).is_nan() && half::f16::from_bits(f16).is_nan());
            } else {
                assert_eq!(bf16, half::bf16::from_f32(value).to_bits(), "{value:e}");
                assert_eq!(f16, half::f16::from_f32(value).to_bits(), "{value:e}");
            }
        }
    }

    #[test]
    fn a_maximum_keeps_nan() {
        assert!(Accumulator::max(1.0_f32, f32::NAN).is_nan());
        assert!(Accumulator::max(f32::NAN, 1.0_f32).is_nan());
        assert_eq!(Accumulator::max(-1.0_f64, -2.0), -1.0);
    }
}
