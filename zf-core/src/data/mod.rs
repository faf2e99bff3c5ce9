//! What the trainer asks of a dataset.

mod batches;
mod order;

pub use batches::{BatchPlan, Turn, assemble};
pub use order::{Order, OrderKind};

use crate::Result;

/// Training or validation part of a dataset. No sequence spans both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Split {
    /// Trained on.
    Train,
    /// Only evaluated.
    Validation,
}

/// Sequences of tokens that can be read in any order, by every rank.
pub trait Dataset: Send + Sync {
    /// Number of sequences.
    fn len(&self, split: Split) -> u64;

    /// Whether a split has no sequence.
    fn is_empty(&self, split: Split) -> bool {
        self.len(split) == 0
    }

    /// Tokens of every sequence.
    fn sequence_length(&self) -> usize;

    /// Copies sequence `index` (below [`Dataset::len`], in the order of the file) into `inputs` and `targets`, both of
    /// [`Dataset::sequence_length`] ids; targets that do not count are [`crate::model::IGNORE`].
    ///
    /// # Errors
    /// An index beyond the end; files that changed underneath.
    fn read(&self, split: Split, index: u64, inputs: &mut [i64], targets: &mut [i64]) -> Result<()>;

    /// A hash of content, tokenizer and settings: a resumed run must see the same.
    fn identity(&self) -> String;

    /// What a person should know (how many rows were cut, what was skipped), one line each.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }
}
