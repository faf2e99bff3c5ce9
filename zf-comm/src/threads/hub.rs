//! What all ranks of one process share: the mailbox where they meet, a seat for each, and the first failure.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};
use dashmap::DashMap;
use parking_lot::Mutex;
use zf_core::stage::{CommBytes, Group};
use zf_core::trace::{Lane, Trace};

use super::meeting::{Meeting, Next, Part};
use super::parts;
use crate::work::Work;

/// Collectives that touch fewer bytes in all are run at once by the rank that came last: waking the others' threads
/// would take longer.
const SMALL: usize = 64 * 1024;

/// What a progress thread is told.
pub(crate) enum Message {
    /// Run this rank's part.
    Run(Arc<Meeting>, usize),
    Stop,
}

/// A rank's place in the process.
pub(crate) struct Seat {
    pub(crate) inbox: Sender<Message>,
    pub(crate) outbox: Receiver<Message>,
    presence: Mutex<Presence>,
    bytes: [AtomicU64; 6],
    /// Issued and not yet over.
    pub(crate) in_flight: AtomicUsize,
    /// Where this rank's collectives are recorded, if anywhere.
    pub(crate) trace: Mutex<Option<Trace>>,
}

struct Presence {
    connection: Connection,
    last: Option<Last>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Connection {
    Never,
    Here,
    Left,
}

/// The last collective that a rank issued.
struct Last {
    group: Group,
    sequence: u64,
    label: String,
}

pub(crate) struct Hub {
    pub(crate) timeout: Duration,
    pub(crate) seats: Vec<Seat>,
    mailbox: DashMap<(Group, u64), Arc<Meeting>>,
    failure: OnceLock<String>,
}

impl Hub {
    pub(crate) fn new(ranks: usize, timeout: Duration) -> Self {
        Self {
            timeout,
            seats: (0..ranks).map(|_| Seat::new()).collect(),
            mailbox: DashMap::new(),
            failure: OnceLock::new(),
        }
    }

    /// Why the whole run failed, if it has.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Takes a rank's seat.
    pub(crate) fn sit(&self, rank: usize) -> Result<(), String> {
        let Some(seat) = self.seats.get(rank) else {
            return Err(format!("rank {rank} does not exist: the world has {} ranks", self.seats.len()));
        };
        let mut presence = seat.presence.lock();
        match presence.connection {
            Connection::Never => presence.connection = Connection::Here,
            Connection::Here => return Err(format!("rank {rank} is connected already")),
            Connection::Left => return Err(format!("rank {rank} has left; a new fabric is needed to connect again")),
        }
        Ok(())
    }

    /// Brings a part to the meeting `sequence` of `group`.
    pub(crate) fn arrive(&self, group: &Group, sequence: u64, member: usize, part: Part) -> Arc<Meeting> {
        let rank = group.ranks()[member];
        self.seats[rank].presence.lock().last =
            Some(Last { group: group.clone(), sequence, label: part.label.clone() });
        let title = (part.name, part.label.clone());
        let meeting = self.meeting(group, sequence);
        let next = meeting.arrive(member, part);
        self.proceed(&meeting, next);
        // Whoever failed or left has looked through the mailbox either before this meeting was there, and is seen
        // here, or after, and has seen it.
        if let Some(reason) = self.failure() {
            self.fail_meeting(&meeting, reason.to_owned());
        } else if let Some(gone) = self.gone(&meeting) {
            self.fail_meeting(&meeting, format!("{}: rank {gone} left", meeting.title(title.0, &title.1)));
        }
        meeting
    }

    /// Ends all meetings, now and later, with `reason`. The first reason stays.
    pub(crate) fn fail(&self, reason: String) {
        let reason = self.failure.get_or_init(|| reason);
        for meeting in self.meetings() {
            self.fail_meeting(&meeting, reason.clone());
        }
    }

    /// Frees a rank's seat: what others still want from it fails.
    pub(crate) fn leave(&self, rank: usize) {
        self.seats[rank].presence.lock().connection = Connection::Left;
        for meeting in self.meetings() {
            if meeting.group.index(rank).is_some() {
                // Where nobody is yet, the first to come will see that this rank is gone.
                if let Some(subject) = meeting.subject() {
                    self.fail_meeting(&meeting, format!("{subject}: rank {rank} left"));
                }
            }
        }
    }

    /// Runs one member's part and whatever follows from it.
    pub(crate) fn run(&self, meeting: &Arc<Meeting>, member: usize) {
        if let Some(next) = self.run_part(meeting, member) {
            self.proceed(meeting, next);
        }
    }

    /// Runs one member's part, unless the meeting failed.
    fn run_part(&self, meeting: &Arc<Meeting>, member: usize) -> Option<Next> {
        if !meeting.begin() {
            return None;
        }
        let rank = meeting.group.ranks()[member];
        let trace = self.seats[rank].trace.lock().clone();
        let part = &meeting.parts()[member];
        let _span = trace.as_ref().map(|trace| trace.span(Lane::Comm, format!("{} {}", part.name, part.label)));
        // The bytes are moved and counted here.
        let moved = catch_unwind(AssertUnwindSafe(|| {
            parts::run(meeting.parts(), member);
            self.seats[rank].count(&meeting.parts()[member]);
        }));
        if moved.is_err() {
            self.fail(format!("rank {rank} failed: a panic while it exchanged tensors"));
        }
        Some(meeting.end())
    }

    /// `rank 2 last issued #15 "..."`, for the message of a rank that is missed.
    pub(crate) fn last_issued(&self, rank: usize, group: &Group) -> String {
        let presence = self.seats[rank].presence.lock();
        match (&presence.last, presence.connection) {
            (_, Connection::Never) => format!("rank {rank} never connected"),
            (_, Connection::Left) => format!("rank {rank} left"),
            (None, _) => format!("rank {rank} has issued nothing"),
            (Some(last), _) if last.group == *group => {
                format!("rank {rank} last issued #{} {:?}", last.sequence, last.label)
            }
            (Some(last), _) => {
                format!("rank {rank} last issued #{} {:?} in group {:?}", last.sequence, last.label, last.group.ranks())
            }
        }
    }

    fn fail_meeting(&self, meeting: &Arc<Meeting>, reason: String) {
        let next = meeting.fail(reason);
        self.proceed(meeting, next);
    }

    /// Does what an event in a meeting asks for. A loop and not a recursion: a settled meeting may start the next one.
    fn proceed(&self, meeting: &Arc<Meeting>, next: Next) {
        let mut current = Arc::clone(meeting);
        let mut next = next;
        loop {
            next = match next {
                Next::Nothing => return,
                Next::Settled => {
                    for rank in current.group.ranks() {
                        self.seats[*rank].in_flight.fetch_sub(1, Ordering::AcqRel);
                    }
                    self.mailbox.remove(&(current.group.clone(), current.sequence));
                    current = self.meeting(&current.group, current.sequence + 1);
                    current.predecessor_settled()
                }
                Next::Start => self.start(&current),
            };
        }
    }

    fn start(&self, meeting: &Arc<Meeting>) -> Next {
        let parts = meeting.parts();
        if let Some(Work::Exchange { .. }) = parts.first().map(|part| &part.work) {
            for (member, rank) in meeting.group.ranks().iter().enumerate() {
                self.seats[*rank].count(&parts[member]);
            }
            return meeting.exchange();
        }
        if parts.iter().map(|part| part.work.bytes()).sum::<usize>() < SMALL {
            // When it fails in between, the event that ended it has been passed on or is the last one here.
            return (0..parts.len()).map_while(|member| self.run_part(meeting, member)).last().unwrap_or(Next::Nothing);
        }
        for (member, rank) in meeting.group.ranks().iter().enumerate() {
            // The receiver lives as long as the hub.
            let _ = self.seats[*rank].inbox.send(Message::Run(Arc::clone(meeting), member));
        }
        Next::Nothing
    }

    fn meeting(&self, group: &Group, sequence: u64) -> Arc<Meeting> {
        let key = (group.clone(), sequence);
        Arc::clone(&self.mailbox.entry(key).or_insert_with(|| Arc::new(Meeting::new(group.clone(), sequence))))
    }

    fn meetings(&self) -> Vec<Arc<Meeting>> {
        let mut meetings: Vec<_> = self.mailbox.iter().map(|entry| Arc::clone(entry.value())).collect();
        meetings.sort_by(|a, b| (a.sequence, a.group.ranks()).cmp(&(b.sequence, b.group.ranks())));
        meetings
    }

    /// A member that left without coming to the meeting.
    fn gone(&self, meeting: &Meeting) -> Option<usize> {
        let (_, missing) = meeting.attendance()?;
        let ranks = missing.into_iter().map(|member| meeting.group.ranks()[member]);
        ranks.into_iter().find(|rank| self.seats[*rank].presence.lock().connection == Connection::Left)
    }
}

impl Seat {
    fn new() -> Self {
        let (inbox, outbox) = unbounded();
        Self {
            inbox,
            outbox,
            presence: Mutex::new(Presence { connection: Connection::Never, last: None }),
            bytes: Default::default(),
            in_flight: AtomicUsize::new(0),
            trace: Mutex::new(None),
        }
    }

    fn count(&self, part: &Part) {
        let at = match part.work {
            Work::AllReduce { .. } => 0,
            Work::ReduceScatter { .. } => 1,
            Work::AllGather { .. } => 2,
            Work::AllToAll { .. } => 3,
            Work::Broadcast { .. } => 4,
            Work::Exchange { .. } => 5,
        };
        self.bytes[at].fetch_add(part.bytes, Ordering::Relaxed);
    }

    /// Counted so far.
    pub(crate) fn bytes(&self) -> CommBytes {
        let [all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, control] =
            self.bytes.each_ref().map(|bytes| bytes.load(Ordering::Relaxed));
        CommBytes { all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, control }
    }
}
