//! Philox4x32-10 and keys derived from it.

/// Blocks computed side by side, so that the compiler can use vector registers.
const LANES: usize = 16;

/// A sequence of random words: value `i` is word `i mod 4` of the block with counter `i div 4`.
///
/// A stream is a place in a tree: [`Stream::new`] is the root of a seed, [`Stream::child`] goes one level down. A
/// stream is used either for values or for children, so that no counter serves twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    /// The key of the block function.
    key: [u32; 2],
    /// The upper half of the counter; the lower half counts blocks.
    upper: [u32; 2],
}

impl Stream {
    /// The root for a seed.
    pub fn new(seed: u64) -> Self {
        Self { key: halves(seed), upper: [0; 2] }
    }

    /// The stream that belongs to `index` below this one: 128 fresh bits from the block at `index`.
    pub fn child(self, index: u64) -> Self {
        let [low, high] = halves(index);
        let [a, b, c, d] = block(self.key, [low, high, self.upper[0], self.upper[1]]);
        Self { key: [a, b], upper: [c, d] }
    }

    /// The stream of a name: the child of the root at the first 128 bits (two little-endian words) of the name's
    /// BLAKE3 hash.
    pub fn named(seed: u64, name: &str) -> Self {
        let hash = blake3::hash(name.as_bytes());
        let (first, rest) = hash.as_bytes().split_at(8);
        let word = |bytes: &[u8]| bytes.iter().take(8).rev().fold(0u64, |word, &byte| word << 8 | u64::from(byte));
        Self::new(seed).child(word(first)).child(word(rest))
    }
}

/// Fills `out` with values number `first_index` and following of `stream`; `map` turns 4 words of each lane into 4
/// values.
pub(super) fn fill<T: Copy + Default>(
    stream: Stream,
    first_index: u64,
    out: &mut [T],
    map: impl Fn([[u32; LANES]; 4]) -> [[T; LANES]; 4],
) {
    let mut counter = first_index / 4;
    let mut skip = (first_index % 4) as usize;
    let mut rest = out;
    while !rest.is_empty() {
        let values = map(blocks(stream, counter));
        let mut row = [T::default(); 4 * LANES];
        for lane in 0..LANES {
            for (word, value) in values.iter().enumerate() {
                row[4 * lane + word] = value[lane];
            }
        }
        let taken = rest.len().min(row.len() - skip);
        let (head, tail) = rest.split_at_mut(taken);
        head.copy_from_slice(&row[skip..skip + taken]);
        rest = tail;
        skip = 0;
        counter = counter.wrapping_add(LANES as u64);
    }
}

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// The blocks with counters `first` to `first + LANES - 1`.
#[expect(clippy::needless_range_loop, reason = "one index runs over all four rows of lanes")]
#[inline(always)]
fn blocks(stream: Stream, first: u64) -> [[u32; LANES]; 4] {
    let mut state = [[0u32; LANES]; 4];
    for lane in 0..LANES {
        let [low, high] = halves(first.wrapping_add(lane as u64));
        state[0][lane] = low;
        state[1][lane] = high;
        state[2][lane] = stream.upper[0];
        state[3][lane] = stream.upper[1];
    }
    rounds(stream.key, state)
}

/// One block.
fn block(key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    rounds(key, counter.map(|word| [word])).map(|[word]| word)
}

#[expect(clippy::needless_range_loop, reason = "one index runs over all four rows of lanes")]
#[inline(always)]
fn rounds<const N: usize>(mut key: [u32; 2], mut state: [[u32; N]; 4]) -> [[u32; N]; 4] {
    for _ in 0..ROUNDS {
        for lane in 0..N {
            let [a, b, c, d] = [state[0][lane], state[1][lane], state[2][lane], state[3][lane]];
            let [low0, high0] = halves(u64::from(a) * u64::from(MULTIPLIERS[0]));
            let [low1, high1] = halves(u64::from(c) * u64::from(MULTIPLIERS[1]));
            state[0][lane] = high1 ^ b ^ key[0];
            state[1][lane] = low1;
            state[2][lane] = high0 ^ d ^ key[1];
            state[3][lane] = low0;
        }
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    state
}

/// Low and high half.
#[inline(always)]
fn halves(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of the reference implementation (Random123, `kat_vectors`, philox4x32 with 10 rounds).
    #[test]
    fn known_answers() {
        let check = |counter, key, expected| assert_eq!(block(key, counter), expected);
        check([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        check([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        check(
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        );
    }

    #[test]
    fn children_differ_from_each_other_and_from_their_parent() {
        let root = Stream::new(7);
        let all = [root, root.child(0), root.child(1), root.child(0).child(0), Stream::new(8), Stream::named(7, "a")];
        for (i, one) in all.iter().enumerate() {
            for other in &all[i + 1..] {
                assert_ne!(one, other);
            }
        }
    }
}
