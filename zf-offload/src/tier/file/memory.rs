//! Memory for pages.

use tch::{Device, Kind, Tensor};
use zf_core::Result;
use zf_sys::heap::{Category, tag};
use zf_sys::storage::slice_mut;

use super::pages::BLOCK;

/// Float32 numbers that begin at a multiple of a block, booked to the heap of the thread that makes them.
#[derive(Debug)]
pub(super) struct Memory {
    /// Never leaves this place, so that a borrow of it is a borrow of the memory.
    tensor: Tensor,
    start: usize,
    len: usize,
}

impl Memory {
    /// `bytes` bytes, all zero.
    pub(super) fn new(bytes: usize) -> Result<Self> {
        let _buffers = tag(Category::Buffers);
        let len = bytes.div_ceil(size_of::<f32>());
        let room = Self::size_of(bytes) / size_of::<f32>() as u64;
        let tensor = Tensor::f_zeros([room as i64], (Kind::Float, Device::Cpu))?;
        let start = (tensor.data_ptr() as usize).wrapping_neg() % BLOCK / size_of::<f32>();
        Ok(Self { tensor, start, len })
    }

    /// Bytes that `bytes` bytes take, wherever they begin.
    pub(super) fn size_of(bytes: usize) -> u64 {
        (bytes.next_multiple_of(size_of::<f32>()) + BLOCK) as u64
    }

    /// All numbers.
    pub(super) fn floats(&mut self) -> Result<&mut [f32]> {
        // SAFETY: the tensor is borrowed mutably through `self`, and there is no other handle of it.
        let all = unsafe { slice_mut::<f32>(&self.tensor)? };
        Ok(&mut all[self.start..self.start + self.len])
    }

    /// All bytes.
    pub(super) fn bytes(&mut self) -> Result<&mut [u8]> {
        let floats = self.floats()?;
        let (data, len) = (floats.as_mut_ptr().cast(), size_of_val(floats));
        // SAFETY: the same memory; bytes have no alignment, and every pattern of bits is a float32.
        Ok(unsafe { std::slice::from_raw_parts_mut(data, len) })
    }

    /// Bytes that it takes.
    pub(super) fn size(&self) -> u64 {
        (self.tensor.numel() * size_of::<f32>()) as u64
    }
}
