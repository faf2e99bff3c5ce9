//! Copies on side streams, and pinned memory.

use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};

use tch::{Device, Kind, Tensor};

use crate::storage::Scalar;
use crate::{Error, Result, ffi};

/// A stream of a CUDA device beside that on which operators run. On the CPU copies happen at once, so that code for both is
/// the same.
#[derive(Debug)]
pub struct Stream(NonNull<c_void>);

// SAFETY: a stream is an identifier that is never changed.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream of `device` from libtorch's pool.
    ///
    /// # Errors
    ///
    /// If the device does not exist, this libtorch is built without it, or it is neither the CPU nor CUDA.
    pub fn beside(device: Device) -> Result<Self> {
        const CALL: &str = "Stream::beside";
        let index = match device {
            Device::Cpu => Ok(-1),
            Device::Cuda(index) => c_int::try_from(index).map_err(|_| format!("there is no CUDA device {index}")),
            other => Err(format!("{other:?} is neither the CPU nor CUDA")),
        };
        let index = index.map_err(|message| Error::Argument { call: CALL, message })?;
        let mut out = ptr::null_mut();
        // SAFETY: the shim checks the index, and `out` is a valid place.
        ffi::check(CALL, unsafe { ffi::zf_stream_new(index, &mut out) })?;
        Ok(Self(NonNull::new(out).expect("zf_stream_new writes a stream when it succeeds")))
    }

    /// Copies `from` into `to`, after all that the calling thread's current stream was given before and beside what it is
    /// given after. Autograd sees nothing of it. Only copies between a device and pinned memory run beside the caller.
    ///
    /// Neither tensor may be used, nor dropped, before [`Copy::query`] says that the copy is over.
    ///
    /// # Errors
    ///
    /// If the tensors do not match.
    pub fn copy(&self, to: &Tensor, from: &Tensor) -> Result<Copy> {
        let mut out = ptr::null_mut();
        // SAFETY: the stream and both handles live during the call, and `out` is a valid place.
        let message = unsafe { ffi::zf_stream_copy(self.0.as_ptr(), ffi::raw(to), ffi::raw(from), &mut out) };
        ffi::check("Stream::copy", message)?;
        Ok(Copy(NonNull::new(out).expect("zf_stream_copy writes a copy when it succeeds")))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by zf_stream_new and freed once.
        unsafe { ffi::zf_stream_free(self.0.as_ptr()) }
    }
}

/// A copy on its way.
#[derive(Debug)]
pub struct Copy(NonNull<c_void>);

// SAFETY: events may be asked from any thread, by one at a time.
unsafe impl Send for Copy {}

impl Copy {
    /// The seconds that the copy took, if it is over; 0 on the CPU.
    ///
    /// # Errors
    ///
    /// If the copy, or work on the device before it, failed.
    pub fn query(&self) -> Result<Option<f64>> {
        let (mut over, mut seconds) = (false, 0.0);
        // SAFETY: the copy is alive and both places are valid.
        let message = unsafe { ffi::zf_copy_query(self.0.as_ptr(), &mut over, &mut seconds) };
        ffi::check("Copy::query", message)?;
        Ok(over.then_some(seconds))
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        // SAFETY: made by zf_stream_copy and freed once.
        unsafe { ffi::zf_copy_free(self.0.as_ptr()) }
    }
}

/// Page-locked host memory, `[numel]` of `kind`, not initialised. libtorch keeps such memory when it is freed, in blocks
/// rounded up to a power of two; no heap counts it.
///
/// # Errors
///
/// If this libtorch is built without CUDA, or the system locks no more pages.
pub fn pinned(numel: usize, kind: Kind) -> Result<Tensor> {
    const CALL: &str = "stream::pinned";
    let count = i64::try_from(numel)
        .map_err(|_| Error::Argument { call: CALL, message: format!("{numel} elements do not fit into memory") })?;
    let code = match kind {
        Kind::Uint8 => u8::CODE,
        Kind::Int16 => i16::CODE,
        Kind::Int => i32::CODE,
        Kind::Int64 => i64::CODE,
        Kind::Half => half::f16::CODE,
        Kind::Float => f32::CODE,
        Kind::Double => f64::CODE,
        Kind::BFloat16 => half::bf16::CODE,
        other => {
            let message = format!("expected a type of `storage::Scalar`, found {other:?}");
            return Err(Error::Argument { call: CALL, message });
        }
    };
    let tensor = ffi::tensor_out(CALL, |out| {
        // SAFETY: `out` is a valid place.
        unsafe { ffi::zf_pinned(count, code, out) }
    })?;
    Ok(tensor.expect("zf_pinned writes a handle when it succeeds"))
}
