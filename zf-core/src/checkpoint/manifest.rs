//! `manifest.json`: what lies where in a checkpoint.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::state::{DTypeName, Meta, numel};

/// The manifest's file name.
pub const MANIFEST: &str = "manifest.json";

/// What the manifest calls itself.
pub const FORMAT: &str = "zenflow-checkpoint";

/// The format's number. A reader refuses newer ones; within a number, fields it does not know are passed over.
pub const VERSION: u64 = 1;

/// One piece of a logical tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Name of the parameter.
    pub name: String,
    /// Kind (`master`, `exp_avg`, `parameter`, ...).
    pub kind: String,
    /// Type of the elements.
    pub dtype: DTypeName,
    /// Shape of the logical tensor.
    pub shape: Vec<i64>,
    /// First index of the box in each dimension; so far all zero.
    pub offset: Vec<i64>,
    /// Size of the box in each dimension; so far the shape.
    pub size: Vec<i64>,
    /// First element of the piece, in row-major order of the box.
    pub start: usize,
    /// End of the piece.
    pub end: usize,
    /// File in the checkpoint's folder.
    pub file: String,
    /// Name of the tensor in the file.
    pub key: String,
    /// xxh3 (64 bits) of the bytes, hexadecimal.
    pub xxh3: String,
}

/// One rank's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Who wrote it.
    pub rank: usize,
    /// Its name in the checkpoint's folder.
    pub file: String,
    /// Its size.
    pub bytes: u64,
}

/// The whole manifest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) format: String,
    pub(super) version: u64,
    pub(super) attempt: String,
    pub(super) world: usize,
    pub(super) meta: Meta,
    pub(super) files: Vec<FileEntry>,
    pub(super) entries: Vec<Entry>,
    /// blake3 of the compact JSON of this manifest with this field empty.
    pub(super) blake3: String,
}

/// What a rank other than 0 leaves for rank 0 to merge.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) attempt: String,
    pub(super) step: u64,
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) outcome: Outcome,
}

/// Whether the rank wrote its file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Outcome {
    Written { file: FileEntry, entries: Vec<Entry> },
    Failed { reason: String },
}

/// A logical tensor and the entries that cover it, in order; without those of no elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Logical {
    pub(super) dtype: DTypeName,
    pub(super) shape: Vec<i64>,
    pub(super) numel: usize,
    pub(super) entries: Vec<usize>,
}

/// Logical tensors by (name, kind).
pub(super) type Index = BTreeMap<(String, String), Logical>;

impl Manifest {
    /// The text of the file, sealed with its checksum.
    pub(super) fn to_text(&self) -> Result<String, String> {
        let mut value = serde_json::to_value(self).map_err(|e| e.to_string())?;
        value["blake3"] = serde_json::Value::String(seal(&value));
        serde_json::to_string_pretty(&value).map_err(|e| e.to_string())
    }

    /// Reads and checks the text of the file; the error says what is wrong, without the file's name.
    pub(super) fn from_text(text: &[u8]) -> Result<Self, String> {
        let value: serde_json::Value = serde_json::from_slice(text).map_err(|e| format!("is not JSON: {e}"))?;
        let format = value.get("format").and_then(|v| v.as_str());
        if format != Some(FORMAT) {
            return Err(format!(
                "is not of a checkpoint of zenflow: expected \"format\": \"{FORMAT}\", found {}",
                format.map_or("none".into(), |f| format!("\"{f}\""))
            ));
        }
        match value.get("version").and_then(serde_json::Value::as_u64) {
            Some(version) if version > VERSION => {
                return Err(format!(
                    "has format version {version}, written by a newer program; this one reads up to {VERSION}"
                ));
            }
            Some(1..=VERSION) => {}
            _ => return Err("names no format version".into()),
        }
        let found = value.get("blake3").and_then(|v| v.as_str()).unwrap_or_default();
        let expected = seal(&value);
        if found != expected {
            return Err(format!("is damaged: its blake3 should be {expected}, found \"{found}\""));
        }
        serde_json::from_value(value).map_err(|e| format!("is incomplete: {e}"))
    }
}

/// blake3 of the compact JSON of the manifest with an empty checksum.
fn seal(manifest: &serde_json::Value) -> String {
    let mut bare = manifest.clone();
    bare["blake3"] = serde_json::Value::String(String::new());
    blake3::hash(bare.to_string().as_bytes()).to_hex().to_string()
}

/// Sorts entries into logical tensors and checks that each is covered exactly.
pub(super) fn index(entries: &[Entry]) -> Result<Index, String> {
    let mut index = Index::new();
    for (number, entry) in entries.iter().enumerate() {
        let what = format!("`{}` ({})", entry.name, entry.kind);
        let count = numel(&entry.shape).ok_or_else(|| format!("{what}: bad shape {:?}", entry.shape))?;
        if entry.offset.iter().any(|&o| o != 0) || entry.offset.len() != entry.shape.len() || entry.size != entry.shape
        {
            return Err(format!(
                "{what}: a box at {:?} of size {:?} within shape {:?}; this version reads only boxes that are the \
                 whole tensor",
                entry.offset, entry.size, entry.shape
            ));
        }
        if entry.start > entry.end || entry.end > count {
            return Err(format!("{what}: range {}..{} lies outside its {count} elements", entry.start, entry.end));
        }
        let logical = index.entry((entry.name.clone(), entry.kind.clone())).or_insert_with(|| Logical {
            dtype: entry.dtype,
            shape: entry.shape.clone(),
            numel: count,
            entries: Vec::new(),
        });
        if logical.shape != entry.shape || logical.dtype != entry.dtype {
            return Err(format!(
                "{what}: pieces disagree: {} {:?} and {} {:?}",
                logical.dtype.name(),
                logical.shape,
                entry.dtype.name(),
                entry.shape
            ));
        }
        if entry.start < entry.end {
            logical.entries.push(number);
        }
    }
    for ((name, kind), logical) in &mut index {
        logical.entries.sort_by_key(|&number| entries[number].start);
        let mut covered = 0;
        for &number in &logical.entries {
            let entry = &entries[number];
            if entry.start > covered {
                return Err(format!(
                    "`{name}` ({kind}): elements {covered}..{} of {} are in no file",
                    entry.start, logical.numel
                ));
            }
            if entry.start < covered {
                return Err(format!(
                    "`{name}` ({kind}): elements {}..{} are in two files, the second {}",
                    entry.start,
                    covered.min(entry.end),
                    entry.file
                ));
            }
            covered = entry.end;
        }
        if covered < logical.numel {
            return Err(format!(
                "`{name}` ({kind}): elements {covered}..{} of {} are in no file",
                logical.numel, logical.numel
            ));
        }
    }
    Ok(index)
}
