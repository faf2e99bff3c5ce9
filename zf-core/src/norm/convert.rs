//! 16-bit floating-point numbers to float32 and back, without branches, so that loops over them become vector code.
//!
//! The bits are those of the crate `half`, which converts one number at a time behind a check of the processor.

use half::{bf16, f16};

/// Rounds to the nearest bfloat16, ties to even. NaN stays NaN with its sign and upper payload, made quiet.
#[inline(always)]
pub fn bf16_from_f32(x: f32) -> bf16 {
    let bits = x.to_bits();
    // Adding just under half a unit, and one more when the kept part is odd, carries exactly when rounding goes up; a
    // carry into the exponent is right too, up to infinity. The largest NaN would wrap round, so NaN goes apart.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let nan = (bits >> 16) | 0x40;
    let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
    bf16::from_bits((if is_nan { nan } else { rounded }) as u16)
}

/// The same value.
#[inline(always)]
pub fn f32_from_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Rounds to the nearest IEEE half, ties to even; from 65520 on to infinity. NaN stays NaN, made quiet.
#[inline(always)]
pub fn f16_from_f32(x: f32) -> f16 {
    /// Half a unit of a subnormal half is the last bit of this number, so that adding it rounds there.
    const SUBNORMAL: u32 = ((127 - 15) + (23 - 10) + 1) << 23;
    let bits = x.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let size = bits & 0x7fff_ffff;

    // Exponent rebiased from 127 to 15; rounding as in `bf16_from_f32`.
    let normal = size.wrapping_sub((127 - 15) << 23).wrapping_add(0xfff + ((size >> 13) & 1)) >> 13;
    let subnormal = (f32::from_bits(size) + f32::from_bits(SUBNORMAL)).to_bits().wrapping_sub(SUBNORMAL);
    let nan = 0x7e00 | ((size >> 13) & 0x3ff);

    let finite = if size < (113 << 23) { subnormal } else { normal };
    let large = if size > 0x7f80_0000 { nan } else { 0x7c00 };
    let magnitude = if size < (143 << 23) { finite } else { large };
    f16::from_bits((sign | magnitude) as u16)
}

/// The same value; NaN is made quiet.
#[inline(always)]
pub fn f32_from_f16(x: f16) -> f32 {
    let bits = u32::from(x.to_bits());
    let sign = (bits & 0x8000) << 16;
    let size = (bits & 0x7fff) << 13;
    let exponent = size & (0x1f << 23);

    let normal = size + ((127 - 15) << 23);
    // A subnormal half is `fraction * 2^-24`: put the fraction below 2^-14 and take 2^-14 away, exactly.
    let subnormal = (f32::from_bits(size + (113 << 23)) - f32::from_bits(113 << 23)).to_bits();
    let quiet = if size > exponent { 0x40_0000 } else { 0 };
    let special = (size | 0x7f80_0000) | quiet;

    let small = if exponent == 0 { subnormal } else { normal };
    let magnitude = if exponent == 0x1f << 23 { special } else { small };
    f32::from_bits(sign | magnitude)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every 16-bit number, the float32 numbers halfway between neighbours, and one bit to each side of both.
    fn interesting(to_f32: impl Fn(u16) -> f32) -> Vec<f32> {
        let mut all = Vec::new();
        for bits in 0..=u16::MAX {
            let here = to_f32(bits).to_bits();
            let next = to_f32(bits.wrapping_add(1)).to_bits();
            let middle = here.wrapping_add(next.wrapping_sub(here) / 2);
            for center in [here, middle] {
                for step in [-1i32, 0, 1] {
                    all.push(f32::from_bits(center.wrapping_add_signed(step)));
                }
            }
        }
        // A coarse walk over all of float32.
        all.extend((0..=u32::MAX).step_by(65521).map(f32::from_bits));
        all
    }

    #[test]
    fn bf16_as_the_reference() {
        for x in interesting(|b| half::bf16::from_bits(b).to_f32()) {
            assert_eq!(bf16_from_f32(x).to_bits(), half::bf16::from_f32(x).to_bits(), "{:#010x}", x.to_bits());
        }
        for bits in 0..=u16::MAX {
            let x = half::bf16::from_bits(bits);
            if !x.is_nan() {
                assert_eq!(f32_from_bf16(x).to_bits(), x.to_f32().to_bits());
            }
        }
    }

    #[test]
    fn f16_as_the_reference() {
        for x in interesting(|b| half::f16::from_bits(b).to_f32_const()) {
            assert_eq!(f16_from_f32(x).to_bits(), half::f16::from_f32_const(x).to_bits(), "{:#010x}", x.to_bits());
        }
        for bits in 0..=u16::MAX {
            let x = half::f16::from_bits(bits);
            assert_eq!(f32_from_f16(x).to_bits(), x.to_f32_const().to_bits(), "{bits:#06x}");
        }
    }
}
