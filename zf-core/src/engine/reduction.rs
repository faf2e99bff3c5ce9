//! How the gradients of a flat buffer are summed over ranks: in which hops, and what each rank holds meanwhile.
//!
//! | when | first hop | then, at the boundary | held |
//! |---|---|---|---|
//! | boundary | reduce-scatter over the o-group, by O | all-reduce of the own part over the replicas of O | everything |
//! | micro-batch | reduce-scatter over the g-group, by G | reduce-scatter by O over those who share a part of G; all-reduce over the replicas | the own part of G |
//! | micro-batch, in order | reduce-scatter over the world, by O cut once more for each replica | all-gather over the replicas | the own part of O |
//!
//! The last row adds every micro-batch to one accumulator in the order of ranks, which is what exact mode needs. Without
//! replicas, and where groups have one member, hops fall away: stages 1 to 3 are one reduce-scatter each.

use std::ops::Range;

use super::party::{Party, base, ranges};
use crate::layout::{Flat, Owner, Placement};
use crate::stage::Channel;
use crate::{Error, Result};

/// When gradients are summed over ranks, for all flats alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    /// Once a step; every rank holds full-size gradients until then.
    Boundary,
    /// Each micro-batch, into the accumulators of the owners of G.
    Each,
    /// Each micro-batch, into one accumulator an element, in the order of ranks.
    EachInOrder,
}

/// One collective on the way of a sum.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Hop {
    /// Member m receives the sum of its pieces.
    Scatter(Party),
    /// Every member receives the sum of the pieces that all have.
    Sum(Party),
    /// Every member receives the pieces of all.
    Gather(Party),
}

/// The way of one flat's gradients.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Reduction {
    /// The elements whose accumulator this rank holds, ascending.
    pub(crate) held: Vec<Range<usize>>,
    /// The elements of which this rank has the final sum and answers for it: each element is one rank's.
    pub(crate) summed: Vec<Range<usize>>,
    /// Issued while backward goes on; `None` where a rank is alone.
    pub(crate) first: Option<Hop>,
    /// At the boundary, one after the other.
    pub(crate) then: Vec<Hop>,
}

impl Reduction {
    /// The way of `flat` as seen by `rank` of `world`.
    pub(crate) fn new(flat: &Flat, rank: usize, world: usize, when: When) -> Result<Self> {
        let (g, o) = (&flat.grads, &flat.optim);
        let final_owner = refined(o, flat.numel, world)?;
        let summed = ranges(&final_owner, rank);
        let owned = ranges(o, rank);
        let replicas = [o.member(rank), o.group(), world / o.group()];
        let over_replicas = Party::new(Channel::Gradients, replicas, |_| owned.clone()).map(Hop::Sum);
        let own_group = [base(o, rank), 1, o.group()];
        let (held, first, then) = match when {
            When::Boundary => {
                let scatter = Party::new(Channel::Gradients, own_group, |r| ranges(o, r)).map(Hop::Scatter);
                let everything = Vec::from_iter(Some(0..flat.numel));
                match (scatter, over_replicas) {
                    (None, replicas) => (everything, replicas, Vec::new()),
                    (scatter, replicas) => (everything, scatter, Vec::from_iter(replicas)),
                }
            }
            When::Each => {
                let group = [base(g, rank), 1, g.group()];
                let scatter = Party::new(Channel::Gradients, group, |r| ranges(g, r)).map(Hop::Scatter);
                let sharers = [base(o, rank) + g.member(rank), g.group(), o.group() / g.group()];
                let split = Party::new(Channel::Gradients, sharers, |r| ranges(o, r)).map(Hop::Scatter);
                (ranges(g, rank), scatter, split.into_iter().chain(over_replicas).collect())
            }
            When::EachInOrder => {
                let scatter =
                    Party::new(Channel::Gradients, [0, 1, world], |r| ranges(&final_owner, r)).map(Hop::Scatter);
                let complete = Party::new(Channel::Gradients, replicas, |r| ranges(&final_owner, r)).map(Hop::Gather);
                (owned, scatter, Vec::from_iter(complete))
            }
        };
        Ok(Self { held, summed, first, then })
    }
}

/// O over the whole world: each owner's ranges are cut into equal parts, one for each replica.
fn refined(optim: &Placement, numel: usize, world: usize) -> Result<Placement> {
    let group = optim.group();
    let replicas = world / group.max(1);
    if replicas * group != world {
        return Err(Error::Config(format!("{world} ranks cannot form groups of {group}")));
    }
    let mut owners = Vec::new();
    for owner in optim.owners() {
        let len = owner.end - owner.start;
        let cut = |k: usize| owner.start + (len as u128 * k as u128 / replicas as u128) as usize;
        owners.extend((0..replicas).map(|k| Owner {
            start: cut(k),
            end: cut(k + 1),
            member: k * group + owner.member,
        }));
    }
    Placement::custom(numel, world, owners)
}
