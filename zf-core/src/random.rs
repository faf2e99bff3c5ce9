//! Randomness that depends on names and indices, never on ranks, threads or the order of calls.
//!
//! Everything random in a run (initial weights, dropout masks) is a function of a counter: Philox4x32-10 of Salmon et
//! al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A [`Stream`] is a key of that function; the value at
//! index `i` of a stream can be had without those before it, so that any split of the work gives the same values.
//! Normal values use single IEEE additions, multiplications and square roots only, so that they are the same bits on
//! every machine.

mod normal;
mod philox;

use tch::{Kind, Tensor};

use crate::model::{Init, Noise, ParamSpec};
use crate::weights::Weights;
use crate::{Error, Result};

pub use philox::Stream;

/// Writes normal values number `first_index`, `first_index + 1`, ... of `stream`.
pub fn normal_into(out: &mut [f32], stream: Stream, first_index: u64, mean: f32, std: f32) {
    philox::fill(stream, first_index, out, |words| {
        let mut values = normal::box_muller(words);
        for lane in values.iter_mut().flatten() {
            *lane = mean + std * *lane;
        }
        values
    });
}

/// Writes uniform values in `[low, high)` number `first_index`, `first_index + 1`, ... of `stream`.
pub fn uniform_into(out: &mut [f32], stream: Stream, first_index: u64, low: f32, high: f32) {
    let width = high - low;
    philox::fill(stream, first_index, out, |words| {
        // 24 bits are all that a float32 in [0, 1) with even spacing holds.
        words.map(|lanes| lanes.map(|word| low + width * ((word >> 8) as f32 * (1.0 / 16_777_216.0))))
    });
}

/// The initial values of `spec`: float32, on the CPU. Element `i` depends on the seed, the name and `i` only.
///
/// # Errors
/// A negative dimension, or libtorch refuses the memory.
pub fn initial(spec: &ParamSpec, seed: u64) -> Result<Tensor> {
    if spec.shape.iter().any(|&dim| dim < 0) {
        return Err(Error::Engine(format!(
            "parameter `{}` has shape {:?}; dimensions start at 0",
            spec.name, spec.shape
        )));
    }
    let options = (Kind::Float, tch::Device::Cpu);
    let fill = |draw: &dyn Fn(&mut [f32])| -> Result<Tensor> {
        let tensor = Tensor::f_empty(&spec.shape, options)?;
        // SAFETY: the tensor was made on the line above and no other handle of its memory exists.
        draw(unsafe { zf_sys::storage::slice_mut::<f32>(&tensor)? });
        Ok(tensor)
    };
    let stream = Stream::named(seed, &spec.name);
    match spec.init {
        Init::Zeros => Ok(Tensor::f_zeros(&spec.shape, options)?),
        Init::Ones => Ok(Tensor::f_ones(&spec.shape, options)?),
        Init::Normal { std } => fill(&|out| normal_into(out, stream, 0, 0.0, std as f32)),
        Init::Uniform { bound } => fill(&|out| uniform_into(out, stream, 0, -bound as f32, bound as f32)),
    }
}

/// A random start: the values that [`initial`] gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RandomWeights {
    /// The run's seed.
    pub seed: u64,
}

impl Weights for RandomWeights {
    fn load(&self, spec: &ParamSpec) -> Result<Tensor> {
        initial(spec, self.seed)
    }
}

/// Dropout (Srivastava et al., 2014, scaled in training): each element of `x` `[sequences, ...]` is set to zero with
/// probability `p`, the others are multiplied by `1 / (1 - p)`.
///
/// Element `j` of sequence `s` is decided by seed, step, `unit`, `site`, `sequences[s]` and `j`, so that a mask is the
/// same however sequences are spread over micro-batches and ranks, and when a unit is recomputed. `site` tells apart
/// the places of one unit. The mask is made on the CPU and moved to where `x` lives.
///
/// # Errors
/// `p` outside `[0, 1)`, or a first dimension that is not the number of sequences.
pub fn dropout(x: &Tensor, p: f64, noise: Noise, unit: usize, site: u32, sequences: &[u64]) -> Result<Tensor> {
    if !(0.0..1.0).contains(&p) {
        return Err(Error::Engine(format!("dropout with probability {p}; expected one in [0, 1)")));
    }
    if p == 0.0 {
        return Ok(x.shallow_clone());
    }
    let shape = x.size();
    if shape.first().copied() != i64::try_from(sequences.len()).ok() {
        return Err(Error::Engine(format!(
            "dropout on shape {shape:?} with {} sequences; the first dimension must be the sequences",
            sequences.len()
        )));
    }
    let width = x.numel() / sequences.len().max(1);
    let mut keep = vec![0u8; x.numel()];
    // A word below the threshold drops its element. Rounding p to 2^-32 is far below what a mask can show.
    let threshold = (p * 4_294_967_296.0) as u32;
    let place = Stream::new(noise.seed).child(noise.step).child(unit as u64).child(u64::from(site));
    for (row, &sequence) in keep.chunks_exact_mut(width.max(1)).zip(sequences) {
        philox::fill(place.child(sequence), 0, row, |words| {
            words.map(|lanes| lanes.map(|word| u8::from(word >= threshold)))
        });
    }
    let mask = Tensor::f_from_data_size(&keep, &shape, Kind::Bool)?.f_to_device(x.device())?;
    // The scale is applied apart from the mask: rounded to bfloat16 it would be off by up to 0.4 %.
    Ok(x.f_mul(&mask)?.f_mul_scalar(1.0 / (1.0 - p))?)
}

#[cfg(test)]
mod tests;
