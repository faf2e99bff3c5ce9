//! Checkpoints: logical tensors by name, written by any number of ranks and read by any other number.
//!
//! # Format
//!
//! A checkpoint is a folder `step-N` with one safetensors file for each rank that wrote it and `manifest.json`, which is
//! written last. The manifest names every piece (logical tensor and kind, dtype, global shape, box of offsets and sizes,
//! flat range within the box, file, key in the file, xxh3 of the bytes), the size of every file, and the [`Meta`] of the
//! run; a blake3 protects the manifest itself. While it is being written the folder has a hidden name with the attempt in
//! it, and gets its own name when everything is synced, so a folder `step-N` is whole unless somebody damaged it.
//!
//! # Use
//!
//! The engine copies its state into [`RankState`], one for each rank, and hands them to [`Writer`] or, beside the
//! training, to [`AsyncWriter`]. Ranks need no collective: rank 0's writer waits for the parts of the others in the file
//! system. [`Checkpoint`] opens a folder, checks it and reads any range of any tensor.
//!
//! ```
//! use zf_core::checkpoint::{Checkpoint, MASTER, Meta, Options, Piece, RankState, Writer, newest_whole};
//!
//! let folder = tempfile::tempdir()?;
//! let root = folder.path().join("checkpoints");
//! let mut writer = Writer::new(&root, 0, Options::default())?;
//! let pieces = vec![Piece::f32("w", MASTER, &[2, 2], 0..4, &[1.0, 2.0, 3.0, 4.0])];
//! let meta = Meta { step: 7, ..Meta::default() };
//! writer.save(RankState { step: 7, rank: 0, world: 1, pieces }, Some(meta))?;
//!
//! let (step, path) = newest_whole(&root)?.expect("one was just written");
//! assert_eq!(step, 7);
//! let checkpoint = Checkpoint::open(&path)?;
//! checkpoint.verify()?;
//! let mut middle = [0.0; 2];
//! checkpoint.read_f32("w", MASTER, 1..3, &mut middle)?;
//! assert_eq!(middle, [2.0, 3.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod background;
mod folder;
mod hash;
mod manifest;
mod reader;
mod shard;
mod state;
#[cfg(test)]
mod tests;
mod writer;

pub use background::AsyncWriter;
pub use folder::{list, newest_whole, set_aside_after, step_path};
pub use hash::{StateHasher, TensorHash};
pub use manifest::{Entry, FORMAT, FileEntry, MANIFEST, VERSION};
pub use reader::{Checkpoint, TensorInfo};
pub use state::{AUXILIARY, Best, DTypeName, MASTER, Meta, PARAMETER, Piece, RankState};
pub use writer::{Options, Writer, new_attempt};
