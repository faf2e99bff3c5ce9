//! What the hooks of a rank reach: its buffers, its transport, and what is in flight.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::Tensor;

use super::buckets::{self, Bucket};
use super::flat::{FlatState, local_offset, narrow};
use super::host::Host;
use super::offload::Offloading;
use super::party::Party;
use super::reduce::Reducing;
use super::residency::Residency;
use crate::layout::Layout;
use crate::stage::{Collective, Group, Request, Ticket, Transfers, Transport};
use crate::trace::Trace;
use crate::{Error, Result};

/// The per-rank lock. Hooks take it during backward, when the rank's thread does not hold it.
pub(crate) type Shared = Arc<Mutex<Core>>;

/// Takes the lock; a panic of an earlier holder has already ended the step with an error.
pub(crate) fn lock(shared: &Shared) -> MutexGuard<'_, Core> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// State of one rank that hooks, forward and update share. Its methods are where they belong: summing gradients in
/// [`super::reduce`], bringing parameters to where they are used in [`super::residency`].
pub(crate) struct Core {
    pub(crate) layout: Layout,
    pub(crate) transport: Box<dyn Transport>,
    pub(crate) flats: Vec<FlatState>,
    pub(crate) trace: Trace,
    pub(crate) reducing: Reducing,
    pub(crate) residency: Residency,
    pub(crate) transfers: Transfers,
    /// From where parameters are fetched, where they lie in host memory.
    pub(crate) host: Option<Host>,
    /// What is kept off the device; taken out while it works with the rest.
    pub(crate) offload: Option<Offloading>,
}

impl Core {
    pub(crate) fn new(
        layout: Layout,
        transport: Box<dyn Transport>,
        flats: Vec<FlatState>,
        reducing: Reducing,
        transfers: Transfers,
        host: Option<Host>,
        trace: Trace,
    ) -> Result<Self> {
        let residency = Residency::new(&layout, transport.rank(), &transfers, host.is_some())?;
        Ok(Self { layout, transport, flats, trace, reducing, residency, transfers, host, offload: None })
    }

    /// Has the offload, if there is one, do something with the rest of the core.
    pub(crate) fn with_offload<T>(
        &mut self,
        f: impl FnOnce(&mut Offloading, &mut Self) -> Result<T>,
    ) -> Result<Option<T>> {
        let Some(mut offload) = self.offload.take() else { return Ok(None) };
        let result = f(&mut offload, self);
        self.offload = Some(offload);
        result.map(Some)
    }

    /// The device of the parameters.
    pub(crate) fn device(&self) -> tch::Device {
        self.flats.first().map_or(tch::Device::Cpu, |flat| flat.device())
    }

    /// Starts a collective for flat number `index`.
    pub(crate) fn issue(&mut self, group: &Group, index: usize, what: &str, collective: Collective) -> Result<Ticket> {
        let unit = &self.layout.units[self.flats[index].spec.unit].name;
        self.transport.issue(Request { group: group.clone(), label: format!("{unit} {what}"), collective })
    }

    /// Starts to send each member's pieces to all members of `party`, in buckets: from `source`, which holds the ranges
    /// `have` one after the other, into `target`, which holds the ranges `hold`.
    pub(crate) fn all_gather(
        &mut self,
        party: &Party,
        index: usize,
        what: &str,
        (source, have): (&Tensor, &[Range<usize>]),
        (target, hold): (&Tensor, &[Range<usize>]),
    ) -> Result<Vec<Ticket>> {
        let member = self.member(&party.group)?;
        let mut tickets = Vec::new();
        for bucket in self.buckets(party, target) {
            let outputs = pieces(target, hold, &bucket)?;
            let input = piece(source, have, &bucket[member])?;
            tickets.push(self.issue(&party.group, index, what, Collective::AllGather { input, outputs })?);
        }
        Ok(tickets)
    }

    /// The buckets in which the elements of `buffer` travel in `party`.
    pub(crate) fn buckets(&self, party: &Party, buffer: &Tensor) -> Vec<Bucket> {
        let elements = self.transfers.bucket_bytes / buffer.kind().elt_size_in_bytes().max(1);
        buckets::sharded(&party.pieces, elements)
    }

    /// This rank's index in a group.
    pub(crate) fn member(&self, group: &Group) -> Result<usize> {
        let rank = self.transport.rank();
        group.index(rank).ok_or_else(|| Error::Engine(format!("rank {rank} is not in the group {:?}", group.ranks())))
    }

    /// Waits for collectives in flight; a wait that is not over at once is a span with its reason.
    pub(crate) fn wait(&self, tickets: Vec<Ticket>, reason: impl Fn() -> String) -> Result<()> {
        for ticket in tickets {
            let _wait = (!ticket.is_done()).then(|| self.trace.wait("wait", reason()));
            ticket.wait()?;
        }
        Ok(())
    }
}

/// Elements `range` of `buffer`, which holds the ranges `hold` one after the other.
pub(crate) fn piece(buffer: &Tensor, hold: &[Range<usize>], range: &Range<usize>) -> Result<Tensor> {
    let start = local_offset(hold, range)?;
    narrow(buffer, start..start + range.len())
}

/// The pieces that a bucket names.
pub(crate) fn pieces(buffer: &Tensor, hold: &[Range<usize>], bucket: &Bucket) -> Result<Vec<Tensor>> {
    bucket.iter().map(|range| piece(buffer, hold, range)).collect()
}
