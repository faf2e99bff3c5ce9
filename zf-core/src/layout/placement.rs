//! Who owns which elements of a flat buffer.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// A range of elements and the group member that owns it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// First element.
    pub start: usize,
    /// One past the last element.
    pub end: usize,
    /// Index in the group: a rank r belongs to group r / size and is its member r % size.
    pub member: usize,
}

/// Owners of all elements of a flat buffer within groups of `group` consecutive ranks. Group size 1 means that every
/// rank holds everything.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    group: usize,
    owners: Vec<Owner>,
}

impl Placement {
    /// Every rank owns all `numel` elements.
    pub fn replicated(numel: usize) -> Self {
        Self { group: 1, owners: vec![Owner { start: 0, end: numel, member: 0 }] }
    }

    /// Equal shards: the buffer seen as `[group, numel / group]`, one row a member.
    ///
    /// # Errors
    /// When `group` does not divide `numel`.
    pub fn even(numel: usize, group: usize) -> Result<Self> {
        if group == 0 || !numel.is_multiple_of(group) {
            return Err(Error::Engine(format!("{numel} elements cannot be split evenly over {group} ranks")));
        }
        let shard = numel / group;
        let owners = (0..group).map(|m| Owner { start: m * shard, end: (m + 1) * shard, member: m }).collect();
        Ok(Self { group, owners })
    }

    /// Any owners: sorted, without gaps or overlaps, covering `numel` elements, members below `group`.
    ///
    /// # Errors
    /// When that does not hold, naming the first bad range.
    pub fn custom(numel: usize, group: usize, owners: Vec<Owner>) -> Result<Self> {
        let mut next = 0;
        for owner in &owners {
            if owner.start != next || owner.end < owner.start || owner.member >= group {
                return Err(Error::Engine(format!(
                    "owner {}..{} -> {} does not follow element {next} in a group of {group}",
                    owner.start, owner.end, owner.member
                )));
            }
            next = owner.end;
        }
        if next != numel {
            return Err(Error::Engine(format!("owners cover {next} of {numel} elements")));
        }
        // Neighbours of one owner are one range, so that a range within what a rank holds lies within one of its ranges.
        let mut merged: Vec<Owner> = Vec::with_capacity(owners.len());
        for owner in owners.into_iter().filter(|owner| owner.start < owner.end) {
            match merged.last_mut().filter(|last| last.member == owner.member) {
                Some(last) => last.end = owner.end,
                None => merged.push(owner),
            }
        }
        Ok(Self { group, owners: merged })
    }

    /// Ranks in a group.
    pub fn group(&self) -> usize {
        self.group
    }

    /// The owners, by element.
    pub fn owners(&self) -> &[Owner] {
        &self.owners
    }

    /// The member index of `rank`.
    pub fn member(&self, rank: usize) -> usize {
        rank % self.group
    }

    /// The ranges that `member` owns, ascending. Their concatenation is the member's local space.
    pub fn ranges(&self, member: usize) -> impl Iterator<Item = Range<usize>> {
        self.owners.iter().filter(move |o| o.member == member && o.start < o.end).map(|o| o.start..o.end)
    }

    /// Elements that `member` owns.
    pub fn len(&self, member: usize) -> usize {
        self.ranges(member).map(|r| r.len()).sum()
    }

    /// Whether nobody owns anything.
    pub fn is_empty(&self) -> bool {
        self.owners.iter().all(|o| o.start == o.end)
    }
}
