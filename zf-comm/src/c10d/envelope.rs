//! The message of fixed size that members send each other before a collective: what each is about to do, and the data
//! itself where it is small.

use zf_core::stage::{Group, Reduce};

use crate::span::DType;
use crate::work::Work;

/// Bytes of an envelope.
pub(crate) const SIZE: usize = 1024;
/// Where the data begin: aligned for every element type.
const DATA: usize = 240;
/// Data of at most so many bytes travel in the envelope.
pub(crate) const INLINE: usize = SIZE - DATA;
const LABEL: usize = 48;
const MARK: u32 = 0x5a46_4331;
const DTYPES: [DType; 6] =
    [DType::Float32, DType::Float16, DType::BFloat16, DType::Float64, DType::Int64, DType::Uint8];
const NAMES: [&str; 6] = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "exchange"];

/// A number of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) len: usize,
    pub(crate) dtype: DType,
}

impl Extent {
    /// Whether they travel in the envelope.
    pub(crate) fn is_inline(self) -> bool {
        self.len * self.dtype.bytes() <= INLINE
    }
}

impl std::fmt::Display for Extent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} elements of {}", self.len, self.dtype)
    }
}

/// What one member tells another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Envelope {
    pub(crate) kind: u8,
    /// The reduction or the root, where there is one.
    pub(crate) detail: u32,
    pub(crate) sequence: u64,
    label: String,
    label_hash: u64,
    /// What the sender has for the other one.
    pub(crate) sends: Extent,
    /// What the sender expects from the other one.
    pub(crate) expects: Extent,
}

impl Envelope {
    /// What member `me` tells member `other`.
    pub(crate) fn new(work: &Work, label: &str, sequence: u64, me: usize, other: usize) -> Self {
        let of = |span: &crate::span::Span| Extent { len: span.len, dtype: span.dtype };
        let (kind, detail, sends, expects) = match work {
            Work::AllReduce { tensor, op } => (0, u32::from(*op == Reduce::Max), of(tensor), of(tensor)),
            Work::ReduceScatter { inputs, .. } => (1, 0, of(&inputs[other]), of(&inputs[me])),
            Work::AllGather { input, outputs } => (2, 0, of(input), of(&outputs[other])),
            Work::AllToAll { inputs, outputs } => (3, 0, of(&inputs[other]), of(&outputs[other])),
            Work::Broadcast { tensor, root } => (4, *root as u32, of(tensor), of(tensor)),
            Work::Exchange { bytes } => {
                let own = Extent { len: bytes.len(), dtype: DType::Uint8 };
                (5, 0, own, Extent { len: 0, dtype: DType::Uint8 })
            }
        };
        let cut = (0..=label.len().min(DATA - LABEL)).rev().find(|end| label.is_char_boundary(*end)).unwrap_or(0);
        Self { kind, detail, sequence, label: label[..cut].into(), label_hash: hash(label), sends, expects }
    }

    /// Writes everything but the data, which have their place behind.
    pub(crate) fn write(&self, to: &mut [u8]) {
        let code = |dtype: DType| DTYPES.iter().position(|other| *other == dtype).unwrap_or(DTYPES.len()) as u8;
        to[..4].copy_from_slice(&MARK.to_le_bytes());
        to[4..8].copy_from_slice(&[self.kind, code(self.sends.dtype), code(self.expects.dtype), 0]);
        to[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        to[16..24].copy_from_slice(&(self.sends.len as u64).to_le_bytes());
        to[24..32].copy_from_slice(&(self.expects.len as u64).to_le_bytes());
        to[32..36].copy_from_slice(&self.detail.to_le_bytes());
        to[36..40].copy_from_slice(&(self.label.len() as u32).to_le_bytes());
        to[40..48].copy_from_slice(&self.label_hash.to_le_bytes());
        to[LABEL..LABEL + self.label.len()].copy_from_slice(self.label.as_bytes());
    }

    /// Reads what [`Envelope::write`] wrote; `None` for anything else.
    pub(crate) fn read(from: &[u8]) -> Option<Self> {
        let long = |at: usize| Some(u64::from_le_bytes(from.get(at..at + 8)?.try_into().ok()?));
        let short = |at: usize| Some(u32::from_le_bytes(from.get(at..at + 4)?.try_into().ok()?));
        if from.len() != SIZE || short(0)? != MARK || usize::from(from[4]) >= NAMES.len() {
            return None;
        }
        let extent = |code: u8, at: usize| {
            Some(Extent { len: usize::try_from(long(at)?).ok()?, dtype: *DTYPES.get(usize::from(code))? })
        };
        let length = short(36)? as usize;
        let label = from.get(LABEL..LABEL + length).filter(|_| length <= DATA - LABEL)?;
        Some(Self {
            kind: from[4],
            detail: short(32)?,
            sequence: long(8)?,
            label: String::from_utf8(label.to_vec()).ok()?,
            label_hash: long(40)?,
            sends: extent(from[5], 16)?,
            expects: extent(from[6], 24)?,
        })
    }

    /// The place of the data in an envelope's bytes.
    pub(crate) fn data(len: usize) -> std::ops::Range<usize> {
        DATA..DATA + len
    }

    fn name(&self) -> &'static str {
        NAMES[usize::from(self.kind)]
    }

    /// Why member `a`, which wrote this, and member `b`, which wrote `other`, cannot do a collective together.
    pub(crate) fn conflict(&self, a: usize, other: &Self, b: usize, group: &Group) -> Option<String> {
        // In the order of members, so that both read the same text.
        if b < a {
            return other.conflict(b, self, a, group);
        }
        let (rank_a, rank_b) = (group.ranks()[a], group.ranks()[b]);
        let place = format!("#{} in group {:?}", self.sequence, group.ranks());
        let same = (self.kind, self.sequence, &self.label, self.label_hash)
            == (other.kind, other.sequence, &other.label, other.label_hash);
        if !same {
            return Some(format!(
                "{place}: rank {rank_a} issued {} {:?}, but rank {rank_b} issued {} {:?}; all ranks of a group must issue \
                 the same collectives in the same order",
                self.name(),
                self.label,
                other.name(),
                other.label
            ));
        }
        let (has, found) = self.difference(a, other, b)?;
        let (name, label) = (self.name(), &self.label);
        Some(format!(
            "{name} #{} {label:?} in group {:?}: rank {rank_a} has {has}, but rank {rank_b} has {found}",
            self.sequence,
            group.ranks()
        ))
    }

    fn difference(&self, a: usize, other: &Self, b: usize) -> Option<(String, String)> {
        let differ = |ours: Extent, theirs: Extent, what: String| {
            (ours != theirs).then(|| (format!("{ours}{what}"), format!("{theirs}{what}")))
        };
        let there = |what: String| differ(self.sends, other.expects, what);
        let back = |what: String| differ(self.expects, other.sends, what);
        match self.name() {
            "all_reduce" | "broadcast" if self.detail != other.detail => {
                let text = |detail: u32| match (self.kind, detail) {
                    (0, 0) => "Sum".to_owned(),
                    (0, _) => "Max".to_owned(),
                    (_, root) => format!("root {root}"),
                };
                Some((text(self.detail), text(other.detail)))
            }
            "reduce_scatter" => back(format!(" for piece {a}")).or_else(|| there(format!(" for piece {b}"))),
            "all_gather" => there(format!(" for piece {a}")).or_else(|| back(format!(" for piece {b}"))),
            "all_to_all" => {
                there(format!(" from member {a} to {b}")).or_else(|| back(format!(" from member {b} to {a}")))
            }
            "exchange" => None,
            _ => there(String::new()),
        }
    }
}

/// FNV-1a, for what of a label does not fit.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exchange(label: &str) -> Envelope {
        Envelope::new(&Work::Exchange { bytes: vec![1, 2, 3] }, label, 7, 0, 1)
    }

    #[test]
    fn what_is_written_is_read() {
        let long = "ä".repeat(200);
        for label in ["", "step 3", &long] {
            let envelope = exchange(label);
            let mut bytes = [0; SIZE];
            envelope.write(&mut bytes);
            assert_eq!(Envelope::read(&bytes), Some(envelope));
        }
        assert_eq!(Envelope::read(&[0; SIZE]), None);
        assert_eq!(Envelope::read(&[]), None);
    }

    #[test]
    fn labels_that_differ_beyond_the_envelope_conflict() {
        let (a, b) = (exchange(&format!("{}1", "x".repeat(300))), exchange(&format!("{}2", "x".repeat(300))));
        assert!(a.conflict(0, &b, 1, &Group::world(2)).is_some());
        assert_eq!(a.conflict(0, &a.clone(), 1, &Group::world(2)), None);
    }
}
