//! The thread that does one group's collectives, one after the other, over a process group of its own.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use parking_lot::Mutex;
use zf_core::stage::{Collective, Group};
use zf_core::trace::Lane;
use zf_sys::c10d::ProcessGroup;

use super::book::{Book, number};
use super::courier::{Courier, Flow, Trouble};
use super::moves::{self, Desk};
use super::shared::{Failure, Shared};
use crate::work::Work;

/// How a collective ended: the bytes of all members for an exchange, or why it failed.
pub(crate) type Reply = Result<Vec<Vec<u8>>, String>;

/// How long after a broken connection the reason may take to become known.
const GRACE: Duration = Duration::from_millis(700);

/// A collective to be done.
pub(crate) struct Item {
    pub(crate) sequence: u64,
    pub(crate) name: &'static str,
    pub(crate) label: String,
    pub(crate) work: Work,
    /// Keeps the tensors alive that `work` points into.
    pub(crate) tensors: Collective,
    /// What it counts for.
    pub(crate) bytes: u64,
    pub(crate) reply: Sender<Reply>,
}

/// A group as one of its members sees it.
pub(crate) struct Line {
    pub(crate) group: Group,
    pub(crate) flow: Flow,
    /// The first collective that a member which left will not take part in, and that member.
    cut: Mutex<Option<(u64, usize)>>,
    /// The last collective that was done.
    pub(crate) completed: Mutex<Option<(u64, String)>>,
    /// What is being done.
    running: Mutex<Option<u64>>,
    queue: Mutex<Option<Sender<Item>>>,
    worker: Mutex<Option<(JoinHandle<()>, Receiver<()>)>>,
}

impl Line {
    pub(crate) fn new(group: Group) -> Self {
        Self {
            group,
            flow: Flow::default(),
            cut: Mutex::default(),
            completed: Mutex::default(),
            running: Mutex::default(),
            queue: Mutex::default(),
            worker: Mutex::default(),
        }
    }

    /// Queues a collective, for which the first one starts the thread.
    pub(crate) fn push(self: &Arc<Self>, shared: &Arc<Shared>, member: usize, item: Item) -> Result<(), String> {
        let mut queue = self.queue.lock();
        let sender = match &*queue {
            Some(sender) => sender.clone(),
            None => {
                let sender = self.start(shared, member)?;
                queue.insert(sender).clone()
            }
        };
        sender.send(item).map_err(|_| "its communication thread has ended".to_owned())
    }

    fn start(self: &Arc<Self>, shared: &Arc<Shared>, member: usize) -> Result<Sender<Item>, String> {
        let (sender, items) = unbounded();
        let (end, ended) = bounded::<()>(0);
        let (line, shared) = (Arc::clone(self), Arc::clone(shared));
        let thread = std::thread::Builder::new().name(format!("c10d-{}", shared.rank));
        let spawned = thread.spawn(move || {
            let _end = end;
            Worker { line: &line, shared: &shared, member, connected: None }.run(&items);
        });
        let worker = spawned.map_err(|error| format!("cannot start its communication thread: {error}"))?;
        *self.worker.lock() = Some((worker, ended));
        Ok(sender)
    }

    /// A member left after what its book tells: what it has not issued will not complete.
    pub(crate) fn cut(&self, rank: usize, book: &Book) {
        if self.group.index(rank).is_none() {
            return;
        }
        let first = book.count(&self.group);
        let mut cut = self.cut.lock();
        if cut.is_none_or(|(sequence, _)| first < sequence) {
            *cut = Some((first, rank));
        }
        if self.running.lock().is_some_and(|sequence| sequence >= first) {
            self.flow.stop();
        }
    }

    /// The member without which collective `sequence` stays incomplete.
    fn gone(&self, sequence: u64) -> Option<usize> {
        self.cut.lock().filter(|(first, _)| sequence >= *first).map(|(_, rank)| rank)
    }

    /// Takes no more, and gives the thread until `deadline` to end.
    pub(crate) fn close(&self, deadline: Instant) {
        drop(self.queue.lock().take());
        if let Some((worker, ended)) = self.worker.lock().take() {
            // One that hangs in a call to a store whose host stopped is left to itself.
            if ended.recv_deadline(deadline) == Err(crossbeam_channel::RecvTimeoutError::Disconnected) {
                let _ = worker.join();
            }
        }
    }

    /// `all_reduce #3 "label" in group [0, 1]`.
    pub(crate) fn title(group: &Group, sequence: u64, name: &str, label: &str) -> String {
        format!("{name} #{sequence} {label:?} in group {:?}", group.ranks())
    }
}

struct Worker<'a> {
    line: &'a Line,
    shared: &'a Shared,
    member: usize,
    connected: Option<(ProcessGroup, Desk)>,
}

impl Worker<'_> {
    fn run(&mut self, items: &Receiver<Item>) {
        for item in items {
            *self.line.running.lock() = Some(item.sequence);
            let title = Line::title(&self.line.group, item.sequence, item.name, &item.label);
            let outcome = catch_unwind(AssertUnwindSafe(|| self.complete(&item)));
            self.line.flow.clear();
            let outcome = match outcome {
                Ok(Ok(blobs)) => {
                    *self.line.completed.lock() = Some((item.sequence, item.label.clone()));
                    Ok(blobs)
                }
                Ok(Err(trouble)) => Err(self.explain(&title, item.sequence, trouble)),
                Err(_) => {
                    let rank = self.shared.rank;
                    self.shared.fail(format!("rank {rank} failed: a panic while it exchanged tensors"));
                    Err(self.ended(&title, item.sequence))
                }
            };
            *self.line.running.lock() = None;
            // The tensors go before the ticket's owner goes on.
            let Item { reply, tensors, .. } = item;
            drop(tensors);
            let _ = reply.send(outcome);
        }
    }

    fn complete(&mut self, item: &Item) -> Result<Vec<Vec<u8>>, Trouble> {
        self.go_on(item.sequence)?;
        if self.connected.is_none() {
            self.connected = Some(self.connect(item.sequence)?);
        }
        let Some((group, desk)) = &mut self.connected else { return Err(Trouble::Stopped) };
        let courier = Courier { group, flow: &self.line.flow, me: self.member };
        let theirs = moves::agree(&courier, desk, &item.work, &item.label, item.sequence, &self.line.group)?;
        let trace = self.shared.trace.lock().clone();
        let _span = trace.as_ref().map(|trace| trace.span(Lane::Comm, format!("{} {}", item.name, item.label)));
        let blobs = moves::run(&courier, desk, &item.work, &item.tensors, &theirs)?;
        self.shared.count(item.name, item.bytes);
        Ok(blobs)
    }

    /// Whether this collective may still complete.
    fn go_on(&self, sequence: u64) -> Result<(), Trouble> {
        let ended = self.line.flow.stopped() || self.line.gone(sequence).is_some() || self.shared.failure().is_some();
        if ended { Err(Trouble::Stopped) } else { Ok(()) }
    }

    /// Connects the members once all of them have come, so that nobody waits within libtorch for one that does not.
    fn connect(&self, sequence: u64) -> Result<(ProcessGroup, Desk), Trouble> {
        let failed = |error: zf_sys::Error| Trouble::Failed(format!("cannot connect: {error}"));
        let group = &self.line.group;
        let ranks: Vec<_> = group.ranks().iter().map(usize::to_string).collect();
        let name = format!("group/{}/{}", number(group.channel()), ranks.join("-"));
        let store = self.shared.store().ok_or(Trouble::Stopped)?;
        let store = store.prefixed(&name).map_err(failed)?;
        store.set(&format!("here/{}", self.member), b"1").map_err(failed)?;
        let keys: Vec<_> = (0..group.size()).map(|member| format!("here/{member}")).collect();
        let keys: Vec<_> = keys.iter().map(String::as_str).collect();
        let mut pause = Duration::from_micros(500);
        while !store.has(&keys).map_err(failed)? {
            self.go_on(sequence)?;
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        }
        let (device, timeout) = (&self.shared.device, self.shared.timeout);
        let connected = ProcessGroup::gloo(&store, device, self.member, group.size(), timeout).map_err(failed)?;
        Ok((connected, Desk::new(group.size())?))
    }

    /// The message of a collective that did not complete. Everybody else hears of it, where they do not know.
    fn explain(&self, title: &str, sequence: u64, trouble: Trouble) -> String {
        match trouble {
            Trouble::Stopped => {}
            Trouble::Conflict(text) => self.shared.fail(text),
            Trouble::Failed(text) => {
                if !self.known(sequence, None) {
                    self.shared.fail(format!("{title}: rank {}: {text}", self.shared.rank));
                }
            }
            Trouble::Broken { member, why } => {
                let rank = self.line.group.ranks()[member];
                if !self.known(sequence, Some(rank)) {
                    let sight =
                        self.shared.look(&self.line.group, vec![rank], false).and_then(|mut sights| sights.pop());
                    let last = sight.and_then(|sight| sight.book).map(|book| book.last(rank, &self.line.group));
                    let more = last.unwrap_or(why);
                    self.shared.fail(format!("{title}: rank {rank} is gone, its connection broke ({more})"));
                }
            }
        }
        self.ended(title, sequence)
    }

    /// Waits for the reason of what went wrong; false if there is none.
    fn known(&self, sequence: u64, broken: Option<usize>) -> bool {
        let deadline = Instant::now() + GRACE;
        loop {
            if self.shared.failure().is_some() || self.line.gone(sequence).is_some() {
                return true;
            }
            if let Some(rank) = broken.filter(|rank| self.shared.left.lock().contains(rank)) {
                // It left in the middle of this one.
                let mut cut = self.line.cut.lock();
                *cut = Some((sequence, rank));
                return true;
            }
            if deadline <= Instant::now() {
                return false;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The message of a collective that was stopped.
    fn ended(&self, title: &str, sequence: u64) -> String {
        // Whoever failed leaves too, and the reason counts.
        if let Some(failure) = self.shared.failure() {
            return failure.of(title);
        }
        self.line.flow.stop();
        let rank = self.line.gone(sequence).unwrap_or(self.shared.rank);
        Failure::Left(rank).of(title)
    }
}
