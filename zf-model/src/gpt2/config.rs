//! Sizes of a GPT-2, by the names of `config.json`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use zf_core::registry::setting;

use crate::sizes;

/// The function inside the MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Activation {
    /// GELU by its tanh approximation (Hendrycks and Gimpel, 2016), GPT-2's own.
    #[serde(rename = "gelu_new", alias = "gelu_pytorch_tanh")]
    GeluNew,
    /// GELU by the error function.
    #[serde(rename = "gelu")]
    Gelu,
}

impl Activation {
    /// libtorch's name of the approximation.
    pub fn approximation(self) -> &'static str {
        match self {
            Self::GeluNew => "tanh",
            Self::Gelu => "none",
        }
    }
}

/// Sizes of a GPT-2 with random initial weights, by the names of Hugging Face's `config.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Gpt2Config {
    /// Number of token ids. 256 suits bytes.
    pub vocab_size: usize,
    /// The longest sequence: rows of the table of positions.
    pub n_positions: usize,
    /// Features of a token between blocks.
    pub n_embd: usize,
    /// Number of blocks.
    pub n_layer: usize,
    /// Heads, a divisor of `n_embd`.
    pub n_head: usize,
    /// Features inside the MLP. Default: 4 times `n_embd`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n_inner: Option<usize>,
    /// The function inside the MLP.
    pub activation_function: Activation,
    /// Dropout after attention and MLP in training.
    pub resid_pdrop: f64,
    /// Dropout of embeddings in training.
    pub embd_pdrop: f64,
    /// Dropout of attention weights in training. Above 0 attention is not fused.
    pub attn_pdrop: f64,
    /// Added to the variance before the root.
    pub layer_norm_epsilon: f64,
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
    /// Whether scores are divided by the root of the head's size.
    pub scale_attn_weights: bool,
    /// Whether scores are also divided by the number of the block, from 1.
    pub scale_attn_by_inverse_layer_idx: bool,
    /// Whether the head shares the embedding's weight.
    pub tie_word_embeddings: bool,
}

impl Default for Gpt2Config {
    fn default() -> Self {
        Self {
            vocab_size: 256,
            n_positions: 1024,
            n_embd: 256,
            n_layer: 4,
            n_head: 4,
            n_inner: None,
            activation_function: Activation::GeluNew,
            resid_pdrop: 0.0,
            embd_pdrop: 0.0,
            attn_pdrop: 0.0,
            layer_norm_epsilon: 1e-5,
            initializer_range: 0.02,
            scale_attn_weights: true,
            scale_attn_by_inverse_layer_idx: false,
            tie_word_embeddings: true,
        }
    }
}

impl Gpt2Config {
    /// Features inside the MLP.
    pub fn inner(&self) -> usize {
        self.n_inner.unwrap_or(4 * self.n_embd)
    }

    /// Whether the sizes fit together.
    ///
    /// # Errors
    /// The first setting that does not, by name.
    pub fn check(&self) -> anyhow::Result<()> {
        sizes::positive(&[
            ("vocab_size", self.vocab_size),
            ("n_positions", self.n_positions),
            ("n_embd", self.n_embd),
            ("n_layer", self.n_layer),
            ("n_head", self.n_head),
            ("n_inner", self.inner()),
        ])?;
        if !self.n_embd.is_multiple_of(self.n_head) {
            return Err(setting("n_head", format!("n_embd {} is not divisible by {} heads", self.n_embd, self.n_head)));
        }
        if !(self.layer_norm_epsilon.is_finite() && self.layer_norm_epsilon > 0.0) {
            let found = self.layer_norm_epsilon;
            return Err(setting("layer_norm_epsilon", format!("is {found}; expected a number above 0")));
        }
        sizes::probability("resid_pdrop", self.resid_pdrop)?;
        sizes::probability("embd_pdrop", self.embd_pdrop)?;
        sizes::probability("attn_pdrop", self.attn_pdrop)?;
        sizes::deviation("initializer_range", self.initializer_range)
    }

    /// A `config.json` that Hugging Face's library reads.
    pub(crate) fn to_config_json(&self) -> Vec<u8> {
        sizes::pretty(&json!({
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": self.vocab_size,
            "n_positions": self.n_positions,
            "n_embd": self.n_embd,
            "n_layer": self.n_layer,
            "n_head": self.n_head,
            "n_inner": self.n_inner,
            "activation_function": self.activation_function,
            "resid_pdrop": self.resid_pdrop,
            "embd_pdrop": self.embd_pdrop,
            "attn_pdrop": self.attn_pdrop,
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "initializer_range": self.initializer_range,
            "scale_attn_weights": self.scale_attn_weights,
            "scale_attn_by_inverse_layer_idx": self.scale_attn_by_inverse_layer_idx,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": "float32",
        }))
    }
}
