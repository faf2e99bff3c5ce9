//! The models by the names that run files know them by.

use std::path::PathBuf;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::model::Model;
use zf_core::random::RandomWeights;
use zf_core::registry::{Build, BuildContext, ModelBundle};
use zf_core::{register, slots};

use crate::folder::{HfFolder, not_a_folder};
use crate::gpt2::{Gpt2, Gpt2Config};
use crate::llama::{Family, Llama, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config};

/// A Hugging Face folder: `config.json` and safetensors files. The weights start as they are in the files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FolderConfig {
    /// The folder, relative to the run file.
    pub path: PathBuf,
}

impl Build<slots::Model> for FolderConfig {
    fn build(self, cx: &BuildContext) -> anyhow::Result<ModelBundle> {
        let path = cx.path(&self.path);
        if !path.is_dir() {
            // The path as it was written shows best whether it is a name on the Hub.
            let shown = if path.exists() { &path } else { &self.path };
            return Err(zf_core::registry::setting("path", not_a_folder(shown)));
        }
        let folder = HfFolder::open(&path)?;
        Ok(ModelBundle { model: folder.model(), weights: Arc::new(folder), folder: Some(path) })
    }
}

/// A model with random initial weights.
fn random(model: impl Model + 'static, cx: &BuildContext) -> ModelBundle {
    ModelBundle { model: Arc::new(model), weights: Arc::new(RandomWeights { seed: cx.seed }), folder: None }
}

impl Build<slots::Model> for LlamaConfig {
    fn build(self, cx: &BuildContext) -> anyhow::Result<ModelBundle> {
        Ok(random(Llama::new(Family::Llama, self)?, cx))
    }
}

impl Build<slots::Model> for MistralConfig {
    fn build(self, cx: &BuildContext) -> anyhow::Result<ModelBundle> {
        Ok(random(Llama::new(Self::FAMILY, self.0)?, cx))
    }
}

impl Build<slots::Model> for Qwen2Config {
    fn build(self, cx: &BuildContext) -> anyhow::Result<ModelBundle> {
        Ok(random(Llama::new(Self::FAMILY, self.0)?, cx))
    }
}

impl Build<slots::Model> for Qwen3Config {
    fn build(self, cx: &BuildContext) -> anyhow::Result<ModelBundle> {
        Ok(random(Llama::new(Self::FAMILY, self.0)?, cx))
    }
}

impl Build<slots::Model> for Gpt2Config {
    fn build(self, cx: &BuildContext) -> anyhow::Result<ModelBundle> {
        Ok(random(Gpt2::new(self)?, cx))
    }
}

register!(
    slots::Model,
    "folder",
    FolderConfig,
    "a pretrained model from a Hugging Face folder",
    "path = \"models/smollm2\""
);
register!(
    slots::Model,
    "llama",
    LlamaConfig,
    "a Llama of given sizes, random start",
    "hidden_size = 256\nnum_hidden_layers = 6\nnum_attention_heads = 4\nvocab_size = 256"
);
register!(
    slots::Model,
    "mistral",
    MistralConfig,
    "a Mistral of given sizes, random start",
    "hidden_size = 256\nnum_hidden_layers = 6\nnum_attention_heads = 4\nnum_key_value_heads = 2"
);
register!(
    slots::Model,
    "qwen2",
    Qwen2Config,
    "a Qwen2 of given sizes (biases on q, k, v), random start",
    "hidden_size = 256\nnum_hidden_layers = 6\nnum_attention_heads = 4\nnum_key_value_heads = 2"
);
register!(
    slots::Model,
    "qwen3",
    Qwen3Config,
    "a Qwen3 of given sizes (norms on q and k), random start",
    "hidden_size = 256\nnum_hidden_layers = 6\nnum_attention_heads = 4\nnum_key_value_heads = 2\nhead_dim = 64"
);
register!(
    slots::Model,
    "gpt2",
    Gpt2Config,
    "a GPT-2 of given sizes, random start",
    "n_embd = 256\nn_layer = 6\nn_head = 4\nvocab_size = 256"
);
