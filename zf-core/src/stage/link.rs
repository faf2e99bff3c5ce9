//! The link between a device and its host.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::trace::Trace;

/// The direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Way {
    /// From the device to host memory.
    ToHost,
    /// From host memory to the device.
    ToDevice,
}

/// One transfer. Both tensors are 1-D, contiguous and of the same type and length; neither may be touched until `done` is
/// called.
pub struct Transfer {
    /// The direction.
    pub way: Way,
    /// What is copied.
    pub from: Tensor,
    /// Where to.
    pub to: Tensor,
    /// What for, in traces and errors.
    pub label: Cow<'static, str>,
    /// Whether these are states of columns that change their tier, which are counted apart.
    pub moves: bool,
    /// Called once with both tensors, on a thread of the link, or by [`Link::issue`] itself. It must not block.
    pub done: Box<dyn FnOnce(Result<Arrived>) + Send>,
}

/// The tensors of a finished transfer.
#[derive(Debug)]
pub struct Arrived {
    /// What was copied.
    pub from: Tensor,
    /// The copy.
    pub to: Tensor,
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer").field("way", &self.way).field("label", &self.label).finish_non_exhaustive()
    }
}

/// What a link has carried since it was opened, both ways apart.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Traffic {
    /// Bytes to the host, moves of columns left out.
    pub to_host: u64,
    /// Bytes to the device, moves of columns left out.
    pub to_device: u64,
    /// Bytes of columns that changed their tier, both ways.
    pub moves: u64,
    /// Seconds in which the way to the host was busy.
    pub busy_to_host: f64,
    /// Seconds in which the way to the device was busy.
    pub busy_to_device: f64,
}

/// The link of one device. Transfers of one direction are done in the order of issue; the two directions do not wait for
/// each other. Transfers run beside the caller.
pub trait Link: Send + Sync {
    /// Starts a transfer and returns at once.
    ///
    /// # Errors
    /// Tensors that do not match; a link that has failed.
    fn issue(&self, transfer: Transfer) -> Result<()>;

    /// Host memory from which and to which this link is fast (pinned memory for CUDA), `[numel]` of `kind`, not initialised.
    ///
    /// # Errors
    /// No memory.
    fn host_memory(&self, numel: usize, kind: Kind) -> Result<Tensor>;

    /// What it has carried.
    fn traffic(&self) -> Traffic;

    /// Bytes a second each way, where that is known beforehand.
    fn bandwidth(&self) -> Option<f64> {
        None
    }
}

/// What `device.link` builds: opens the link of each rank's device.
pub trait Links: fmt::Debug + Send + Sync {
    /// The link of `rank`, whose device is `device`. Its transfers are recorded in `trace`. `cores` are those that host work
    /// may use; empty: any.
    ///
    /// # Errors
    /// A device that this link does not reach.
    fn open(&self, rank: usize, device: Device, cores: &[usize], trace: &Trace) -> Result<Arc<dyn Link>>;
}
