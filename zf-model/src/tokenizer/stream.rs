//! Decoding one token after the other.

use super::Tokenizer;

/// Gives out text as soon as its characters are complete, from [`Tokenizer::stream`].
///
/// A token may hold a part of a character, and its text may depend on the token before. So a short window of tokens is
/// decoded each time, and what the window adds is given out unless it ends in an incomplete character.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    ids: Vec<u32>,
    shown: usize,
}

impl<'a> TextStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, ids: Vec::new(), shown: 0 }
    }

    /// Takes the next token and returns the text that is new, often empty.
    pub fn push(&mut self, id: u32) -> String {
        self.ids.push(id);
        let (text, before) = self.texts();
        if text.ends_with(char::REPLACEMENT_CHARACTER) || text.len() <= before {
            return String::new();
        }
        let new = text.get(before..).unwrap_or_default().to_owned();
        self.ids.drain(..self.shown);
        self.shown = self.ids.len();
        new
    }

    /// The text that is still held back at the end; incomplete characters as U+FFFD.
    pub fn finish(self) -> String {
        let (text, before) = self.texts();
        text.get(before..).unwrap_or_default().to_owned()
    }

    fn texts(&self) -> (String, usize) {
        let before = self.tokenizer.decode(&self.ids[..self.shown]).len();
        (self.tokenizer.decode(&self.ids), before)
    }
}
