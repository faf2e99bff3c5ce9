//! Devices, and what this libtorch can do.

use std::ffi::{CStr, c_int};
use std::ptr;

use tch::Device;

use crate::{Error, Result, ffi};

/// Waits until all work submitted to the device is done. On the CPU nothing is outstanding, so it returns at once.
///
/// # Errors
///
/// If the device does not exist, this libtorch is built without it, or work submitted before failed.
pub fn synchronize(device: Device) -> Result<()> {
    const CALL: &str = "device::synchronize";
    let index = match device {
        Device::Cpu => -1,
        Device::Cuda(index) => c_int::try_from(index)
            .map_err(|_| Error::Argument { call: CALL, message: format!("there is no CUDA device {index}") })?,
        other => {
            return Err(Error::Argument { call: CALL, message: format!("{other:?} is neither the CPU nor CUDA") });
        }
    };
    // SAFETY: the shim checks the index.
    ffi::check(CALL, unsafe { ffi::zf_synchronize(index) })
}

/// Whether this libtorch is a CUDA build and a CUDA device is present.
#[must_use]
pub fn cuda_available() -> bool {
    0 < cuda().1
}

/// Whether this libtorch is a CUDA build, with or without a device in this machine.
#[must_use]
pub fn has_cuda_build() -> bool {
    cuda().0
}

fn cuda() -> (bool, c_int) {
    let (mut built, mut count) = (false, 0);
    // SAFETY: both are valid places.
    let asked = ffi::check("device::cuda_available", unsafe { ffi::zf_cuda_devices(&mut built, &mut count) });
    // A driver that cannot be asked offers no devices.
    if asked.is_ok() { (built, count) } else { (built, 0) }
}

/// The version of libtorch this crate was compiled against, such as `2.11.0`.
#[must_use]
pub fn libtorch_version() -> String {
    // SAFETY: the shim returns a string constant.
    unsafe { CStr::from_ptr(ffi::zf_libtorch_version()) }.to_string_lossy().into_owned()
}

/// The instruction set that libtorch's CPU kernels use, such as `AVX512`.
#[must_use]
pub fn cpu_capability() -> String {
    let mut text = ptr::null_mut();
    // SAFETY: `text` is a valid place.
    let message = unsafe { ffi::zf_cpu_capability(&mut text) };
    ffi::take_text(if message.is_null() { text } else { message })
}
