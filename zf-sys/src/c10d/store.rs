//! The TCP store.

use std::ffi::c_void;
use std::ptr;
use std::time::Duration;

use super::ffi;
use super::milliseconds;
use crate::{Error, Result, ffi::check};

/// A connection to a key-value store that one process hosts (`c10d::TCPStore`).
///
/// A connection serves one call after the other and waits inside a call; [`Store::another`] makes a second one.
#[derive(Debug)]
pub struct Store(*mut c_void);

// SAFETY: a store is a socket and a lock; nothing in it belongs to a thread.
unsafe impl Send for Store {}

impl Store {
    /// Hosts a store on `port` of all addresses of this machine (0: a free one) and connects to it. The store lives as
    /// long as this handle, handles made from it and process groups made over them. Also returns the port.
    ///
    /// # Errors
    /// The port is taken, or `host` does not lead here within `timeout`.
    pub fn host(host: &str, port: u16, timeout: Duration) -> Result<(Self, u16)> {
        tcp("c10d::Store::host", host, port, true, timeout)
    }

    /// Connects to the store of another process, trying again until `timeout`.
    ///
    /// # Errors
    /// Nobody answers there within `timeout`.
    pub fn connect(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        tcp("c10d::Store::connect", host, port, false, timeout).map(|(store, _)| store)
    }

    /// The same connection, with `prefix` and a slash before every key.
    ///
    /// # Errors
    /// Memory is refused.
    pub fn prefixed(&self, prefix: &str) -> Result<Self> {
        // SAFETY: the handle lives during the call; the shim copies the text.
        store_out("c10d::Store::prefixed", |out| unsafe { ffi::zf_store_prefix(prefix.into(), self.0, out) })
    }

    /// A second connection to the same store, with the same prefix.
    ///
    /// # Errors
    /// The host cannot be reached.
    pub fn another(&self) -> Result<Self> {
        // SAFETY: the handle lives during the call.
        store_out("c10d::Store::another", |out| unsafe { ffi::zf_store_clone(self.0, out) })
    }

    /// Writes a value.
    ///
    /// # Errors
    /// The connection broke.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        // SAFETY: handle and texts live during the call.
        check("c10d::Store::set", unsafe { ffi::zf_store_set(self.0, key.into(), value.into()) })
    }

    /// Adds bytes to the end of a value.
    ///
    /// # Errors
    /// The connection broke.
    pub fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        // SAFETY: as above.
        check("c10d::Store::append", unsafe { ffi::zf_store_append(self.0, key.into(), value.into()) })
    }

    /// Writes `desired` if the value is `expected`, and returns the value that then stands there.
    ///
    /// # Errors
    /// The connection broke.
    pub fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let mut values = vec![Vec::new()];
        let target = ptr::from_mut(&mut values).cast();
        // SAFETY: as above; the sink fills the one place of `values` before the call returns.
        let message = unsafe {
            ffi::zf_store_compare_set(self.0, key.into(), expected.into(), desired.into(), target, ffi::fill)
        };
        check("c10d::Store::compare_set", message)?;
        Ok(values.swap_remove(0))
    }

    /// Whether all of these keys have values.
    ///
    /// # Errors
    /// The connection broke.
    pub fn has(&self, keys: &[&str]) -> Result<bool> {
        let keys = ffi::list(keys);
        let mut all = false;
        // SAFETY: as above; `all` is a valid place.
        check("c10d::Store::has", unsafe { ffi::zf_store_check(self.0, keys.as_ptr(), keys.len(), &mut all) })?;
        Ok(all)
    }

    /// Waits until all of these keys have values.
    ///
    /// # Errors
    /// The connection broke, or a key has no value within `timeout`.
    pub fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        let keys = ffi::list(keys);
        // SAFETY: as above.
        let message = unsafe { ffi::zf_store_wait(self.0, keys.as_ptr(), keys.len(), milliseconds(timeout)) };
        check("c10d::Store::wait", message)
    }

    /// The values of these keys, waiting for those that have none yet.
    ///
    /// # Errors
    /// The connection broke, or a key has no value within `timeout`.
    pub fn get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let keys = ffi::list(keys);
        let mut values = vec![Vec::new(); keys.len()];
        let target = ptr::from_mut(&mut values).cast();
        // SAFETY: as above; the sink fills the places of `values` before the call returns.
        let message =
            unsafe { ffi::zf_store_get(self.0, keys.as_ptr(), keys.len(), milliseconds(timeout), target, ffi::fill) };
        check("c10d::Store::get", message)?;
        Ok(values)
    }

    pub(super) fn raw(&self) -> *mut c_void {
        self.0
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: made by the shim and freed once.
        unsafe { ffi::zf_store_free(self.0) }
    }
}

fn tcp(call: &'static str, host: &str, port: u16, server: bool, timeout: Duration) -> Result<(Store, u16)> {
    if host.is_empty() {
        return Err(Error::Argument { call, message: "the host is empty; expected a name or an address".into() });
    }
    let mut bound = 0;
    let store = store_out(call, |out| {
        // SAFETY: the shim copies the text, and both places are valid.
        unsafe { ffi::zf_store_tcp(host.into(), port, server, milliseconds(timeout), out, &mut bound) }
    })?;
    Ok((store, bound))
}

fn store_out(call: &'static str, fill: impl FnOnce(*mut *mut c_void) -> crate::ffi::Message) -> Result<Store> {
    let mut out = ptr::null_mut();
    check(call, fill(&mut out))?;
    Ok(Store(out))
}
