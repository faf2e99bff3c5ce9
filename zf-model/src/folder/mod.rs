//! Hugging Face folders: `config.json`, safetensors files, tokenizer.

mod config;
mod export;
mod keys;
mod shards;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tch::Tensor;
use zf_core::model::{Batch, Context, LossSum, Model, ParamSpec, UnitSpec};
use zf_core::weights::Weights;
use zf_core::{Error, Result};

pub use config::model_from_config;
pub use export::export;

use shards::Shards;

/// Files beside `config.json` and the weights that belong to a model and are exported with it.
pub const COMPANIONS: &[&str] = &[
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
];

/// An opened folder: its model, and its weights, which are read one tensor at a time when asked for.
#[derive(Debug)]
pub struct HfFolder {
    path: PathBuf,
    model: Arc<FolderModel>,
    shards: Shards,
}

impl HfFolder {
    /// Opens a folder and checks it: the configuration is understood, and names, shapes and types of the tensors are
    /// those of the model.
    ///
    /// # Errors
    /// No such folder (with a hint if it looks like a name on the Hugging Face Hub), missing or broken files, settings
    /// that are not supported, tensors that are missing, unexpected or of the wrong shape; all by name.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if !path.is_dir() {
            return Err(Error::Input(not_a_folder(path)));
        }
        let config = path.join("config.json");
        let text = std::fs::read(&config).map_err(|error| unreadable(&config, &error))?;
        let value =
            serde_json::from_slice(&text).map_err(|error| Error::Input(format!("{}: {error}", config.display())))?;
        let model = model_from_config(&config, &value)?;
        let mut files = vec![("config.json".to_owned(), text)];
        for name in COMPANIONS {
            let file = path.join(name);
            if file.is_file() {
                files.push(((*name).to_owned(), std::fs::read(&file).map_err(|error| unreadable(&file, &error))?));
            }
        }
        let shards = Shards::open(path)?;
        let folder = Self { path: path.to_path_buf(), model: Arc::new(FolderModel { model, files }), shards };
        folder.check()?;
        Ok(folder)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its model. Exporting it copies `config.json` and the tokenizer from the folder.
    pub fn model(&self) -> Arc<dyn Model> {
        self.model.clone()
    }

    /// Compares the tensors of the files with the parameters of the model.
    ///
    /// # Errors
    /// Missing, unexpected and wrongly shaped tensors, by name.
    pub fn check(&self) -> Result<()> {
        let mut problems = Vec::new();
        let mut used = BTreeSet::new();
        let mut missing = Vec::new();
        let units = self.model.units();
        for spec in units.iter().flat_map(|unit| &unit.params) {
            // A tied weight may be stored under each of its names.
            used.extend(spec.aliases.iter().map(String::as_str).filter(|alias| self.shards.shape(alias).is_some()));
            let Some(name) = self.find(spec) else {
                missing.push(spec.name.clone());
                continue;
            };
            used.insert(name);
            if let Some(shape) = self.shards.shape(name).filter(|&shape| shape != spec.shape) {
                problems.push(format!("{name} has shape {shape:?}, config.json asks for {:?}", spec.shape));
            }
            problems.extend(self.shards.loadable(name));
        }
        if !missing.is_empty() {
            problems.push(format!("missing: {}", listed(&missing)));
        }
        let unexpected: Vec<_> = self.shards.names().filter(|name| !used.contains(name) && !is_buffer(name)).collect();
        if !unexpected.is_empty() {
            problems.push(format!("unexpected: {}", listed(&unexpected)));
        }
        if problems.is_empty() {
            return Ok(());
        }
        Err(Error::Input(format!(
            "{}: the tensors do not fit config.json: {}",
            self.path.display(),
            listed_with("; ", &problems)
        )))
    }

    /// The name under which the files hold a parameter: its own, the same without the prefix of the language model
    /// (files of the bare transformer), or that of a tied weight.
    fn find<'a>(&'a self, spec: &'a ParamSpec) -> Option<&'a str> {
        let bare = ["transformer.", "model."].iter().find_map(|prefix| spec.name.strip_prefix(prefix));
        std::iter::once(spec.name.as_str())
            .chain(bare)
            .chain(spec.aliases.iter().map(String::as_str))
            .find(|name| self.shards.shape(name).is_some())
    }
}

impl Weights for HfFolder {
    fn load(&self, spec: &ParamSpec) -> Result<Tensor> {
        let at = |message: String| Error::Input(format!("{}: {message}", self.path.display()));
        let name = self.find(spec).ok_or_else(|| at(format!("tensor `{}` is missing", spec.name)))?;
        let tensor = self.shards.tensor(name)?;
        if tensor.size() != spec.shape {
            return Err(at(format!("tensor `{name}` has shape {:?}, expected {:?}", tensor.size(), spec.shape)));
        }
        Ok(tensor)
    }
}

/// A model that remembers the files of its folder.
struct FolderModel {
    model: Arc<dyn Model>,
    files: Vec<(String, Vec<u8>)>,
}

impl std::fmt::Debug for FolderModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FolderModel").field("vocabulary", &self.model.vocabulary()).finish_non_exhaustive()
    }
}

impl Model for FolderModel {
    fn units(&self) -> Vec<UnitSpec> {
        self.model.units()
    }

    fn loss(&self, cx: &dyn Context, batch: &Batch) -> anyhow::Result<LossSum> {
        self.model.loss(cx, batch)
    }

    fn next_logits(&self, cx: &dyn Context, tokens: &Tensor) -> anyhow::Result<Tensor> {
        self.model.next_logits(cx, tokens)
    }

    fn vocabulary(&self) -> usize {
        self.model.vocabulary()
    }

    fn max_length(&self) -> Option<usize> {
        self.model.max_length()
    }

    fn flops_per_token(&self, length: usize) -> f64 {
        self.model.flops_per_token(length)
    }

    fn export_files(&self) -> Vec<(String, Vec<u8>)> {
        self.files.clone()
    }
}

/// Buffers that older versions of Hugging Face's library stored beside the parameters; they follow from the sizes.
fn is_buffer(name: &str) -> bool {
    [".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq"].iter().any(|suffix| name.ends_with(suffix))
}

pub(crate) fn not_a_folder(path: &Path) -> String {
    let text = path.display().to_string();
    let mut parts = text.split('/');
    let plain = |part: Option<&str>| part.is_some_and(|part| !part.is_empty() && part != "." && part != "..");
    if path.exists() {
        format!("{text} is a file; expected a Hugging Face folder with config.json and safetensors files")
    } else if plain(parts.next()) && plain(parts.next()) && parts.next().is_none() {
        let name = text.rsplit('/').next().unwrap_or(&text);
        format!(
            "there is no folder {text}; if this is a name on the Hugging Face Hub, fetch it first \
             (`hf download {text} --local-dir models/{name}`) and give that folder"
        )
    } else {
        format!("there is no folder {text}; expected a Hugging Face folder with config.json and safetensors files")
    }
}

/// A folder that was given is input, and so is a file of it that cannot be read.
fn unreadable(path: &Path, error: &std::io::Error) -> Error {
    Error::Input(format!("{}: {error}", path.display()))
}

fn listed<T: AsRef<str>>(names: &[T]) -> String {
    listed_with(", ", names)
}

/// At most eight of them, then how many more.
fn listed_with<T: AsRef<str>>(separator: &str, names: &[T]) -> String {
    let shown: Vec<_> = names.iter().take(8).map(AsRef::as_ref).collect();
    let more = names.len() - shown.len();
    let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{rest}", shown.join(separator))
}
