//! The dataset over mapped tokens.

use zf_core::data::{Dataset, Split};
use zf_core::{Error, Result};

use super::segment::Stream;
use super::split::Part;

/// Sequences of tokens from files of text or tokens. Made by [`super::DataConfig::open`].
#[derive(Debug)]
pub struct TextDataset {
    pub(super) train: Part,
    pub(super) validation: Option<Part>,
    pub(super) stream: Stream,
    /// The stream of a validation file; a fraction lies in the training stream.
    pub(super) validation_stream: Option<Stream>,
    pub(super) length: usize,
    pub(super) pad: i64,
    pub(super) identity: String,
    pub(super) notes: Vec<String>,
}

impl TextDataset {
    /// Number of tokens in all files, training and validation.
    pub fn tokens(&self) -> u64 {
        let other = self.validation_stream.as_ref().map_or(0, Stream::tokens);
        self.stream.tokens() + other
    }
}

impl Dataset for TextDataset {
    fn len(&self, split: Split) -> u64 {
        match split {
            Split::Train => self.train.len(),
            Split::Validation => self.validation.as_ref().map_or(0, Part::len),
        }
    }

    fn sequence_length(&self) -> usize {
        self.length
    }

    fn read(&self, split: Split, index: u64, inputs: &mut [i64], targets: &mut [i64]) -> Result<()> {
        let (part, stream) = match split {
            Split::Train => (Some(&self.train), &self.stream),
            Split::Validation => (self.validation.as_ref(), self.validation_stream.as_ref().unwrap_or(&self.stream)),
        };
        let part = part.filter(|part| index < part.len()).ok_or_else(|| {
            Error::Engine(format!("sequence {index} of {split:?} was asked for, there are {}", self.len(split)))
        })?;
        if inputs.len() != self.length || targets.len() != self.length {
            return Err(Error::Engine(format!(
                "a sequence has {} tokens, got room for {} inputs and {} targets",
                self.length,
                inputs.len(),
                targets.len()
            )));
        }
        part.read(stream, index, self.pad, inputs, targets)
    }

    fn identity(&self) -> String {
        self.identity.clone()
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }
}
