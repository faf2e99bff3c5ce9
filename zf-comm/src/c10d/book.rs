//! What each rank has issued, written where the others can read it when they miss it.

use serde::{Deserialize, Serialize};
use zf_core::stage::{Channel, Group};

/// The last collective of each group of a rank, the latest one last.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Book {
    issued: Vec<Issued>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Issued {
    ranks: Vec<usize>,
    channel: u8,
    sequence: u64,
    label: String,
}

impl Book {
    /// Enters a collective.
    pub(crate) fn enter(&mut self, group: &Group, sequence: u64, label: &str) {
        self.issued.retain(|entry| !entry.is_of(group));
        let (ranks, channel) = (group.ranks().to_vec(), number(group.channel()));
        self.issued.push(Issued { ranks, channel, sequence, label: label.to_owned() });
    }

    /// How many collectives of `group` were issued.
    pub(crate) fn count(&self, group: &Group) -> u64 {
        self.issued.iter().find(|entry| entry.is_of(group)).map_or(0, |entry| entry.sequence + 1)
    }

    /// `rank 2 last issued #16 "..."`, with the group where it is another one.
    pub(crate) fn last(&self, rank: usize, group: &Group) -> String {
        if let Some(entry) = self.issued.iter().find(|entry| entry.is_of(group)) {
            return format!("rank {rank} last issued #{} {:?}", entry.sequence, entry.label);
        }
        match self.issued.last() {
            None => format!("rank {rank} has issued nothing"),
            Some(entry) => {
                format!("rank {rank} last issued #{} {:?} in group {:?}", entry.sequence, entry.label, entry.ranks)
            }
        }
    }
}

impl Issued {
    fn is_of(&self, group: &Group) -> bool {
        self.channel == number(group.channel()) && self.ranks == group.ranks()
    }
}

/// The channel in keys and books.
pub(crate) fn number(channel: Channel) -> u8 {
    match channel {
        Channel::Control => 0,
        Channel::Gradients => 1,
        Channel::Parameters => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_book_tells_the_last_of_a_group_and_of_all() {
        let world = Group::world(3);
        let gradients = world.on(Channel::Gradients);
        let mut book = Book::default();
        assert_eq!(book.last(2, &world), "rank 2 has issued nothing");
        book.enter(&gradients, 0, "a");
        book.enter(&world, 0, "b");
        book.enter(&gradients, 1, "c");
        assert_eq!((book.count(&gradients), book.count(&world), book.count(&Group::new(vec![2]))), (2, 1, 0));
        assert_eq!(book.last(2, &world), "rank 2 last issued #0 \"b\"");
        assert_eq!(book.last(2, &Group::new(vec![0, 2])), "rank 2 last issued #1 \"c\" in group [0, 1, 2]");
        let text = serde_json::to_vec(&book).expect("plain data");
        assert_eq!(serde_json::from_slice::<Book>(&text).expect("just written"), book);
    }
}
