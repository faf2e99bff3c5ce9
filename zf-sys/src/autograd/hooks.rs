//! Rust closures that run as gradients become known.
//!
//! On CPU a hook runs on the thread that called backward; on CUDA it runs on the engine's device thread, hence
//! `Send + Sync`. Hooks issue work; they must not wait for another rank. An error or a panic in a hook ends the backward
//! pass, which returns the message.

use std::ffi::c_void;

use tch::Tensor;

use crate::{Result, ffi};

/// A hook: it takes nothing and says whether backward may go on.
pub type HookFn = Box<dyn Fn() -> std::result::Result<(), String> + Send + Sync>;

/// Calls `hook` each time a leaf's gradient is complete: once a backward pass, also when the parameter is used several
/// times in the graph, and after the gradient was added to `.grad`. There is one hook a parameter; a new one replaces the old.
///
/// A parameter that is used inside several [`checkpoint`](super::checkpoint) calls is completed by each of them, so the
/// hook runs once for each.
///
/// # Errors
///
/// If the tensor is not a leaf or does not require a gradient.
pub fn on_grad_accumulated(param: &Tensor, hook: HookFn) -> Result<()> {
    let value = Box::into_raw(Box::new(hook)).cast();
    // SAFETY: the shim owns `value` from here on and frees it with `drop_box::<HookFn>`, also if it fails.
    let message = unsafe { ffi::zf_hook_accumulated(ffi::raw(param), value, run, ffi::drop_box::<HookFn>) };
    ffi::check("autograd::on_grad_accumulated", message)
}

/// Removes the hook set by [`on_grad_accumulated`], if there is one.
///
/// # Errors
///
/// If the tensor is undefined.
pub fn clear_grad_hook(param: &Tensor) -> Result<()> {
    // SAFETY: the handle lives during the call.
    ffi::check("autograd::clear_grad_hook", unsafe { ffi::zf_hook_clear(ffi::raw(param)) })
}

/// Calls `hook` when the gradient of `output` is known, before the operation that made `output` runs backward. Hooks on
/// one tensor add up and live as long as its graph.
///
/// # Errors
///
/// If the tensor does not require a gradient.
pub fn on_output_grad(output: &Tensor, hook: HookFn) -> Result<()> {
    let value = Box::into_raw(Box::new(hook)).cast();
    // SAFETY: as in `on_grad_accumulated`.
    let message = unsafe { ffi::zf_hook_output(ffi::raw(output), value, run, ffi::drop_box::<HookFn>) };
    ffi::check("autograd::on_output_grad", message)
}

unsafe extern "C" fn run(value: *mut c_void) -> ffi::Message {
    // SAFETY: the shim passes the pointer it was given and keeps the closure alive during the call.
    let hook = unsafe { &*value.cast::<HookFn>() };
    ffi::contain(hook)
}
