//! One rank's safetensors file.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::Path;

use safetensors::tensor::Metadata;
use xxhash_rust::xxh3::xxh3_64;

use super::manifest::{Entry, FileEntry};
use super::state::{Piece, RankState, numel};
use crate::{Error, Result};

/// The longest header that is read, as in the safetensors crate.
const MAX_HEADER: u64 = 100_000_000;

/// `rank-00001-of-00004.safetensors`.
pub(super) fn file_name(rank: usize, world: usize) -> String {
    format!("rank-{rank:05}-of-{world:05}.safetensors")
}

/// The hexadecimal xxh3 of `bytes`.
pub(super) fn checksum(bytes: &[u8]) -> String {
    format!("{:016x}", xxh3_64(bytes))
}

/// Writes and syncs the file of a rank in `folder`. The folder is hidden until the checkpoint is whole, so the file needs
/// no temporary name.
pub(super) fn write(folder: &Path, state: &RankState) -> Result<(FileEntry, Vec<Entry>)> {
    let file = file_name(state.rank, state.world);
    let path = folder.join(&file);
    let mut entries = Vec::with_capacity(state.pieces.len());
    let mut infos = Vec::with_capacity(state.pieces.len());
    let mut keys = BTreeSet::new();
    let mut end = 0;
    for piece in &state.pieces {
        piece.check()?;
        let start = end;
        end += piece.data.len();
        let key = key(piece);
        if !keys.insert(key.clone()) {
            return Err(Error::Engine(format!(
                "checkpoint of `{}` ({}): rank {} gives elements {}..{} twice",
                piece.name, piece.kind, state.rank, piece.range.start, piece.range.end
            )));
        }
        infos.push((
            key.clone(),
            safetensors::tensor::TensorInfo {
                dtype: piece.dtype.safetensors(),
                shape: shape(piece),
                data_offsets: (start, end),
            },
        ));
        entries.push(Entry {
            name: piece.name.clone(),
            kind: piece.kind.clone(),
            dtype: piece.dtype,
            shape: piece.shape.clone(),
            offset: vec![0; piece.shape.len()],
            size: piece.shape.clone(),
            start: piece.range.start,
            end: piece.range.end,
            file: file.clone(),
            key,
            xxh3: checksum(&piece.data),
        });
    }
    let metadata = Metadata::new(None, infos)
        .and_then(|metadata| Ok(serde_json::to_vec(&metadata)?))
        .map_err(|e| Error::Engine(format!("checkpoint of rank {}: {e}", state.rank)))?;
    // The format pads the header with spaces, so that the data are aligned.
    let padded = metadata.len().next_multiple_of(8);
    let bytes = 8 + padded as u64 + end as u64;

    let write = || -> std::io::Result<()> {
        let mut out = BufWriter::new(File::create(&path)?);
        out.write_all(&(padded as u64).to_le_bytes())?;
        out.write_all(&metadata)?;
        out.write_all(&vec![b' '; padded - metadata.len()])?;
        for piece in &state.pieces {
            out.write_all(&piece.data)?;
        }
        out.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()
    };
    write().map_err(|e| Error::io(&path, e))?;
    let rank = state.rank;
    Ok((FileEntry { rank, file, bytes }, entries))
}

/// The header of a file: where its data begin, and what it says of each tensor.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) data: u64,
    pub(super) metadata: Metadata,
}

impl Header {
    /// Reads the header of `path`, whose size is `bytes`. The error says what is wrong, without the file's name.
    pub(super) fn read(path: &Path, bytes: u64) -> Result<Self, String> {
        let mut file = File::open(path).map_err(|e| e.to_string())?;
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(|e| format!("has no safetensors header: {e}"))?;
        let length = u64::from_le_bytes(length);
        let data = length.saturating_add(8);
        if length > MAX_HEADER || data > bytes {
            return Err(format!("has a damaged safetensors header: length {length} in a file of {bytes} bytes"));
        }
        let mut text = vec![0; usize::try_from(length).map_err(|e| e.to_string())?];
        file.read_exact(&mut text).map_err(|e| format!("has a truncated safetensors header: {e}"))?;
        let metadata: Metadata =
            serde_json::from_slice(&text).map_err(|e| format!("has a damaged safetensors header: {e}"))?;
        if data + metadata.data_len() as u64 != bytes {
            return Err(format!(
                "has a safetensors header for {} bytes of data, found {}",
                metadata.data_len(),
                bytes - data
            ));
        }
        Ok(Self { data, metadata })
    }
}

/// A name that is unique among the pieces of all ranks: `master:w`, or `master:w[4..8]` for a part.
fn key(piece: &Piece) -> String {
    if whole(piece) {
        format!("{}:{}", piece.kind, piece.name)
    } else {
        let range = &piece.range;
        format!("{}:{}[{}..{}]", piece.kind, piece.name, range.start, range.end)
    }
}

/// Whole tensors keep their shape in the file, parts are flat.
fn shape(piece: &Piece) -> Vec<usize> {
    if whole(piece) {
        piece.shape.iter().map(|&d| usize::try_from(d).unwrap_or(0)).collect()
    } else {
        vec![piece.range.len()]
    }
}

fn whole(piece: &Piece) -> bool {
    piece.range.start == 0 && Some(piece.range.end) == numel(&piece.shape)
}
