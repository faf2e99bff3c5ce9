//! Process groups, and the messages under way in them.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::time::Duration;

use tch::Tensor;

use super::ffi;
use super::{Store, milliseconds};
use crate::{Error, Result, ffi::check, ffi::raw};

/// A network address of this machine from which Gloo connects, with the thread that moves the bytes.
#[derive(Debug)]
pub struct Device(*mut c_void);

// SAFETY: a shared pointer to an object that libtorch itself shares between threads; the handle is only read.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// The address that `host` (a name or an address of this machine) stands for.
    ///
    /// # Errors
    /// The name means nothing, or no address of this machine.
    pub fn at_address(host: &str) -> Result<Self> {
        Self::new("c10d::Device::at_address", false, host)
    }

    /// The address of a network interface, such as `eth0`.
    ///
    /// # Errors
    /// There is no such interface, or it has no address.
    pub fn at_interface(name: &str) -> Result<Self> {
        Self::new("c10d::Device::at_interface", true, name)
    }

    fn new(call: &'static str, interface: bool, name: &str) -> Result<Self> {
        let mut out = ptr::null_mut();
        // SAFETY: the shim copies the text and `out` is a valid place.
        check(call, unsafe { ffi::zf_gloo_device(interface, name.into(), &mut out) })?;
        Ok(Self(out))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: made by the shim and freed once; groups over it hold the object themselves.
        unsafe { ffi::zf_gloo_device_free(self.0) }
    }
}

/// Connections between all members of a group of processes.
#[derive(Debug)]
pub struct ProcessGroup {
    handle: *mut c_void,
    size: usize,
}

// SAFETY: nothing in a process group belongs to a thread; it is used by one at a time.
unsafe impl Send for ProcessGroup {}

impl ProcessGroup {
    /// Connects member `rank` of `size` with the others over Gloo, for CPU tensors. All members call this with stores of
    /// the same prefix, which is theirs alone.
    ///
    /// # Errors
    /// A member does not come within `timeout`, or cannot be reached at the address it published.
    pub fn gloo(store: &Store, device: &Device, rank: usize, size: usize, timeout: Duration) -> Result<Self> {
        const CALL: &str = "c10d::ProcessGroup::gloo";
        let (me, all) = members(CALL, rank, size)?;
        let mut out = ptr::null_mut();
        // SAFETY: the handles live during the call, which copies the pointers behind them; `out` is a valid place.
        let message = unsafe { ffi::zf_group_gloo(store.raw(), device.0, me, all, milliseconds(timeout), &mut out) };
        check(CALL, message)?;
        Ok(Self { handle: out, size })
    }

    /// As [`ProcessGroup::gloo`], over NCCL, for tensors on the current CUDA device.
    ///
    /// # Errors
    /// No CUDA device, or as for [`ProcessGroup::gloo`].
    #[cfg(feature = "nccl")]
    pub fn nccl(store: &Store, rank: usize, size: usize, timeout: Duration) -> Result<Self> {
        const CALL: &str = "c10d::ProcessGroup::nccl";
        let (me, all) = members(CALL, rank, size)?;
        let mut out = ptr::null_mut();
        // SAFETY: as in `gloo`.
        check(CALL, unsafe { ffi::zf_group_nccl(store.raw(), me, all, milliseconds(timeout), &mut out) })?;
        Ok(Self { handle: out, size })
    }

    /// Number of members.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// Starts to send `tensor`, which is contiguous and must not be written before the work is complete. Messages to one
    /// member with the same tag arrive in the order of their calls.
    ///
    /// # Errors
    /// The connection is broken, the tensor has gaps, or there is no such member.
    pub fn send(&self, tensor: &Tensor, to: usize, tag: u16) -> Result<Work> {
        const CALL: &str = "c10d::ProcessGroup::send";
        let (to, _) = members(CALL, to, self.size)?;
        // SAFETY: the handles live during the call, and the work keeps the tensor's memory.
        work_out(CALL, |out| unsafe { ffi::zf_group_send(self.handle, raw(tensor), to, c_int::from(tag), out) })
    }

    /// Starts to receive into `tensor`, which is contiguous, exactly as long as what the other member sends, and must be
    /// neither read nor written before the work is complete.
    ///
    /// # Errors
    /// As for [`ProcessGroup::send`].
    pub fn recv(&self, tensor: &Tensor, from: usize, tag: u16) -> Result<Work> {
        const CALL: &str = "c10d::ProcessGroup::recv";
        let (from, _) = members(CALL, from, self.size)?;
        // SAFETY: as in `send`.
        work_out(CALL, |out| unsafe { ffi::zf_group_recv(self.handle, raw(tensor), from, c_int::from(tag), out) })
    }

    /// Collects messages into one launch, which NCCL needs where two members send to each other.
    ///
    /// # Errors
    /// The group is not over NCCL.
    #[cfg(feature = "nccl")]
    pub fn batch(&mut self) -> Result<Batch<'_>> {
        let mut none = ptr::null_mut();
        // SAFETY: the handle lives during the call.
        check("c10d::ProcessGroup::batch", unsafe { ffi::zf_group_batch(self.handle, true, &mut none) })?;
        Ok(Batch { group: self, ended: false })
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        // SAFETY: made by the shim and freed once.
        unsafe { ffi::zf_group_free(self.handle) }
    }
}

/// Messages that begin together; see [`ProcessGroup::batch`].
#[cfg(feature = "nccl")]
#[derive(Debug)]
pub struct Batch<'a> {
    group: &'a mut ProcessGroup,
    ended: bool,
}

#[cfg(feature = "nccl")]
impl Batch<'_> {
    /// Adds a message to be sent; as [`ProcessGroup::send`].
    ///
    /// # Errors
    /// As [`ProcessGroup::send`].
    pub fn send(&self, tensor: &Tensor, to: usize) -> Result<()> {
        self.group.send(tensor, to, 0).map(drop)
    }

    /// Adds a message to be received; as [`ProcessGroup::recv`].
    ///
    /// # Errors
    /// As [`ProcessGroup::recv`].
    pub fn recv(&self, tensor: &Tensor, from: usize) -> Result<()> {
        self.group.recv(tensor, from, 0).map(drop)
    }

    /// Starts all of them; the tensors have to be kept until the work is complete.
    ///
    /// # Errors
    /// NCCL reports a failure.
    pub fn start(mut self) -> Result<Work> {
        self.ended = true;
        // SAFETY: the handle lives during the call.
        work_out("c10d::Batch::start", |out| unsafe { ffi::zf_group_batch(self.group.handle, false, out) })
    }
}

#[cfg(feature = "nccl")]
impl Drop for Batch<'_> {
    fn drop(&mut self) {
        if !self.ended {
            // SAFETY: as above. A batch that failed half way is ended so that the group can be freed.
            let _ = work_out("c10d::Batch", |out| unsafe { ffi::zf_group_batch(self.group.handle, false, out) });
        }
    }
}

/// A message under way. It keeps the memory of its tensor; dropping it gives the message up, after which nothing more is
/// read from or written to that memory, and the group can only be closed.
#[derive(Debug)]
pub struct Work(*mut c_void);

// SAFETY: a work is guarded by its own lock; libtorch waits for it on one thread and aborts it from another.
unsafe impl Send for Work {}
// SAFETY: as above.
unsafe impl Sync for Work {}

impl Work {
    /// Waits until the message has been sent or received; false if [`Work::abort`] ended the wait.
    ///
    /// # Errors
    /// The connection broke, or `timeout` has passed. Gloo then closes the connections of the whole group.
    pub fn wait(&self, timeout: Duration) -> Result<bool> {
        let mut completed = false;
        // SAFETY: the handle lives during the call and `completed` is a valid place.
        check("c10d::Work::wait", unsafe { ffi::zf_work_wait(self.0, milliseconds(timeout), &mut completed) })?;
        Ok(completed)
    }

    /// Ends a wait on another thread, or the next one.
    ///
    /// # Errors
    /// The backend cannot abort.
    pub fn abort(&self) -> Result<()> {
        // SAFETY: the handle lives during the call.
        check("c10d::Work::abort", unsafe { ffi::zf_work_abort(self.0) })
    }

    /// Whether the work is known to be complete. Over Gloo only a wait finds that out.
    ///
    /// # Errors
    /// The backend's own.
    pub fn is_completed(&self) -> Result<bool> {
        let mut completed = false;
        // SAFETY: as in `wait`.
        check("c10d::Work::is_completed", unsafe { ffi::zf_work_is_completed(self.0, &mut completed) })?;
        Ok(completed)
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // SAFETY: made by the shim and freed once.
        unsafe { ffi::zf_work_free(self.0) }
    }
}

fn members(call: &'static str, rank: usize, size: usize) -> Result<(c_int, c_int)> {
    let refuse = || Error::Argument { call, message: format!("there is no member {rank} in a group of {size}") };
    if rank >= size {
        return Err(refuse());
    }
    Ok((c_int::try_from(rank).map_err(|_| refuse())?, c_int::try_from(size).map_err(|_| refuse())?))
}

fn work_out(call: &'static str, fill: impl FnOnce(*mut *mut c_void) -> crate::ffi::Message) -> Result<Work> {
    let mut out = ptr::null_mut();
    check(call, fill(&mut out))?;
    if out.is_null() {
        return Err(Error::Libtorch { call, message: "the backend started nothing".into() });
    }
    Ok(Work(out))
}
