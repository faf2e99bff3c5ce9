//! Sizes of a model of the Llama family, by the names of `config.json`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use zf_core::registry::setting;

use crate::ops::RopeScaling;
use crate::sizes;

/// Which member of the family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Llama 2 and 3, SmolLM2.
    Llama,
    /// Mistral: Llama with other defaults and an optional sliding window.
    Mistral,
    /// Qwen2 and 2.5: biases on queries, keys and values.
    Qwen2,
    /// Qwen3: RMSNorm on each query and key head; heads of 128 features unless `head_dim` says otherwise.
    Qwen3,
}

impl Family {
    /// The `model_type` of `config.json`.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    /// The entry of `architectures` in `config.json`.
    pub fn architecture(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }
}

/// Sizes of a Llama with random initial weights, by the names of Hugging Face's `config.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LlamaConfig {
    /// Number of token ids. 256 suits bytes.
    pub vocab_size: usize,
    /// Features of a token between blocks.
    pub hidden_size: usize,
    /// Features inside the gated MLP. Default: 8/3 of `hidden_size`, rounded up to a multiple of 16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub intermediate_size: Option<usize>,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads, a divisor of the query heads. Default: as many.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_key_value_heads: Option<usize>,
    /// Features of a head. Default: `hidden_size / num_attention_heads` (Qwen3: 128).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// The longest sequence.
    pub max_position_embeddings: usize,
    /// Added to the mean square before the root.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Stretching of the rotary frequencies. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<RopeScaling>,
    /// Whether the head shares the embedding's weight.
    pub tie_word_embeddings: bool,
    /// Dropout of attention weights in training. Above 0 attention is not fused.
    pub attention_dropout: f64,
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
}

impl Default for LlamaConfig {
    fn default() -> Self {
        Self {
            vocab_size: 256,
            hidden_size: 256,
            intermediate_size: None,
            num_hidden_layers: 4,
            num_attention_heads: 4,
            num_key_value_heads: None,
            head_dim: None,
            max_position_embeddings: 2048,
            rms_norm_eps: 1e-5,
            rope_theta: 10_000.0,
            rope_scaling: None,
            tie_word_embeddings: false,
            attention_dropout: 0.0,
            initializer_range: 0.02,
        }
    }
}

impl LlamaConfig {
    /// Features inside the MLP.
    pub fn intermediate_size(&self) -> usize {
        self.intermediate_size.unwrap_or_else(|| (self.hidden_size * 8).div_ceil(3).next_multiple_of(16))
    }

    /// Key and value heads.
    pub fn key_value_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    /// Features of a head.
    pub fn head_dim(&self, family: Family) -> usize {
        self.head_dim.unwrap_or(match family {
            Family::Qwen3 => 128,
            _ => self.hidden_size / self.num_attention_heads.max(1),
        })
    }

    /// Whether the sizes fit together.
    ///
    /// # Errors
    /// The first setting that does not, by name.
    pub fn check(&self, family: Family) -> anyhow::Result<()> {
        sizes::positive(&[
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size()),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.key_value_heads()),
            ("max_position_embeddings", self.max_position_embeddings),
        ])?;
        let refuse = |key: &str, text: String| Err(setting(key, text));
        let (hidden, heads, groups) = (self.hidden_size, self.num_attention_heads, self.key_value_heads());
        if self.head_dim.is_none() && family != Family::Qwen3 && !hidden.is_multiple_of(heads) {
            return refuse("num_attention_heads", format!("hidden_size {hidden} is not divisible by {heads} heads"));
        }
        if !heads.is_multiple_of(groups) {
            return refuse(
                "num_key_value_heads",
                format!("{heads} attention heads are not divisible by {groups} key and value heads"),
            );
        }
        let head_dim = self.head_dim(family);
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            let key = if self.head_dim.is_some() { "head_dim" } else { "num_attention_heads" };
            return refuse(key, format!("heads of {head_dim} features; rotary positions need an even number above 0"));
        }
        for (key, value) in [("rms_norm_eps", self.rms_norm_eps), ("rope_theta", self.rope_theta)] {
            if !(value.is_finite() && value > 0.0) {
                return refuse(key, format!("is {value}; expected a number above 0"));
            }
        }
        sizes::probability("attention_dropout", self.attention_dropout)?;
        sizes::deviation("initializer_range", self.initializer_range)?;
        self.check_scaling()
    }

    fn check_scaling(&self) -> anyhow::Result<()> {
        let refuse = |text: String| Err(setting("rope_scaling", text));
        let factor = match self.rope_scaling {
            None => return Ok(()),
            Some(RopeScaling::Linear { factor }) => factor,
            Some(RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            }) => {
                let ordered =
                    0.0 < low_freq_factor && low_freq_factor < high_freq_factor && high_freq_factor.is_finite();
                if !ordered || original_max_position_embeddings == 0 {
                    return refuse(format!(
                        "low_freq_factor {low_freq_factor}, high_freq_factor {high_freq_factor}, original_max_position_embeddings {original_max_position_embeddings}; expected 0 < low < high and a length above 0"
                    ));
                }
                factor
            }
        };
        if factor.is_finite() && factor >= 1.0 {
            Ok(())
        } else {
            refuse(format!("factor {factor}; expected at least 1"))
        }
    }

    /// A `config.json` that Hugging Face's library reads.
    pub(crate) fn to_config_json(&self, family: Family) -> Vec<u8> {
        let mut value = json!({
            "architectures": [family.architecture()],
            "model_type": family.model_type(),
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size(),
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.key_value_heads(),
            "head_dim": self.head_dim(family),
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_dropout": self.attention_dropout,
            "initializer_range": self.initializer_range,
            "torch_dtype": "float32",
        });
        match family {
            Family::Llama => {
                value["attention_bias"] = json!(false);
                value["mlp_bias"] = json!(false);
            }
            Family::Mistral => value["sliding_window"] = json!(null),
            Family::Qwen2 => value["use_sliding_window"] = json!(false),
            Family::Qwen3 => {
                value["attention_bias"] = json!(false);
                value["use_sliding_window"] = json!(false);
            }
        }
        sizes::pretty(&value)
    }
}

macro_rules! relative {
    ($name:ident, $family:ident, $help:literal) => {
        #[doc = $help]
        #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(transparent)]
        pub struct $name(
            /// The sizes, named as in [`LlamaConfig`].
            pub LlamaConfig,
        );

        impl $name {
            /// The member of the family that it describes.
            pub const FAMILY: Family = Family::$family;
        }
    };
}

relative!(MistralConfig, Mistral, "Sizes of a Mistral (without a sliding window) with random initial weights.");
relative!(Qwen2Config, Qwen2, "Sizes of a Qwen2 with random initial weights.");
relative!(
    Qwen3Config,
    Qwen3,
    "Sizes of a Qwen3 with random initial weights. Heads have 128 features unless `head_dim` says otherwise."
);
