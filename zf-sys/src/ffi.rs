//! The C functions of the shim, and the few helpers through which all of them are called.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use tch::Tensor;
use torch_sys::C_tensor;

use crate::{Error, Result};

/// An owned error message, or null for success.
pub(crate) type Message = *mut c_char;
pub(crate) type Drop = unsafe extern "C" fn(*mut c_void);
pub(crate) type Callback = unsafe extern "C" fn(*mut c_void) -> Message;

/// A C++ vector of tensors.
#[repr(C)]
pub(crate) struct RawList {
    _private: [u8; 0],
}

/// `ZfCheckpointCalls` of checkpoint.cpp.
#[repr(C)]
pub(crate) struct CheckpointCalls {
    pub(crate) run: unsafe extern "C" fn(*mut c_void, *const *mut C_tensor, usize, *mut RawList) -> Message,
    pub(crate) stash: Option<unsafe extern "C" fn(*mut c_void, *const *mut C_tensor, usize) -> Message>,
    pub(crate) fetch: unsafe extern "C" fn(*mut c_void, *mut RawList) -> Message,
    pub(crate) begin: Option<Callback>,
    pub(crate) end: Option<Callback>,
    pub(crate) release: Drop,
    pub(crate) drop: Drop,
}

/// `ZfView` of storage.cpp.
#[repr(C)]
pub(crate) struct View {
    pub(crate) data: *mut c_void,
    pub(crate) count: i64,
    pub(crate) storage_bytes: i64,
    pub(crate) needed_bytes: i64,
    pub(crate) scalar_type: i32,
    pub(crate) cpu: bool,
    pub(crate) contiguous: bool,
}

/// `ZfRefusal` of heap.h.
#[repr(C)]
pub(crate) struct RawRefusal {
    pub(crate) number: u64,
    pub(crate) asked: i64,
    pub(crate) free: i64,
    pub(crate) largest: i64,
    pub(crate) live: [i64; 6],
    pub(crate) category: u8,
    pub(crate) phase: *const c_char,
    pub(crate) phase_length: usize,
}

impl Default for RawRefusal {
    fn default() -> Self {
        let (phase, phase_length) = (ptr::null(), 0);
        Self { number: 0, asked: 0, free: 0, largest: 0, live: [0; 6], category: 0, phase, phase_length }
    }
}

unsafe extern "C" {
    pub(crate) fn zf_message_new(text: *const c_char, length: usize) -> Message;
    pub(crate) fn zf_message_free(message: Message);
    pub(crate) fn zf_list_new(out: *mut *mut RawList) -> Message;
    pub(crate) fn zf_list_free(list: *mut RawList);
    pub(crate) fn zf_list_length(list: *const RawList) -> usize;
    pub(crate) fn zf_list_push(list: *mut RawList, tensor: *mut C_tensor) -> Message;
    pub(crate) fn zf_list_get(list: *const RawList, index: usize, out: *mut *mut C_tensor) -> Message;
    pub(crate) fn zf_tensor_clone(tensor: *mut C_tensor, out: *mut *mut C_tensor) -> Message;

    pub(crate) fn zf_heap_install() -> Message;
    pub(crate) fn zf_heap_new(name: *const c_char, length: usize, size: i64, out: *mut *mut c_void) -> Message;
    pub(crate) fn zf_heap_release(heap: *mut c_void);
    pub(crate) fn zf_heap_enter(heap: *mut c_void) -> *mut c_void;
    pub(crate) fn zf_heap_tag(category: u8) -> u8;
    pub(crate) fn zf_heap_retag(tensor: *mut C_tensor, category: u8) -> Message;
    pub(crate) fn zf_heap_stats(heap: *mut c_void, live: *mut i64, at_peak: *mut i64, peak: *mut i64, cached: *mut i64);
    pub(crate) fn zf_heap_room(heap: *mut c_void, size: *mut i64, free: *mut i64, largest: *mut i64) -> bool;
    pub(crate) fn zf_heap_refusal(heap: *mut c_void, out: *mut RawRefusal, text: *mut Message) -> Message;
    pub(crate) fn zf_heap_phase(
        text: *const c_char,
        length: usize,
        before: *mut *const c_char,
        before_length: *mut usize,
    );
    pub(crate) fn zf_heap_reset_peak(heap: *mut c_void);
    pub(crate) fn zf_heap_drop_cached(heap: *mut c_void);

    pub(crate) fn zf_backward(
        roots: *const *mut C_tensor,
        grads: *const *mut C_tensor,
        count: usize,
        retain: bool,
    ) -> Message;
    pub(crate) fn zf_set_grad(param: *mut C_tensor, grad: *mut C_tensor) -> Message;
    pub(crate) fn zf_grad(param: *mut C_tensor, out: *mut *mut C_tensor) -> Message;
    pub(crate) fn zf_hook_accumulated(param: *mut C_tensor, value: *mut c_void, call: Callback, drop: Drop) -> Message;
    pub(crate) fn zf_hook_clear(param: *mut C_tensor) -> Message;
    pub(crate) fn zf_hook_output(output: *mut C_tensor, value: *mut c_void, call: Callback, drop: Drop) -> Message;
    pub(crate) fn zf_variable_data(source: *mut C_tensor, out: *mut *mut C_tensor) -> Message;
    pub(crate) fn zf_version(source: *mut C_tensor, out: *mut u64) -> Message;
    pub(crate) fn zf_checkpoint(
        inputs: *const *mut C_tensor,
        count: usize,
        anchor: *mut C_tensor,
        value: *mut c_void,
        calls: *const CheckpointCalls,
        out: *mut RawList,
    ) -> Message;

    pub(crate) fn zf_storage_resize(tensor: *mut C_tensor, bytes: usize) -> Message;
    pub(crate) fn zf_storage_bytes(tensor: *mut C_tensor, out: *mut usize) -> Message;
    pub(crate) fn zf_view(tensor: *mut C_tensor, out: *mut View) -> Message;
    pub(crate) fn zf_scalar_name(scalar_type: i32, out: *mut Message) -> Message;
    pub(crate) fn zf_tensor_from(
        data: *const c_void,
        bytes: usize,
        shape: *const i64,
        dimensions: usize,
        scalar_type: i32,
        out: *mut *mut C_tensor,
    ) -> Message;

    pub(crate) fn zf_rng_state(out: *mut *mut C_tensor) -> Message;
    pub(crate) fn zf_rng_set_state(bytes: *const c_void, length: usize) -> Message;
    pub(crate) fn zf_fused_adamw(
        params: *const *mut C_tensor,
        grads: *const *mut C_tensor,
        exp_avgs: *const *mut C_tensor,
        exp_avg_sqs: *const *mut C_tensor,
        steps: *const *mut C_tensor,
        count: usize,
        lr: f64,
        beta1: f64,
        beta2: f64,
        weight_decay: f64,
        eps: f64,
    ) -> Message;
    pub(crate) fn zf_set_threads(count: c_int) -> Message;
    pub(crate) fn zf_threads(out: *mut c_int) -> Message;
    pub(crate) fn zf_synchronize(index: c_int) -> Message;
    pub(crate) fn zf_cuda_devices(built: *mut bool, count: *mut c_int) -> Message;
    pub(crate) fn zf_libtorch_version() -> *const c_char;
    pub(crate) fn zf_cpu_capability(out: *mut Message) -> Message;

    pub(crate) fn zf_stream_new(index: c_int, out: *mut *mut c_void) -> Message;
    pub(crate) fn zf_stream_free(stream: *mut c_void);
    pub(crate) fn zf_stream_copy(
        stream: *mut c_void,
        to: *mut C_tensor,
        from: *mut C_tensor,
        out: *mut *mut c_void,
    ) -> Message;
    pub(crate) fn zf_copy_query(copy: *mut c_void, over: *mut bool, seconds: *mut f64) -> Message;
    pub(crate) fn zf_copy_free(copy: *mut c_void);
    pub(crate) fn zf_pinned(count: i64, scalar_type: c_int, out: *mut *mut C_tensor) -> Message;
}

/// Turns the shim's answer into a result.
pub(crate) fn check(call: &'static str, message: Message) -> Result<()> {
    if message.is_null() {
        return Ok(());
    }
    Err(Error::Libtorch { call, message: take_text(message) })
}

/// Copies and frees a message, which must not be null.
pub(crate) fn take_text(message: Message) -> String {
    // SAFETY: the shim returns owned, terminated strings, and each is taken once.
    unsafe {
        let text = CStr::from_ptr(message).to_string_lossy().into_owned();
        zf_message_free(message);
        text
    }
}

/// The pointer the shim wants. The shim only reads the handle, so that a shared borrow is enough; what happens to the
/// tensor behind it follows libtorch's own rules.
pub(crate) fn raw(tensor: &Tensor) -> *mut C_tensor {
    tensor.as_ptr().cast_mut()
}

pub(crate) fn raws(tensors: &[Tensor]) -> Vec<*mut C_tensor> {
    tensors.iter().map(raw).collect()
}

/// Calls a function that writes a new tensor handle (or null) to the place it is given.
pub(crate) fn tensor_out(
    call: &'static str,
    fill: impl FnOnce(*mut *mut C_tensor) -> Message,
) -> Result<Option<Tensor>> {
    let mut out = ptr::null_mut();
    check(call, fill(&mut out))?;
    // SAFETY: the shim wrote null or a handle made by `new at::Tensor`, which `Tensor` now owns.
    Ok((!out.is_null()).then(|| unsafe { Tensor::from_ptr(out) }))
}

/// Runs a callback for C++: an error or a panic becomes a message, and nothing unwinds.
pub(crate) fn contain(callback: impl FnOnce() -> std::result::Result<(), String>) -> Message {
    let text = match catch_unwind(AssertUnwindSafe(callback)) {
        Ok(Ok(())) => return ptr::null_mut(),
        Ok(Err(text)) => text,
        Err(payload) => {
            let reason = payload
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| payload.downcast_ref::<&str>().copied())
                .unwrap_or("no message");
            format!("a callback panicked: {reason}")
        }
    };
    // SAFETY: pointer and length describe `text`, which the shim copies.
    unsafe { zf_message_new(text.as_ptr().cast(), text.len()) }
}

/// Frees a boxed value that the shim owned.
pub(crate) unsafe extern "C" fn drop_box<T>(value: *mut c_void) {
    // A destructor that panics has nowhere to report to; its message was printed by the panic hook.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: `value` came from `Box::<T>::into_raw`, and the shim calls this once.
        drop(unsafe { Box::from_raw(value.cast::<T>()) });
    }));
}

/// An owned list of tensors.
pub(crate) struct List(*mut RawList);

impl List {
    pub(crate) fn new(call: &'static str) -> Result<Self> {
        let mut out = ptr::null_mut();
        // SAFETY: `out` is a valid place for the pointer.
        check(call, unsafe { zf_list_new(&mut out) })?;
        Ok(Self(out))
    }

    pub(crate) fn as_ptr(&self) -> *mut RawList {
        self.0
    }

    pub(crate) fn tensors(&self, call: &'static str) -> Result<Vec<Tensor>> {
        // SAFETY: the list lives as long as `self`, and indices stay below its length.
        let length = unsafe { zf_list_length(self.0) };
        (0..length)
            .map(|index| {
                let tensor = tensor_out(call, |out| unsafe { zf_list_get(self.0, index, out) })?;
                Ok(tensor.expect("zf_list_get writes a handle when it succeeds"))
            })
            .collect()
    }
}

impl std::ops::Drop for List {
    fn drop(&mut self) {
        // SAFETY: made by zf_list_new and freed once.
        unsafe { zf_list_free(self.0) }
    }
}

/// Appends handles of `tensors` to a list that C++ lends to a callback.
///
/// # Safety
///
/// `list` must be a living list of the shim.
pub(crate) unsafe fn push_all(list: *mut RawList, tensors: &[Tensor]) -> std::result::Result<(), String> {
    for tensor in tensors {
        // SAFETY: both are alive during the call.
        let message = unsafe { zf_list_push(list, raw(tensor)) };
        if !message.is_null() {
            return Err(take_text(message));
        }
    }
    Ok(())
}

/// New handles of tensors that C++ lends to a callback.
///
/// # Safety
///
/// `tensors` must point to `count` living tensors.
pub(crate) unsafe fn borrow_all(
    tensors: *const *mut C_tensor,
    count: usize,
) -> std::result::Result<Vec<Tensor>, String> {
    (0..count)
        .map(|index| {
            // SAFETY: the caller vouches for the array.
            let tensor = tensor_out("zf_tensor_clone", |out| unsafe { zf_tensor_clone(*tensors.add(index), out) })
                .map_err(|error| error.to_string())?;
            Ok(tensor.expect("zf_tensor_clone writes a handle when it succeeds"))
        })
        .collect()
}
