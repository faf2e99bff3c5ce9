//! The C functions of c10d.cpp.

use std::ffi::{c_int, c_void};

use torch_sys::C_tensor;

use crate::ffi::Message;

/// `ZfBytes` of c10d.cpp.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bytes {
    data: *const u8,
    length: usize,
}

impl From<&[u8]> for Bytes {
    fn from(bytes: &[u8]) -> Self {
        Self { data: bytes.as_ptr(), length: bytes.len() }
    }
}

impl From<&str> for Bytes {
    fn from(text: &str) -> Self {
        text.as_bytes().into()
    }
}

pub(crate) fn list(texts: &[&str]) -> Vec<Bytes> {
    texts.iter().map(|text| Bytes::from(*text)).collect()
}

/// `ZfSink` of c10d.cpp.
pub(crate) type Sink = unsafe extern "C" fn(target: *mut c_void, index: usize, data: *const u8, length: usize);

/// Writes value `index` into a `Vec<Vec<u8>>` behind `target`.
pub(crate) unsafe extern "C" fn fill(target: *mut c_void, index: usize, data: *const u8, length: usize) {
    // SAFETY: the callers pass a pointer to a vector of theirs that outlives the call, and the shim describes its bytes.
    unsafe {
        let values = &mut *target.cast::<Vec<Vec<u8>>>();
        if let Some(value) = values.get_mut(index).filter(|_| length > 0) {
            *value = std::slice::from_raw_parts(data, length).to_vec();
        }
    }
}

unsafe extern "C" {
    pub(crate) fn zf_store_tcp(
        host: Bytes,
        port: u16,
        server: bool,
        timeout_ms: i64,
        out: *mut *mut c_void,
        bound: *mut u16,
    ) -> Message;
    pub(crate) fn zf_store_prefix(prefix: Bytes, store: *mut c_void, out: *mut *mut c_void) -> Message;
    pub(crate) fn zf_store_clone(store: *mut c_void, out: *mut *mut c_void) -> Message;
    pub(crate) fn zf_store_free(store: *mut c_void);
    pub(crate) fn zf_store_set(store: *mut c_void, key: Bytes, value: Bytes) -> Message;
    pub(crate) fn zf_store_append(store: *mut c_void, key: Bytes, value: Bytes) -> Message;
    pub(crate) fn zf_store_compare_set(
        store: *mut c_void,
        key: Bytes,
        expected: Bytes,
        desired: Bytes,
        target: *mut c_void,
        sink: Sink,
    ) -> Message;
    pub(crate) fn zf_store_check(store: *mut c_void, keys: *const Bytes, count: usize, out: *mut bool) -> Message;
    pub(crate) fn zf_store_wait(store: *mut c_void, keys: *const Bytes, count: usize, timeout_ms: i64) -> Message;
    pub(crate) fn zf_store_get(
        store: *mut c_void,
        keys: *const Bytes,
        count: usize,
        timeout_ms: i64,
        target: *mut c_void,
        sink: Sink,
    ) -> Message;

    pub(crate) fn zf_gloo_device(interface: bool, name: Bytes, out: *mut *mut c_void) -> Message;
    pub(crate) fn zf_gloo_device_free(device: *mut c_void);
    pub(crate) fn zf_group_gloo(
        store: *mut c_void,
        device: *mut c_void,
        rank: c_int,
        size: c_int,
        timeout_ms: i64,
        out: *mut *mut c_void,
    ) -> Message;
    #[cfg(feature = "nccl")]
    pub(crate) fn zf_group_nccl(
        store: *mut c_void,
        rank: c_int,
        size: c_int,
        timeout_ms: i64,
        out: *mut *mut c_void,
    ) -> Message;
    #[cfg(feature = "nccl")]
    pub(crate) fn zf_group_batch(group: *mut c_void, begin: bool, out: *mut *mut c_void) -> Message;
    pub(crate) fn zf_group_free(group: *mut c_void);
    pub(crate) fn zf_group_send(
        group: *mut c_void,
        tensor: *mut C_tensor,
        to: c_int,
        tag: c_int,
        out: *mut *mut c_void,
    ) -> Message;
    pub(crate) fn zf_group_recv(
        group: *mut c_void,
        tensor: *mut C_tensor,
        from: c_int,
        tag: c_int,
        out: *mut *mut c_void,
    ) -> Message;
    pub(crate) fn zf_work_wait(work: *mut c_void, timeout_ms: i64, completed: *mut bool) -> Message;
    pub(crate) fn zf_work_abort(work: *mut c_void) -> Message;
    pub(crate) fn zf_work_is_completed(work: *mut c_void, out: *mut bool) -> Message;
    pub(crate) fn zf_work_free(work: *mut c_void);
}
