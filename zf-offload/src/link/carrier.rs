//! What links with threads of their own share: a thread for each direction, and what its transfers are booked in.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use zf_core::stage::{Transfer, Way};
use zf_core::trace::{Lane, Trace};
use zf_core::{Error, Result};

use super::check::refuse;
use super::counts::Counts;
use super::finish::Failure;
use crate::{cores, precise};

/// The lane of a transfer in a trace.
pub(super) fn lane(way: Way) -> Lane {
    match way {
        Way::ToHost => Lane::ToHost,
        Way::ToDevice => Lane::ToDevice,
    }
}

/// Both directions of a link: to the host, to the device.
pub(super) type Ways<T> = [T; 2];

/// What both directions use.
#[derive(Debug)]
pub(super) struct Shared {
    stage: &'static str,
    pub(super) counts: Counts,
    pub(super) failure: Failure,
    closing: AtomicBool,
    trace: Trace,
}

impl Shared {
    pub(super) fn new(stage: &'static str, trace: &Trace) -> Arc<Self> {
        Arc::new(Self {
            stage,
            counts: Counts::default(),
            failure: Failure::new(stage),
            closing: AtomicBool::new(false),
            trace: trace.clone(),
        })
    }

    /// From now on transfers end with an error.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::Release);
    }

    /// Whether the link is being dropped.
    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// The error of a transfer that the end of its link overtook.
    pub(super) fn closed(&self, transfer: &Transfer) -> Error {
        refuse(self.stage, format!("transfer `{}`: the link was closed", transfer.label))
    }

    /// Books a copy that was over at `end` and kept the link busy for `busy` since `start`.
    pub(super) fn book(&self, transfer: &Transfer, bytes: u64, [start, end]: [Instant; 2], busy: Duration) {
        self.trace.record(lane(transfer.way), transfer.label.clone(), None, start, end);
        self.counts.add(transfer.way, transfer.moves, bytes, busy);
    }

    /// Ends a transfer; one that failed makes the link fail.
    pub(super) fn end(&self, transfer: Transfer, outcome: Result<()>) {
        if let Err(error) = &outcome {
            self.failure.set(error.to_string());
        }
        self.failure.finish(transfer, outcome);
    }
}

/// The thread of one direction, which takes jobs in the order in which they are sent.
#[derive(Debug)]
pub(super) struct Carrier<J> {
    stage: &'static str,
    jobs: Option<Sender<J>>,
    thread: Option<JoinHandle<()>>,
}

impl<J: Send + 'static> Carrier<J> {
    /// Starts a thread called after `way` on `cores` (any, if empty).
    ///
    /// # Errors
    /// Cores that this process may not use; no thread.
    pub(super) fn start(
        stage: &'static str,
        way: &str,
        cores: &[usize],
        trace: &Trace,
        run: impl FnOnce(Receiver<J>) + Send + 'static,
    ) -> Result<Self> {
        let (jobs, queue) = unbounded();
        let (ready, started) = bounded(1);
        let cores = cores.to_vec();
        let failed = |error: String| refuse(stage, format!("its thread does not start: {error}"));
        let thread = thread::Builder::new()
            .name(format!("zf-{way}-{}", trace.rank()))
            .spawn(move || {
                let pinned = if cores.is_empty() { Ok(()) } else { cores::pin_current_thread(&cores) };
                let go = pinned.is_ok();
                // Whoever opened the link waits for this.
                let _ = ready.send(pinned);
                if go {
                    precise::sharpen();
                    run(queue);
                }
            })
            .map_err(|error| failed(error.to_string()))?;
        started.recv().map_err(|_| failed("it ended at once".into()))??;
        Ok(Self { stage, jobs: Some(jobs), thread: Some(thread) })
    }

    /// Hands a job over, or gives it back with the reason.
    pub(super) fn send(&self, job: J) -> Result<(), (J, Error)> {
        let Some(jobs) = &self.jobs else { return Err((job, refuse(self.stage, "the link is closed"))) };
        jobs.send(job)
            .map_err(|refused| (refused.into_inner(), refuse(self.stage, "the link has failed: its thread has ended")))
    }
}

/// Ends both threads, each after the job that it is at.
pub(super) fn end<J>(mut carriers: Ways<&mut Carrier<J>>) {
    for carrier in &mut carriers {
        carrier.jobs = None;
    }
    for carrier in carriers {
        // The last handle of a link may lie in what a transfer does when done: such a thread cannot wait for itself.
        if let Some(thread) = carrier.thread.take().filter(|thread| thread.thread().id() != thread::current().id()) {
            // A panic in `done` was caught, so that the thread has none of its own.
            let _ = thread.join();
        }
    }
}
