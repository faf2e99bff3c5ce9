//! Datasets of text: files in, sequences of tokens out.
//!
//! A run's data is a file or a folder: `.txt` (one document), `.jsonl` (a document a line), `.bin` (tokens). Text is
//! tokenised once, in a stream, into a token file in the cache (`token_file`), keyed by content and tokenizer. All token
//! files are mapped and joined to one stream (`segment`), which is cut into packed sequences or read document by
//! document (`dataset`).
//!
//! # Limitations
//! * The cache is keyed by contents, so every start reads each source file once to hash it.
//! * A large `.txt` is tokenised in pieces of about a megabyte that end at line breaks. A tokenizer that puts a blank
//!   before every text (SentencePiece) sees one more at each piece.
//! * A `.bin` file has no document boundaries, so it can only be packed.

mod config;
mod dataset;
mod jsonl;
mod segment;
mod source;
mod split;
mod text;
mod token_file;
mod tokenise;

#[cfg(test)]
mod tests;

pub use config::{DataConfig, Validation};
pub use dataset::TextDataset;
