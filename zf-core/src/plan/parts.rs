//! How many elements of a flat buffer each rank owns.

use super::refuse;
use crate::Result;
use crate::layout::{Flat, Placement};

/// What the ranks own of one flat buffer.
pub(super) struct Parts {
    pub(super) params: Lens,
    pub(super) grads: Lens,
    pub(super) optim: Lens,
}

/// Elements that one rank owns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Own {
    pub(super) params: usize,
    pub(super) grads: usize,
    pub(super) optim: usize,
}

/// The lengths of the ranges that each member of a group owns.
pub(super) struct Lens {
    /// Ranks in a group.
    pub(super) group: usize,
    /// By member, in one row.
    ranges: Vec<usize>,
    /// Where each member's ranges start.
    starts: Vec<usize>,
    /// Their sums, by member.
    sums: Vec<usize>,
}

impl Parts {
    pub(super) fn new(flat: &Flat, world: usize) -> Result<Self> {
        let (p, g, o) = (flat.params.group(), flat.grads.group(), flat.optim.group());
        if p == 0 || !o.is_multiple_of(g) || !g.is_multiple_of(p) || !world.is_multiple_of(o) {
            return refuse(
                flat,
                &format!(
                    "size(o) >= size(g) >= size(p) must hold, each a multiple of the next and o a divisor of the ranks; \
                     found o = {o}, g = {g}, p = {p} on {world} ranks"
                ),
            );
        }
        let parts = Self { params: Lens::of(&flat.params), grads: Lens::of(&flat.grads), optim: Lens::of(&flat.optim) };
        for rank in 0..o {
            let own = parts.of(rank);
            if own.optim > own.grads || own.grads > own.params {
                return refuse(
                    flat,
                    &format!(
                        "rank {rank} owns {} elements of optimizer states, {} of gradients and {} of parameters; what a rank \
                         updates it must also accumulate, and what it accumulates it must also keep",
                        own.optim, own.grads, own.params
                    ),
                );
            }
        }
        Ok(parts)
    }

    pub(super) fn of(&self, rank: usize) -> Own {
        Own { params: self.params.sum(rank), grads: self.grads.sum(rank), optim: self.optim.sum(rank) }
    }
}

impl Lens {
    fn of(placement: &Placement) -> Self {
        let group = placement.group();
        let owners = placement.owners();
        let mut starts = vec![0; group + 1];
        owners.iter().for_each(|owner| starts[owner.member + 1] += 1);
        (0..group).for_each(|member| starts[member + 1] += starts[member]);
        let (mut ranges, mut sums, mut next) = (vec![0; owners.len()], vec![0; group], starts.clone());
        for owner in owners {
            let len = owner.end - owner.start;
            ranges[next[owner.member]] = len;
            next[owner.member] += 1;
            sums[owner.member] += len;
        }
        Self { group, ranges, starts, sums }
    }

    /// Elements that `rank` owns.
    pub(super) fn sum(&self, rank: usize) -> usize {
        self.sums[rank % self.group]
    }

    /// The lengths of the ranges that `rank` owns.
    pub(super) fn ranges(&self, rank: usize) -> &[usize] {
        let member = rank % self.group;
        &self.ranges[self.starts[member]..self.starts[member + 1]]
    }
}

/// Elements of part `member` of `len` elements cut into `parts` parts that differ by at most one.
pub(super) fn share(len: usize, member: usize, parts: usize) -> usize {
    let cut = |at: usize| (len as u128 * at as u128 / parts as u128) as usize;
    cut(member + 1) - cut(member)
}
