//! One rank's connection: issues collectives, and the tickets that wait for them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use parking_lot::Mutex;
use zf_core::stage::{CommBytes, Group, Request, Ticket, TicketState, Transport};
use zf_core::trace::Trace;
use zf_core::{Error, Result};

use super::hub::{Hub, Message};
use super::meeting::{Meeting, Part, Reply};
use crate::counting::ring_bytes;
use crate::work::Work;
use zf_core::duration;

pub(crate) struct ThreadsTransport {
    hub: Arc<Hub>,
    rank: usize,
    /// The next sequence number of each group.
    sequences: HashMap<Group, u64>,
    progress: Option<JoinHandle<()>>,
    /// Closed by the progress thread when it ends.
    ended: Receiver<()>,
}

impl ThreadsTransport {
    /// Takes the rank's seat and starts its progress thread.
    pub(crate) fn connect(hub: Arc<Hub>, rank: usize) -> Result<Self> {
        hub.sit(rank).map_err(Error::Comm)?;
        let (end, ended) = bounded::<()>(0);
        let shared = Arc::clone(&hub);
        let spawned = std::thread::Builder::new().name(format!("comm-{rank}")).spawn(move || {
            let _end = end;
            while let Ok(Message::Run(meeting, member)) = shared.seats[rank].outbox.recv() {
                shared.run(&meeting, member);
            }
        });
        match spawned {
            Ok(progress) => Ok(Self { hub, rank, sequences: HashMap::new(), progress: Some(progress), ended }),
            Err(error) => {
                hub.leave(rank);
                Err(Error::comm(format!("rank {rank}: cannot start its communication thread: {error}")))
            }
        }
    }
}

impl Transport for ThreadsTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.hub.seats.len()
    }

    fn issue(&mut self, request: Request) -> Result<Ticket> {
        if let Some(reason) = self.hub.failure() {
            return Err(Error::comm(reason));
        }
        let Request { group, label, mut collective } = request;
        let name = collective.name();
        let refuse = |found: String| {
            Error::comm(format!("{name} {label:?} in group {:?}, rank {}: {found}", group.ranks(), self.rank))
        };
        let member = check_group(&group, self.rank, self.hub.seats.len()).map_err(refuse)?;
        let bytes = ring_bytes(&collective, member, group.size());
        let work = Work::of(&mut collective, member, group.size()).map_err(refuse)?;
        let seat = &self.hub.seats[self.rank];
        if group.size() == 1 && work.is_done_alone() && seat.in_flight.load(Ordering::Acquire) == 0 {
            let blobs = if let Work::Exchange { bytes } = work { vec![bytes] } else { Vec::new() };
            return Ok(Ticket::new(Box::new(Done(blobs))));
        }
        let sequence = {
            let next = self.sequences.entry(group.clone()).or_insert(0);
            let sequence = *next;
            *next += 1;
            sequence
        };
        let (reply, answer) = bounded(1);
        seat.in_flight.fetch_add(1, Ordering::AcqRel);
        let part = Part { name, label: label.clone(), work, bytes, tensors: Mutex::new(Some(collective)), reply };
        let meeting = self.hub.arrive(&group, sequence, member, part);
        Ok(Ticket::new(Box::new(Waiting { hub: Arc::clone(&self.hub), meeting, name, label, answer })))
    }

    fn record(&mut self, trace: &Trace) {
        *self.hub.seats[self.rank].trace.lock() = Some(trace.clone());
    }

    fn bytes(&self) -> CommBytes {
        self.hub.seats[self.rank].bytes()
    }

    fn abort(&self, reason: &str) {
        self.hub.fail(format!("rank {} failed: {reason}", self.rank));
    }
}

impl Drop for ThreadsTransport {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.hub.fail(format!("rank {} failed: its thread panicked", self.rank));
        }
        self.hub.leave(self.rank);
        // The receiver lives in the hub; the progress thread runs at most the part it is in.
        let _ = self.hub.seats[self.rank].inbox.send(Message::Stop);
        let finished = self.ended.recv_timeout(self.hub.timeout);
        if let (Some(progress), Err(RecvTimeoutError::Disconnected)) = (self.progress.take(), finished) {
            let _ = progress.join();
        }
    }
}

/// The rank's index in the group, which names every rank once.
pub(crate) fn check_group(group: &Group, rank: usize, world: usize) -> std::result::Result<usize, String> {
    if let Some(stranger) = group.ranks().iter().find(|other| **other >= world) {
        return Err(format!("the group names rank {stranger}, but the world has {world} ranks"));
    }
    let twice = group.ranks().iter().enumerate().find(|(at, other)| group.index(**other) != Some(*at));
    if let Some((_, other)) = twice {
        return Err(format!("the group names rank {other} twice"));
    }
    group.index(rank).ok_or_else(|| "this rank is not in the group".into())
}

/// A collective that was complete when it was issued.
pub(crate) struct Done(pub(crate) Vec<Vec<u8>>);

impl TicketState for Done {
    fn wait(self: Box<Self>) -> Result<Vec<Vec<u8>>> {
        Ok(self.0)
    }

    fn is_done(&self) -> bool {
        true
    }
}

/// A collective that others take part in.
struct Waiting {
    hub: Arc<Hub>,
    meeting: Arc<Meeting>,
    name: &'static str,
    label: String,
    answer: Receiver<Reply>,
}

impl TicketState for Waiting {
    fn wait(self: Box<Self>) -> Result<Vec<Vec<u8>>> {
        let mut answer = self.answer.recv_timeout(self.hub.timeout);
        if answer == Err(RecvTimeoutError::Timeout) {
            // Nobody's collectives fit together any more, so that everybody ends with this message.
            if let Some(reason) = self.overdue() {
                self.hub.fail(reason);
            }
            // Now the answer comes as soon as no part of the collective is running.
            answer = self.answer.recv_timeout(self.hub.timeout);
        }
        match answer {
            Ok(reply) => reply.map_err(Error::Comm),
            Err(_) => Err(Error::comm(format!(
                "{}: a rank is stuck in the middle of it",
                self.meeting.title(self.name, &self.label)
            ))),
        }
    }

    fn is_done(&self) -> bool {
        !self.answer.is_empty()
    }
}

impl Waiting {
    /// Who is missing: `reduce_scatter #17 "..." in group [0, 1, 2]: rank 2 did not arrive within 60 s (...)`. Nobody,
    /// if it has just come to its end.
    fn overdue(&self) -> Option<String> {
        let title = self.meeting.title(self.name, &self.label);
        let time = seconds(self.hub.timeout);
        let ranks = |members: &[usize]| -> Vec<usize> {
            members.iter().map(|member| self.meeting.group.ranks()[*member]).collect()
        };
        let (here, missing) = self.meeting.attendance()?;
        let (here, missing) = (ranks(&here), ranks(&missing));
        if missing.is_empty() {
            return Some(format!("{title}: all ranks arrived, but it did not complete within {time}"));
        }
        let plural = if missing.len() == 1 { "rank" } else { "ranks" };
        let last: Vec<_> = missing.iter().map(|rank| self.hub.last_issued(*rank, &self.meeting.group)).collect();
        Some(format!(
            "{title}: {plural} {} did not arrive within {time} (arrived: {}; {})",
            list(&missing),
            list(&here),
            last.join(", ")
        ))
    }
}

pub(crate) fn list(ranks: &[usize]) -> String {
    ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

pub(crate) fn seconds(time: Duration) -> String {
    if time.subsec_nanos() == 0 { format!("{} s", time.as_secs()) } else { duration::format(time) }
}
