//! A link of a given speed between an emulated device and its host.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use tch::{Device, Kind, Tensor};
use zf_core::Result;
use zf_core::bandwidth::Bandwidth;
use zf_core::stage::{Link, Traffic, Transfer};
use zf_core::trace::Trace;

use super::carrier::{Carrier, Shared, Ways, end};
use super::check;
use super::pace::Pace;
use crate::precise;

pub(super) const NAME: &str = "emulated";

/// A full-duplex link of limited speed: each direction has a thread that really copies the bytes and ends each transfer
/// no earlier than its latency and bandwidth allow.
///
/// Transfers of one direction follow each other; each takes latency + bytes / bandwidth from its issue or from the end of
/// the one before, whichever is later. A machine whose copies are slower than that makes the link slower, and its busy
/// times say so.
#[derive(Debug)]
pub struct EmulatedLink {
    shared: Arc<Shared>,
    bandwidth: Bandwidth,
    ways: Ways<Carrier<Job>>,
}

#[derive(Debug)]
struct Job {
    transfer: Transfer,
    bytes: u64,
    issued: Instant,
}

impl EmulatedLink {
    /// Opens a link of `bandwidth` each way. Its threads run on `cores` (any, if empty), its transfers are recorded in
    /// `trace`.
    ///
    /// # Errors
    /// Cores that this process may not use; no thread.
    pub fn new(bandwidth: Bandwidth, latency: Duration, cores: &[usize], trace: &Trace) -> Result<Self> {
        let shared = Shared::new(NAME, trace);
        let open = |way| {
            let (pace, shared) = (Pace::new(bandwidth, latency), Arc::clone(&shared));
            Carrier::start(NAME, way, cores, trace, move |queue| run(&queue, pace, &shared))
        };
        let ways = [open("d2h")?, open("h2d")?];
        Ok(Self { shared, bandwidth, ways })
    }
}

impl Link for EmulatedLink {
    fn issue(&self, transfer: Transfer) -> Result<()> {
        let issued = Instant::now();
        let checked = self.shared.failure.check().and_then(|()| {
            let bytes = check::bytes(NAME, &transfer)?;
            check::in_memory(NAME, &transfer)?;
            Ok(bytes)
        });
        let bytes = match checked {
            Ok(bytes) => bytes,
            Err(error) => return Err(self.shared.failure.reject(transfer, error)),
        };
        let sent = self.ways[transfer.way as usize].send(Job { transfer, bytes, issued });
        sent.map_err(|(job, error)| self.shared.failure.reject(job.transfer, error))
    }

    fn host_memory(&self, numel: usize, kind: Kind) -> Result<Tensor> {
        Ok(Tensor::f_empty([numel as i64], (kind, Device::Cpu))?)
    }

    fn traffic(&self) -> Traffic {
        self.shared.counts.traffic()
    }

    fn bandwidth(&self) -> Option<f64> {
        Some(self.bandwidth.bytes_per_second())
    }
}

impl Drop for EmulatedLink {
    /// What is still on its way ends with an error.
    fn drop(&mut self) {
        self.shared.close();
        end(self.ways.each_mut());
    }
}

/// The thread of one direction.
fn run(queue: &Receiver<Job>, mut pace: Pace, shared: &Shared) {
    for Job { transfer, bytes, issued } in queue {
        let outcome = carry(&transfer, bytes, issued, &mut pace, shared);
        shared.end(transfer, outcome);
    }
}

fn carry(transfer: &Transfer, bytes: u64, issued: Instant, pace: &mut Pace, shared: &Shared) -> Result<()> {
    shared.failure.check()?;
    if shared.is_closing() {
        return Err(shared.closed(transfer));
    }
    let end = pace.next(issued, bytes);
    let begun = Instant::now();
    // SAFETY: `issue` checked the tensors; whoever issued the transfer leaves them alone until `done`.
    unsafe { check::copy(transfer)? };
    let copying = begun.elapsed();
    if !precise::wait_until(end, || shared.is_closing()) {
        return Err(shared.closed(transfer));
    }
    let (since, free) = pace.held(issued, end, copying);
    shared.book(transfer, bytes, [since, free], free - since);
    Ok(())
}
