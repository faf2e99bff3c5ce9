//! What the threads of one rank share: its lines to the groups, its book, and why it ended.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crossbeam_channel::{Sender, bounded};
use parking_lot::Mutex;
use zf_core::stage::{CommBytes, Group};
use zf_core::trace::Trace;
use zf_sys::c10d::{Device, Store};

use super::book::Book;
use super::control::{Ask, Sight, TICK};
use super::line::Line;

/// How long the control thread may take for what needs no wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

/// Why a rank ended before its work was done.
#[derive(Debug, Clone)]
pub(crate) enum Failure {
    /// The whole message, the same on all ranks.
    Reason(String),
    /// The store of the run cannot be reached any more, so that nobody can tell this rank why.
    Store(String),
    /// This rank itself has left.
    Left(usize),
}

impl Failure {
    /// The message of a collective that it ended.
    pub(crate) fn of(&self, title: &str) -> String {
        match self {
            Self::Reason(reason) => reason.clone(),
            Self::Store(text) => format!("{title}: {text}"),
            Self::Left(rank) => format!("{title}: rank {rank} left"),
        }
    }
}

pub(crate) struct Shared {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    pub(crate) timeout: Duration,
    /// Who hosts the store, for messages.
    pub(crate) store_host: String,
    pub(crate) device: Device,
    pub(crate) book: Mutex<Book>,
    /// Ranks that left in peace.
    pub(crate) left: Mutex<BTreeSet<usize>>,
    /// How many ranks need the store no more.
    pub(crate) done: AtomicUsize,
    pub(crate) trace: Mutex<Option<Trace>>,
    pub(crate) control: Sender<Ask>,
    lines: Mutex<HashMap<Group, Arc<Line>>>,
    failure: OnceLock<Failure>,
    bytes: [AtomicU64; 6],
}

impl Shared {
    pub(crate) fn new(
        (rank, world): (usize, usize),
        timeout: Duration,
        store_host: String,
        device: Device,
        control: Sender<Ask>,
    ) -> Self {
        Self {
            rank,
            world,
            timeout,
            store_host,
            device,
            book: Mutex::default(),
            left: Mutex::default(),
            done: AtomicUsize::new(0),
            trace: Mutex::default(),
            control,
            lines: Mutex::default(),
            failure: OnceLock::new(),
            bytes: Default::default(),
        }
    }

    pub(crate) fn failure(&self) -> Option<&Failure> {
        self.failure.get()
    }

    /// Ends all collectives of this rank, now and later. The first reason stays.
    pub(crate) fn end(&self, failure: Failure) {
        self.failure.get_or_init(|| failure);
        for line in self.lines() {
            line.flow.stop();
        }
    }

    /// Ends all collectives of all ranks with a reason, unless another rank was first.
    pub(crate) fn fail(&self, reason: String) {
        if self.failure().is_none() {
            let (reply, answer) = bounded(1);
            let asked = self.control.send(Ask::Fail(reason.clone(), reply));
            let first = asked.ok().and_then(|()| answer.recv_timeout(PATIENCE).ok());
            self.end(Failure::Reason(first.unwrap_or(reason)));
        }
    }

    /// What is known of these members of a group; `None` if the store does not answer.
    pub(crate) fn look(&self, group: &Group, ranks: Vec<usize>, for_life: bool) -> Option<Vec<Sight>> {
        let (reply, answer) = bounded(1);
        self.control.send(Ask::Look { ranks, for_life, reply }).ok()?;
        let mut sights = answer.recv_timeout(PATIENCE + TICK * 5).ok()?;
        // What completed here was issued by all, also by one that stopped before it could publish it.
        if let Some((sequence, label)) = &*self.line(group).completed.lock() {
            for book in sights.iter_mut().filter_map(|sight| sight.book.as_mut()) {
                if book.count(group) <= *sequence {
                    book.enter(group, *sequence, label);
                }
            }
        }
        Some(sights)
    }

    /// A connection to the store for a thread of its own.
    pub(crate) fn store(&self) -> Option<Store> {
        let (reply, answer) = bounded(1);
        self.control.send(Ask::Store(reply)).ok()?;
        answer.recv_timeout(self.timeout).ok()
    }

    pub(crate) fn lines(&self) -> Vec<Arc<Line>> {
        self.lines.lock().values().map(Arc::clone).collect()
    }

    /// The line of a group.
    pub(crate) fn line(&self, group: &Group) -> Arc<Line> {
        let line = || Arc::new(Line::new(group.clone()));
        Arc::clone(self.lines.lock().entry(group.clone()).or_insert_with(line))
    }

    /// Lets go of all lines, whose threads end when they have answered what they hold.
    pub(crate) fn take_lines(&self) -> Vec<Arc<Line>> {
        self.lines.lock().drain().map(|(_, line)| line).collect()
    }

    /// Counts a collective by its name.
    pub(crate) fn count(&self, name: &str, bytes: u64) {
        let names = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "exchange"];
        if let Some(at) = names.iter().position(|other| *other == name) {
            self.bytes[at].fetch_add(bytes, Ordering::Relaxed);
        }
    }

    pub(crate) fn bytes(&self) -> CommBytes {
        let [all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, control] =
            self.bytes.each_ref().map(|bytes| bytes.load(Ordering::Relaxed));
        CommBytes { all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, control }
    }
}
