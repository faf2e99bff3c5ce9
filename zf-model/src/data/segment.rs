//! Mapped tokens of one file, and several of them joined to a stream.

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use zf_core::{Error, Result};

use super::source::input;
use super::token_file::{HEADER, Header};

/// Bytes of a stored token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Width {
    /// u16.
    Two,
    /// u32.
    Four,
}

/// The tokens of one source file.
#[derive(Debug)]
pub(super) struct Segment {
    map: Mmap,
    file: File,
    path: PathBuf,
    origin: PathBuf,
    start: usize,
    tokens: u64,
    width: Width,
    mask: u32,
    largest: u32,
    documents: Option<u64>,
    skipped: u64,
}

/// Segments one after the other.
#[derive(Debug)]
pub(super) struct Stream {
    segments: Vec<Segment>,
    starts: Vec<u64>,
    tokens: u64,
}

impl Width {
    /// The width of that many bytes.
    pub(super) fn new(bytes: u32) -> Option<Self> {
        match bytes {
            2 => Some(Self::Two),
            4 => Some(Self::Four),
            _ => None,
        }
    }

    /// How many bytes.
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Two => 2,
            Self::Four => 4,
        }
    }

    /// The bit that is the mask in files that have one.
    pub(super) fn mask(self) -> u32 {
        match self {
            Self::Two => 1 << 15,
            Self::Four => 1 << 31,
        }
    }
}

impl Segment {
    /// Maps a file of bare tokens and looks for the largest id.
    pub(super) fn raw(path: &Path, width: Width) -> Result<Self> {
        let (file, map) = map(path)?;
        let bytes = width.bytes();
        if map.is_empty() {
            return Err(input(path, "the file is empty"));
        }
        if map.len() % bytes != 0 {
            return Err(input(
                path,
                format!(
                    "{} bytes are no whole number of tokens of {bytes} bytes; is data.token_bytes right?",
                    map.len()
                ),
            ));
        }
        let mut this = Self {
            tokens: (map.len() / bytes) as u64,
            map,
            file,
            path: path.to_owned(),
            origin: path.to_owned(),
            start: 0,
            width,
            mask: 0,
            largest: 0,
            documents: None,
            skipped: 0,
        };
        this.largest = this.ids(0, this.tokens).map(|(id, _)| id).max().unwrap_or(0);
        Ok(this)
    }

    /// Maps a token file made from `origin`. `None` when there is none, or a damaged one.
    pub(super) fn cached(path: &Path, origin: &Path) -> Option<Self> {
        let (file, map) = map(path).ok()?;
        let header = Header::check(&map)?;
        Some(Self {
            map,
            file,
            path: path.to_owned(),
            origin: origin.to_owned(),
            start: HEADER as usize,
            tokens: header.tokens,
            width: header.width,
            mask: if header.masked { header.width.mask() } else { 0 },
            largest: header.largest,
            documents: Some(header.documents),
            skipped: header.skipped,
        })
    }

    /// Number of tokens.
    pub(super) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// The file that a person knows it by.
    pub(super) fn origin(&self) -> &Path {
        &self.origin
    }

    /// Number of documents; `None` for bare tokens.
    pub(super) fn documents(&self) -> Option<u64> {
        self.documents
    }

    /// Documents that had no token.
    pub(super) fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Whether some tokens do not count.
    pub(super) fn masked(&self) -> bool {
        self.mask != 0
    }

    /// The number of tokens up to the end of document `index`, which must exist.
    pub(super) fn document_end(&self, index: u64) -> u64 {
        let at = self.start + self.tokens as usize * self.width.bytes() + index as usize * 8;
        let bytes = self.map[at..at + 8].try_into().expect("eight bytes");
        u64::from_le_bytes(bytes)
    }

    /// Ids from `from` to `to` (at most [`Segment::tokens`]), each with whether it counts.
    pub(super) fn ids(&self, from: u64, to: u64) -> impl Iterator<Item = (u32, bool)> + '_ {
        let bytes = self.width.bytes();
        let place = self.start + from as usize * bytes..self.start + to as usize * bytes;
        let (width, mask) = (self.width, self.mask);
        self.map[place].chunks_exact(bytes).map(move |token| {
            let stored = match width {
                Width::Two => u32::from(u16::from_le_bytes([token[0], token[1]])),
                Width::Four => u32::from_le_bytes([token[0], token[1], token[2], token[3]]),
            };
            (stored & !mask, stored & mask == 0)
        })
    }

    /// Refuses ids of `vocabulary` and more.
    pub(super) fn check_vocabulary(&self, vocabulary: usize) -> Result<()> {
        if (self.largest as usize) < vocabulary {
            return Ok(());
        }
        let found = (0_u64..).zip(self.ids(0, self.tokens)).find(|(_, (id, _))| *id as usize >= vocabulary);
        let (at, id) = found.map_or((0, self.largest), |(at, (id, _))| (at, id));
        let hint = if self.documents.is_some() {
            "the tokenizer belongs to another model"
        } else {
            "the file was made for another model, or data.token_bytes is wrong"
        };
        Err(input(
            &self.origin,
            format!(
                "token {at} has id {id}, beyond the model's vocabulary of {vocabulary} (ids 0 to {}); {hint}",
                vocabulary.saturating_sub(1)
            ),
        ))
    }

    /// Refuses to read a file whose size has changed: beyond its end a mapping cannot be read.
    fn check_size(&self) -> Result<()> {
        let size = self.file.metadata().map_err(|e| Error::io(&self.path, e))?.len();
        if size == self.map.len() as u64 {
            return Ok(());
        }
        Err(input(
            &self.path,
            format!("the file changed during the run: {} bytes at the start, {size} now", self.map.len()),
        ))
    }
}

impl Stream {
    /// Joins segments.
    pub(super) fn new(segments: Vec<Segment>) -> Self {
        let mut tokens = 0;
        let starts = segments
            .iter()
            .map(|segment| {
                let start = tokens;
                tokens += segment.tokens();
                start
            })
            .collect();
        Self { segments, starts, tokens }
    }

    /// Number of tokens.
    pub(super) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Its parts.
    pub(super) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The stream position of the first token of segment `index`.
    pub(super) fn start(&self, index: usize) -> u64 {
        self.starts[index]
    }

    /// Calls `each` with the offset from `from`, the id and whether it counts, of `count` tokens that all exist.
    pub(super) fn visit(&self, from: u64, count: usize, mut each: impl FnMut(usize, u32, bool)) -> Result<()> {
        let mut segment = self.starts.partition_point(|&start| start <= from) - 1;
        let mut done = 0;
        while done < count {
            let part = &self.segments[segment];
            part.check_size()?;
            let local = from + done as u64 - self.starts[segment];
            let end = part.tokens.min(local + (count - done) as u64);
            for (id, counts) in part.ids(local, end) {
                each(done, id, counts);
                done += 1;
            }
            segment += 1;
        }
        Ok(())
    }
}

fn map(path: &Path) -> Result<(File, Mmap)> {
    let file = super::source::open(path)?;
    // SAFETY: the mapping is only read, as plain bytes. Files of the cache are never written after they got their name.
    // A token file of the user may be changed by others, which a mapping cannot prevent: other values are still plain
    // bytes and checked against nothing but the vocabulary, and a changed size is looked for before each read.
    let map = unsafe { Mmap::map(&file) }.map_err(|e| input(path, e))?;
    Ok((file, map))
}
