//! The Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3.
//!
//! A block is `x += attention(rms_norm(x))`, `x += mlp(rms_norm(x))` with rotary positions, grouped queries and a gated
//! SiLU (Touvron et al., "Llama 2", 2023). Qwen2 adds biases to queries, keys and values, Qwen3 normalises queries and
//! keys head by head. Parameter names are those of Hugging Face.

mod block;
mod config;

use std::sync::Arc;

use anyhow::{Context as _, ensure};
use tch::Tensor;
use zf_core::model::{Batch, Context, Init, LossSum, Model, ParamSpec, UnitFn, UnitSpec};

pub use config::{Family, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config};

use crate::ops::{self, AttentionDropout, Rotary};
use block::Block;

/// A model of the Llama family.
#[derive(Debug, Clone)]
pub struct Llama {
    family: Family,
    config: LlamaConfig,
    block: Arc<Block>,
    rotary: Rotary,
    window: Option<usize>,
}

impl Llama {
    /// A model of the given sizes.
    ///
    /// # Errors
    /// Sizes that do not fit together, naming the setting.
    pub fn new(family: Family, config: LlamaConfig) -> anyhow::Result<Self> {
        config.check(family)?;
        let head_dim = config.head_dim(family);
        let block = Arc::new(Block {
            heads: config.num_attention_heads as i64,
            groups: config.key_value_heads() as i64,
            head_dim: head_dim as i64,
            eps: config.rms_norm_eps,
            qkv_bias: family == Family::Qwen2,
            qk_norm: family == Family::Qwen3,
        });
        let rotary = Rotary::new(head_dim, config.rope_theta, config.rope_scaling);
        Ok(Self { family, config, block, rotary, window: None })
    }

    /// The same for a model pretrained with a sliding window of `tokens`: sequences that fit into the window are
    /// computed exactly, longer ones are refused.
    pub fn with_window(mut self, tokens: usize) -> Self {
        self.window = Some(tokens);
        self
    }

    /// Its sizes.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// Which member of the family it is.
    pub fn family(&self) -> Family {
        self.family
    }

    /// Index of the unit that holds the head.
    fn head(&self) -> usize {
        if self.config.tie_word_embeddings { 0 } else { self.config.num_hidden_layers + 1 }
    }

    fn norm(&self, name: &str, size: usize) -> ParamSpec {
        ParamSpec::new(name, &[size as i64], Init::Ones)
    }

    fn block_unit(&self, layer: usize) -> UnitSpec {
        let name = format!("model.layers.{layer}");
        let config = &self.config;
        let (hidden, inner) = (config.hidden_size, config.intermediate_size());
        let head_dim = self.block.head_dim as usize;
        let queries = config.num_attention_heads * head_dim;
        let keys = config.key_value_heads() * head_dim;
        let init = Init::Normal { std: config.initializer_range };
        let mut params = Vec::new();
        for (part, out, input) in [
            ("self_attn.q_proj", queries, hidden),
            ("self_attn.k_proj", keys, hidden),
            ("self_attn.v_proj", keys, hidden),
            ("self_attn.o_proj", hidden, queries),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ] {
            params.push(ParamSpec::new(format!("{name}.{part}.weight"), &[out as i64, input as i64], init));
            if self.block.qkv_bias && matches!(part, "self_attn.q_proj" | "self_attn.k_proj" | "self_attn.v_proj") {
                params.push(ParamSpec::new(format!("{name}.{part}.bias"), &[out as i64], Init::Zeros));
            }
        }
        if self.block.qk_norm {
            params.push(self.norm(&format!("{name}.self_attn.q_norm.weight"), head_dim));
            params.push(self.norm(&format!("{name}.self_attn.k_norm.weight"), head_dim));
        }
        params.push(self.norm(&format!("{name}.input_layernorm.weight"), hidden));
        params.push(self.norm(&format!("{name}.post_attention_layernorm.weight"), hidden));
        UnitSpec { name, params, root: false }
    }

    /// Hidden states `[B, T, C]` after the last block.
    fn hidden(&self, cx: &dyn Context, tokens: &Tensor, sequences: &Arc<[u64]>) -> anyhow::Result<Tensor> {
        let (_, length) = tokens.size2().context("token ids must be [sequences, length]")?;
        self.check_length(length)?;
        let embed: UnitFn = Arc::new(|p, inputs| {
            let weight = p.get("embed_tokens.weight")?;
            Ok(vec![Tensor::f_embedding(weight, &inputs[0], -1, false, false)?])
        });
        let mut x = single(cx.run(0, &[tokens.shallow_clone()], embed)?)?;
        let (cos, sin) = self.rotary.tables(length, cx.dtype(), cx.device())?;
        let p = self.config.attention_dropout;
        for layer in 0..self.config.num_hidden_layers {
            let unit = layer + 1;
            let drop = (cx.training() && p > 0.0).then(|| AttentionDropout {
                p,
                noise: cx.noise(),
                unit,
                site: 0,
                sequences: sequences.clone(),
            });
            let block = self.block.clone();
            let run: UnitFn = Arc::new(move |p, inputs| {
                Ok(vec![block.forward(p, &inputs[0], &inputs[1], &inputs[2], drop.as_ref())?])
            });
            x = single(cx.run(unit, &[x, cos.shallow_clone(), sin.shallow_clone()], run)?)?;
        }
        Ok(x)
    }

    fn check_length(&self, length: i64) -> anyhow::Result<()> {
        let limit = self.config.max_position_embeddings;
        ensure!(length as usize <= limit, "sequences of {length} tokens; max_position_embeddings is {limit}");
        if let Some(window) = self.window {
            ensure!(
                length as usize <= window,
                "sequences of {length} tokens are longer than this model's sliding_window of {window}, which is not implemented; use shorter ones"
            );
        }
        Ok(())
    }
}

impl Model for Llama {
    fn units(&self) -> Vec<UnitSpec> {
        let config = &self.config;
        let table = [config.vocab_size as i64, config.hidden_size as i64];
        let init = Init::Normal { std: config.initializer_range };
        let embedding = ParamSpec::new("model.embed_tokens.weight", &table, init);
        let norm = self.norm("model.norm.weight", config.hidden_size);
        let blocks = (0..config.num_hidden_layers).map(|layer| self.block_unit(layer));
        if config.tie_word_embeddings {
            let params = vec![embedding.alias("lm_head.weight"), norm];
            let root = UnitSpec { name: "root".into(), params, root: true };
            return std::iter::once(root).chain(blocks).collect();
        }
        let first = UnitSpec { name: "model.embed_tokens".into(), params: vec![embedding], root: false };
        let params = vec![norm, ParamSpec::new("lm_head.weight", &table, init)];
        let head = UnitSpec { name: "head".into(), params, root: false };
        std::iter::once(first).chain(blocks).chain(std::iter::once(head)).collect()
    }

    fn loss(&self, cx: &dyn Context, batch: &Batch) -> anyhow::Result<LossSum> {
        let x = self.hidden(cx, &batch.inputs, &batch.sequences.as_slice().into())?;
        let (eps, head) = (self.config.rms_norm_eps, self.head_name());
        let run: UnitFn = Arc::new(move |p, inputs| {
            let x = ops::rms_norm(&inputs[0], p.get("model.norm.weight")?, eps)?;
            Ok(vec![ops::cross_entropy_sum(&x, p.get(head)?, &inputs[1])?])
        });
        let sum = single(cx.run(self.head(), &[x, batch.targets.shallow_clone()], run)?)?;
        Ok(LossSum { sum })
    }

    fn next_logits(&self, cx: &dyn Context, tokens: &Tensor) -> anyhow::Result<Tensor> {
        let count = tokens.size2().context("token ids must be [sequences, length]")?.0;
        let x = self.hidden(cx, tokens, &(0..count as u64).collect())?;
        let last = x.f_narrow(1, x.size3()?.1 - 1, 1)?.f_squeeze_dim(1)?;
        let (eps, head) = (self.config.rms_norm_eps, self.head_name());
        let run: UnitFn = Arc::new(move |p, inputs| {
            let x = ops::rms_norm(&inputs[0], p.get("model.norm.weight")?, eps)?;
            Ok(vec![ops::logits(&x, p.get(head)?)?])
        });
        single(cx.run(self.head(), &[last], run)?)
    }

    fn vocabulary(&self) -> usize {
        self.config.vocab_size
    }

    fn max_length(&self) -> Option<usize> {
        let limit = self.config.max_position_embeddings;
        Some(self.window.map_or(limit, |window| limit.min(window)))
    }

    fn flops_per_token(&self, length: usize) -> f64 {
        let config = &self.config;
        let width = config.num_attention_heads * self.block.head_dim as usize;
        let keys = config.key_value_heads() * self.block.head_dim as usize;
        let block = config.hidden_size * (2 * width + 2 * keys + 3 * config.intermediate_size());
        let products = config.num_hidden_layers * block + config.vocab_size * config.hidden_size;
        ops::flops(products, config.num_hidden_layers, width, length)
    }

    fn export_files(&self) -> Vec<(String, Vec<u8>)> {
        vec![("config.json".into(), self.config.to_config_json(self.family))]
    }
}

impl Llama {
    /// The name by which the unit of the head knows its weight.
    fn head_name(&self) -> &'static str {
        if self.config.tie_word_embeddings { "model.embed_tokens.weight" } else { "lm_head.weight" }
    }
}

/// The only output of a unit.
fn single(outputs: Vec<Tensor>) -> anyhow::Result<Tensor> {
    outputs.into_iter().next().context("a unit returned no tensor")
}
