//! The threads that read and write.

use std::fs::File;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender, unbounded};
use zf_core::{Error, Result};

use super::disk::{Disk, read_all, write_all};
use super::memory::Memory;
use crate::cores;

/// A page of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Page {
    pub(super) buffer: usize,
    pub(super) page: usize,
}

/// A page to be read into memory or written from it.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) page: Page,
    pub(super) write: bool,
    pub(super) file: Arc<File>,
    pub(super) offset: u64,
    pub(super) bytes: usize,
    pub(super) memory: Memory,
}

/// What became of a job.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) page: Page,
    pub(super) write: bool,
    pub(super) memory: Memory,
    pub(super) result: io::Result<()>,
}

/// Threads with a queue of jobs. Dropped, they finish what is queued and end.
#[derive(Debug)]
pub(super) struct Workers {
    jobs: Option<Sender<Job>>,
    done: Receiver<Done>,
    threads: Vec<JoinHandle<()>>,
    /// Jobs whose end was not fetched yet.
    under_way: usize,
}

impl Workers {
    /// Starts `count` threads, on `cores` if there are any.
    ///
    /// # Errors
    /// Cores that this process may not use; no thread.
    pub(super) fn start(disk: &Arc<dyn Disk>, count: usize, cores: &[usize]) -> Result<Self> {
        let allowed = if cores.is_empty() { Vec::new() } else { cores::allowed()? };
        if let Some(core) = cores.iter().find(|&&id| allowed.iter().all(|core| core.id != id)) {
            return Err(Error::Config(format!("threads for files: this process may not use core {core}")));
        }
        let (jobs, queue) = unbounded::<Job>();
        let (ended, done) = unbounded();
        let mut threads = Vec::with_capacity(count);
        for index in 0..count.max(1) {
            let (queue, ended, disk, cores) = (queue.clone(), ended.clone(), Arc::clone(disk), cores.to_vec());
            let run = move || {
                if !cores.is_empty() {
                    // Just checked; threads that run elsewhere are merely slower.
                    let _ = cores::pin_current_thread(&cores);
                }
                for job in queue {
                    if ended.send(carry_out(disk.as_ref(), job)).is_err() {
                        return;
                    }
                }
            };
            let thread = thread::Builder::new().name(format!("zf-file-{index}")).spawn(run);
            threads.push(thread.map_err(|error| Error::Engine(format!("a thread for files does not start: {error}")))?);
        }
        Ok(Self { jobs: Some(jobs), done, threads, under_way: 0 })
    }

    /// Queues a job.
    pub(super) fn submit(&mut self, job: Job) -> Result<()> {
        let jobs = self.jobs.as_ref().expect("the queue is taken away only when the workers are dropped");
        jobs.send(job).map_err(|_| gone())?;
        self.under_way += 1;
        Ok(())
    }

    /// Whether jobs are under way.
    pub(super) fn busy(&self) -> bool {
        self.under_way > 0
    }

    /// The end of a job, if one has ended.
    pub(super) fn poll(&mut self) -> Option<Done> {
        let done = self.done.try_recv().ok()?;
        self.under_way -= 1;
        Some(done)
    }

    /// Waits for the end of a job. At least one must be under way.
    pub(super) fn wait(&mut self) -> Result<Done> {
        let done = self.done.recv().map_err(|_| gone())?;
        self.under_way -= 1;
        Ok(done)
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // A panic in a job was caught.
            let _ = thread.join();
        }
    }
}

fn gone() -> Error {
    Error::Engine("the threads for files have ended".into())
}

fn carry_out(disk: &dyn Disk, job: Job) -> Done {
    let Job { page, write, file, offset, bytes, mut memory } = job;
    let work = AssertUnwindSafe(|| {
        let piece = memory.bytes().map_err(io::Error::other)?.get_mut(..bytes);
        let piece = piece.ok_or_else(|| io::Error::other("the page is larger than its memory"))?;
        if write { write_all(disk, &file, piece, offset) } else { read_all(disk, &file, piece, offset) }
    });
    let result = catch_unwind(work).unwrap_or_else(|_| Err(io::Error::other("the thread for files panicked")));
    Done { page, write, memory, result }
}
