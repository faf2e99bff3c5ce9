//! A link that takes no time of its own.

use std::time::Instant;

use tch::{Device, Kind, Tensor};
use zf_core::Result;
use zf_core::stage::{Link, Traffic, Transfer};
use zf_core::trace::Trace;

use super::carrier::lane;
use super::check;
use super::counts::Counts;
use super::finish::Failure;

pub(super) const NAME: &str = "direct";

/// Copies at once, on the caller's thread, and calls `done` before [`Link::issue`] returns. Its busy times are those of
/// the copies.
#[derive(Debug)]
pub struct DirectLink {
    counts: Counts,
    failure: Failure,
    trace: Trace,
}

impl DirectLink {
    /// A link whose copies are recorded in `trace`.
    pub fn new(trace: &Trace) -> Self {
        Self { counts: Counts::default(), failure: Failure::new(NAME), trace: trace.clone() }
    }

    fn carry(&self, transfer: &Transfer) -> Result<()> {
        self.failure.check()?;
        let bytes = check::bytes(NAME, transfer)?;
        check::in_memory(NAME, transfer)?;
        let start = Instant::now();
        // SAFETY: just checked; whoever issues a transfer leaves its tensors alone until `done`.
        unsafe { check::copy(transfer)? };
        let end = Instant::now();
        self.trace.record(lane(transfer.way), transfer.label.clone(), None, start, end);
        self.counts.add(transfer.way, transfer.moves, bytes, end - start);
        Ok(())
    }
}

impl Link for DirectLink {
    fn issue(&self, transfer: Transfer) -> Result<()> {
        match self.carry(&transfer) {
            Ok(()) => {
                self.failure.finish(transfer, Ok(()));
                Ok(())
            }
            Err(error) => Err(self.failure.reject(transfer, error)),
        }
    }

    fn host_memory(&self, numel: usize, kind: Kind) -> Result<Tensor> {
        Ok(Tensor::f_empty([numel as i64], (kind, Device::Cpu))?)
    }

    fn traffic(&self) -> Traffic {
        self.counts.traffic()
    }
}
