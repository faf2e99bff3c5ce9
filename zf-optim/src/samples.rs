//! What the tests of several rules share.

use tch::Tensor;

/// Numbers from -1 to 1.
pub(crate) fn uniform(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// Numbers of many magnitudes, with zeros, subnormals and both signs.
pub(crate) fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut numbers = uniform(n, seed);
    for (i, x) in numbers.iter_mut().enumerate() {
        *x = match i % 11 {
            0 => 0.0,
            // Subnormal.
            1 => f32::from_bits(((*x + 1.0) * (1 << 18) as f32) as u32),
            2 => *x * 1e-20,
            3 => *x * 1e10,
            _ => *x,
        }
    }
    numbers
}

/// The bits, so that zeros of both signs differ and NaN equals itself.
pub(crate) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// The elements of a 1-D float32 tensor.
pub(crate) fn back(x: &Tensor) -> Vec<f32> {
    x.try_into().unwrap()
}
