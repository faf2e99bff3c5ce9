//! A transport that keeps a list of what was issued.

use std::sync::Arc;

use parking_lot::Mutex;
use zf_core::Result;
use zf_core::stage::{Group, Request, Ticket, Transport};

use crate::counting::ring_bytes;

/// A collective that was issued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The rank that issued it.
    pub rank: usize,
    /// `all_reduce`, `reduce_scatter`, ...
    pub kind: &'static str,
    /// What for.
    pub label: String,
    /// With whom.
    pub group: Group,
    /// What [`CommBytes`](zf_core::stage::CommBytes) counts for it on this rank.
    pub bytes: u64,
}

/// The list that [`Counted`] transports write, in the order of issue. Clones are handles of the same list, which may
/// serve several ranks.
#[derive(Debug, Clone, Default)]
pub struct Log(Arc<Mutex<Vec<Record>>>);

impl Log {
    /// What was issued so far.
    pub fn records(&self) -> Vec<Record> {
        self.0.lock().clone()
    }

    /// What was issued so far, leaving an empty list.
    pub fn take(&self) -> Vec<Record> {
        std::mem::take(&mut *self.0.lock())
    }
}

/// Records every collective that the transport within accepted.
pub struct Counted {
    inner: Box<dyn Transport>,
    log: Log,
}

impl Counted {
    /// Records what `inner` is asked for in `log`.
    pub fn new(inner: Box<dyn Transport>, log: Log) -> Self {
        Self { inner, log }
    }
}

impl Transport for Counted {
    pass_on!();

    fn issue(&mut self, request: Request) -> Result<Ticket> {
        let (rank, group) = (self.rank(), request.group.clone());
        let bytes = group.index(rank).map_or(0, |member| ring_bytes(&request.collective, member, group.size()));
        let kind = request.collective.name();
        let label = request.label.clone();
        let ticket = self.inner.issue(request)?;
        self.log.0.lock().push(Record { rank, kind, label, group, bytes });
        Ok(ticket)
    }
}
