//! From a source file to mapped tokens, through the cache.

use std::path::{Path, PathBuf};

use zf_core::{Error, Result};

use super::jsonl::{self, Line};
use super::segment::{Segment, Width};
use super::source::{Format, Hashing, Source, input, open};
use super::text;
use super::token_file::Writer;
use crate::tokenizer::Tokenizer;

/// Changes whenever the same file and tokenizer would give other tokens than before.
const RULES: &str = "zenflow tokens 1";

/// How sources become tokens.
#[derive(Debug)]
pub(super) struct Tokeniser<'a> {
    /// Text to ids.
    pub(super) tokenizer: &'a Tokenizer,
    /// The folder of the cache.
    pub(super) cache: PathBuf,
    /// The tokens of `.bin` files.
    pub(super) width: Width,
}

impl Tokeniser<'_> {
    /// The tokens of one source. Text comes from the cache, into which it is written first when it is not there;
    /// `notes` hears of a damaged one.
    pub(super) fn segment(&self, source: &Source, notes: &mut Vec<String>) -> Result<Segment> {
        if source.format == Format::Tokens {
            return Segment::raw(&source.path, self.width);
        }
        let path = self.cached_path(source);
        if let Some(segment) = Segment::cached(&path, &source.path) {
            return Ok(segment);
        }
        if path.exists() {
            notes.push(format!("the cached tokens of {} were damaged and made anew", source.path.display()));
        }
        self.write(source, &path)?;
        Segment::cached(&path, &source.path).ok_or_else(|| {
            Error::Input(format!(
                "{}: the token file cannot be read back; is the disk full or failing?",
                path.display()
            ))
        })
    }

    fn cached_path(&self, source: &Source) -> PathBuf {
        let mut key = blake3::Hasher::new();
        key.update(RULES.as_bytes());
        key.update(source.hash.as_bytes());
        key.update(self.tokenizer.identity().as_bytes());
        key.update(&[u8::from(source.format == Format::JsonLines)]);
        let key = key.finalize().to_hex();
        self.cache.join(format!("{}.tokens", &key[..40]))
    }

    fn write(&self, source: &Source, path: &Path) -> Result<()> {
        let masked = source.format == Format::JsonLines;
        let mut writer = Writer::new(&self.cache, masked, self.tokenizer.vocabulary())?;
        let mut reader = Hashing::new(open(&source.path)?);
        match source.format {
            Format::JsonLines => {
                jsonl::lines(&mut reader, &source.path, &mut |number, line| {
                    self.line(&mut writer, line).map_err(|e| at_line(&source.path, number, e))
                })?;
            }
            _ => {
                let lines = !self.tokenizer.is_bytes();
                text::pieces(&mut reader, &source.path, lines, &mut |piece| self.text(&mut writer, piece, true))?;
                self.end(&mut writer)?;
            }
        }
        if reader.finish() != source.hash {
            return Err(input(&source.path, "the file changed while it was read"));
        }
        writer.finish(path)
    }

    fn line(&self, writer: &mut Writer, line: Line) -> Result<()> {
        match line {
            Line::Text(text) => self.text(writer, &text, true)?,
            Line::Completion { prompt, completion } => {
                // Apart, so that the boundary lies where it will be when the model completes a prompt.
                self.text(writer, &prompt, false)?;
                self.text(writer, &completion, true)?;
            }
            Line::Chat(messages) => {
                let chat = self.tokenizer.chat_mask(&messages)?;
                let last = chat.ids.last().copied();
                writer.push(chat.ids.into_iter().zip(chat.counts))?;
                // Templates close their turns themselves; what is added only keeps conversations apart.
                if let Some(eos) = self.tokenizer.eos().filter(|&eos| last != Some(eos)) {
                    writer.push([(eos, false)])?;
                }
                return writer.end_document();
            }
        }
        self.end(writer)
    }

    /// Appends text to the current document, after the tokens that open one.
    fn text(&self, writer: &mut Writer, text: &str, counts: bool) -> Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        if !writer.started() {
            writer.push(self.tokenizer.start().iter().map(|&id| (id, counts)))?;
        }
        let ids = self.tokenizer.encode(text, false)?;
        writer.push(ids.into_iter().map(|id| (id, counts)))
    }

    /// Ends a document that is not empty with the end-of-text token.
    fn end(&self, writer: &mut Writer) -> Result<()> {
        if writer.started() {
            writer.push(self.tokenizer.eos().map(|eos| (eos, true)))?;
        }
        writer.end_document()
    }
}

/// Adds file and line to an error of one document.
fn at_line(path: &Path, number: u64, error: Error) -> Error {
    match error {
        Error::Input(what) => jsonl::wrong(path, number, what),
        other => other,
    }
}
