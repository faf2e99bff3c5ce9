//! Backward passes, gradients, hooks and recomputation.

mod checkpoint;
mod hooks;

use std::ptr;

use tch::Tensor;

use crate::{Error, Result, ffi};

pub use checkpoint::{CheckpointFn, CheckpointHooks, Fetch, StashFn, StepFn, checkpoint};
pub use hooks::{HookFn, clear_grad_hook, on_grad_accumulated, on_output_grad};

/// Backpropagates from `roots` with the given gradients and adds to the leaves' `.grad`
/// (`torch::autograd::backward`).
///
/// `grads` holds one entry a root, of the root's shape; `None` stands for one, for a root of one element. `retain` keeps
/// the graph for another pass.
///
/// # Errors
///
/// If the lengths differ, libtorch refuses, or a hook fails or panics; the message is then the hook's.
pub fn backward(roots: &[Tensor], grads: &[Option<Tensor>], retain: bool) -> Result<()> {
    const CALL: &str = "autograd::backward";
    if roots.len() != grads.len() {
        return Err(Error::Argument {
            call: CALL,
            message: format!("{} roots but {} gradients; give one (or None) a root", roots.len(), grads.len()),
        });
    }
    let grads: Vec<_> = grads.iter().map(|grad| grad.as_ref().map_or(ptr::null_mut(), ffi::raw)).collect();
    let roots = ffi::raws(roots);
    // SAFETY: both arrays have `roots.len()` entries and live during the call.
    ffi::check(CALL, unsafe { ffi::zf_backward(roots.as_ptr(), grads.as_ptr(), roots.len(), retain) })
}

/// Makes `grad` the gradient of a leaf, or removes it.
///
/// The gradient is bound, not copied: a view of a flat buffer stays one, and later backward passes add to it in place.
/// Its dtype may differ from the parameter's. With a float32 gradient on a 16-bit parameter each incoming gradient is
/// widened before anything is summed. Without a gradient the next backward pass makes one of the parameter's dtype.
///
/// # Errors
///
/// If the parameter is not a leaf, or the gradient's shape or device differs.
pub fn set_grad(param: &Tensor, grad: Option<&Tensor>) -> Result<()> {
    let grad = grad.map_or(ptr::null_mut(), ffi::raw);
    // SAFETY: both handles live during the call.
    ffi::check("autograd::set_grad", unsafe { ffi::zf_set_grad(ffi::raw(param), grad) })
}

/// A handle of the leaf's gradient, or `None` if it has none.
#[must_use]
pub fn grad(param: &Tensor) -> Option<Tensor> {
    // SAFETY: the handle lives during the call.
    ffi::tensor_out("autograd::grad", |out| unsafe { ffi::zf_grad(ffi::raw(param), out) }).unwrap_or(None)
}

/// An alias of `source` outside the graph, with a version counter of its own.
///
/// Writing through it is not seen by autograd's check for in-place changes. That is what refilling a released parameter
/// needs, and a hazard everywhere else: the caller must know that backward will find the right values.
///
/// # Errors
///
/// If the tensor is undefined.
pub fn variable_data(source: &Tensor) -> Result<Tensor> {
    const CALL: &str = "autograd::variable_data";
    // SAFETY: the handle lives during the call.
    let alias = ffi::tensor_out(CALL, |out| unsafe { ffi::zf_variable_data(ffi::raw(source), out) })?;
    Ok(alias.expect("zf_variable_data writes a handle when it succeeds"))
}

/// How often the tensor has been changed in place, as autograd counts it. Views and `detach` share the counter.
///
/// # Errors
///
/// If the tensor keeps no counter (undefined or an inference tensor).
pub fn version(tensor: &Tensor) -> Result<u64> {
    let mut out = 0;
    // SAFETY: the handle lives during the call and `out` is a valid place.
    ffi::check("autograd::version", unsafe { ffi::zf_version(ffi::raw(tensor), &mut out) })?;
    Ok(out)
}
