//! The token cache: text that was tokenised once, in a file that can be mapped.
//!
//! A token file is a header of [`HEADER`] bytes, the tokens (2 or 4 bytes each, little-endian), and for each document
//! the number of tokens up to its end (8 bytes). In a file with a mask the highest bit of a token says that it does not
//! count as a target. The header holds the sizes and hashes of itself and of all that follows, so that a truncated or
//! damaged file is noticed and made anew. Files are named by the hash of all they depend on, written under a temporary
//! name and renamed: two processes that make the same one at once both succeed.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;
use zf_core::{Error, Result};

use super::segment::Width;

/// Bytes of the header.
pub(super) const HEADER: u64 = 128;
const MAGIC: &[u8; 8] = b"zftokens";
const VERSION: u32 = 1;
const HASHED: usize = 96;

/// What the header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    /// Bytes a token.
    pub(super) width: Width,
    /// Whether the highest bit of a token is the mask.
    pub(super) masked: bool,
    /// The largest id.
    pub(super) largest: u32,
    /// Number of tokens.
    pub(super) tokens: u64,
    /// Number of documents.
    pub(super) documents: u64,
    /// Documents without a token, which are left out.
    pub(super) skipped: u64,
    payload: [u8; 32],
}

/// Writes a token file, token by token.
#[derive(Debug)]
pub(super) struct Writer {
    file: BufWriter<NamedTempFile>,
    ends: BufWriter<File>,
    hasher: blake3::Hasher,
    bytes: Vec<u8>,
    header: Header,
    ended: u64,
}

/// The folder of the cache when none is given: `$XDG_CACHE_HOME/zenflow/tokens`, else `~/.cache/zenflow/tokens`.
pub(super) fn default_folder() -> PathBuf {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    absolute("XDG_CACHE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".cache")))
        .unwrap_or_else(std::env::temp_dir)
        .join("zenflow")
        .join("tokens")
}

impl Writer {
    /// Starts a file in `folder`, which is made if need be. `limit` is one more than the largest id that will come.
    pub(super) fn new(folder: &Path, masked: bool, limit: usize) -> Result<Self> {
        let failed = |e| unwritable(folder, &e);
        std::fs::create_dir_all(folder).map_err(failed)?;
        let mut file = tempfile::Builder::new().prefix(".partial-").tempfile_in(folder).map_err(failed)?;
        file.write_all(&[0; HEADER as usize]).map_err(failed)?;
        let ends = tempfile::tempfile_in(folder).map_err(failed)?;
        let small = if masked { 1 << 15 } else { 1 << 16 };
        Ok(Self {
            file: BufWriter::with_capacity(1 << 16, file),
            ends: BufWriter::new(ends),
            hasher: blake3::Hasher::new(),
            bytes: Vec::new(),
            header: Header {
                width: if limit <= small { Width::Two } else { Width::Four },
                masked,
                largest: 0,
                tokens: 0,
                documents: 0,
                skipped: 0,
                payload: [0; 32],
            },
            ended: 0,
        })
    }

    /// Appends tokens of the current document. Those that do not count need a file with a mask.
    pub(super) fn push(&mut self, tokens: impl IntoIterator<Item = (u32, bool)>) -> Result<()> {
        let Header { width, masked, .. } = self.header;
        let mask = if masked { width.mask() } else { 0 };
        self.bytes.clear();
        for (id, counts) in tokens {
            debug_assert!(counts || masked);
            self.header.largest = self.header.largest.max(id);
            self.header.tokens += 1;
            let stored = if counts { id } else { id | mask };
            self.bytes.extend_from_slice(&stored.to_le_bytes()[..width.bytes()]);
        }
        self.hasher.update(&self.bytes);
        self.file.write_all(&self.bytes).map_err(|e| self.failed(&e))
    }

    /// Whether the current document has a token.
    pub(super) fn started(&self) -> bool {
        self.ended < self.header.tokens
    }

    /// Ends the current document; one without tokens is counted as skipped.
    pub(super) fn end_document(&mut self) -> Result<()> {
        if !self.started() {
            self.header.skipped += 1;
            return Ok(());
        }
        self.ended = self.header.tokens;
        self.header.documents += 1;
        self.ends.write_all(&self.ended.to_le_bytes()).map_err(|e| self.failed(&e))
    }

    /// Completes the file under its final name.
    pub(super) fn finish(mut self, path: &Path) -> Result<()> {
        self.complete(path).map_err(|e| self.failed(&e))
    }

    fn complete(&mut self, path: &Path) -> std::io::Result<()> {
        self.ends.flush()?;
        let ends = self.ends.get_mut();
        ends.seek(SeekFrom::Start(0))?;
        let mut ends = BufReader::new(ends);
        let mut block = vec![0; 1 << 16];
        loop {
            let read = ends.read(&mut block)?;
            if read == 0 {
                break;
            }
            self.hasher.update(&block[..read]);
            self.file.write_all(&block[..read])?;
        }
        self.header.payload = *self.hasher.finalize().as_bytes();
        self.file.flush()?;
        let file = self.file.get_mut().as_file_mut();
        file.seek(SeekFrom::Start(0))?;
        file.write_all(&self.header.encode())?;
        file.sync_all()?;
        let temporary = self.file.get_ref().path();
        std::fs::rename(temporary, path)?;
        // The rename is safe only when the folder is on disk, too.
        if let Some(folder) = path.parent() {
            File::open(folder)?.sync_all()?;
        }
        Ok(())
    }

    fn failed(&self, error: &std::io::Error) -> Error {
        let folder = self.file.get_ref().path().parent();
        unwritable(folder.unwrap_or(Path::new(".")), error)
    }
}

impl Header {
    /// Reads and checks a whole token file of `bytes`. `None` when it is not one, or damaged.
    pub(super) fn check(bytes: &[u8]) -> Option<Self> {
        let (header, payload) = bytes.split_at_checked(HEADER as usize)?;
        let header = Self::decode(header)?;
        let size =
            header.tokens.checked_mul(header.width.bytes() as u64)?.checked_add(header.documents.checked_mul(8)?)?;
        let whole = size == payload.len() as u64 && header.payload == *blake3::hash(payload).as_bytes();
        whole.then_some(header)
    }

    fn encode(&self) -> [u8; HEADER as usize] {
        let mut bytes = Vec::with_capacity(HEADER as usize);
        bytes.extend_from_slice(MAGIC);
        for value in [VERSION, self.width.bytes() as u32, u32::from(self.masked), self.largest] {
            bytes.extend_from_slice(&value.to_le_bytes());
        }
        for value in [self.tokens, self.documents, self.skipped] {
            bytes.extend_from_slice(&value.to_le_bytes());
        }
        bytes.extend_from_slice(&self.payload);
        bytes.resize(HASHED, 0);
        let hash = blake3::hash(&bytes);
        bytes.extend_from_slice(hash.as_bytes());
        bytes.try_into().expect("96 bytes and a hash of 32")
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (content, hash) = bytes.split_at(HASHED);
        if !content.starts_with(MAGIC) || blake3::hash(content).as_bytes() != hash {
            return None;
        }
        let u32_at = |at: usize| Some(u32::from_le_bytes(content[at..at + 4].try_into().ok()?));
        let u64_at = |at: usize| Some(u64::from_le_bytes(content[at..at + 8].try_into().ok()?));
        if u32_at(8)? != VERSION {
            return None;
        }
        Some(Self {
            width: Width::new(u32_at(12)?)?,
            masked: u32_at(16)? != 0,
            largest: u32_at(20)?,
            tokens: u64_at(24)?,
            documents: u64_at(32)?,
            skipped: u64_at(40)?,
            payload: content[48..80].try_into().ok()?,
        })
    }
}

fn unwritable(folder: &Path, error: &std::io::Error) -> Error {
    Error::Input(format!(
        "cannot write the token cache in {}: {error}; set data.cache to a folder with room",
        folder.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(folder: &Path) -> Vec<u8> {
        let mut writer = Writer::new(folder, true, 1 << 15).unwrap();
        writer.push([(5, true), (32_767, false)]).unwrap();
        writer.end_document().unwrap();
        writer.end_document().unwrap();
        writer.push([(6, true)]).unwrap();
        writer.end_document().unwrap();
        let path = folder.join("x.tokens");
        writer.finish(&path).unwrap();
        std::fs::read(path).unwrap()
    }

    #[test]
    fn says_what_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let bytes = written(folder.path());
        let header = Header::check(&bytes).unwrap();
        assert_eq!(header.width, Width::Two);
        assert_eq!((header.tokens, header.documents, header.skipped), (3, 2, 1));
        assert_eq!(header.largest, 32_767);
        assert_eq!(bytes[128..134], [5, 0, 0xff, 0xff, 6, 0]);
        assert_eq!(bytes.len(), 128 + 6 + 16);
        let names = std::fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(names, 1, "no temporary file is left");
    }

    #[test]
    fn any_damage_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let bytes = written(folder.path());
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 4;
            assert_eq!(Header::check(&damaged), None, "byte {at}");
            assert_eq!(Header::check(&bytes[..at]), None, "{at} bytes");
        }
        assert_eq!(Header::check(&[&bytes[..], &[0]].concat()), None);
    }

    #[test]
    fn large_vocabularies_take_four_bytes() {
        let folder = tempfile::tempdir().unwrap();
        for (masked, limit, width) in [
            (false, 65_536, Width::Two),
            (false, 65_537, Width::Four),
            (true, 32_768, Width::Two),
            (true, 32_769, Width::Four),
        ] {
            let writer = Writer::new(folder.path(), masked, limit).unwrap();
            assert_eq!(writer.header.width, width);
        }
    }
}
