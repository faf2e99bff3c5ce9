//! Rotary position embedding (Su et al., RoFormer, 2021) in the half-split layout of Hugging Face: feature `i` turns
//! with feature `i + D/2`.

use std::f64::consts::TAU;

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, TchError, Tensor};

/// How frequencies are stretched for sequences longer than those of pretraining (`rope_scaling` in `config.json`).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(tag = "rope_type", rename_all = "lowercase", deny_unknown_fields)]
pub enum RopeScaling {
    /// All frequencies divided by `factor` (position interpolation, Chen et al., 2023).
    Linear {
        /// At least 1.
        factor: f64,
    },
    /// Low frequencies divided by `factor`, high ones kept, a smooth passage between (Llama 3.1).
    Llama3 {
        /// At least 1.
        factor: f64,
        /// Wavelengths longer than `original_max_position_embeddings / low_freq_factor` are stretched.
        low_freq_factor: f64,
        /// Wavelengths shorter than `original_max_position_embeddings / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Length of pretraining.
        original_max_position_embeddings: usize,
    },
}

/// Frequencies of a model's heads.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotary {
    /// Radians a position, one for each pair of features, rounded as float32 arithmetic rounds them.
    frequencies: Vec<f32>,
}

impl Rotary {
    /// Frequencies `theta^(-2i/D)` of heads with `head_dim` features, an even number.
    pub fn new(head_dim: usize, theta: f64, scaling: Option<RopeScaling>) -> Self {
        let plain = (0..head_dim / 2).map(|pair| {
            let exponent = (2 * pair) as f32 / head_dim as f32;
            1.0 / theta.powf(f64::from(exponent)) as f32
        });
        let frequencies = match scaling {
            None => plain.collect(),
            Some(RopeScaling::Linear { factor }) => plain.map(|frequency| frequency / factor as f32).collect(),
            Some(RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            }) => {
                let length = original_max_position_embeddings as f64;
                plain
                    .map(|frequency| {
                        let exact = f64::from(frequency);
                        let wavelength = TAU / exact;
                        let stretched = if wavelength > length / low_freq_factor {
                            exact / factor
                        } else if wavelength < length / high_freq_factor {
                            exact
                        } else {
                            let smooth = (length / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                            (1.0 - smooth) * exact / factor + smooth * exact
                        };
                        stretched as f32
                    })
                    .collect()
            }
        };
        Self { frequencies }
    }

    /// Radians a position for each pair of features.
    pub fn frequencies(&self) -> &[f32] {
        &self.frequencies
    }

    /// Cosines and signed sines for positions `0 .. length`, each `[T, 1, D]`: computed in float32, rounded to `kind`.
    /// The first half of the sines is negative, so that [`rotate`](Self::rotate) needs no negation.
    ///
    /// # Errors
    /// Out of memory.
    pub fn tables(&self, length: i64, kind: Kind, device: Device) -> Result<(Tensor, Tensor), TchError> {
        let positions = Tensor::f_arange(length, (Kind::Float, device))?;
        let frequencies = Tensor::f_from_slice(&self.frequencies)?.f_to_device(device)?;
        let angles = positions.f_outer(&frequencies)?.f_unsqueeze(1)?;
        let cos = angles.f_cos()?;
        let sin = angles.f_sin()?;
        let cos = Tensor::f_cat(&[&cos, &cos], -1)?.f_to_kind(kind)?;
        let sin = Tensor::f_cat(&[&sin.f_neg()?, &sin], -1)?.f_to_kind(kind)?;
        Ok((cos, sin))
    }

    /// Turns queries or keys `[B, T, H, D]` by the angles of `(cos, sin)` from [`tables`](Self::tables).
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor, TchError> {
        let half = x.size().last().copied().unwrap_or(0) / 2;
        let swapped = x.f_roll([half].as_slice(), [-1i64].as_slice())?;
        x.f_mul(cos)?.f_addcmul(&swapped, sin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotation_keeps_lengths_and_depends_on_distance_only() {
        let rotary = Rotary::new(8, 10_000.0, None);
        let (cos, sin) = rotary.tables(16, Kind::Float, Device::Cpu).unwrap();
        let one = Tensor::arange(8, (Kind::Float, Device::Cpu)).sin().view([1, 1, 1, 8]).expand([1, 16, 1, 8], false);
        let turned = Rotary::rotate(&one, &cos, &sin).unwrap().view([16, 8]);
        let products = turned.matmul(&turned.tr());
        for (i, j) in [(0, 0), (0, 3), (5, 9)] {
            let here = products.double_value(&[i, j]);
            let there = products.double_value(&[i + 6, j + 6]);
            assert!((here - there).abs() < 1e-5, "positions {i}, {j}: {here} and {there}");
        }
    }

    /// From `transformers` 4.57 `_compute_llama3_parameters`, by hand for three regions.
    #[test]
    fn llama3_keeps_high_and_divides_low_frequencies() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        let plain = Rotary::new(128, 500_000.0, None);
        let scaled = Rotary::new(128, 500_000.0, Some(scaling));
        let ratio = |i: usize| plain.frequencies()[i] / scaled.frequencies()[i];
        assert_eq!(ratio(0), 1.0);
        assert!((ratio(63) - 8.0).abs() < 1e-5);
        assert!((1.0..8.0).contains(&ratio(32)), "{}", ratio(32));
        let wavelength = TAU / f64::from(plain.frequencies()[32]);
        let smooth = (8192.0 / wavelength - 1.0) / 3.0;
        assert!((f64::from(ratio(32)) - 1.0 / ((1.0 - smooth) / 8.0 + smooth)).abs() < 1e-5);
    }

    #[test]
    fn linear_divides_all() {
        let plain = Rotary::new(16, 10_000.0, None);
        let scaled = Rotary::new(16, 10_000.0, Some(RopeScaling::Linear { factor: 4.0 }));
        for (a, b) in plain.frequencies().iter().zip(scaled.frequencies()) {
            assert_eq!(*a, b * 4.0);
        }
    }
}
