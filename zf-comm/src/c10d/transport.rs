//! One rank's connection: issues collectives, and the tickets that wait for them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use zf_core::stage::{CommBytes, Group, Reduce, Request, Ticket, TicketState, Transport};
use zf_core::trace::{Lane, Trace};
use zf_core::{Error, Result};

use super::control::{Ask, Sight, TICK};
use super::line::{Item, Line, Reply};
use super::shared::{Failure, PATIENCE, Shared};
use crate::counting::ring_bytes;
use crate::kernel;
use crate::threads::{Done, check_group, list, seconds};
use crate::work::Work;

/// How long a rank that hosts the store stays for the others to read why the run failed.
const LINGER: Duration = Duration::from_secs(3);

pub(crate) struct C10dTransport {
    shared: Arc<Shared>,
    /// The next sequence number of each group.
    sequences: HashMap<Group, u64>,
    /// The control thread, and what it closes when it ends.
    control: Option<(JoinHandle<()>, Receiver<()>)>,
    hosts_store: bool,
}

impl C10dTransport {
    pub(crate) fn new(shared: Arc<Shared>, control: (JoinHandle<()>, Receiver<()>), hosts_store: bool) -> Self {
        Self { shared, sequences: HashMap::new(), control: Some(control), hosts_store }
    }
}

impl Transport for C10dTransport {
    fn rank(&self) -> usize {
        self.shared.rank
    }

    fn world(&self) -> usize {
        self.shared.world
    }

    fn issue(&mut self, request: Request) -> Result<Ticket> {
        let Request { group, label, mut collective } = request;
        let name = collective.name();
        let sequence = self.sequences.get(&group).copied().unwrap_or(0);
        if let Some(failure) = self.shared.failure() {
            return Err(Error::comm(failure.of(&Line::title(&group, sequence, name, &label))));
        }
        let rank = self.shared.rank;
        let refuse =
            |found: String| Error::comm(format!("{name} {label:?} in group {:?}, rank {rank}: {found}", group.ranks()));
        let member = check_group(&group, rank, self.shared.world).map_err(refuse)?;
        let bytes = ring_bytes(&collective, member, group.size());
        let work = Work::of(&mut collective, member, group.size()).map_err(refuse)?;
        if group.size() == 1 {
            return Ok(Ticket::new(Box::new(Done(self.alone(name, &label, work)))));
        }
        let line = self.shared.line(&group);
        self.sequences.insert(group.clone(), sequence + 1);
        self.shared.book.lock().enter(&group, sequence, &label);
        let (reply, answer) = bounded(1);
        let item = Item { sequence, name, label: label.clone(), work, tensors: collective, bytes, reply };
        line.push(&self.shared, member, item).map_err(refuse)?;
        let shared = Arc::clone(&self.shared);
        Ok(Ticket::new(Box::new(Waiting { shared, group, sequence, name, label, answer })))
    }

    fn record(&mut self, trace: &Trace) {
        *self.shared.trace.lock() = Some(trace.clone());
    }

    fn bytes(&self) -> CommBytes {
        self.shared.bytes()
    }

    fn abort(&self, reason: &str) {
        self.shared.fail(format!("rank {} failed: {reason}", self.shared.rank));
    }
}

impl C10dTransport {
    /// A collective of this rank with itself, done at once.
    fn alone(&self, name: &str, label: &str, work: Work) -> Vec<Vec<u8>> {
        if !work.is_done_alone() {
            let trace = self.shared.trace.lock().clone();
            let _span = trace.as_ref().map(|trace| trace.span(Lane::Comm, format!("{name} {label}")));
            // SAFETY: lengths and dtypes were checked, and the caller leaves the tensors alone.
            unsafe {
                match &work {
                    Work::ReduceScatter { inputs, output, accumulate } => {
                        kernel::combine(inputs, &[*output], Reduce::Sum, *accumulate);
                    }
                    Work::AllGather { input, outputs } => outputs[0].copy_from(input),
                    Work::AllToAll { inputs, outputs } => outputs[0].copy_from(&inputs[0]),
                    Work::AllReduce { .. } | Work::Broadcast { .. } | Work::Exchange { .. } => {}
                }
            }
        }
        if let Work::Exchange { bytes } = work { vec![bytes] } else { Vec::new() }
    }

    /// Tells the others that this rank is done, and waits for them: whoever closes a connection may cut off what is still
    /// under way in it, and the store ends with the rank that hosts it.
    fn leave(&self) {
        let tell = |ask: fn(Sender<()>) -> Ask| {
            let (reply, told) = bounded(1);
            self.shared.control.send(ask(reply)).is_ok() && told.recv_timeout(PATIENCE).is_ok()
        };
        if !tell(Ask::Leave) {
            return;
        }
        let shared = &self.shared;
        self.linger(shared.timeout, || shared.failure().is_some() || shared.left.lock().len() + 1 >= shared.world);
        if !self.hosts_store {
            tell(Ask::Done);
            return;
        }
        self.linger(LINGER.min(shared.timeout), || shared.done.load(Ordering::Relaxed) + 1 >= shared.world);
    }

    /// Waits for `over`, the end of the store, or the end of `limit`.
    fn linger(&self, limit: Duration, over: impl Fn() -> bool) {
        let begin = Instant::now();
        while !over() && begin.elapsed() < limit && !matches!(self.shared.failure(), Some(Failure::Store(_))) {
            std::thread::sleep(TICK / 5);
        }
    }
}

impl Drop for C10dTransport {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.shared.fail(format!("rank {} failed: its thread panicked", self.shared.rank));
        }
        self.leave();
        self.shared.end(Failure::Left(self.shared.rank));
        let deadline = Instant::now() + PATIENCE;
        for line in self.shared.take_lines() {
            line.close(deadline);
        }
        let _ = self.shared.control.send(Ask::Stop);
        if let Some((control, ended)) = self.control.take() {
            // It hangs where the store's host stopped, and is left to itself then.
            if ended.recv_deadline(deadline) == Err(RecvTimeoutError::Disconnected) {
                let _ = control.join();
            }
        }
    }
}

/// A collective that others take part in.
struct Waiting {
    shared: Arc<Shared>,
    group: Group,
    sequence: u64,
    name: &'static str,
    label: String,
    answer: Receiver<Reply>,
}

impl TicketState for Waiting {
    fn wait(self: Box<Self>) -> Result<Vec<Vec<u8>>> {
        let title = || Line::title(&self.group, self.sequence, self.name, &self.label);
        let mut answer = self.answer.recv_timeout(self.shared.timeout);
        if answer == Err(RecvTimeoutError::Timeout) {
            // Nobody's collectives fit together any more, so that everybody ends with this message.
            let reason = self.overdue(&title());
            if self.answer.is_empty() {
                self.shared.fail(reason);
            }
            answer = self.answer.recv_timeout(PATIENCE);
        }
        match answer {
            Ok(reply) => reply.map_err(Error::Comm),
            Err(_) => Err(Error::comm(match self.shared.failure() {
                Some(failure) => failure.of(&title()),
                None => format!("{}: its communication thread has ended", title()),
            })),
        }
    }

    fn is_done(&self) -> bool {
        !self.answer.is_empty()
    }
}

impl Waiting {
    /// Who is missing: `reduce_scatter #17 "..." in group [0, 1, 2]: rank 2 did not arrive within 60 s (...)`.
    fn overdue(&self, title: &str) -> String {
        let time = seconds(self.shared.timeout);
        let Some(sights) = self.shared.look(&self.group, self.group.ranks().to_vec(), true) else {
            let host = &self.shared.store_host;
            return format!(
                "{title}: it did not complete within {time}, and {host}, which hosts the store of the run, does not answer"
            );
        };
        let arrived = |sight: &&Sight| {
            let count = sight.book.as_ref().map_or(0, |book| book.count(&self.group));
            sight.rank == self.shared.rank || count > self.sequence
        };
        let (here, missing): (Vec<_>, Vec<_>) = sights.iter().partition(arrived);
        let ranks = |sights: &[&Sight]| list(&sights.iter().map(|sight| sight.rank).collect::<Vec<_>>());
        let plural = |sights: &[&Sight]| if sights.len() == 1 { "rank" } else { "ranks" };
        if missing.is_empty() {
            let silent: Vec<_> = here.into_iter().filter(|sight| !sight.alive).collect();
            if silent.is_empty() {
                return format!("{title}: all ranks arrived, but it did not complete within {time}");
            }
            return format!(
                "{title}: it did not complete within {time}: {} {} arrived, but shows no sign of life any more",
                plural(&silent),
                ranks(&silent)
            );
        }
        let last: Vec<_> = missing.iter().map(|sight| self.last(sight)).collect();
        format!(
            "{title}: {} {} did not arrive within {time} (arrived: {}; {})",
            plural(&missing),
            ranks(&missing),
            ranks(&here),
            last.join(", ")
        )
    }

    fn last(&self, sight: &Sight) -> String {
        let rank = sight.rank;
        match &sight.book {
            None => format!("rank {rank} never connected"),
            Some(_) if sight.left => format!("rank {rank} left"),
            Some(book) => {
                let silent = if sight.alive { "" } else { " and shows no sign of life" };
                format!("{}{silent}", book.last(rank, &self.group))
            }
        }
    }
}
