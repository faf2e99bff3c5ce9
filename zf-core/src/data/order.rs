//! The order in which sequences are visited: a counter-based permutation, so that any position can be computed alone.

use serde::{Deserialize, Serialize};

/// How sequences are ordered within an epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OrderKind {
    /// Another pseudo-random permutation in every epoch.
    #[default]
    Shuffled,
    /// The order of the file, the same in every epoch.
    Sequential,
}

/// Maps a position in the run (from 0, over all epochs) to a sequence of the dataset.
///
/// The shuffled order is a keyed permutation: a balanced Feistel network (Luby and Rackoff, "How to construct
/// pseudorandom permutations from pseudorandom functions", SIAM J. Comput. 17, 1988) on the smallest power of four that
/// holds the dataset, restricted to it by cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains",
/// CT-RSA 2002). It has no state, takes a few dozen operations a position, and knows nothing of ranks: every
/// rank count and every resumed run sees the same sequences at the same step.
///
/// ```
/// use zf_core::data::{Order, OrderKind};
///
/// let order = Order::new(5, 1, OrderKind::Shuffled);
/// let mut epoch: Vec<u64> = (0..5).map(|position| order.at(position).1).collect();
/// epoch.sort_unstable();
/// assert_eq!(epoch, [0, 1, 2, 3, 4]);
/// assert_eq!(order.at(7).0, 1);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    len: u64,
    seed: u64,
    kind: OrderKind,
}

impl Order {
    /// The order of a dataset of `len` sequences. The order of an empty dataset answers index 0, which no dataset has.
    pub fn new(len: u64, seed: u64, kind: OrderKind) -> Self {
        Self { len, seed, kind }
    }

    /// Number of sequences in an epoch.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there is nothing to order.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The epoch (from 0) and the sequence index (below [`Order::len`]) at `position`.
    pub fn at(&self, position: u64) -> (u64, u64) {
        if self.len == 0 {
            return (0, 0);
        }
        let (epoch, index) = (position / self.len, position % self.len);
        match self.kind {
            OrderKind::Sequential => (epoch, index),
            OrderKind::Shuffled => (epoch, permute(index, self.len, self.seed, epoch)),
        }
    }
}

/// Rounds of the network. Four suffice for large domains; small ones mix better with more.
const ROUNDS: u64 = 8;

fn permute(index: u64, len: u64, seed: u64, epoch: u64) -> u64 {
    if len == 1 {
        return 0;
    }
    let bits = u64::BITS - (len - 1).leading_zeros();
    let half = bits.div_ceil(2);
    let mask = (1_u64 << half) - 1;
    let key = mix(mix(seed ^ 0x7a66_2d6f_7264_6572).wrapping_add(epoch));
    let mut value = index;
    loop {
        let (mut left, mut right) = (value >> half, value & mask);
        for round in 0..ROUNDS {
            let keyed = mix(key.wrapping_add(round.wrapping_mul(GOLDEN)) ^ right);
            (left, right) = (right, left ^ (keyed & mask));
        }
        value = (left << half) | right;
        // The domain has less than four times the dataset's size, and a permutation that starts inside the dataset
        // comes back to it: about four turns on average at worst.
        if value < len {
            return value;
        }
    }
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
/// OOPSLA 2014), a bijection of 64 bits.
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(GOLDEN);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_epoch_visits_every_sequence_once(len in 1_u64..700, seed: u64, epoch in 0_u64..5) {
            for kind in [OrderKind::Shuffled, OrderKind::Sequential] {
                let order = Order::new(len, seed, kind);
                let mut seen = vec![false; len as usize];
                for position in epoch * len..(epoch + 1) * len {
                    let (at, index) = order.at(position);
                    prop_assert_eq!(at, epoch);
                    prop_assert!(!std::mem::replace(&mut seen[index as usize], true));
                }
            }
        }

        #[test]
        fn huge_datasets_stay_in_range(len in 1_u64 << 40..u64::MAX, seed: u64, position: u64) {
            prop_assert!(Order::new(len, seed, OrderKind::Shuffled).at(position).1 < len);
        }
    }

    #[test]
    fn epochs_and_seeds_differ() {
        let epoch = |seed: u64, epoch: u64| -> Vec<u64> {
            let order = Order::new(1000, seed, OrderKind::Shuffled);
            (0..1000).map(|i| order.at(epoch * 1000 + i).1).collect()
        };
        let first = epoch(1, 0);
        for other in [epoch(1, 1), epoch(2, 0), epoch(1, 2)] {
            let same = first.iter().zip(&other).filter(|(a, b)| a == b).count();
            assert!(same < 15, "{same} of 1000 stay in place, one is expected");
        }
    }

    #[test]
    fn the_order_is_not_the_files() {
        // The correlation of position and index of a random permutation of n has a standard deviation of 1/sqrt(n).
        let n = 10_000_u64;
        let order = Order::new(n, 3, OrderKind::Shuffled);
        let mean = (n - 1) as f64 / 2.0;
        let covariance: f64 = (0..n).map(|i| (i as f64 - mean) * (order.at(i).1 as f64 - mean)).sum();
        let variance: f64 = (0..n).map(|i| (i as f64 - mean).powi(2)).sum();
        assert!((covariance / variance).abs() < 0.05);
    }

    #[test]
    fn small_permutations_are_about_uniform() {
        let mut counts = std::collections::BTreeMap::new();
        for seed in 0..6000 {
            let order = Order::new(3, seed, OrderKind::Shuffled);
            *counts.entry([order.at(0).1, order.at(1).1, order.at(2).1]).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 6, "all permutations of three occur");
        assert!(counts.values().all(|&n| (850..1150).contains(&n)), "{counts:?}");
    }

    #[test]
    fn the_permutation_never_changes() {
        // A change of these numbers would give resumed runs other data.
        let order = Order::new(10, 1, OrderKind::Shuffled);
        let got: Vec<u64> = (0..20).map(|position| order.at(position).1).collect();
        assert_eq!(got, PINNED);
    }

    const PINNED: [u64; 20] = [8, 9, 2, 3, 7, 5, 0, 1, 4, 6, 6, 5, 3, 0, 1, 4, 8, 2, 9, 7];

    #[test]
    fn an_empty_order_answers() {
        assert_eq!(Order::new(0, 1, OrderKind::Shuffled).at(9), (0, 0));
        assert!(Order::new(0, 1, OrderKind::Shuffled).is_empty());
    }
}
