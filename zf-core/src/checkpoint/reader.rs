//! Opening, checking and reading a checkpoint.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use xxhash_rust::xxh3::Xxh3;

use super::hash::StateHasher;
use super::manifest::{Entry, FileEntry, Index, Logical, MANIFEST, Manifest, index};
use super::shard::Header;
use super::state::{DTypeName, MASTER, Meta, PARAMETER};
use crate::{Error, Result};

/// Bytes read at once: a multiple of every element size, small enough for any machine.
const CHUNK: usize = 1 << 20;

/// One logical tensor of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// Name of the parameter.
    pub name: &'a str,
    /// Kind (`master`, `exp_avg`, `parameter`, ...).
    pub kind: &'a str,
    /// Type of the elements.
    pub dtype: DTypeName,
    /// Shape of the logical tensor.
    pub shape: &'a [i64],
    /// Number of elements.
    pub numel: usize,
}

/// An open checkpoint. It holds the manifest, no tensors: reads go to the files, in chunks, so that any number of
/// threads may read at once and none needs more memory than what it asks for.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Manifest,
    index: Index,
    /// Where the bytes of each entry of the manifest begin in its file.
    begins: Vec<u64>,
}

impl Checkpoint {
    /// Opens the folder of one checkpoint. Checks everything but the tensors' bytes: the manifest and its checksum, that
    /// all files exist with their sizes, that their headers agree with the manifest, and that the pieces cover each
    /// logical tensor exactly.
    ///
    /// # Errors
    /// [`Error::Input`] naming the file and what is wrong with it.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join(MANIFEST);
        let text = fs::read(&path).map_err(|e| {
            if !folder.is_dir() {
                return Error::Input(format!(
                    "{}: expected a checkpoint, but there is no such folder",
                    folder.display()
                ));
            }
            match e.kind() {
                std::io::ErrorKind::NotFound => {
                    Error::Input(format!("{}: not a checkpoint: it has no {MANIFEST}", folder.display()))
                }
                _ => Error::io(&path, e),
            }
        })?;
        let manifest = Manifest::from_text(&text).map_err(|what| Error::Input(format!("{} {what}", path.display())))?;
        Self::with_manifest(folder, manifest)
    }

    /// The same with a manifest that is not written yet.
    pub(super) fn with_manifest(folder: &Path, manifest: Manifest) -> Result<Self> {
        let wrong = |what: String| Error::Input(format!("{}: damaged checkpoint: {what}", folder.display()));
        let index = index(&manifest.entries).map_err(wrong)?;
        let mut headers = BTreeMap::new();
        for file in &manifest.files {
            headers.insert(file.file.as_str(), open_file(folder, file).map_err(wrong)?);
        }
        let begins =
            manifest.entries.iter().map(|entry| locate(entry, &headers).map_err(wrong)).collect::<Result<_>>()?;
        Ok(Self { folder: folder.to_path_buf(), manifest, index, begins })
    }

    pub(super) fn manifest_mut(&mut self) -> &mut Manifest {
        &mut self.manifest
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// Everything that is no tensor.
    pub fn meta(&self) -> &Meta {
        &self.manifest.meta
    }

    /// Number of ranks that wrote it.
    pub fn world(&self) -> usize {
        self.manifest.world
    }

    /// Its files, by rank.
    pub fn files(&self) -> &[FileEntry] {
        &self.manifest.files
    }

    /// Its pieces, by rank.
    pub fn entries(&self) -> &[Entry] {
        &self.manifest.entries
    }

    /// Its logical tensors in the order of names, then kinds.
    pub fn tensors(&self) -> impl Iterator<Item = TensorInfo<'_>> {
        self.index.iter().map(|((name, kind), logical)| TensorInfo {
            name,
            kind,
            dtype: logical.dtype,
            shape: &logical.shape,
            numel: logical.numel,
        })
    }

    /// One logical tensor, if the checkpoint has it.
    pub fn tensor(&self, name: &str, kind: &str) -> Option<TensorInfo<'_>> {
        let key = (name.to_owned(), kind.to_owned());
        let ((name, kind), logical) = self.index.get_key_value(&key)?;
        Some(TensorInfo { name, kind, dtype: logical.dtype, shape: &logical.shape, numel: logical.numel })
    }

    /// Reads all tensors and compares the checksums of their pieces.
    ///
    /// # Errors
    /// [`Error::Input`] naming the first tensor that is damaged, its elements and file.
    pub fn verify(&self) -> Result<()> {
        for (number, entry) in self.manifest.entries.iter().enumerate() {
            let mut hasher = Xxh3::new();
            self.stream_entry(number, 0..entry.end - entry.start, &mut |bytes| {
                hasher.update(bytes);
            })?;
            let found = format!("{:016x}", hasher.digest());
            if found != entry.xxh3 {
                return Err(Error::Input(format!(
                    "{}: damaged: elements {}..{} of `{}` ({}) have checksum {found}, expected {}; use an earlier \
                     checkpoint",
                    self.folder.join(&entry.file).display(),
                    entry.start,
                    entry.end,
                    entry.name,
                    entry.kind,
                    entry.xxh3
                )));
            }
        }
        Ok(())
    }

    /// The state hash of what the files hold, with the counts of [`Checkpoint::meta`].
    ///
    /// # Errors
    /// [`Error::Io`] when a file cannot be read.
    pub fn state_hash(&self) -> Result<String> {
        let mut hasher = StateHasher::new();
        for ((name, kind), logical) in &self.index {
            if StateHasher::includes(kind) {
                let mut tensor = StateHasher::tensor();
                self.stream(logical, 0..logical.numel, &mut |bytes| {
                    tensor.update(bytes);
                })?;
                hasher.add_tensor(name, kind, &tensor);
            }
        }
        for (name, &count) in &self.manifest.meta.counts {
            hasher.add_count(name, count);
        }
        Ok(hasher.finish())
    }

    /// Reads elements `range` (row-major) of a floating-point tensor as float32, from whichever pieces hold them.
    ///
    /// # Errors
    /// [`Error::Input`] for a tensor, kind, range or type the checkpoint does not have; [`Error::Engine`] when `out` has
    /// another length than the range; [`Error::Io`] when a file cannot be read.
    pub fn read_f32(&self, name: &str, kind: &str, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        let logical = self.find(name, kind, &range)?;
        if range.len() != out.len() {
            return Err(Error::Engine(format!(
                "`{name}` ({kind}): {} elements asked for, room for {}",
                range.len(),
                out.len()
            )));
        }
        let convert: fn(&[u8], &mut [f32]) = match logical.dtype {
            DTypeName::F32 => |bytes, out| {
                for (value, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *value = f32::from_le_bytes(*b);
                }
            },
            DTypeName::BF16 => |bytes, out| {
                for (value, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *value = bf16::from_le_bytes(*b).to_f32();
                }
            },
            DTypeName::F16 => |bytes, out| {
                for (value, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *value = f16::from_le_bytes(*b).to_f32();
                }
            },
            DTypeName::F64 | DTypeName::I64 | DTypeName::U8 => {
                return Err(Error::Input(format!(
                    "{}: `{name}` ({kind}) is {}, expected F32, BF16 or F16",
                    self.folder.display(),
                    logical.dtype.name()
                )));
            }
        };
        let size = logical.dtype.size();
        let mut rest = out;
        self.stream(logical, range, &mut |bytes| {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(bytes.len() / size);
            convert(bytes, now);
            rest = later;
        })
    }

    /// Reads the bytes of elements `range` in the tensor's own type.
    ///
    /// # Errors
    /// As [`Checkpoint::read_f32`].
    pub fn read_bytes(&self, name: &str, kind: &str, range: Range<usize>) -> Result<Vec<u8>> {
        let logical = self.find(name, kind, &range)?;
        let mut out = Vec::with_capacity(range.len() * logical.dtype.size());
        self.stream(logical, range, &mut |bytes| {
            out.extend_from_slice(bytes);
        })?;
        Ok(out)
    }

    /// Shape and float32 values of a whole parameter: its master, or the parameter itself where it is frozen.
    ///
    /// # Errors
    /// As [`Checkpoint::read_f32`].
    pub fn read_tensor_f32(&self, name: &str) -> Result<(Vec<i64>, Vec<f32>)> {
        let info = [MASTER, PARAMETER].iter().find_map(|kind| self.tensor(name, kind)).ok_or_else(|| {
            Error::Input(format!("{}: the checkpoint has no parameter `{name}`", self.folder.display()))
        })?;
        let mut values = vec![0.0; info.numel];
        self.read_f32(name, info.kind, 0..info.numel, &mut values)?;
        Ok((info.shape.to_vec(), values))
    }

    fn find(&self, name: &str, kind: &str, range: &Range<usize>) -> Result<&Logical> {
        let logical = self.index.get(&(name.to_owned(), kind.to_owned())).ok_or_else(|| {
            let kinds: Vec<&str> = self.tensors().filter(|info| info.name == name).map(|info| info.kind).collect();
            Error::Input(if kinds.is_empty() {
                format!("{}: the checkpoint has no parameter `{name}`", self.folder.display())
            } else {
                format!(
                    "{}: the checkpoint has no {kind} of `{name}`, only {}",
                    self.folder.display(),
                    kinds.join(", ")
                )
            })
        })?;
        if range.start > range.end || range.end > logical.numel {
            return Err(Error::Input(format!(
                "{}: `{name}` ({kind}) has {} elements, asked for {range:?}",
                self.folder.display(),
                logical.numel
            )));
        }
        Ok(logical)
    }

    /// Hands the bytes of elements `range` to `take`, in order, whole elements at a time.
    fn stream(&self, logical: &Logical, range: Range<usize>, take: &mut dyn FnMut(&[u8])) -> Result<()> {
        let entries = &self.manifest.entries;
        let first = logical.entries.partition_point(|&number| entries[number].end <= range.start);
        for &number in &logical.entries[first..] {
            let entry = &entries[number];
            if entry.start >= range.end {
                break;
            }
            let start = range.start.max(entry.start) - entry.start;
            let end = range.end.min(entry.end) - entry.start;
            self.stream_entry(number, start..end, take)?;
        }
        Ok(())
    }

    /// The same within one piece.
    fn stream_entry(&self, number: usize, range: Range<usize>, take: &mut dyn FnMut(&[u8])) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let entry = &self.manifest.entries[number];
        let size = entry.dtype.size();
        let path = self.folder.join(&entry.file);
        let file = File::open(&path).map_err(|e| Error::io(&path, e))?;
        let mut position = self.begins[number] + (range.start * size) as u64;
        let mut left = range.len() * size;
        let mut buffer = vec![0; left.min(CHUNK)];
        while left > 0 {
            let now = left.min(CHUNK);
            file.read_exact_at(&mut buffer[..now], position).map_err(|e| Error::io(&path, e))?;
            take(&buffer[..now]);
            position += now as u64;
            left -= now;
        }
        Ok(())
    }
}

/// Checks a file's presence, size and header.
fn open_file(folder: &Path, file: &FileEntry) -> Result<Header, String> {
    // A manifest from elsewhere must not lead out of its folder.
    if Path::new(&file.file).file_name() != Some(file.file.as_ref()) {
        return Err(format!("`{}` is no file name", file.file));
    }
    let path = folder.join(&file.file);
    let found = fs::metadata(&path)
        .map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => format!("{} is missing", file.file),
            _ => format!("{}: {e}", file.file),
        })?
        .len();
    if found != file.bytes {
        let what = if found < file.bytes { "truncated" } else { "too long" };
        return Err(format!("{} is {what}: expected {} bytes, found {found}", file.file, file.bytes));
    }
    Header::read(&path, found).map_err(|what| format!("{} {what}", file.file))
}

/// Where the bytes of an entry begin in its file.
fn locate(entry: &Entry, headers: &BTreeMap<&str, Header>) -> Result<u64, String> {
    let header = headers.get(entry.file.as_str()).ok_or_else(|| {
        format!("`{}` ({}) lies in {}, which the manifest does not list", entry.name, entry.kind, entry.file)
    })?;
    let info =
        header.metadata.info(&entry.key).ok_or_else(|| format!("{} has no tensor `{}`", entry.file, entry.key))?;
    let elements = info.shape.iter().try_fold(1usize, |product, &d| product.checked_mul(d));
    if info.dtype != entry.dtype.safetensors() || elements != Some(entry.end - entry.start) {
        return Err(format!(
            "{}: tensor `{}` is {} {:?}, the manifest says {} and {} elements",
            entry.file,
            entry.key,
            info.dtype,
            info.shape,
            entry.dtype.name(),
            entry.end - entry.start
        ));
    }
    Ok(header.data + info.data_offsets.0 as u64)
}
