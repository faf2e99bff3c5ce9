//! One collective, from the first rank that brings its tensors to the last one that has done its part.
//!
//! Nobody waits inside a meeting: arrivals, finished parts and failures are events, and each returns what its caller has
//! to do next, after the lock is released. A failed meeting is settled only when no part is running any more, so that
//! nobody's memory is touched after its wait has ended.

use std::sync::OnceLock;

use crossbeam_channel::Sender;
use parking_lot::Mutex;
use zf_core::stage::{Collective, Group};

use crate::work::Work;

/// How a collective ended for one rank: the bytes of all members for an exchange, or why it failed.
pub(crate) type Reply = Result<Vec<Vec<u8>>, String>;

/// What one member brings.
pub(crate) struct Part {
    pub(crate) name: &'static str,
    pub(crate) label: String,
    pub(crate) work: Work,
    /// What it counts for, see `CommBytes`.
    pub(crate) bytes: u64,
    /// Keeps the tensors alive that `work` points into, until the meeting is settled.
    pub(crate) tensors: Mutex<Option<Collective>>,
    pub(crate) reply: Sender<Reply>,
}

/// What the caller of an event has to do.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Next {
    Nothing,
    /// All are here and the one before is over: have every member's part run.
    Start,
    /// It is over and all tickets are answered: forget it and tell the next one.
    Settled,
}

pub(crate) struct Meeting {
    pub(crate) group: Group,
    /// Number in its group.
    pub(crate) sequence: u64,
    parts: OnceLock<Vec<Part>>,
    state: Mutex<State>,
}

struct State {
    /// By member, until the start.
    arrived: Vec<Option<Part>>,
    /// By member: kept after the start, for messages.
    present: Vec<bool>,
    first: bool,
    running: usize,
    finished: usize,
    failed: Option<String>,
    settled: bool,
}

impl Meeting {
    pub(crate) fn new(group: Group, sequence: u64) -> Self {
        let size = group.size();
        Self {
            group,
            sequence,
            parts: OnceLock::new(),
            state: Mutex::new(State {
                arrived: (0..size).map(|_| None).collect(),
                present: vec![false; size],
                // Nothing comes before the first one.
                first: sequence == 0,
                running: 0,
                finished: 0,
                failed: None,
                settled: false,
            }),
        }
    }

    /// Member `member` is here.
    pub(crate) fn arrive(&self, member: usize, part: Part) -> Next {
        let mut state = self.state.lock();
        state.present[member] = true;
        if let Some(reason) = &state.failed {
            part.answer(Err(reason.clone()));
            return self.settle_failed(&mut state);
        }
        let conflict = state
            .arrived
            .iter()
            .enumerate()
            .find_map(|(other, arrived)| self.conflict(other, arrived.as_ref()?, member, &part));
        state.arrived[member] = Some(part);
        if let Some(reason) = conflict {
            return self.fail_locked(&mut state, reason);
        }
        self.start_if_ready(&mut state)
    }

    /// The one before in this group is over.
    pub(crate) fn predecessor_settled(&self) -> Next {
        let mut state = self.state.lock();
        state.first = true;
        if state.failed.is_some() { self.settle_failed(&mut state) } else { self.start_if_ready(&mut state) }
    }

    /// Announces that a member's part begins to run; false if it must not, because the meeting failed.
    pub(crate) fn begin(&self) -> bool {
        let mut state = self.state.lock();
        if state.failed.is_none() {
            state.running += 1;
        }
        state.failed.is_none()
    }

    /// A part that began has ended.
    pub(crate) fn end(&self) -> Next {
        let mut state = self.state.lock();
        state.running -= 1;
        state.finished += 1;
        if state.failed.is_some() {
            return self.settle_failed(&mut state);
        }
        if state.finished < self.group.size() {
            return Next::Nothing;
        }
        self.succeed(&mut state)
    }

    /// All parts of an exchange are done by being there.
    pub(crate) fn exchange(&self) -> Next {
        let mut state = self.state.lock();
        if state.failed.is_some() { Next::Nothing } else { self.succeed(&mut state) }
    }

    /// Ends the meeting with an error for all, unless it is over already.
    pub(crate) fn fail(&self, reason: String) -> Next {
        let mut state = self.state.lock();
        self.fail_locked(&mut state, reason)
    }

    /// What the members brought, once all are here.
    pub(crate) fn parts(&self) -> &[Part] {
        self.parts.get().map_or(&[], Vec::as_slice)
    }

    /// Members that are here and members that are not; `None` once it is over.
    pub(crate) fn attendance(&self) -> Option<(Vec<usize>, Vec<usize>)> {
        let state = self.state.lock();
        if state.settled {
            return None;
        }
        Some((0..self.group.size()).partition(|member| state.present[*member]))
    }

    /// The title, if anybody is here who knows what it is about.
    pub(crate) fn subject(&self) -> Option<String> {
        let state = self.state.lock();
        let part = state.arrived.iter().flatten().chain(self.parts()).next()?;
        Some(self.title(part.name, &part.label))
    }

    /// `all_reduce #3 "label" in group [0, 1]`.
    pub(crate) fn title(&self, name: &str, label: &str) -> String {
        format!("{name} #{} {label:?} in group {:?}", self.sequence, self.group.ranks())
    }

    fn conflict(&self, a: usize, ours: &Part, b: usize, theirs: &Part) -> Option<String> {
        // In the order of members, so that every rank reads the same text whoever came first.
        if b < a {
            return self.conflict(b, theirs, a, ours);
        }
        let (rank_a, rank_b) = (self.group.ranks()[a], self.group.ranks()[b]);
        if ours.name != theirs.name || ours.label != theirs.label {
            return Some(format!(
                "#{} in group {:?}: rank {rank_a} issued {} {:?}, but rank {rank_b} issued {} {:?}; all ranks of a \
                 group must issue the same collectives in the same order",
                self.sequence,
                self.group.ranks(),
                ours.name,
                ours.label,
                theirs.name,
                theirs.label
            ));
        }
        let (has, other) = ours.work.agrees(a, &theirs.work, b).err()?;
        let title = self.title(ours.name, &ours.label);
        Some(format!("{title}: rank {rank_a} has {has}, but rank {rank_b} has {other}"))
    }

    fn start_if_ready(&self, state: &mut State) -> Next {
        if !state.first || state.arrived.iter().any(Option::is_none) {
            return Next::Nothing;
        }
        let parts = state.arrived.iter_mut().filter_map(Option::take).collect();
        if self.parts.set(parts).is_ok() { Next::Start } else { Next::Nothing }
    }

    fn succeed(&self, state: &mut State) -> Next {
        state.settled = true;
        self.release();
        let blobs: Vec<Vec<u8>> = self
            .parts()
            .iter()
            .filter_map(|part| match &part.work {
                Work::Exchange { bytes } => Some(bytes.clone()),
                _ => None,
            })
            .collect();
        for part in self.parts() {
            part.answer(Ok(blobs.clone()));
        }
        Next::Settled
    }

    fn fail_locked(&self, state: &mut State, reason: String) -> Next {
        if state.settled || state.failed.is_some() {
            return Next::Nothing;
        }
        state.failed = Some(reason);
        self.settle_failed(state)
    }

    /// Answers those who are here once nothing runs; it is over when everybody came.
    fn settle_failed(&self, state: &mut State) -> Next {
        let Some(reason) = &state.failed else { return Next::Nothing };
        if state.running > 0 || state.settled {
            return Next::Nothing;
        }
        for part in state.arrived.iter_mut().filter_map(Option::take) {
            part.answer(Err(reason.clone()));
        }
        self.release();
        for part in self.parts() {
            part.answer(Err(reason.clone()));
        }
        state.settled = state.first && state.present.iter().all(|present| *present);
        if state.settled { Next::Settled } else { Next::Nothing }
    }

    fn release(&self) {
        for part in self.parts() {
            drop(part.tensors.lock().take());
        }
    }
}

impl Part {
    fn answer(&self, reply: Reply) {
        // A part answered by value lets go of its tensors before the ticket's owner goes on. Nobody listens if the
        // ticket was dropped.
        drop(self.tensors.lock().take());
        let _ = self.reply.try_send(reply);
    }
}
