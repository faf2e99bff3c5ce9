//! The host part of one rank: a thread that owns masters and states, and one that sends what they become.

mod actor;
mod apply;
mod handover;
mod progress;
mod sums;
mod work;

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};
use tch::{Kind, Tensor};
use zf_core::stage::{
    Arrived, HostPool, HostUpdate, HostWork, Landing, Link, Output, ParametersOn, Site, Take, Taken, Tier, Transfer,
    Way,
};
use zf_core::{Error, Result};
use zf_sys::heap::{Category, tag};

use self::actor::{Actor, Outgoing, Request, State};
use self::progress::Progress;
use self::sums::Sums;
use crate::cores::pin_current_thread;
use crate::throttle::Throttle;

/// How long a worker may take to answer before it is taken for lost.
const PATIENCE: Duration = Duration::from_secs(600);

/// A worker thread with its queues.
pub struct Worker {
    name: String,
    requests: Option<Sender<Request>>,
    memory: Receiver<Tensor>,
    arrivals: Receiver<Result<Output>>,
    landing: Option<Sender<Tensor>>,
    /// Of the calls of [`HostPool::take`], in their order.
    taken: VecDeque<Receiver<Result<Taken>>>,
    gives: u64,
    updates: u64,
    progress: Arc<Progress>,
    threads: Vec<JoinHandle<()>>,
    notes: Vec<String>,
}

impl Worker {
    /// Starts the worker of a site, whose states are in `tier`. `buffers` is how many landings it has memory for.
    ///
    /// # Errors
    /// No memory; cores that do not exist; threads that cannot be started.
    pub fn start(site: Site, tier: Box<dyn Tier>, buffers: usize) -> Result<Self> {
        let name = format!("the host worker of rank {}", site.rank);
        let (requests, inbox) = unbounded();
        let (memory_back, memory) = unbounded();
        let (outgoing, outbox) = unbounded();
        let (output_back, outputs) = unbounded();
        let (arrived, arrivals) = unbounded();
        let (landing, landings) = unbounded();
        {
            let _host = site.heap.enter();
            let _tag = tag(Category::Buffers);
            for _ in 0..buffers.max(2) {
                let memory = site.link.host_memory(site.staging_bytes, Kind::Uint8)?;
                // The other ends live here and in the worker.
                let _ = memory_back.send(memory);
            }
        }
        for tensor in site.landing {
            let _ = landing.send(tensor);
        }
        let progress = Arc::new(Progress::default());
        progress.holds(tier.bytes());
        let arrays = 1 + site.optimizer.state().len();
        let threads = site.host.threads.unwrap_or(site.cores.len() / site.world.max(1)).max(1);
        let actor = Actor {
            requests: inbox,
            tier,
            optimizer: site.optimizer,
            link: Arc::clone(&site.link),
            sums: Sums::new(&site.lens, &site.wire),
            arrays,
            out: site.out,
            out_bytes: site.staging_bytes,
            threads,
            measures: site.measures,
            throttle: Throttle::new(site.host.bandwidth.map(|bandwidth| bandwidth.bytes_per_second())),
            trace: site.trace,
            progress: Arc::clone(&progress),
            memory: memory_back,
            outgoing,
            outputs,
            state: State::default(),
        };
        let (heap, cores, failed) = (site.heap.clone(), site.cores.clone(), Arc::clone(&progress));
        let spawn = |name: String,
                     body: Box<dyn FnOnce() -> Result<()> + Send>,
                     heap,
                     cores: Vec<usize>,
                     failed: Arc<Progress>| {
            std::thread::Builder::new()
                .name(name)
                .spawn(move || guarded(body, &heap, &cores, &failed))
                .map_err(|error| Error::Engine(format!("cannot start a host thread: {error}")))
        };
        let worker = spawn(
            format!("zf-host-{}", site.rank),
            Box::new(move || actor.run()),
            heap.clone(),
            cores.clone(),
            Arc::clone(&failed),
        )?;
        let errors = arrived.clone();
        let link = (site.parameters == ParametersOn::Device).then_some(site.link);
        let sender = spawn(
            format!("zf-send-{}", site.rank),
            Box::new(move || {
                send_all(&outbox, &landings, link.as_deref(), &arrived, &output_back);
                Ok(())
            }),
            heap,
            cores,
            failed,
        )?;
        drop(errors);
        Ok(Self {
            name,
            requests: Some(requests),
            memory,
            arrivals,
            landing: Some(landing),
            taken: VecDeque::new(),
            gives: 0,
            updates: 0,
            progress,
            threads: vec![worker, sender],
            notes: Vec::new(),
        })
    }

    /// The same with something to tell a person at the start.
    #[must_use]
    pub fn with_notes(mut self, notes: Vec<String>) -> Self {
        self.notes = notes;
        self
    }

    fn ask(&self, request: Request) -> Result<()> {
        let sent = self.requests.as_ref().and_then(|requests| requests.send(request).ok());
        sent.ok_or_else(|| self.reason())
    }

    /// Why the worker ended. What it held is gone a moment before it has said so.
    fn reason(&self) -> Error {
        let end = Instant::now() + Duration::from_secs(5);
        while !self.progress.has_failed() && !self.has_ended() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.progress.reason(&self.name)
    }

    fn has_ended(&self) -> bool {
        self.threads.first().is_none_or(JoinHandle::is_finished)
    }

    /// Asks, and waits for the answer.
    fn answer<T>(&self, request: impl FnOnce(Sender<T>) -> Request) -> Result<T> {
        let (reply, answer) = bounded(1);
        self.ask(request(reply))?;
        self.wait(&answer)
    }

    fn wait<T>(&self, answer: &Receiver<T>) -> Result<T> {
        answer.recv_timeout(PATIENCE).map_err(|error| match error {
            RecvTimeoutError::Timeout => {
                Error::Engine(format!("{} did not answer within {} s", self.name, PATIENCE.as_secs()))
            }
            RecvTimeoutError::Disconnected => self.reason(),
        })
    }
}

/// Runs a thread's body in the heap of its rank's host memory; an error or a panic is kept for the rank.
fn guarded(
    body: Box<dyn FnOnce() -> Result<()> + Send>,
    heap: &zf_sys::heap::Heap,
    cores: &[usize],
    failed: &Progress,
) {
    let _heap = heap.enter();
    let run = || {
        if !cores.is_empty() {
            pin_current_thread(cores)?;
        }
        tch::set_num_threads(1);
        body()
    };
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => {}
        Ok(Err(error)) => failed.fail(error.to_string()),
        Err(panic) => {
            failed.fail(format!("panicked: {}", panic_text(&*panic)));
        }
    }
}

/// The message of a panic.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}

/// Sends outputs to where parameters lie, each as soon as there is room: over the link, or within host memory.
fn send_all(
    outbox: &Receiver<Outgoing>,
    landings: &Receiver<Tensor>,
    link: Option<&dyn Link>,
    arrived: &Sender<Result<Output>>,
    back: &Sender<Tensor>,
) {
    while let Ok(Outgoing { buffer, ranges, values, bytes }) = outbox.recv() {
        let Ok(landing) = landings.recv() else { return };
        let views = (|| Ok((values.f_narrow(0, 0, bytes as i64)?, landing.f_narrow(0, 0, bytes as i64)?)))();
        let (from, to) = match views {
            Ok(views) => views,
            Err(error) => {
                let _ = arrived.send(Err(error));
                return;
            }
        };
        let (arrived, back) = (arrived.clone(), back.clone());
        let done: Box<dyn FnOnce(Result<Arrived>) + Send> = Box::new(move |result: Result<Arrived>| {
            // Either end may be gone when the run is over.
            let _ = back.send(values);
            let _ = arrived.send(result.map(|_| Output { buffer, ranges, values: landing }));
        });
        let Some(link) = link else {
            let copied = tch::no_grad(|| to.shallow_clone().f_copy_(&from));
            done(copied.map(|_| Arrived { from, to }).map_err(Error::from));
            continue;
        };
        let label = "parameters".into();
        // An error is also given to `done`.
        if link.issue(Transfer { way: Way::ToDevice, from, to, label, moves: false, done }).is_err() {
            return;
        }
    }
}

impl HostPool for Worker {
    fn inlet(&self) -> Arc<dyn Fn(Result<Landing>) + Send + Sync> {
        let requests = self.requests.clone();
        Arc::new(move |landing| {
            // A worker that has ended says why when it is asked.
            if let Some(requests) = &requests {
                let _ = requests.send(Request::Land(landing));
            }
        })
    }

    fn landing_memory(&mut self, wait: bool) -> Result<Option<Tensor>> {
        if wait { self.wait(&self.memory).map(Some) } else { Ok(self.memory.try_recv().ok()) }
    }

    fn update(&mut self, update: HostUpdate) -> Result<()> {
        self.updates += 1;
        self.ask(Request::Update { update, gives: self.gives })
    }

    fn go(&mut self) -> Result<()> {
        self.ask(Request::Go)
    }

    fn output(&mut self) -> Result<Output> {
        let started = Instant::now();
        loop {
            match self.arrivals.recv_timeout(Duration::from_millis(200)) {
                Ok(output) => return output,
                Err(RecvTimeoutError::Disconnected) => return Err(self.reason()),
                // The sender outlives a worker that failed.
                Err(RecvTimeoutError::Timeout) if self.has_ended() => {
                    return Err(self.reason());
                }
                Err(RecvTimeoutError::Timeout) if started.elapsed() > PATIENCE => {
                    let seconds = PATIENCE.as_secs();
                    return Err(Error::Engine(format!("{} updated nothing within {seconds} s", self.name)));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    fn recycle(&mut self, values: Tensor) {
        if let Some(landing) = &self.landing {
            // The sender may have ended; then nobody needs it.
            let _ = landing.send(values);
        }
    }

    fn take(&mut self, take: Take) -> Result<()> {
        let (reply, taken) = bounded(1);
        self.ask(Request::Take { take, gives: self.gives, updates: self.updates, reply })?;
        self.taken.push_back(taken);
        Ok(())
    }

    fn taken(&mut self) -> Result<Taken> {
        let taken = self.taken.pop_front().ok_or_else(|| Error::Engine("no elements were taken".into()))?;
        self.wait(&taken)?
    }

    fn give(&mut self, elements: Vec<(usize, Vec<Range<usize>>)>) -> Result<Box<dyn FnOnce(Result<Tensor>) + Send>> {
        self.gives += 1;
        let requests = self.requests.clone().ok_or_else(|| self.reason())?;
        Ok(Box::new(move |values| {
            // A worker that has ended says why when it is asked.
            let _ = requests.send(Request::Give { elements, values });
        }))
    }

    fn settle(&mut self) -> Result<()> {
        self.answer(|reply| Request::Settle { reply })
    }

    fn read(&mut self, buffer: usize, array: usize, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        let values = self.answer(|reply| Request::Read { buffer, array, range, reply })?;
        out.copy_from_slice(&values);
        Ok(())
    }

    fn write(&mut self, buffer: usize, array: usize, range: Range<usize>, values: &[f32]) -> Result<()> {
        self.answer(|reply| Request::Write { buffer, array, range, values: values.to_vec(), reply })
    }

    fn sums(&mut self, window: u64, landings: u64, buffer: usize) -> Result<Vec<f32>> {
        self.answer(|reply| Request::Sums { window, landings, buffer, reply })
    }

    fn set_sums(&mut self, window: u64, buffer: usize, values: Vec<f32>) -> Result<()> {
        self.answer(|reply| Request::SetSums { window, buffer, values, reply })
    }

    fn work(&self) -> HostWork {
        self.progress.work()
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The worker ends when nobody can ask it any more, and the sender with it.
        (self.requests, self.landing) = (None, None);
        for thread in self.threads.drain(..) {
            // A panic was kept by the thread itself.
            let _ = thread.join();
        }
    }
}
