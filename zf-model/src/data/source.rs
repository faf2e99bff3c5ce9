//! Finding the files of a dataset and hashing them.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use zf_core::{Error, Result};

/// What a file holds, by its extension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// One document.
    Text,
    /// One document a line.
    JsonLines,
    /// Token ids.
    Tokens,
}

/// A file to be read, with the hash of its contents.
#[derive(Debug, Clone)]
pub(super) struct Source {
    /// Where it lies.
    pub(super) path: PathBuf,
    /// What it holds.
    pub(super) format: Format,
    /// blake3 of its contents.
    pub(super) hash: blake3::Hash,
}

/// The files of a path (sorted, folders recursively), never empty, and how many files of a folder were left out for
/// their extension.
pub(super) fn find(path: &Path, setting: &str) -> Result<(Vec<Source>, usize)> {
    let wrong = |what: String| Error::Input(format!("{setting}: {}: {what}", path.display()));
    let kind = std::fs::metadata(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => wrong("no such file or folder; paths are relative to the run file".into()),
        _ => wrong(e.to_string()),
    })?;
    let (mut files, mut other) = (BTreeSet::new(), 0);
    if kind.is_dir() {
        walk(path, &mut BTreeSet::new(), &mut files, &mut other)?;
        if files.is_empty() {
            return Err(wrong("the folder has no .txt, .jsonl or .bin file".to_owned()));
        }
    } else if kind.is_file() {
        files.insert(path.to_owned());
    } else {
        // Opening a pipe would wait for somebody to write into it.
        return Err(wrong("neither a file nor a folder".into()));
    }
    let mut sources = Vec::with_capacity(files.len());
    for path in files {
        let Some(format) = Format::of(&path) else {
            return Err(wrong("unknown extension; expected .txt, .jsonl, .bin or a folder of these".into()));
        };
        let hash = hash(&path)?;
        sources.push(Source { path, format, hash });
    }
    Ok((sources, other))
}

/// An [`Error::Input`] about a source file.
pub(super) fn input(path: &Path, what: impl std::fmt::Display) -> Error {
    Error::Input(format!("{}: {what}", path.display()))
}

/// Opens a source file.
pub(super) fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|e| input(path, e))
}

/// A reader that hashes what passes, so that a file that changes between hashing and reading is noticed.
#[derive(Debug)]
pub(super) struct Hashing<R> {
    inner: R,
    hasher: blake3::Hasher,
}

impl<R: Read> Hashing<R> {
    pub(super) fn new(inner: R) -> Self {
        Self { inner, hasher: blake3::Hasher::new() }
    }

    /// The hash of everything read.
    pub(super) fn finish(&self) -> blake3::Hash {
        self.hasher.finalize()
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..read]);
        Ok(read)
    }
}

impl Format {
    fn of(path: &Path) -> Option<Self> {
        let extension = path.extension()?.to_str()?;
        match extension.to_ascii_lowercase().as_str() {
            "txt" => Some(Self::Text),
            "jsonl" => Some(Self::JsonLines),
            "bin" => Some(Self::Tokens),
            _ => None,
        }
    }
}

fn walk(folder: &Path, seen: &mut BTreeSet<PathBuf>, files: &mut BTreeSet<PathBuf>, other: &mut usize) -> Result<()> {
    // A link to a folder above would otherwise never end.
    let real = folder.canonicalize().map_err(|e| input(folder, e))?;
    if !seen.insert(real) {
        return Ok(());
    }
    for entry in std::fs::read_dir(folder).map_err(|e| input(folder, e))? {
        let entry = entry.map_err(|e| input(folder, e))?;
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let path = entry.path();
        let kind = std::fs::metadata(&path).map_err(|e| input(&path, e))?;
        if kind.is_dir() {
            walk(&path, seen, files, other)?;
        } else if kind.is_file() && Format::of(&path).is_some() {
            files.insert(path);
        } else {
            *other += 1;
        }
    }
    Ok(())
}

fn hash(path: &Path) -> Result<blake3::Hash> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(open(path)?).map_err(|e| input(path, e))?;
    if hasher.count() == 0 {
        return Err(input(path, "the file is empty"));
    }
    Ok(hasher.finalize())
}
