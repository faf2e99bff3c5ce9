//! The link of a CUDA device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use parking_lot::Mutex;
use tch::{Device, Kind, Tensor};
use zf_core::Result;
use zf_core::stage::{Link, Traffic, Transfer};
use zf_core::trace::Trace;
use zf_sys::stream::{Copy, Stream, pinned};

use super::check::{self, refuse};
use super::counts::Counts;
use super::emulated::lane;
use super::finish::Failure;
use crate::{cores, precise};

pub(super) const NAME: &str = "cuda";

/// How often a thread asks whether a copy is over. Waiting in the driver would keep a core busy.
const ASK: Duration = Duration::from_micros(20);

/// The longest that a copy may take.
const LONGEST: Duration = Duration::from_secs(600);

/// Copies on a stream for each direction, from and to pinned memory ([`Link::host_memory`]), beside the device's
/// computation. A transfer begins after what the issuing thread's current stream was given before; `done` is called by a thread of
/// the link once the copy is over. Busy times are the device's own.
#[derive(Debug)]
pub struct CudaLink {
    device: Device,
    shared: Arc<Shared>,
    /// To the host, to the device.
    directions: [Direction; 2],
}

#[derive(Debug)]
struct Shared {
    counts: Counts,
    failure: Failure,
    trace: Trace,
    closing: AtomicBool,
}

#[derive(Debug)]
struct Direction {
    stream: Stream,
    /// Held while a copy is given to the stream and its job to the thread, so that both have the same order.
    jobs: Mutex<Option<Sender<Job>>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Job {
    transfer: Transfer,
    bytes: u64,
    copy: Copy,
}

impl CudaLink {
    /// Opens the link of a CUDA device. Its threads run on `cores` (any, if empty).
    ///
    /// # Errors
    /// A device that is not CUDA's or that does not exist, cores that this process may not use.
    pub fn new(device: Device, cores: &[usize], trace: &Trace) -> Result<Self> {
        if !matches!(device, Device::Cuda(_)) {
            return Err(refuse(
                NAME,
                format!("expected a CUDA device, found {device:?}; use the link `emulated` or `direct` for others"),
            ));
        }
        Self::on(device, cores, trace)
    }

    /// The same on the CPU too, where copies happen at once.
    pub(super) fn on(device: Device, cores: &[usize], trace: &Trace) -> Result<Self> {
        let shared = Arc::new(Shared {
            counts: Counts::default(),
            failure: Failure::new(NAME),
            trace: trace.clone(),
            closing: AtomicBool::new(false),
        });
        let open = |way: &str| {
            let name = format!("zf-{way}-{}", trace.rank());
            Direction::open(name, Stream::beside(device)?, cores.to_vec(), Arc::clone(&shared))
        };
        let directions = [open("d2h")?, open("h2d")?];
        Ok(Self { device, shared, directions })
    }

    fn check(&self, transfer: &Transfer) -> Result<u64> {
        self.shared.failure.check()?;
        let bytes = check::bytes(NAME, transfer)?;
        let places = [transfer.from.device(), transfer.to.device()];
        if let Some(other) = places.into_iter().find(|device| ![Device::Cpu, self.device].contains(device)) {
            return Err(refuse(
                NAME,
                format!(
                    "transfer `{}`: expected tensors on the host and on {:?}, found {other:?}",
                    transfer.label, self.device
                ),
            ));
        }
        Ok(bytes)
    }
}

impl Link for CudaLink {
    fn issue(&self, transfer: Transfer) -> Result<()> {
        let bytes = match self.check(&transfer) {
            Ok(bytes) => bytes,
            Err(error) => return Err(self.shared.failure.reject(transfer, error)),
        };
        let direction = &self.directions[transfer.way as usize];
        let refused = {
            let jobs = direction.jobs.lock();
            match (direction.stream.copy(&transfer.to, &transfer.from), jobs.as_ref()) {
                (Ok(copy), Some(jobs)) => jobs.send(Job { transfer, bytes, copy }).map_err(|refused| {
                    (refused.into_inner().transfer, refuse(NAME, "the link has failed: its thread has ended"))
                }),
                (Ok(_), None) => Err((transfer, refuse(NAME, "the link is closed"))),
                (Err(error), _) => Err((transfer, error.into())),
            }
        };
        refused.map_err(|(transfer, error)| self.shared.failure.reject(transfer, error))
    }

    fn host_memory(&self, numel: usize, kind: Kind) -> Result<Tensor> {
        match self.device {
            Device::Cuda(_) => pinned(numel, kind).map_err(|error| {
                refuse(
                    NAME,
                    format!(
                        "no page-locked memory for {numel} x {kind:?}: {error}; raise the limit of locked memory (ulimit -l), \
                         or free host memory"
                    ),
                )
            }),
            _ => Ok(Tensor::f_empty([numel as i64], (kind, Device::Cpu))?),
        }
    }

    fn traffic(&self) -> Traffic {
        self.shared.counts.traffic()
    }
}

impl Drop for CudaLink {
    /// Copies that are under way end first: the device writes into their memory.
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        for direction in &mut self.directions {
            *direction.jobs.get_mut() = None;
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
    fn open(name: String, stream: Stream, cores: Vec<usize>, shared: Arc<Shared>) -> Result<Self> {
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
                    run(&queue, &shared);
                }
            })
            .map_err(|error| failed(error.to_string()))?;
        started.recv().map_err(|_| failed("it ended at once".into()))??;
        Ok(Self { stream, jobs: Mutex::new(Some(jobs)), thread: Some(thread) })
    }
}

fn run(queue: &Receiver<Job>, shared: &Shared) {
    for Job { transfer, bytes, copy } in queue {
        // The copy ends in any case before its tensors are given back.
        let outcome = wait(&copy, &transfer).and_then(|busy| {
            shared.failure.check()?;
            if shared.closing.load(Ordering::Acquire) {
                return Err(refuse(NAME, format!("transfer `{}`: the link was closed", transfer.label)));
            }
            let now = Instant::now();
            let start = now.checked_sub(busy).unwrap_or(now);
            shared.trace.record(lane(transfer.way), transfer.label.clone(), None, start, now);
            shared.counts.add(transfer.way, transfer.moves, bytes, busy);
            Ok(())
        });
        if let Err(error) = &outcome {
            shared.failure.set(error.to_string());
        }
        shared.failure.finish(transfer, outcome);
    }
}

fn wait(copy: &Copy, transfer: &Transfer) -> Result<Duration> {
    let begin = Instant::now();
    loop {
        if let Some(seconds) = copy.query()? {
            return Ok(Duration::try_from_secs_f64(seconds).unwrap_or_default());
        }
        if begin.elapsed() > LONGEST {
            let message = format!("transfer `{}`: not over after {} s", transfer.label, LONGEST.as_secs());
            return Err(refuse(NAME, message));
        }
        thread::sleep(ASK);
    }
}
