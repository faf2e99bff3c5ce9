//! PyTorch's own process groups: the TCP store by which processes find each other, and point-to-point messages over Gloo
//! or, with the cargo feature `nccl`, over NCCL.
//!
//! Messages lie at the base of every collective and are the one form in which Gloo neither copies nor adds: a collective
//! built of them decides by itself in which order it sums. They move straight between the sockets and the tensors' memory.
//!
//! Calls into a store whose host does not answer (stopped, or cut off) may never return; call them from a thread that
//! nobody has to wait for.

mod ffi;
mod group;
mod store;

#[cfg(feature = "nccl")]
pub use group::Batch;
pub use group::{Device, ProcessGroup, Work};
pub use store::Store;

use std::time::Duration;

/// Milliseconds for the shim: at least one, since zero means no timeout, and at most what steady clocks can add to now.
fn milliseconds(timeout: Duration) -> i64 {
    const MOST: u128 = 1000 * 3600 * 24 * 365;
    i64::try_from(timeout.as_millis().clamp(1, MOST)).expect("a year of milliseconds fits")
}
