//! What a step moves: by collective as [`CommBytes`] counts a ring, and by tier.

use serde::Serialize;

use super::parts::{Parts, share};
use super::{PlanOptions, RankPlan, Summation, bytes};
use crate::layout::{Flat, Layout};
use crate::stage::{CommBytes, Reshard};

/// Bytes that one rank sends in a step. In a ring a rank sends everything to its successor, so a collective counts for
/// the tier of the way to that rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// To a rank of the same machine.
    pub inside_node: CommBytes,
    /// To a rank of another machine.
    pub between_nodes: CommBytes,
}

impl Traffic {
    /// Both tiers, as a transport counts.
    pub fn total(&self) -> CommBytes {
        let mut total = self.inside_node;
        add(&mut total, &self.between_nodes, 1);
        total
    }

    pub(super) fn add(&mut self, other: &Self) {
        add(&mut self.inside_node, &other.inside_node, 1);
        add(&mut self.between_nodes, &other.between_nodes, 1);
    }
}

/// Adds `times` times `more`.
pub(crate) fn add(to: &mut CommBytes, more: &CommBytes, times: u64) {
    to.all_reduce += times * more.all_reduce;
    to.reduce_scatter += times * more.reduce_scatter;
    to.all_gather += times * more.all_gather;
    to.all_to_all += times * more.all_to_all;
    to.broadcast += times * more.broadcast;
    to.control += times * more.control;
}

/// All collectives.
pub(super) fn sum(bytes: &CommBytes) -> u64 {
    let CommBytes { all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, control } = *bytes;
    all_reduce + reduce_scatter + all_gather + all_to_all + broadcast + control
}

#[derive(Clone, Copy)]
enum Kind {
    AllReduce,
    ReduceScatter,
    AllGather,
}

/// `size` ranks from `first` on, each `stride` after the one before.
type Ring = [usize; 3];

/// The movements of one flat buffer.
pub(super) struct Movements<'a> {
    flat: &'a Flat,
    parts: &'a Parts,
    options: &'a PlanOptions,
    summation: Summation,
    root: bool,
    /// Whether its unit's backward runs: something up to it is trained.
    returns: bool,
    world: usize,
    node: usize,
}

impl<'a> Movements<'a> {
    pub(super) fn new(
        layout: &Layout,
        flat: &'a Flat,
        parts: &'a Parts,
        options: &'a PlanOptions,
        summation: Summation,
    ) -> Self {
        let root = layout.units[flat.unit].root;
        let returns = layout.flats.iter().any(|other| other.trainable && other.unit <= flat.unit);
        let (world, node) = (layout.mesh.world(), layout.mesh.node());
        Self { flat, parts, options, summation, root, returns, world, node }
    }

    /// Books all of a step for one rank.
    pub(super) fn book(&self, rank: &mut RankPlan) {
        if self.options.fetches() {
            self.fetch(rank);
        }
        self.gather(rank);
        if self.flat.trainable {
            self.reduce(rank);
            self.publish(rank);
        }
    }

    /// What the rank keeps of parameters, from the host before each pass, as [`Movements::gather`] from the other ranks.
    fn fetch(&self, rank: &mut RankPlan) {
        let (flat, group) = (self.flat, self.parts.params.group);
        let once = bytes(self.parts.of(rank.rank).params, flat.dtype.size());
        let copied = match self.options.transfers.reshard {
            Reshard::Keep => true,
            Reshard::Group(keepers) => group > 1 && keepers > 0 && keepers != group,
            Reshard::Shard => false,
        };
        let passes = if self.root || !self.returns || copied { 1 } else { 2 };
        rank.link.fetched += passes * self.options.micro_batches as u64 * once;
        rank.link.fetched_to_validate += once;
    }

    /// Parameters for use: for forward and again for backward, root units once. Units run one after the other, so that
    /// one without anything trained up to it has no backward.
    fn gather(&self, rank: &mut RankPlan) {
        let (flat, group) = (self.flat, self.parts.params.group);
        if group == 1 {
            return;
        }
        let (size, times) = (flat.dtype.size(), self.options.micro_batches as u64);
        let once = bytes(flat.numel - self.parts.params.sum(rank.rank), size);
        let ring = [base(rank.rank, group), 1, group];
        rank.validation.all_gather += once;
        self.send(rank, Kind::AllGather, ring, times * once);
        if self.root || !self.returns {
            return;
        }
        match self.options.transfers.reshard {
            Reshard::Keep => {}
            Reshard::Group(keepers) if keepers > 0 && keepers != group => {
                let again = bytes(flat.numel - share(flat.numel, rank.rank % keepers, keepers), size);
                self.send(rank, Kind::AllGather, [base(rank.rank, keepers), 1, keepers], times * again);
            }
            Reshard::Shard | Reshard::Group(_) => self.send(rank, Kind::AllGather, ring, times * once),
        }
    }

    /// Gradients to the owners of the optimizer states.
    fn reduce(&self, rank: &mut RankPlan) {
        let (numel, at) = (self.flat.numel, rank.rank);
        let own = self.parts.of(at);
        let (g, o) = (self.parts.grads.group, self.parts.optim.group);
        let (travelling, held) = (self.flat.dtype.size(), self.options.accumulated(self.flat));
        let times = self.options.micro_batches as u64;
        match self.summation {
            Summation::Loose => {}
            Summation::Boundary => {
                self.send(rank, Kind::ReduceScatter, [base(at, o), 1, o], bytes(numel - own.optim, held));
                self.reduce_replicas(rank, held);
            }
            Summation::MicroBatch => {
                let each = bytes(numel - own.grads, travelling);
                self.send(rank, Kind::ReduceScatter, [base(at, g), 1, g], times * each);
                let sharers = [base(at, o) + at % g, g, o / g];
                self.send(rank, Kind::ReduceScatter, sharers, bytes(own.grads - own.optim, held));
                self.reduce_replicas(rank, held);
            }
            Summation::InOrder => {
                let replicas = self.world / o;
                let ranges = self.parts.optim.ranges(at);
                let part: usize = ranges.iter().map(|&len| share(len, at / o, replicas)).sum();
                self.send(rank, Kind::ReduceScatter, [0, 1, self.world], times * bytes(numel - part, travelling));
                let gathered = bytes(own.optim - part, held);
                self.send(rank, Kind::AllGather, [at % o, o, replicas], gathered);
            }
        }
    }

    /// The own part of O, summed over its replicas bucket by bucket.
    fn reduce_replicas(&self, rank: &mut RankPlan, held: usize) {
        let o = self.parts.optim.group;
        let replicas = self.world / o;
        let bucket = (self.options.transfers.bucket_bytes / held).max(1);
        let sent = |len: usize| len - share(len, rank.rank / o, replicas);
        let ranges = self.parts.optim.ranges(rank.rank);
        let elements: usize = ranges.iter().map(|len| len / bucket * sent(bucket) + sent(len % bucket)).sum();
        self.send(rank, Kind::AllReduce, [rank.rank % o, o, replicas], 2 * bytes(elements, held));
    }

    /// Updated parameters to all ranks of an o-group that keep them.
    fn publish(&self, rank: &mut RankPlan) {
        let (p, o) = (self.parts.params.group, self.parts.optim.group);
        let published = self.published(rank.rank);
        self.send(rank, Kind::AllGather, [base(rank.rank, o) + rank.rank % p, p, o / p], published);
        rank.of_update.all_gather += published;
    }

    /// Bytes of this buffer's updated parameters that a rank sends on.
    pub(super) fn published(&self, rank: usize) -> u64 {
        let own = self.parts.of(rank);
        let published = if self.flat.trainable { own.params - own.optim } else { 0 };
        bytes(published, self.flat.dtype.size())
    }

    /// Books `bytes` for the way to the next rank of the ring.
    fn send(&self, rank: &mut RankPlan, kind: Kind, [first, stride, size]: Ring, bytes: u64) {
        let member = (rank.rank - first) / stride;
        let next = first + (member + 1) % size * stride;
        let near = next / self.node == rank.rank / self.node;
        let tier = if near { &mut rank.traffic.inside_node } else { &mut rank.traffic.between_nodes };
        match kind {
            Kind::AllReduce => tier.all_reduce += bytes,
            Kind::ReduceScatter => tier.reduce_scatter += bytes,
            Kind::AllGather => tier.all_gather += bytes,
        }
    }
}

/// The first rank of the group of consecutive ranks that `rank` is in.
fn base(rank: usize, group: usize) -> usize {
    rank / group * group
}
