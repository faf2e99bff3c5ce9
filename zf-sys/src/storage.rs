//! Storage that is released and refilled under living views, and typed access to CPU tensors.
//!
//! [`Scalar`] knows the right dtype of [`half::bf16`], which `tch`'s own element trait takes for float16.

use std::ffi::c_void;
use std::ptr;

use tch::{Kind, Tensor};

use crate::{Error, Result, ffi};

/// Sets the size of the tensor's storage. Zero frees the memory; a larger size allocates, with the common front part
/// kept and the rest not initialised.
///
/// Views made before stay valid, also those that autograd saved: they see the new memory. While the storage is smaller
/// than a view, reading the view is an error. Fill it again through
/// [`variable_data`](crate::autograd::variable_data), which leaves the version counters alone.
///
/// # Errors
///
/// If the tensor has no storage, its memory belongs to someone outside libtorch, or a heap's limit refuses.
pub fn resize_bytes(tensor: &Tensor, bytes: usize) -> Result<()> {
    // SAFETY: the handle lives during the call.
    ffi::check("storage::resize_bytes", unsafe { ffi::zf_storage_resize(ffi::raw(tensor), bytes) })
}

/// The size of the tensor's storage in bytes, which several views may share.
///
/// # Errors
///
/// If the tensor has no storage.
pub fn nbytes(tensor: &Tensor) -> Result<usize> {
    let mut out = 0;
    // SAFETY: the handle lives during the call and `out` is a valid place.
    ffi::check("storage::nbytes", unsafe { ffi::zf_storage_bytes(ffi::raw(tensor), &mut out) })?;
    Ok(out)
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust number with the same bits as a libtorch dtype. Sealed.
pub trait Scalar: sealed::Sealed + Copy + Send + Sync + 'static {
    /// The libtorch dtype.
    const KIND: Kind;
    /// libtorch's number for the dtype (`c10::ScalarType`).
    const CODE: i32;
}

macro_rules! scalar {
    ($($rust:ty, $kind:ident, $code:literal;)*) => {
        $(
            impl sealed::Sealed for $rust {}
            impl Scalar for $rust {
                const KIND: Kind = Kind::$kind;
                const CODE: i32 = $code;
            }
        )*
    };
}

scalar! {
    u8, Uint8, 0;
    i16, Int16, 2;
    i32, Int, 3;
    i64, Int64, 4;
    half::f16, Half, 5;
    f32, Float, 6;
    f64, Double, 7;
    half::bf16, BFloat16, 15;
}

/// The elements of a contiguous CPU tensor, in order.
///
/// The slice borrows this handle. Other handles of the same memory exist freely in libtorch; nobody may write through
/// them, or resize the storage, while the slice is in use.
///
/// # Errors
///
/// If the tensor is not on the CPU, not contiguous, of another dtype, or its storage is released.
pub fn slice<T: Scalar>(tensor: &Tensor) -> Result<&[T]> {
    let (data, count) = elements::<T>("storage::slice", tensor)?;
    // SAFETY: `elements` checked dtype, contiguity and that the storage reaches that far; `data` is aligned for `T`,
    // since storage is aligned to 64 bytes and offsets are in elements.
    Ok(unsafe { std::slice::from_raw_parts(data, count) })
}

/// The elements of a contiguous CPU tensor, to be written.
///
/// # Safety
///
/// While the slice is in use, nothing else may read or write the same memory: no other slice, no other handle or view,
/// on any thread. Autograd does not see the writes.
///
/// # Errors
///
/// As for [`slice()`].
#[expect(
    clippy::mut_from_ref,
    reason = "a tensor is a handle of shared memory; the safety section says who may use it"
)]
pub unsafe fn slice_mut<T: Scalar>(tensor: &Tensor) -> Result<&mut [T]> {
    let (data, count) = elements::<T>("storage::slice_mut", tensor)?;
    // SAFETY: as in `slice`, and the caller vouches for being alone.
    Ok(unsafe { std::slice::from_raw_parts_mut(data, count) })
}

/// A new CPU tensor with a copy of `values` in the given shape, in row-major order.
///
/// # Errors
///
/// If the shape does not hold exactly `values.len()` elements, or memory is refused.
pub fn tensor_from<T: Scalar>(values: &[T], shape: &[i64]) -> Result<Tensor> {
    const CALL: &str = "storage::tensor_from";
    let tensor = ffi::tensor_out(CALL, |out| {
        let data = values.as_ptr().cast::<c_void>();
        // SAFETY: pointers and lengths describe `values` and `shape`; the shim compares the sizes before it copies.
        unsafe { ffi::zf_tensor_from(data, size_of_val(values), shape.as_ptr(), shape.len(), T::CODE, out) }
    })?;
    Ok(tensor.expect("zf_tensor_from writes a handle when it succeeds"))
}

fn elements<T: Scalar>(call: &'static str, tensor: &Tensor) -> Result<(*mut T, usize)> {
    let mut view = ffi::View {
        data: ptr::null_mut(),
        count: 0,
        storage_bytes: 0,
        needed_bytes: 0,
        scalar_type: 0,
        cpu: false,
        contiguous: false,
    };
    // SAFETY: the handle lives during the call and `view` is a valid place.
    ffi::check(call, unsafe { ffi::zf_view(ffi::raw(tensor), &mut view) })?;
    let refuse = |expected: String, found: String| Err(Error::Tensor { call, expected, found });
    if view.scalar_type != T::CODE {
        return refuse(format!("dtype {}", scalar_name(T::CODE)), scalar_name(view.scalar_type));
    }
    if !view.cpu {
        return refuse("a tensor on the CPU".into(), "one on another device; copy it first".into());
    }
    if !view.contiguous {
        return refuse("a contiguous tensor".into(), "one with gaps or swapped axes; call contiguous() first".into());
    }
    if view.count == 0 {
        return Ok((ptr::NonNull::dangling().as_ptr(), 0));
    }
    if view.needed_bytes > view.storage_bytes {
        return refuse(
            format!("a storage of at least {} bytes", view.needed_bytes),
            format!("{} bytes; the storage was released and not refilled", view.storage_bytes),
        );
    }
    let count = usize::try_from(view.count).expect("libtorch's element counts are not negative");
    Ok((view.data.cast(), count))
}

fn scalar_name(code: i32) -> String {
    let mut name = ptr::null_mut();
    // SAFETY: the code came from libtorch or is one of the eight above; `name` is a valid place.
    let message = unsafe { ffi::zf_scalar_name(code, &mut name) };
    if !message.is_null() {
        return ffi::take_text(message);
    }
    ffi::take_text(name)
}
