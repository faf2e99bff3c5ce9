//! States in host memory.

use tch::{Device, Kind, Tensor};
use zf_core::stage::{Span, Tier, TierBytes};
use zf_core::{Error, Result};
use zf_sys::heap::{Category, tag};
use zf_sys::storage::slice_mut;

/// Arrays in host memory, booked to the heap of the thread that makes them, as optimizer states.
#[derive(Debug)]
pub struct MemoryTier {
    /// The arrays of each buffer, `[len]` float32 each.
    buffers: Vec<Vec<Tensor>>,
    lens: Vec<usize>,
}

impl MemoryTier {
    /// For each of `lens` a buffer of so many elements, `arrays` arrays each, all zero.
    ///
    /// # Errors
    /// No memory.
    pub fn new(lens: &[usize], arrays: usize) -> Result<Self> {
        let _states = tag(Category::Optimizer);
        let array = |len: usize| Ok(Tensor::f_zeros([len as i64], (Kind::Float, Device::Cpu))?);
        let buffer = |&len: &usize| (0..arrays).map(|_| array(len)).collect::<Result<Vec<_>>>();
        Ok(Self { buffers: lens.iter().map(buffer).collect::<Result<_>>()?, lens: lens.to_vec() })
    }
}

impl Tier for MemoryTier {
    fn announce(&mut self, spans: &[Span]) -> Result<()> {
        spans.iter().try_for_each(|span| inside(span, self.lens.iter().copied()))
    }

    fn with(&mut self, span: &Span, f: &mut dyn FnMut(&mut [&mut [f32]]) -> Result<()>) -> Result<()> {
        inside(span, self.lens.iter().copied())?;
        let mut slices = Vec::with_capacity(self.buffers[span.buffer].len());
        for array in &self.buffers[span.buffer] {
            // SAFETY: the tier is borrowed mutably, and its tensors never leave it.
            slices.push(&mut unsafe { slice_mut::<f32>(array)? }[span.range.clone()]);
        }
        f(&mut slices)
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    fn bytes(&self) -> TierBytes {
        let held = |(arrays, &len): (&Vec<Tensor>, &usize)| (arrays.len() * len * size_of::<f32>()) as u64;
        TierBytes { host: self.buffers.iter().zip(&self.lens).map(held).sum(), file: 0 }
    }
}

/// That `span` lies in its buffer.
///
/// # Errors
/// It does not.
pub(super) fn inside(span: &Span, mut lens: impl ExactSizeIterator<Item = usize>) -> Result<()> {
    let count = lens.len();
    match lens.nth(span.buffer) {
        Some(len) if span.range.start <= span.range.end && span.range.end <= len => Ok(()),
        Some(len) => Err(Error::Engine(format!(
            "expected elements within 0..{len} of buffer {}, found {:?}",
            span.buffer, span.range
        ))),
        None => Err(Error::Engine(format!("expected a buffer below {}, found {}", count, span.buffer))),
    }
}
