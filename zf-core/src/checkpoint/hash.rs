//! The state hash: one number for masters, moments and update counts, whatever the layout.

use std::collections::BTreeMap;

use super::state::{AUXILIARY, PARAMETER};

/// Combines tensors and counts into the state hash.
///
/// The hash is blake3 over the tensors in the order of (name, kind), each by the blake3 of its elements (float32,
/// little-endian, row-major), followed by the update counts in the order of names. Names and kinds are preceded by
/// their lengths. Tensors may be added in any order and streamed in parts; rank counts, partitioners and files leave
/// no trace. Equal hashes mean equal bits: 0.0 and -0.0 differ.
///
/// ```
/// use zf_core::checkpoint::StateHasher;
///
/// let mut a = StateHasher::new();
/// a.add("w", "master", &1f32.to_le_bytes());
/// a.add("b", "master", &2f32.to_le_bytes());
/// a.add_count("w", 3);
/// let mut b = StateHasher::new();
/// b.add_count("w", 3);
/// b.add("b", "master", &2f32.to_le_bytes());
/// let mut part = StateHasher::tensor();
/// part.update(&1f32.to_le_bytes()[..1]).update(&1f32.to_le_bytes()[1..]);
/// b.add_tensor("w", "master", &part);
/// assert_eq!(a.finish(), b.finish());
/// ```
#[derive(Debug, Default)]
pub struct StateHasher {
    tensors: BTreeMap<(String, String), TensorHash>,
    counts: BTreeMap<String, u64>,
}

/// The running hash of one tensor's elements; see [`StateHasher::tensor`].
#[derive(Debug, Default, Clone)]
pub struct TensorHash {
    hasher: Box<blake3::Hasher>,
}

impl TensorHash {
    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) -> &mut Self {
        self.hasher.update(bytes);
        self
    }
}

impl StateHasher {
    /// Without any tensor.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether tensors of this kind are part of the hash: all but frozen parameters and what begins with
    /// [`AUXILIARY`].
    pub fn includes(kind: &str) -> bool {
        kind != PARAMETER && !kind.starts_with(AUXILIARY)
    }

    /// A running hash for a tensor that comes in parts.
    pub fn tensor() -> TensorHash {
        TensorHash::default()
    }

    /// Adds all elements of a tensor, or its next ones. Kinds that are [not included](Self::includes) are passed over.
    pub fn add(&mut self, name: &str, kind: &str, bytes: &[u8]) {
        if Self::includes(kind) {
            self.tensors.entry((name.into(), kind.into())).or_default().update(bytes);
        }
    }

    /// Adds a tensor by its finished hash.
    pub fn add_tensor(&mut self, name: &str, kind: &str, hash: &TensorHash) {
        if Self::includes(kind) {
            self.tensors.insert((name.into(), kind.into()), hash.clone());
        }
    }

    /// Adds the update count of a parameter.
    pub fn add_count(&mut self, name: &str, count: u64) {
        self.counts.insert(name.into(), count);
    }

    /// The hash, 64 hexadecimal digits.
    pub fn finish(&self) -> String {
        let mut all = blake3::Hasher::new();
        let text = |all: &mut blake3::Hasher, s: &str| {
            all.update(&(s.len() as u64).to_le_bytes());
            all.update(s.as_bytes());
        };
        all.update(&(self.tensors.len() as u64).to_le_bytes());
        for ((name, kind), tensor) in &self.tensors {
            text(&mut all, name);
            text(&mut all, kind);
            all.update(tensor.hasher.finalize().as_bytes());
        }
        all.update(&(self.counts.len() as u64).to_le_bytes());
        for (name, count) in &self.counts {
            text(&mut all, name);
            all.update(&count.to_le_bytes());
        }
        all.finalize().to_hex().to_string()
    }
}
