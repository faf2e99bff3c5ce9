//! The safetensors files of a folder, memory-mapped.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use tch::{Kind, Tensor};
use zf_core::{Error, Result};

use super::unreadable;

/// Where one tensor lies.
#[derive(Debug, Clone)]
struct Entry {
    shard: usize,
    dtype: Dtype,
    shape: Vec<i64>,
    bytes: Range<usize>,
}

/// All tensors of a folder by name. Nothing is read before it is asked for.
#[derive(Debug)]
pub(super) struct Shards {
    files: Vec<(PathBuf, Mmap)>,
    entries: BTreeMap<String, Entry>,
}

impl Shards {
    /// Opens `model.safetensors`, or the files that `model.safetensors.index.json` names.
    pub(super) fn open(folder: &Path) -> Result<Self> {
        let mut shards = Self { files: Vec::new(), entries: BTreeMap::new() };
        let whole = folder.join("model.safetensors");
        if whole.exists() {
            shards.add(whole)?;
            return Ok(shards);
        }
        let index = folder.join("model.safetensors.index.json");
        if !index.exists() {
            return Err(no_weights(folder));
        }
        let places = read_index(&index)?;
        let mut files: Vec<&String> = places.values().collect();
        files.sort_unstable();
        files.dedup();
        for file in files {
            // Names of an index are file names; anything else could lead out of the folder.
            if Path::new(file).file_name().is_none_or(|name| name != file.as_str()) {
                return Err(Error::Input(format!("{}: `{file}` is no plain file name", index.display())));
            }
            shards.add(folder.join(file))?;
        }
        for (name, file) in &places {
            let found = shards.entries.get(name).map(|entry| &shards.files[entry.shard].0);
            if found.is_none_or(|path| !path.ends_with(file)) {
                return Err(Error::Input(format!(
                    "{}: tensor `{name}` should be in {file} and is not; fetch the folder again",
                    index.display()
                )));
            }
        }
        Ok(shards)
    }

    fn add(&mut self, path: PathBuf) -> Result<()> {
        let file = File::open(&path).map_err(|error| unreadable(&path, &error))?;
        // SAFETY: the mapping is only read. Changing the file meanwhile would change values or end the process, as for
        // every program that maps its input; files that this project writes are replaced by renaming, never in place.
        let map = unsafe { Mmap::map(&file) }.map_err(|error| unreadable(&path, &error))?;
        let damaged = |reason: &dyn std::fmt::Display| {
            Error::Input(format!("{}: not a whole safetensors file ({reason}); fetch it again", path.display()))
        };
        // This also checks that offsets are in order and that the file is as long as they say.
        let (header, metadata) = SafeTensors::read_metadata(&map).map_err(|error| damaged(&error))?;
        let start = 8 + header;
        for (name, info) in metadata.tensors() {
            let (first, end) = info.data_offsets;
            let shape = info.shape.iter().map(|&dim| i64::try_from(dim)).collect::<Result<Vec<_>, _>>();
            let shape = shape.map_err(|_| damaged(&format!("tensor `{name}` has shape {:?}", info.shape)))?;
            let entry = Entry { shard: self.files.len(), dtype: info.dtype, shape, bytes: start + first..start + end };
            if self.entries.insert(name.clone(), entry).is_some() {
                return Err(Error::Input(format!("{}: tensor `{name}` is in two files of the folder", path.display())));
            }
        }
        self.files.push((path, map));
        Ok(())
    }

    /// All names, sorted.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// The shape of a tensor that is there.
    pub(super) fn shape(&self, name: &str) -> Option<&[i64]> {
        self.entries.get(name).map(|entry| entry.shape.as_slice())
    }

    /// A copy of a tensor on the CPU, in the type of the file.
    pub(super) fn tensor(&self, name: &str) -> Result<Tensor> {
        let entry = self.entries.get(name).ok_or_else(|| Error::Input(format!("tensor `{name}` is missing")))?;
        let (path, map) = &self.files[entry.shard];
        let kind = match entry.dtype {
            Dtype::F32 => Kind::Float,
            Dtype::F16 => Kind::Half,
            Dtype::BF16 => Kind::BFloat16,
            other => {
                return Err(Error::Input(format!(
                    "{}: tensor `{name}` has type {other:?}; supported are F32, F16 and BF16",
                    path.display()
                )));
            }
        };
        // libtorch copies the raw bytes: little-endian, as safetensors prescribes, on every platform it runs on.
        Ok(Tensor::f_from_data_size(&map[entry.bytes.clone()], &entry.shape, kind)?)
    }

    /// The error for a tensor of a type that cannot be loaded, if it is one.
    pub(super) fn loadable(&self, name: &str) -> Option<String> {
        let entry = self.entries.get(name)?;
        let known = matches!(entry.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16);
        (!known).then(|| format!("{name} has type {:?}; supported are F32, F16 and BF16", entry.dtype))
    }
}

fn read_index(path: &Path) -> Result<BTreeMap<String, String>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let text = std::fs::read(path).map_err(|error| unreadable(path, &error))?;
    let index: Index =
        serde_json::from_slice(&text).map_err(|error| Error::Input(format!("{}: {error}", path.display())))?;
    Ok(index.weight_map)
}

fn no_weights(folder: &Path) -> Error {
    let pickled = ["pytorch_model.bin", "pytorch_model.bin.index.json"].iter().any(|name| folder.join(name).exists());
    let reason = if pickled {
        "its weights are Python pickles (pytorch_model.bin), which are not read because they can run code; \
         save it again from Python with `save_pretrained(folder, safe_serialization=True)`, or fetch a version with safetensors"
    } else {
        "no model.safetensors and no model.safetensors.index.json in it"
    };
    Error::Input(format!("{}: {reason}", folder.display()))
}
