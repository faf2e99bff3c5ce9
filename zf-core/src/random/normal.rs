//! Normal values from random words (Box and Muller, 1958), with polynomials instead of the system's functions.
//!
//! The system's `ln`, `sin` and `cos` differ between platforms in the last bit, and are calls that a compiler cannot
//! vectorise. The polynomials are those of the Cephes library (Moshier, `logf.c` and `sinf.c`), good to about 1e-7.

use std::f32::consts::{FRAC_1_SQRT_2, FRAC_PI_2};

/// Standard normal values of four random words in each lane: words 0 and 1 give two, words 2 and 3 the others.
#[inline(always)]
pub(super) fn box_muller<const N: usize>(words: [[u32; N]; 4]) -> [[f32; N]; 4] {
    let mut values = [[0.0; N]; 4];
    for pair in [0, 2] {
        for lane in 0..N {
            // In (0, 1], so that the logarithm is finite. The largest value is sqrt(2 ln 2^24) = 5.8.
            let uniform = ((words[pair][lane] >> 8) + 1) as f32 * (1.0 / 16_777_216.0);
            let radius = (-2.0 * ln(uniform)).max(0.0).sqrt();
            let (sin, cos) = sin_cos(words[pair + 1][lane]);
            values[pair][lane] = radius * cos;
            values[pair + 1][lane] = radius * sin;
        }
    }
    values
}

/// The natural logarithm of a normal positive number.
#[inline(always)]
fn ln(x: f32) -> f32 {
    let bits = x.to_bits();
    let half = f32::from_bits((bits & 0x007f_ffff) | 0x3f00_0000);
    let exponent = (bits >> 23) as i32 - 126;
    let small = half < FRAC_1_SQRT_2;
    let exponent = (exponent - i32::from(small)) as f32;
    let m = if small { half + half } else { half } - 1.0;
    let z = m * m;
    let mut y = 7.037_683_6e-2;
    for coefficient in [
        -0.115_146_1,
        0.116_769_984,
        -0.124_201_41,
        0.142_493_23,
        -0.166_680_57,
        0.200_007_15,
        -0.249_999_94,
        0.333_333_3,
    ] {
        y = y * m + coefficient;
    }
    let y = y * m * z - 2.121_944_4e-4 * exponent - 0.5 * z;
    m + y + 0.693_359_4 * exponent
}

/// Sine and cosine of an angle that is uniform on the circle: the top two bits choose the quadrant, the others the
/// place in it.
#[inline(always)]
fn sin_cos(word: u32) -> (f32, f32) {
    let quadrant = word >> 30;
    let place = (word & 0x3fff_ffff) as i32 as f32 * (1.0 / 1_073_741_824.0);
    let angle = (place - 0.5) * FRAC_PI_2;
    let z = angle * angle;
    let sin = ((-1.951_529_6e-4 * z + 8.332_161e-3) * z - 0.166_666_55) * z * angle + angle;
    let cos = ((2.443_315_7e-5 * z - 1.388_731_6e-3) * z + 4.166_664_6e-2) * z * z - 0.5 * z + 1.0;
    let (sin, cos) = if quadrant & 1 == 0 { (sin, cos) } else { (cos, -sin) };
    if quadrant & 2 == 0 { (sin, cos) } else { (-sin, -cos) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithm_matches_the_system() {
        for i in 1..=10_000u32 {
            let x = i as f32 / 10_000.0;
            assert!((ln(x) - x.ln()).abs() <= 3e-7 * (1.0 + x.ln().abs()), "ln({x}) = {}, expected {}", ln(x), x.ln());
        }
    }

    #[test]
    fn angles_cover_the_circle() {
        for i in 0..4096u32 {
            let (sin, cos) = sin_cos(i << 20);
            let angle = (f64::from(i) / 4096.0) * std::f64::consts::TAU - std::f64::consts::FRAC_PI_4;
            assert!((f64::from(sin) - angle.sin()).abs() < 2e-7, "sine of {angle}");
            assert!((f64::from(cos) - angle.cos()).abs() < 2e-7, "cosine of {angle}");
        }
    }
}
