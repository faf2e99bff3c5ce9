//! What a stage may need to know beside its own settings, and what models and datasets build.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::data::{Dataset, OrderKind};
use crate::model::Model;
use crate::weights::Weights;

/// What a stage may need beside its own settings. New fields may come: fill the rest with `..Default::default()`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BuildContext {
    /// The folder that relative paths in the settings are relative to: that of the run file. Empty: the current one.
    pub base: PathBuf,
    /// The run's seed.
    pub seed: u64,
    /// The Hugging Face folder of the model, where it has one (its tokenizer serves the data).
    pub model_folder: Option<PathBuf>,
    /// Size of the model's vocabulary, where it is known.
    pub vocabulary: Option<usize>,
}

impl BuildContext {
    /// A context with this base folder and nothing else.
    pub fn new(base: impl Into<PathBuf>) -> Self {
        Self { base: base.into(), ..Self::default() }
    }

    /// `path` as seen from [`BuildContext::base`]; absolute paths stay.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.base.join(path)
    }
}

/// What `[model]` builds.
#[derive(Clone)]
pub struct ModelBundle {
    /// The model, shared by all ranks.
    pub model: Arc<dyn Model>,
    /// Its initial values.
    pub weights: Arc<dyn Weights>,
    /// The folder it was read from, if any; its tokenizer serves the data and is exported with the model.
    pub folder: Option<PathBuf>,
}

impl std::fmt::Debug for ModelBundle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ModelBundle")
            .field("vocabulary", &self.model.vocabulary())
            .field("folder", &self.folder)
            .finish_non_exhaustive()
    }
}

/// What `[data]` builds.
#[derive(Clone)]
pub struct DataBundle {
    /// The sequences, shared by all ranks.
    pub dataset: Arc<dyn Dataset>,
    /// In which order they are visited.
    pub order: OrderKind,
}

impl std::fmt::Debug for DataBundle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DataBundle")
            .field("identity", &self.dataset.identity())
            .field("order", &self.order)
            .finish_non_exhaustive()
    }
}
