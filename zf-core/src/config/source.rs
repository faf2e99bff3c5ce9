//! Where values come from, and errors that show the place.

use std::ops::Range;
use std::path::PathBuf;

/// The longest line that messages show in full.
const LONG: usize = 160;

/// What kind of layer a value comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A file, or a text given by a program.
    File,
    /// A registered preset.
    Preset,
    /// `-o key=value`.
    Override,
}

/// One layer's text.
#[derive(Debug, Clone)]
pub(super) struct Source {
    /// What it is.
    pub(super) kind: Kind,
    /// What messages call it: the file as given, the preset's name, the override.
    pub(super) label: String,
    /// The text that spans point into.
    pub(super) text: String,
    /// What relative paths are relative to; `None`: nothing, as in presets.
    pub(super) dir: Option<PathBuf>,
}

/// A range of a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mark {
    /// Index of the source.
    pub(super) source: usize,
    /// Bytes of its text.
    pub(super) span: Range<usize>,
}

impl Source {
    /// Line and column of a byte, both from 1, and the line's text and first byte.
    fn line(&self, at: usize) -> (usize, usize, &str, usize) {
        let at = (0..=at.min(self.text.len())).rev().find(|&at| self.text.is_char_boundary(at)).unwrap_or(0);
        let before = &self.text[..at];
        let start = before.rfind('\n').map_or(0, |newline| newline + 1);
        let line = self.text[start..].lines().next().unwrap_or("");
        let number = before.matches('\n').count() + 1;
        let column = self.text[start..at].chars().count() + 1;
        (number, column, line, start)
    }

    /// `recipes/demo.toml:12:3`, `preset zero-1` or `-o run.steps=x`.
    pub(super) fn place(&self, span: &Range<usize>) -> String {
        match self.kind {
            Kind::File => {
                let (line, column, _, _) = self.line(span.start);
                format!("{}:{line}:{column}", self.label)
            }
            Kind::Preset => format!("preset {}", self.label),
            Kind::Override => format!("-o {}", self.label),
        }
    }

    /// `recipes/demo.toml:12`, `preset zero-1` or `-o run.steps=100`.
    pub(super) fn origin(&self, span: &Range<usize>) -> String {
        match self.kind {
            Kind::File => format!("{}:{}", self.label, self.line(span.start).0),
            Kind::Preset | Kind::Override => self.place(span),
        }
    }

    /// The message with its place, the line and a caret under `span`, with `advice` beside it.
    pub(super) fn render(&self, span: &Range<usize>, message: &str, advice: &str) -> String {
        let place = self.place(span);
        if self.kind == Kind::Override {
            let join = if advice.is_empty() { "" } else { "; " };
            return format!("{place}: {message}{join}{advice}");
        }
        let (number, column, line, start) = self.line(span.start);
        let end = span.end.clamp(start, start + line.len());
        let width = self.text.get(span.start..end).map_or(1, |marked| marked.chars().count().max(1));
        // Of a very long line the part around the place is shown.
        let skipped = if line.chars().count() > LONG { (column - 1).saturating_sub(LONG / 4) } else { 0 };
        let line: String = line.chars().skip(skipped).take(LONG).collect();
        let before = column - 1 - skipped;
        let width = width.min(LONG.saturating_sub(before)).max(1);
        // Tabs stay tabs, so that the caret lies below its text whatever their width.
        let indent: String = line.chars().take(before).map(|c| if c == '\t' { '\t' } else { ' ' }).collect();
        let digits = number.to_string();
        let gap = " ".repeat(digits.len());
        let caret = "^".repeat(width);
        format!("{place}: {message}\n   {digits} | {line}\n   {gap} | {indent}{caret} {advice}").trim_end().to_owned()
    }
}
