//! Who exchanges which elements of a flat buffer with whom, read off the layout once.
//!
//! Groups are of consecutive ranks, of sizes p | g | o that divide the world; ownership nests: what a rank updates (O) it
//! also accumulates (G), and what it accumulates it also keeps (P). So every movement of a flat is a collective over one
//! regular set of ranks:
//!
//! | movement | ranks | pieces |
//! |---|---|---|
//! | gather parameters for use | the p-group | P |
//! | publish updated parameters | of an o-group those that keep the same part of P | O |
//! | sum gradients | see [`super::reduction`] | G or O |

use std::ops::Range;

use crate::layout::{Flat, Placement};
use crate::stage::{Channel, Group};
use crate::{Error, Result};

/// Ranks that take part in a collective, and by member the element ranges that it sends or receives.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Party {
    pub(crate) group: Group,
    pub(crate) pieces: Vec<Vec<Range<usize>>>,
}

impl Party {
    /// `size` ranks from `first` on, each `stride` after the one before; `None` where there is nobody to talk to.
    pub(crate) fn new(
        channel: Channel,
        [first, stride, size]: [usize; 3],
        pieces: impl Fn(usize) -> Vec<Range<usize>>,
    ) -> Option<Self> {
        let ranks: Vec<usize> = (0..size).map(|k| first + k * stride).collect();
        let pieces = ranks.iter().map(|&rank| pieces(rank)).collect();
        (size > 1).then(|| Self { group: Group::new(ranks).on(channel), pieces })
    }
}

/// The group of `placement` that `rank` is in: its first rank.
pub(crate) fn base(placement: &Placement, rank: usize) -> usize {
    rank / placement.group() * placement.group()
}

/// The ranges of `placement` that `rank` owns.
pub(crate) fn ranges(placement: &Placement, rank: usize) -> Vec<Range<usize>> {
    placement.ranges(placement.member(rank)).collect()
}

/// All-gather of the parameters for use; `None` where each rank keeps them whole.
pub(crate) fn gather(flat: &Flat, rank: usize) -> Option<Party> {
    let p = &flat.params;
    Party::new(Channel::Parameters, [base(p, rank), 1, p.group()], |other| ranges(p, other))
}

/// All-gather for backward from the copy that `size` consecutive ranks keep between them in equal parts.
pub(crate) fn regather(flat: &Flat, rank: usize, size: usize) -> Option<Party> {
    let part = flat.numel / size.max(1);
    let first = rank / size.max(1) * size;
    let own = |member: usize| Vec::from_iter(Some(member * part..(member + 1) * part));
    Party::new(Channel::Parameters, [first, 1, size], |other| own(other - first))
}

/// All-gather of updated parameters from the owners of their states to all who keep them.
pub(crate) fn publish(flat: &Flat, rank: usize) -> Option<Party> {
    let (p, o) = (&flat.params, &flat.optim);
    let first = base(o, rank) + p.member(rank);
    Party::new(Channel::Parameters, [first, p.group(), o.group() / p.group()], |other| ranges(o, other))
}

/// Refuses a layout that this engine cannot run, with the rule it breaks.
pub(crate) fn check(flat: &Flat, world: usize) -> Result<()> {
    let name = flat.slots.first().map_or("?", |slot| slot.name.as_str());
    let refuse = |what: String| Err(Error::Config(format!("the layout of the buffer of `{name}`: {what}")));
    let sizes = [("parameters", &flat.params), ("gradients", &flat.grads), ("optimizer states", &flat.optim)];
    for window in sizes.windows(2) {
        let [(few, small), (many, large)] = [window[0], window[1]];
        if !large.group().is_multiple_of(small.group()) {
            return refuse(format!(
                "{few} are split over {} ranks and {many} over {}, which is no multiple: size(o) >= size(g) >= size(p) \
                 must hold, each a multiple of the next",
                small.group(),
                large.group()
            ));
        }
    }
    if !world.is_multiple_of(flat.optim.group()) {
        return refuse(format!("{world} ranks cannot form groups of {}", flat.optim.group()));
    }
    for rank in 0..flat.optim.group() {
        for window in sizes.windows(2) {
            let [(outer, held), (inner, part)] = [window[0], window[1]];
            let held = ranges(held, rank);
            if let Some(lost) = ranges(part, rank).iter().find(|range| super::flat::local_offset(&held, range).is_err())
            {
                return refuse(format!(
                    "rank {rank} owns {inner} of elements {lost:?} but not the {outer}; what a rank updates it must also \
                     accumulate, and what it accumulates it must also keep"
                ));
            }
        }
    }
    Ok(())
}
