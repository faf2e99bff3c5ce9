//! Writing beside the training.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::Mutex;

use super::state::{Meta, RankState};
use super::writer::Writer;
use crate::{Error, Result};

/// What the thread is told.
enum Job {
    Save(Box<(RankState, Option<Meta>)>),
    /// A save whose state could not be collected.
    GiveUp {
        step: u64,
        world: usize,
        reason: String,
    },
    /// Answered when all jobs before it are done.
    Flush(Sender<()>),
}

/// A [`Writer`] on a thread of its own.
///
/// One save is under way at a time: [`AsyncWriter::submit`] returns at once when the thread is idle and otherwise waits
/// for the save before, so at most one snapshot is held here. A caller that wants to hold no second one calls
/// [`AsyncWriter::flush`] before it takes the next snapshot. Errors appear at the next call. Dropped, it finishes the save under
/// way, waiting for other ranks only a few seconds; a program that ends in order calls `flush` first.
#[derive(Debug)]
pub struct AsyncWriter {
    jobs: Option<Sender<Job>>,
    failure: Arc<Mutex<Option<Error>>>,
    ending: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl AsyncWriter {
    /// Moves `writer` to a thread.
    ///
    /// # Errors
    /// [`Error::Engine`] when the system refuses a thread.
    pub fn new(writer: Writer) -> Result<Self> {
        // Without places in the queue a send succeeds only when the thread is ready for the job.
        let (jobs, queue) = bounded(0);
        let failure = Arc::new(Mutex::new(None));
        let ending = writer.ending();
        let thread = std::thread::Builder::new()
            .name("checkpoint".into())
            .spawn({
                let failure = Arc::clone(&failure);
                move || work(writer, &queue, &failure)
            })
            .map_err(|e| Error::Engine(format!("cannot start the checkpoint thread: {e}")))?;
        Ok(Self { jobs: Some(jobs), failure, ending, thread: Some(thread) })
    }

    /// Waits for the save before, if it is still under way, and hands over a snapshot; see [`Writer::save`].
    ///
    /// # Errors
    /// That of the save before; this snapshot is then not written.
    pub fn submit(&self, state: RankState, meta: Option<Meta>) -> Result<()> {
        self.flush()?;
        self.send(Job::Save(Box::new((state, meta))))
    }

    /// In the place of [`AsyncWriter::submit`], where this rank could not collect its state: rank 0 is told why.
    ///
    /// # Errors
    /// That of the save before.
    pub fn give_up(&self, step: u64, world: usize, reason: String) -> Result<()> {
        self.flush()?;
        self.send(Job::GiveUp { step, world, reason })
    }

    /// Waits until everything submitted is written.
    ///
    /// # Errors
    /// That of an earlier save, once.
    pub fn flush(&self) -> Result<()> {
        let (done, wait) = bounded(1);
        self.send(Job::Flush(done))?;
        wait.recv().map_err(|_| ended())?;
        self.take_failure()
    }

    fn send(&self, job: Job) -> Result<()> {
        let jobs = self.jobs.as_ref().ok_or_else(ended)?;
        jobs.send(job).map_err(|_| ended())
    }

    fn take_failure(&self) -> Result<()> {
        self.failure.lock().take().map_or(Ok(()), Err)
    }
}

impl Drop for AsyncWriter {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::Relaxed);
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // `work` catches panics, so joining cannot fail.
            let _ = thread.join();
        }
        if let Some(error) = self.failure.lock().take() {
            tracing::error!("the last checkpoint was not written: {error}");
        }
    }
}

fn work(mut writer: Writer, queue: &Receiver<Job>, failure: &Mutex<Option<Error>>) {
    for job in queue {
        match job {
            Job::Save(save) => {
                let (state, meta) = *save;
                // A panic here must reach the trainer as an error, not as a thread that is gone.
                let result = catch_unwind(AssertUnwindSafe(|| writer.save(state, meta)))
                    .unwrap_or_else(|_| Err(Error::Engine("the checkpoint writer panicked".into())));
                if let Err(error) = result {
                    failure.lock().get_or_insert(error);
                }
            }
            Job::GiveUp { step, world, reason } => writer.give_up(step, world, reason),
            // Nobody listens when the caller gave up; that is its affair.
            Job::Flush(done) => drop(done.send(())),
        }
    }
}

fn ended() -> Error {
    Error::Engine("the checkpoint thread has ended".into())
}
