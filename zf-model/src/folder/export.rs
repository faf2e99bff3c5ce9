//! Writing a Hugging Face folder.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tch::{Device, Kind, Tensor};
use zf_core::files::rename_dir_synced;
use zf_core::layout::DType;
use zf_core::model::{Model, ParamSpec};
use zf_core::{Error, Result};
use zf_sys::storage;

/// Writes `model` as a folder that Hugging Face's library and [`HfFolder`](super::HfFolder) read: the model's own files
/// ([`Model::export_files`], with the type of the weights in `config.json` set to `dtype`) and `model.safetensors`.
///
/// `tensor` is asked for one parameter after the other, in the order of the units, and gives its values in type `dtype`
/// on any device; tied weights are asked for once, under their first name. The folder appears when it is complete: it is
/// written beside `dir` and renamed.
///
/// # Errors
/// `dir` exists and is not empty; what `tensor` returns; tensors of another shape or type; failing writes.
pub fn export(
    dir: &Path,
    model: &dyn Model,
    dtype: DType,
    tensor: &mut dyn FnMut(&ParamSpec) -> Result<Tensor>,
) -> Result<()> {
    let io = |path: &Path| {
        let path = path.to_path_buf();
        move |source: io::Error| Error::io(path, source)
    };
    if dir.exists() && !dir.is_dir() {
        return Err(Error::Input(format!("{}: is a file; choose a new or empty folder", dir.display())));
    }
    if dir.exists() && std::fs::read_dir(dir).map_err(io(dir))?.next().is_some() {
        return Err(Error::Input(format!("{}: already holds files; choose a new or empty folder", dir.display())));
    }
    let name = dir.file_name().ok_or_else(|| Error::Input(format!("{}: not a name for a folder", dir.display())))?;
    let parent = dir.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).map_err(io(parent))?;
    let scratch = Scratch(parent.join(format!(".{}.{}.tmp", name.to_string_lossy(), std::process::id())));
    if scratch.0.exists() {
        std::fs::remove_dir_all(&scratch.0).map_err(io(&scratch.0))?;
    }
    std::fs::create_dir(&scratch.0).map_err(io(&scratch.0))?;
    for (name, contents) in model.export_files() {
        let path = scratch.0.join(&name);
        let contents = if name == "config.json" { with_dtype(contents, dtype) } else { contents };
        let file = File::create_new(&path).map_err(io(&path))?;
        (&file).write_all(&contents).and_then(|()| file.sync_all()).map_err(io(&path))?;
    }
    let specs: Vec<ParamSpec> = model.units().into_iter().flat_map(|unit| unit.params).collect();
    write_weights(&scratch.0.join("model.safetensors"), &specs, dtype, tensor)?;
    if dir.exists() {
        std::fs::remove_dir(dir).map_err(io(dir))?;
    }
    rename_dir_synced(&scratch.0, dir)
}

/// A folder that is removed if it is still there.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // After the rename there is nothing to remove, and a failed clean-up must not hide the error before it.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The safetensors format: length of the header (u64), header (JSON), data.
fn write_weights(
    path: &Path,
    specs: &[ParamSpec],
    dtype: DType,
    tensor: &mut dyn FnMut(&ParamSpec) -> Result<Tensor>,
) -> Result<()> {
    let code = match dtype {
        DType::Float32 => "F32",
        DType::Bfloat16 => "BF16",
        DType::Float16 => "F16",
    };
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut end = 0;
    for spec in specs {
        let start = end;
        end += spec.numel() * dtype.size();
        header.insert(spec.name.clone(), json!({ "dtype": code, "shape": spec.shape, "data_offsets": [start, end] }));
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    // Data starts at a multiple of 8, as the format asks; blanks are part of the header.
    header.resize(header.len().next_multiple_of(8), b' ');
    let failed = |source| Error::io(path, source);
    let mut file = BufWriter::with_capacity(1 << 20, File::create_new(path).map_err(failed)?);
    file.write_all(&(header.len() as u64).to_le_bytes()).map_err(failed)?;
    file.write_all(&header).map_err(failed)?;
    for spec in specs {
        let values = tensor(spec)?;
        if values.size() != spec.shape || values.kind() != dtype.kind() {
            return Err(Error::Engine(format!(
                "export of `{}`: got {:?} of shape {:?}, expected {:?} of shape {:?}",
                spec.name,
                values.kind(),
                values.size(),
                dtype.kind(),
                spec.shape
            )));
        }
        let values = values.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()?;
        write_values(&mut file, &values)?.map_err(failed)?;
    }
    let file = file.into_inner().map_err(|error| failed(error.into_error()))?;
    file.sync_all().map_err(failed)
}

/// The outer error is libtorch's, the inner one the file's.
fn write_values(file: &mut impl Write, values: &Tensor) -> Result<io::Result<()>> {
    fn all<T: Copy, const N: usize>(
        file: &mut impl Write,
        values: &[T],
        bytes: impl Fn(T) -> [u8; N],
    ) -> io::Result<()> {
        values.iter().try_for_each(|&value| file.write_all(&bytes(value)))
    }
    Ok(match values.kind() {
        Kind::Float => all(file, storage::slice::<f32>(values)?, f32::to_le_bytes),
        Kind::Half => all(file, storage::slice::<half::f16>(values)?, half::f16::to_le_bytes),
        _ => all(file, storage::slice::<half::bf16>(values)?, half::bf16::to_le_bytes),
    })
}

/// `config.json` with the type of the weights; the same bytes if it says so already.
fn with_dtype(contents: Vec<u8>, dtype: DType) -> Vec<u8> {
    let Ok(Value::Object(mut map)) = serde_json::from_slice::<Value>(&contents) else { return contents };
    let wanted = match dtype {
        DType::Float32 => "float32",
        DType::Bfloat16 => "bfloat16",
        DType::Float16 => "float16",
    };
    let mut changed = false;
    for key in ["dtype", "torch_dtype"] {
        if let Some(value) = map.get_mut(key).filter(|value| *value != wanted) {
            *value = json!(wanted);
            changed = true;
        }
    }
    if changed { crate::sizes::pretty(&Value::Object(map)) } else { contents }
}
