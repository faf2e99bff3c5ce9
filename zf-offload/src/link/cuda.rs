//! The link of a CUDA device.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use parking_lot::Mutex;
use tch::{Device, Kind, Tensor};
use zf_core::stage::{Link, Traffic, Transfer};
use zf_core::trace::Trace;
use zf_core::{Error, Result};
use zf_sys::stream::{Copy, Stream, pinned};

use super::carrier::{Carrier, Shared, Ways, end};
use super::check::{self, refuse};

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
    ways: Ways<Direction>,
}

#[derive(Debug)]
struct Direction {
    stream: Stream,
    /// Held while a copy is given to the stream and its job to the thread, so that both have the same order.
    carrier: Mutex<Carrier<Job>>,
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
            return Err(Error::Config(format!(
                "`device.link`: the link `{NAME}` needs a CUDA device, found {device:?}; use `emulated` or `direct` for others, or \
                 leave it out"
            )));
        }
        Self::on(device, cores, trace)
    }

    /// The same on the CPU too, where copies happen at once.
    pub(super) fn on(device: Device, cores: &[usize], trace: &Trace) -> Result<Self> {
        let shared = Shared::new(NAME, trace);
        let open = |way| {
            let (stream, shared) = (Stream::beside(device)?, Arc::clone(&shared));
            let carrier = Carrier::start(NAME, way, cores, trace, move |queue| run(&queue, &shared))?;
            Ok::<_, Error>(Direction { stream, carrier: Mutex::new(carrier) })
        };
        let ways = [open("d2h")?, open("h2d")?];
        Ok(Self { device, shared, ways })
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
        let direction = &self.ways[transfer.way as usize];
        let sent = {
            let carrier = direction.carrier.lock();
            match direction.stream.copy(&transfer.to, &transfer.from) {
                Ok(copy) => carrier.send(Job { transfer, bytes, copy }).map_err(|(job, error)| (job.transfer, error)),
                Err(error) => Err((transfer, error.into())),
            }
        };
        sent.map_err(|(transfer, error)| self.shared.failure.reject(transfer, error))
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
        self.shared.close();
        end(self.ways.each_mut().map(|way| way.carrier.get_mut()));
    }
}

fn run(queue: &Receiver<Job>, shared: &Shared) {
    for Job { transfer, bytes, copy } in queue {
        // The copy ends in any case before its tensors are given back.
        let outcome = wait(&copy, &transfer).and_then(|busy| {
            shared.failure.check()?;
            if shared.is_closing() {
                return Err(shared.closed(&transfer));
            }
            let now = Instant::now();
            let start = now.checked_sub(busy).unwrap_or(now);
            shared.book(&transfer, bytes, [start, now], busy);
            Ok(())
        });
        shared.end(transfer, outcome);
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
