//! What a transfer must look like, and its bytes.

use tch::{Device, Kind, Tensor};
use zf_core::stage::Transfer;
use zf_core::{Error, Result};
use zf_sys::storage::{Scalar, slice, slice_mut};

/// An error of the link registered as `stage`.
pub(super) fn refuse(stage: &'static str, message: impl Into<String>) -> Error {
    Error::Stage { slot: "device.link", stage: stage.into(), message: message.into() }
}

/// The bytes of a transfer whose tensors match.
///
/// # Errors
/// A tensor that is not 1-D and contiguous, or two that differ in type or length.
pub(super) fn bytes(stage: &'static str, transfer: &Transfer) -> Result<u64> {
    let Transfer { from, to, label, .. } = transfer;
    for (tensor, which) in [(from, "source"), (to, "destination")] {
        if !tensor.defined() || tensor.dim() != 1 || !tensor.is_contiguous() {
            let found = if tensor.defined() { format!("{:?}", tensor.size()) } else { "none".into() };
            return Err(refuse(
                stage,
                format!(
                    "transfer `{label}`: expected a contiguous 1-D tensor as {which}, found {found}; flatten it first"
                ),
            ));
        }
    }
    let describe = |tensor: &Tensor| Ok::<_, Error>((tensor.f_kind()?, tensor.numel()));
    let (source, destination) = (describe(from)?, describe(to)?);
    if source != destination {
        return Err(refuse(
            stage,
            format!(
                "transfer `{label}`: expected tensors of one type and length, found {} x {:?} to {} x {:?}",
                source.1, source.0, destination.1, destination.0
            ),
        ));
    }
    Ok(source.1 as u64 * source.0.elt_size_in_bytes() as u64)
}

/// That both tensors of a transfer are in this machine's memory, where emulated devices have theirs, and apart.
///
/// # Errors
/// A tensor elsewhere, of a type that is not copied here, or two that overlap.
pub(super) fn in_memory(stage: &'static str, transfer: &Transfer) -> Result<()> {
    let Transfer { from, to, label, .. } = transfer;
    if let Some(other) = [from, to].map(Tensor::device).into_iter().find(|device| *device != Device::Cpu) {
        return Err(refuse(
            stage,
            format!(
                "transfer `{label}`: expected tensors of an emulated device, found one on {other:?}; use the link `cuda`"
            ),
        ));
    }
    let (source, destination) = (view(from)?.as_ptr_range(), view(to)?.as_ptr_range());
    if source.start < destination.end && destination.start < source.end {
        return Err(refuse(stage, format!("transfer `{label}`: the source and the destination overlap")));
    }
    Ok(())
}

/// Copies a transfer's bytes.
///
/// # Safety
/// [`in_memory`] accepted the transfer, and nobody else uses either tensor's memory.
pub(super) unsafe fn copy(transfer: &Transfer) -> Result<()> {
    // SAFETY: the caller vouches for being alone, and the two do not overlap.
    unsafe { view_mut(&transfer.to)? }.copy_from_slice(view(&transfer.from)?);
    Ok(())
}

macro_rules! by_kind {
    ($tensor:expr, $call:ident) => {
        match $tensor.f_kind()? {
            Kind::Uint8 => $call::<u8>($tensor),
            Kind::Int16 => $call::<i16>($tensor),
            Kind::Int => $call::<i32>($tensor),
            Kind::Int64 => $call::<i64>($tensor),
            Kind::Half => $call::<half::f16>($tensor),
            Kind::Float => $call::<f32>($tensor),
            Kind::Double => $call::<f64>($tensor),
            Kind::BFloat16 => $call::<half::bf16>($tensor),
            other => Err(Error::Engine(format!("a link carries integers and floating-point numbers, found {other:?}"))),
        }
    };
}

fn view(tensor: &Tensor) -> Result<&[u8]> {
    fn of<T: Scalar>(tensor: &Tensor) -> Result<&[u8]> {
        let values = slice::<T>(tensor)?;
        // SAFETY: a `Scalar` has no padding, so that its bytes are initialised, and any alignment suits a byte.
        Ok(unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) })
    }
    by_kind!(tensor, of)
}

/// # Safety
/// That of [`slice_mut`].
#[expect(clippy::mut_from_ref, reason = "as `slice_mut`, whose safety section says who may use it")]
unsafe fn view_mut(tensor: &Tensor) -> Result<&mut [u8]> {
    fn of<T: Scalar>(tensor: &Tensor) -> Result<&mut [u8]> {
        // SAFETY: the caller of `view_mut` vouches for being alone.
        let values = unsafe { slice_mut::<T>(tensor)? };
        // SAFETY: as in `view`, and every pattern of bits is a `Scalar`.
        Ok(unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) })
    }
    by_kind!(tensor, of)
}
