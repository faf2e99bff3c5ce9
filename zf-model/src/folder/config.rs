//! From `config.json` to a model.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;
use zf_core::model::Model;
use zf_core::{Error, Result};

use super::keys::Keys;
use crate::gpt2::{Activation, Gpt2, Gpt2Config};
use crate::llama::{Family, Llama, LlamaConfig};
use crate::ops::RopeScaling;

/// The model that the parsed `config.json` `value` describes. `file` serves for messages.
///
/// # Errors
/// Keys that are missing, of the wrong type or not supported, naming key and value.
pub fn model_from_config(file: &Path, value: &Value) -> Result<Arc<dyn Model>> {
    let keys = Keys::new(file, value)?;
    let family = match keys.required("model_type", keys.text("model_type"))? {
        "llama" => Family::Llama,
        "mistral" => Family::Mistral,
        "qwen2" => Family::Qwen2,
        "qwen3" => Family::Qwen3,
        "gpt2" => return gpt2(file, &keys).map(|model| Arc::new(model) as Arc<dyn Model>),
        _ => return Err(keys.unsupported("model_type", "supported are gpt2, llama, mistral, qwen2, qwen3")),
    };
    llama(file, &keys, family).map(|model| Arc::new(model) as Arc<dyn Model>)
}

fn llama(file: &Path, keys: &Keys<'_>, family: Family) -> Result<Llama> {
    plain_weights(keys)?;
    match keys.text("hidden_act")? {
        None | Some("silu" | "swish") => {}
        Some(_) => return Err(keys.unsupported("hidden_act", "expected \"silu\"")),
    }
    for key in ["attention_bias", "mlp_bias"] {
        if keys.flag(key, false)? {
            return Err(keys.unsupported(key, "expected false"));
        }
    }
    for key in ["num_local_experts", "num_experts"] {
        if keys.size(key)?.is_some_and(|count| count > 0) {
            return Err(keys.unsupported(key, "mixtures of experts are not implemented"));
        }
    }
    let layers = keys.required("num_hidden_layers", keys.size("num_hidden_layers"))?;
    let groups = keys.size("num_key_value_heads")?;
    if family != Family::Llama && groups.is_none() {
        return keys.required("num_key_value_heads", Ok(None));
    }
    let length = match family {
        Family::Llama => 2048,
        Family::Mistral => 131_072,
        Family::Qwen2 | Family::Qwen3 => 32_768,
    };
    let (rope_theta, rope_scaling) = rope(keys)?;
    // Where a key is missing, the defaults are those of Hugging Face's configuration classes.
    let config = LlamaConfig {
        vocab_size: keys.required("vocab_size", keys.size("vocab_size"))?,
        hidden_size: keys.required("hidden_size", keys.size("hidden_size"))?,
        intermediate_size: Some(keys.required("intermediate_size", keys.size("intermediate_size"))?),
        num_hidden_layers: layers,
        num_attention_heads: keys.required("num_attention_heads", keys.size("num_attention_heads"))?,
        num_key_value_heads: groups,
        head_dim: keys.size("head_dim")?,
        max_position_embeddings: keys.size("max_position_embeddings")?.unwrap_or(length),
        rms_norm_eps: keys.number("rms_norm_eps")?.unwrap_or(1e-6),
        rope_theta,
        rope_scaling,
        tie_word_embeddings: keys.flag("tie_word_embeddings", false)?,
        attention_dropout: keys.number("attention_dropout")?.unwrap_or(0.0),
        initializer_range: keys.number("initializer_range")?.unwrap_or(0.02),
    };
    let model = Llama::new(family, config).map_err(|error| refused(file, &error))?;
    Ok(match window(keys, family)? {
        Some(window) => model.with_window(window),
        None => model,
    })
}

/// The sliding window that some layers use, if any.
fn window(keys: &Keys<'_>, family: Family) -> Result<Option<usize>> {
    let sliding = match keys.get("layer_types").map(Value::as_array) {
        None => match family {
            Family::Mistral => true,
            _ => keys.flag("use_sliding_window", false)?,
        },
        Some(Some(layers)) if layers.iter().all(|layer| layer == "full_attention") => false,
        Some(Some(layers)) if layers.iter().all(|layer| layer == "full_attention" || layer == "sliding_attention") => {
            true
        }
        Some(_) => {
            return Err(
                keys.unsupported("layer_types", "expected a list of \"full_attention\" and \"sliding_attention\"")
            );
        }
    };
    if !sliding {
        return Ok(None);
    }
    // Hugging Face's default applies where the key is missing; null says that there is no window.
    if keys.has("sliding_window") { keys.size("sliding_window") } else { Ok(Some(4096)) }
}

/// Base and stretching of the rotary frequencies, from `rope_parameters` (Transformers 5) or `rope_theta` and
/// `rope_scaling`.
fn rope(keys: &Keys<'_>) -> Result<(f64, Option<RopeScaling>)> {
    let section = match keys.object("rope_parameters")? {
        Some(section) => Some(section),
        None => keys.object("rope_scaling")?,
    };
    let outer = keys.number("rope_theta")?;
    if keys.number("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
        return Err(keys.unsupported("partial_rotary_factor", "expected 1"));
    }
    let Some(section) = section else { return Ok((outer.unwrap_or(10_000.0), None)) };
    if section.number("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
        return Err(section.unsupported("partial_rotary_factor", "expected 1"));
    }
    for key in ["full_attention", "sliding_attention"] {
        if section.has(key) {
            return Err(section.unsupported(key, "expected the same rotary positions in all layers"));
        }
    }
    let theta = section.number("rope_theta")?.or(outer).unwrap_or(10_000.0);
    let key = if section.has("rope_type") { "rope_type" } else { "type" };
    let scaling = match section.text(key)? {
        None | Some("default") => None,
        Some("linear") => Some(RopeScaling::Linear { factor: section.required("factor", section.number("factor"))? }),
        Some("llama3") => {
            let number = |key: &str| section.required(key, section.number(key));
            let length = "original_max_position_embeddings";
            Some(RopeScaling::Llama3 {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_max_position_embeddings: section.required(length, section.size(length))?,
            })
        }
        Some(_) => return Err(section.unsupported(key, "supported are \"default\", \"linear\" and \"llama3\"")),
    };
    Ok((theta, scaling))
}

fn gpt2(file: &Path, keys: &Keys<'_>) -> Result<Gpt2> {
    plain_weights(keys)?;
    let activation_function = match keys.text("activation_function")? {
        None | Some("gelu_new" | "gelu_pytorch_tanh") => Activation::GeluNew,
        Some("gelu") => Activation::Gelu,
        Some(_) => {
            return Err(keys
                .unsupported("activation_function", "supported are \"gelu_new\", \"gelu_pytorch_tanh\" and \"gelu\""));
        }
    };
    for key in ["reorder_and_upcast_attn", "add_cross_attention"] {
        if keys.flag(key, false)? {
            return Err(keys.unsupported(key, "expected false"));
        }
    }
    let size = |key: &str| keys.required(key, keys.size(key));
    let dropout = |key: &str| keys.number(key).map(|found| found.unwrap_or(0.1));
    let config = Gpt2Config {
        vocab_size: size("vocab_size")?,
        n_positions: size("n_positions")?,
        n_embd: size("n_embd")?,
        n_layer: size("n_layer")?,
        n_head: size("n_head")?,
        n_inner: keys.size("n_inner")?,
        activation_function,
        resid_pdrop: dropout("resid_pdrop")?,
        embd_pdrop: dropout("embd_pdrop")?,
        attn_pdrop: dropout("attn_pdrop")?,
        layer_norm_epsilon: keys.number("layer_norm_epsilon")?.unwrap_or(1e-5),
        initializer_range: keys.number("initializer_range")?.unwrap_or(0.02),
        scale_attn_weights: keys.flag("scale_attn_weights", true)?,
        scale_attn_by_inverse_layer_idx: keys.flag("scale_attn_by_inverse_layer_idx", false)?,
        tie_word_embeddings: keys.flag("tie_word_embeddings", true)?,
    };
    Gpt2::new(config).map_err(|error| refused(file, &error))
}

fn plain_weights(keys: &Keys<'_>) -> Result<()> {
    if keys.get("quantization_config").is_some() {
        return Err(keys.unsupported("quantization_config", "take the model's unquantised weights"));
    }
    Ok(())
}

fn refused(file: &Path, error: &anyhow::Error) -> Error {
    Error::Input(format!("{}: {error:#}", file.display()))
}
