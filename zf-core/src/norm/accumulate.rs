//! Adding gradients of any type into float32.

use half::{bf16, f16};

use super::squares::{LANES, Lanes};
use super::{Kernel, Level, SquareSum, f32_from_bf16, f32_from_f16};
use crate::{Error, Result};

/// Numbers to be added to, or stored in, a float32 buffer.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    /// float32.
    F32(&'a [f32]),
    /// bfloat16, widened exactly.
    Bf16(&'a [bf16]),
    /// IEEE half, widened exactly.
    F16(&'a [f16]),
}

impl Source<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(s) => s.len(),
            Self::Bf16(s) => s.len(),
            Self::F16(s) => s.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// `dst += src`, one float32 addition an element.
///
/// # Errors
/// Unequal lengths.
pub fn accumulate(dst: &mut [f32], src: Source<'_>) -> Result<()> {
    pass::<Add, false>(Level::detect(), dst, src).map(drop)
}

/// `dst = src`.
///
/// # Errors
/// Unequal lengths.
pub fn assign(dst: &mut [f32], src: Source<'_>) -> Result<()> {
    pass::<Assign, false>(Level::detect(), dst, src).map(drop)
}

/// `dst += src`, and the sum of squares of the result in the same pass, with the bits of [`super::square_sum`].
///
/// # Errors
/// Unequal lengths.
pub fn add_and_square(dst: &mut [f32], src: Source<'_>) -> Result<SquareSum> {
    pass::<Add, true>(Level::detect(), dst, src)
}

/// What to do with an element and its addend.
trait Combine {
    fn combine(old: f32, new: f32) -> f32;
}

struct Add;

impl Combine for Add {
    #[inline(always)]
    fn combine(old: f32, new: f32) -> f32 {
        old + new
    }
}

struct Assign;

impl Combine for Assign {
    #[inline(always)]
    fn combine(_: f32, new: f32) -> f32 {
        new
    }
}

/// A type that widens to float32.
trait Widen: Copy {
    fn widen(self) -> f32;
}

impl Widen for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl Widen for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32_from_bf16(self)
    }
}

impl Widen for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32_from_f16(self)
    }
}

fn pass<C: Combine, const SQUARE: bool>(level: Level, dst: &mut [f32], src: Source<'_>) -> Result<SquareSum> {
    if dst.len() != src.len() {
        return Err(Error::Engine(format!("{} elements cannot be accumulated into {}", src.len(), dst.len())));
    }
    Ok(match src {
        Source::F32(src) => level.run(Pass::<_, C, SQUARE>::new(dst, src)),
        Source::Bf16(src) => level.run(Pass::<_, C, SQUARE>::new(dst, src)),
        Source::F16(src) => level.run(Pass::<_, C, SQUARE>::new(dst, src)),
    })
}

struct Pass<'a, T, C, const SQUARE: bool> {
    dst: &'a mut [f32],
    src: &'a [T],
    combine: std::marker::PhantomData<C>,
}

impl<'a, T, C, const SQUARE: bool> Pass<'a, T, C, SQUARE> {
    fn new(dst: &'a mut [f32], src: &'a [T]) -> Self {
        Self { dst, src, combine: std::marker::PhantomData }
    }
}

impl<T: Widen, C: Combine, const SQUARE: bool> Kernel for Pass<'_, T, C, SQUARE> {
    type Output = SquareSum;

    #[inline(always)]
    fn run(self) -> SquareSum {
        if SQUARE {
            with_squares::<T, C>(self.dst, self.src)
        } else {
            plain::<T, C>(self.dst, self.src);
            SquareSum::default()
        }
    }
}

#[inline(always)]
fn plain<T: Widen, C: Combine>(dst: &mut [f32], src: &[T]) {
    for (d, s) in dst.iter_mut().zip(src) {
        *d = C::combine(*d, s.widen());
    }
}

#[inline(always)]
fn with_squares<T: Widen, C: Combine>(dst: &mut [f32], src: &[T]) -> SquareSum {
    let mut lanes = Lanes::new();
    let (blocks, rest) = dst.as_chunks_mut::<LANES>();
    let (sources, rest_sources) = src.as_chunks::<LANES>();
    for (stretch, sources) in blocks.chunks_mut(1 << 30).zip(sources.chunks(1 << 30)) {
        for (block, source) in stretch.iter_mut().zip(sources) {
            for (d, s) in block.iter_mut().zip(source) {
                *d = C::combine(*d, s.widen());
            }
            lanes.add(block);
        }
        lanes.carry();
    }
    plain::<T, C>(rest, rest_sources);
    lanes.add_rest(rest);
    lanes.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::norm::square_sum;

    fn numbers(n: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
                (state >> 40) as f32 / (1 << 22) as f32 - 2.0
            })
            .collect()
    }

    fn check(level: Level, n: usize) {
        let start = numbers(n, 1);
        let full = numbers(n, 2);
        let brain: Vec<bf16> = full.iter().map(|&x| bf16::from_f32(x)).collect();
        let half: Vec<f16> = full.iter().map(|&x| f16::from_f32(x)).collect();
        let widened: [Vec<f32>; 3] =
            [full.clone(), brain.iter().map(|x| x.to_f32()).collect(), half.iter().map(|x| x.to_f32()).collect()];
        let sources = [Source::F32(&full), Source::Bf16(&brain), Source::F16(&half)];
        for (source, wide) in sources.into_iter().zip(&widened) {
            let sum: Vec<f32> = start.iter().zip(wide).map(|(a, b)| a + b).collect();
            let mut dst = start.clone();
            pass::<Add, false>(level, &mut dst, source).unwrap();
            assert_eq!(dst, sum, "{level:?} {n}");
            let mut dst = start.clone();
            let squares = pass::<Add, true>(level, &mut dst, source).unwrap();
            assert_eq!(dst, sum, "{level:?} {n}");
            assert_eq!(squares, square_sum(&sum), "{level:?} {n}");
            let mut dst = start.clone();
            pass::<Assign, false>(level, &mut dst, source).unwrap();
            assert_eq!(&dst, wide, "{level:?} {n}");
        }
    }

    #[test]
    fn every_level_and_short_length() {
        for &level in Level::available() {
            (0..70).for_each(|n| check(level, n));
            check(level, 10_007);
        }
    }

    #[test]
    fn counts_what_overflows_in_the_sum() {
        let mut dst = [f32::MAX, 1.0, f32::NAN];
        let found = add_and_square(&mut dst, Source::F32(&[f32::MAX, 1.0, 1.0])).unwrap();
        assert_eq!(found, SquareSum { sum: 4.0, nonfinite: 2 });
    }

    #[test]
    fn unequal_lengths_are_an_error() {
        let message = accumulate(&mut [0.0; 3], Source::F32(&[0.0; 2])).unwrap_err().to_string();
        assert_eq!(message, "2 elements cannot be accumulated into 3");
    }
}
