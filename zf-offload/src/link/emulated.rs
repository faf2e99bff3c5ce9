//! A link of a given speed between an emulated device and its host.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use tch::{Device, Kind, Tensor};
use zf_core::bandwidth::Bandwidth;
use zf_core::stage::{Link, Traffic, Transfer, Way};
use zf_core::trace::{Lane, Trace};
use zf_core::{Error, Result};

use super::check::{self, refuse};
use super::counts::Counts;
use super::finish::Failure;
use super::pace::Pace;
use crate::{cores, precise};

pub(super) const NAME: &str = "emulated";

/// The lane of a transfer in a trace.
pub(super) fn lane(way: Way) -> Lane {
    match way {
        Way::ToHost => Lane::ToHost,
        Way::ToDevice => Lane::ToDevice,
    }
}

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
    /// To the host, to the device.
    directions: [Direction; 2],
}

#[derive(Debug)]
struct Shared {
    counts: Counts,
    failure: Failure,
    closing: AtomicBool,
    trace: Trace,
}

#[derive(Debug)]
struct Direction {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
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
        let shared = Arc::new(Shared {
            counts: Counts::default(),
            failure: Failure::new(NAME),
            closing: AtomicBool::new(false),
            trace: trace.clone(),
        });
        let open = |way: &str| {
            let name = format!("zf-{way}-{}", trace.rank());
            Direction::open(name, Pace::new(bandwidth, latency), cores.to_vec(), Arc::clone(&shared))
        };
        let directions = [open("d2h")?, open("h2d")?];
        Ok(Self { shared, bandwidth, directions })
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
        let jobs = self.directions[transfer.way as usize].jobs.as_ref();
        let jobs = jobs.expect("the queue is taken away only when the link is dropped");
        jobs.send(Job { transfer, bytes, issued }).map_err(|refused| {
            let error = refuse(NAME, "the link has failed: its thread has ended");
            self.shared.failure.reject(refused.into_inner().transfer, error)
        })
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
        self.shared.closing.store(true, Ordering::Release);
        for direction in &mut self.directions {
            direction.jobs = None;
        }
        for direction in &mut self.directions {
            // The last handle of a link may lie in what a transfer does when done: such a thread cannot wait for itself.
            if let Some(thread) = direction.thread.take().filter(|t| t.thread().id() != thread::current().id()) {
                // A panic in `done` was caught, so that the thread has none of its own.
                let _ = thread.join();
            }
        }
    }
}

impl Direction {
    fn open(name: String, pace: Pace, cores: Vec<usize>, shared: Arc<Shared>) -> Result<Self> {
        let (jobs, queue) = unbounded();
        let (ready, started) = bounded(1);
        let failed = |error: String| refuse(NAME, format!("its thread does not start: {error}"));
        let thread = thread::Builder::new()
            .name(name)
            .spawn(move || {
                let pinned = if cores.is_empty() { Ok(()) } else { cores::pin_current_thread(&cores) };
                let go = pinned.is_ok();
                // Whoever opened the link waits for this.
                let _ = ready.send(pinned);
                if go {
                    precise::sharpen();
                    run(&queue, pace, &shared);
                }
            })
            .map_err(|error| failed(error.to_string()))?;
        started.recv().map_err(|_| failed("it ended at once".into()))??;
        Ok(Self { jobs: Some(jobs), thread: Some(thread) })
    }
}

/// The thread of one direction.
fn run(queue: &Receiver<Job>, mut pace: Pace, shared: &Shared) {
    for Job { transfer, bytes, issued } in queue {
        let outcome = carry(&transfer, bytes, issued, &mut pace, shared);
        if let Err(error) = &outcome {
            shared.failure.set(error.to_string());
        }
        shared.failure.finish(transfer, outcome);
    }
}

fn carry(transfer: &Transfer, bytes: u64, issued: Instant, pace: &mut Pace, shared: &Shared) -> Result<()> {
    shared.failure.check()?;
    let closing = || shared.closing.load(Ordering::Acquire);
    let closed = || -> Error { refuse(NAME, format!("transfer `{}`: the link was closed", transfer.label)) };
    if closing() {
        return Err(closed());
    }
    let end = pace.next(issued, bytes);
    let begun = Instant::now();
    // SAFETY: `issue` checked the tensors; whoever issued the transfer leaves them alone until `done`.
    unsafe { check::copy(transfer)? };
    let copying = begun.elapsed();
    if !precise::wait_until(end, closing) {
        return Err(closed());
    }
    let (since, free) = pace.held(issued, end, copying);
    shared.trace.record(lane(transfer.way), transfer.label.clone(), None, since, free);
    shared.counts.add(transfer.way, transfer.moves, bytes, free - since);
    Ok(())
}
