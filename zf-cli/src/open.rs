//! Opens what `zf eval`, `generate` and `export` are given: a run folder, a checkpoint, or a Hugging Face folder.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tch::{Device, Tensor};
use zf_core::checkpoint::{Checkpoint, MANIFEST, newest_whole};
use zf_core::config::Run;
use zf_core::layout::DType;
use zf_core::model::{Model, ParamSpec};
use zf_core::registry::Registry;
use zf_core::weights::Weights;
use zf_core::{Error, Result, slots};
use zf_model::folder::HfFolder;
use zf_model::plain::PlainContext;
use zf_model::tokenizer::Tokenizer;

/// A model with its weights and tokenizer.
pub(crate) struct Opened {
    pub(crate) model: Arc<dyn Model>,
    pub(crate) weights: Box<dyn Weights>,
    pub(crate) dtype: DType,
    /// Where the tokenizer is, if not bytes.
    pub(crate) folder: Option<PathBuf>,
    /// Tokens of a training sequence, where it was a run.
    pub(crate) sequence_length: Option<usize>,
}

impl Opened {
    /// Opens `path`.
    ///
    /// # Errors
    /// A path that is none of the three, with what each would need.
    pub(crate) fn new(path: &Path) -> Result<Self> {
        if path.join(MANIFEST).is_file() {
            return Self::checkpoint(path);
        }
        let checkpoints = path.join("checkpoints");
        if checkpoints.is_dir() {
            return match newest_whole(&checkpoints)? {
                Some((_, newest)) => Self::checkpoint(&newest),
                None => Err(Error::Input(format!("{}: no whole checkpoint in it yet", checkpoints.display()))),
            };
        }
        if !path.exists() {
            return Err(Error::Input(format!(
                "{}: no such folder; expected a run folder, a checkpoint or a Hugging Face folder",
                path.display()
            )));
        }
        let folder = HfFolder::open(path)?;
        folder.check()?;
        Ok(Self {
            model: folder.model(),
            dtype: DType::Float32,
            folder: Some(path.to_path_buf()),
            sequence_length: None,
            weights: Box::new(folder),
        })
    }

    fn checkpoint(path: &Path) -> Result<Self> {
        let checkpoint = Checkpoint::open(path)?;
        checkpoint.verify()?;
        let meta = checkpoint.meta();
        if let Some(open) = zf_core::train::open_window(meta) {
            eprintln!("note: {}: saved within an update window: {open}", checkpoint.path().display());
        }
        let run = Run::from_toml_str(&meta.run, "the run stored in the checkpoint")?;
        let bundle = run.build::<slots::Model>(Registry::global()?, &run.context())?;
        let data = run.resolved().into_iter().find(|(section, _)| section == "data");
        let length = data.and_then(|(_, table)| table.get("sequence_length")?.as_integer());
        Ok(Self {
            model: bundle.model,
            dtype: run.run.dtype,
            folder: bundle.folder,
            sequence_length: length.and_then(|length| usize::try_from(length).ok()),
            weights: Box::new(Saved(checkpoint)),
        })
    }

    /// The tokenizer; bytes where the model has none.
    pub(crate) fn tokenizer(&self) -> Result<Tokenizer> {
        Tokenizer::open(self.folder.as_deref())
    }

    /// The model ready to run, without dropout.
    pub(crate) fn context(&self) -> Result<PlainContext> {
        let device = if tch::Cuda::is_available() { Device::Cuda(0) } else { Device::Cpu };
        let mut context = PlainContext::new(&*self.model, &*self.weights, self.dtype.kind(), device)?;
        context.training = false;
        Ok(context)
    }
}

/// The masters of a checkpoint as weights.
struct Saved(Checkpoint);

impl Weights for Saved {
    fn load(&self, spec: &ParamSpec) -> Result<Tensor> {
        let (shape, values) = self.0.read_tensor_f32(&spec.name)?;
        if shape != spec.shape {
            return Err(Error::Input(format!(
                "{}: `{}` has shape {shape:?} where {:?} is expected",
                self.0.path().display(),
                spec.name,
                spec.shape
            )));
        }
        Ok(Tensor::f_from_slice(&values)?.f_view(shape.as_slice())?)
    }
}
