//! Recomputation: keep a block's inputs, drop everything between, and run the block again in backward.
//!
//! The method is that of Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), with one block a segment.

use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use tch::Tensor;
use torch_sys::C_tensor;

use crate::{Result, ffi};

/// A block: tensors in, tensors out. It runs once in forward without recording, and once more in each backward pass with
/// recording, and must compute the same both times.
pub type CheckpointFn = Arc<dyn Fn(&[Tensor]) -> std::result::Result<Vec<Tensor>, String> + Send + Sync>;

/// Takes a block's inputs over and says how to get them back.
pub type StashFn = Arc<dyn Fn(Vec<Tensor>) -> std::result::Result<Fetch, String> + Send + Sync>;

/// Gives a block's inputs back, as many as were stashed and in the same order; called once in each backward pass, and
/// dropped when the graph is released.
pub type Fetch = Box<dyn Fn() -> std::result::Result<Vec<Tensor>, String> + Send>;

/// Something to do at a fixed place around a block.
pub type StepFn = Arc<dyn Fn() -> std::result::Result<(), String> + Send + Sync>;

/// What happens around a checkpointed block. Every part is optional.
///
/// In backward the order is: `before_backward`, the inputs are fetched, the block runs again, its gradients are
/// computed, `after_backward`.
#[derive(Clone, Default)]
pub struct CheckpointHooks {
    /// Where the inputs live until backward (partitioned, on the host, in a file). Called before the block runs. Without
    /// it the graph keeps the inputs themselves, and reports an error if they were changed in place meanwhile.
    pub stash: Option<StashFn>,
    /// First in the block's backward.
    pub before_backward: Option<StepFn>,
    /// Last in the block's backward, when the gradients of its parameters and inputs are complete. Not called when the
    /// block failed.
    pub after_backward: Option<StepFn>,
}

impl fmt::Debug for CheckpointHooks {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("CheckpointHooks")
            .field("stash", &self.stash.is_some())
            .field("before_backward", &self.before_backward.is_some())
            .field("after_backward", &self.after_backward.is_some())
            .finish()
    }
}

/// Runs `f(inputs)` without recording, keeping only the inputs, and runs it again in backward.
///
/// Gradients of leaf parameters that `f` reads by itself accumulate in place as usual; gradients of the inputs flow on.
/// `anchor` is a small tensor that requires a gradient (and never gets one): it makes the outputs require a gradient when
/// no input does. Inputs may be integer or undefined tensors. Integer outputs have no gradient. Calls nest. Random
/// numbers must come from a counter, since no generator state is saved.
///
/// When nothing records (no-grad mode, or neither an input nor the anchor requires a gradient), `f` simply runs: the
/// hooks are not used, and `f` follows the caller's grad mode.
///
/// # Errors
///
/// If `f` or a hook fails or panics; in backward the same error comes out of
/// [`backward`](super::backward).
pub fn checkpoint(inputs: &[Tensor], anchor: &Tensor, f: CheckpointFn, hooks: CheckpointHooks) -> Result<Vec<Tensor>> {
    const CALL: &str = "autograd::checkpoint";
    let calls = ffi::CheckpointCalls {
        run,
        stash: hooks.stash.is_some().then_some(stash),
        fetch,
        begin: hooks.before_backward.is_some().then_some(begin),
        end: hooks.after_backward.is_some().then_some(end),
        release,
        drop: ffi::drop_box::<Block>,
    };
    let outputs = ffi::List::new(CALL)?;
    let inputs = ffi::raws(inputs);
    let block = Box::into_raw(Box::new(Block { f, hooks, fetch: Mutex::new(None) }));
    // SAFETY: the arrays live during the call. The shim owns `block` from here on and drops it once, also if it fails.
    let message = unsafe {
        ffi::zf_checkpoint(inputs.as_ptr(), inputs.len(), ffi::raw(anchor), block.cast(), &calls, outputs.as_ptr())
    };
    ffi::check(CALL, message)?;
    outputs.tensors(CALL)
}

/// What a node of the graph owns on the Rust side.
struct Block {
    f: CheckpointFn,
    hooks: CheckpointHooks,
    fetch: Mutex<Option<Fetch>>,
}

impl Block {
    /// # Safety
    ///
    /// `value` must be the pointer that `checkpoint` gave to the shim.
    unsafe fn borrow<'a>(value: *mut c_void) -> &'a Self {
        // SAFETY: the shim keeps the block alive during each callback.
        unsafe { &*value.cast::<Self>() }
    }
}

unsafe extern "C" fn run(
    value: *mut c_void,
    inputs: *const *mut C_tensor,
    count: usize,
    outputs: *mut ffi::RawList,
) -> ffi::Message {
    ffi::contain(|| {
        // SAFETY: the shim's arguments are alive during the call.
        unsafe {
            let inputs = ffi::borrow_all(inputs, count)?;
            ffi::push_all(outputs, &(Block::borrow(value).f)(&inputs)?)
        }
    })
}

unsafe extern "C" fn stash(value: *mut c_void, inputs: *const *mut C_tensor, count: usize) -> ffi::Message {
    ffi::contain(|| {
        // SAFETY: as in `run`.
        let (block, inputs) = unsafe { (Block::borrow(value), ffi::borrow_all(inputs, count)?) };
        if let Some(stash) = &block.hooks.stash {
            let fetch = stash(inputs)?;
            *block.fetch.lock().unwrap_or_else(PoisonError::into_inner) = Some(fetch);
        }
        Ok(())
    })
}

unsafe extern "C" fn fetch(value: *mut c_void, inputs: *mut ffi::RawList) -> ffi::Message {
    ffi::contain(|| {
        // SAFETY: as in `run`.
        let block = unsafe { Block::borrow(value) };
        let guard = block.fetch.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(fetch) = guard.as_ref() else {
            return Err("the stashed inputs of a checkpointed block were released already".to_owned());
        };
        // SAFETY: as in `run`.
        unsafe { ffi::push_all(inputs, &fetch()?) }
    })
}

unsafe extern "C" fn begin(value: *mut c_void) -> ffi::Message {
    // SAFETY: as in `run`.
    ffi::contain(|| unsafe { Block::borrow(value) }.hooks.before_backward.as_ref().map_or(Ok(()), |step| step()))
}

unsafe extern "C" fn end(value: *mut c_void) -> ffi::Message {
    // SAFETY: as in `run`.
    ffi::contain(|| unsafe { Block::borrow(value) }.hooks.after_backward.as_ref().map_or(Ok(()), |step| step()))
}

unsafe extern "C" fn release(value: *mut c_void) {
    let message = ffi::contain(|| {
        // SAFETY: as in `run`.
        let block = unsafe { Block::borrow(value) };
        drop(block.fetch.lock().unwrap_or_else(PoisonError::into_inner).take());
        Ok(())
    });
    if !message.is_null() {
        // A stash whose destructor panics has nowhere to report to.
        drop(ffi::take_text(message));
    }
}
