//! GPT-2 (Radford et al., 2019): learned positions, LayerNorm before each part, biases everywhere.
//!
//! Weights of products are stored `[in, out]`, as in the published files.

mod block;
mod config;

use std::sync::Arc;

use anyhow::{Context as _, ensure};
use tch::{Kind, Tensor};
use zf_core::model::{Batch, Context, Init, LossSum, Model, ParamSpec, UnitFn, UnitSpec};

pub use config::{Activation, Gpt2Config};

use crate::ops;
use block::{Block, Place, layer_norm};

/// A GPT-2.
#[derive(Debug, Clone)]
pub struct Gpt2 {
    config: Arc<Gpt2Config>,
}

impl Gpt2 {
    /// A model of the given sizes.
    ///
    /// # Errors
    /// Sizes that do not fit together, naming the setting.
    pub fn new(config: Gpt2Config) -> anyhow::Result<Self> {
        config.check()?;
        Ok(Self { config: Arc::new(config) })
    }

    /// Its sizes.
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// Index of the unit that holds the head.
    fn head(&self) -> usize {
        if self.config.tie_word_embeddings { 0 } else { self.config.n_layer + 1 }
    }

    /// The name by which the unit of the head knows its weight.
    fn head_name(&self) -> &'static str {
        if self.config.tie_word_embeddings { "wte.weight" } else { "lm_head.weight" }
    }

    fn block_unit(&self, layer: usize) -> UnitSpec {
        let name = format!("transformer.h.{layer}");
        let (hidden, inner) = (self.config.n_embd as i64, self.config.inner() as i64);
        let std = self.config.initializer_range;
        // Products that add to the residual stream start smaller, so that its size does not grow with depth (GPT-2
        // paper, section 2.3, as Hugging Face does it).
        let narrow = std / (2.0 * self.config.n_layer as f64).sqrt();
        let mut params = Vec::new();
        let norm = |part: &str| {
            [
                ParamSpec::new(format!("{name}.{part}.weight"), &[hidden], Init::Ones),
                ParamSpec::new(format!("{name}.{part}.bias"), &[hidden], Init::Zeros),
            ]
        };
        let product = |part: &str, input: i64, out: i64, std: f64| {
            [
                ParamSpec::new(format!("{name}.{part}.weight"), &[input, out], Init::Normal { std }).input_dim(0),
                ParamSpec::new(format!("{name}.{part}.bias"), &[out], Init::Zeros),
            ]
        };
        params.extend(norm("ln_1"));
        params.extend(product("attn.c_attn", hidden, 3 * hidden, std));
        params.extend(product("attn.c_proj", hidden, hidden, narrow));
        params.extend(norm("ln_2"));
        params.extend(product("mlp.c_fc", hidden, inner, std));
        params.extend(product("mlp.c_proj", inner, hidden, narrow));
        UnitSpec { name, params, root: false }
    }

    /// Hidden states `[B, T, C]` after the last block.
    fn hidden(&self, cx: &dyn Context, tokens: &Tensor, sequences: &Arc<[u64]>) -> anyhow::Result<Tensor> {
        let (_, length) = tokens.size2().context("token ids must be [sequences, length]")?;
        let limit = self.config.n_positions;
        ensure!(length as usize <= limit, "sequences of {length} tokens; n_positions is {limit}");
        let place =
            |unit: usize| Place { noise: cx.training().then(|| cx.noise()), unit, sequences: sequences.clone() };
        let positions = Tensor::f_arange(length, (Kind::Int64, cx.device()))?;
        let (start, p_embed) = (place(0), self.config.embd_pdrop);
        let embed: UnitFn = Arc::new(move |p, inputs| {
            let look_up =
                |table: &str, ids: &Tensor| anyhow::Ok(Tensor::f_embedding(p.get(table)?, ids, -1, false, false)?);
            let x = look_up("wte.weight", &inputs[0])?.f_add(&look_up("wpe.weight", &inputs[1])?)?;
            Ok(vec![start.dropout(&x, p_embed, 0)?])
        });
        let mut x = single(cx.run(0, &[tokens.shallow_clone(), positions], embed)?)?;
        for layer in 0..self.config.n_layer {
            let block = Block { config: self.config.clone(), layer, place: place(layer + 1) };
            let run: UnitFn = Arc::new(move |p, inputs| Ok(vec![block.forward(p, &inputs[0])?]));
            x = single(cx.run(layer + 1, &[x], run)?)?;
        }
        Ok(x)
    }
}

impl Model for Gpt2 {
    fn units(&self) -> Vec<UnitSpec> {
        let config = &self.config;
        let hidden = config.n_embd as i64;
        let init = Init::Normal { std: config.initializer_range };
        let wte = ParamSpec::new("transformer.wte.weight", &[config.vocab_size as i64, hidden], init);
        let wpe = ParamSpec::new("transformer.wpe.weight", &[config.n_positions as i64, hidden], init);
        let norm = [
            ParamSpec::new("transformer.ln_f.weight", &[hidden], Init::Ones),
            ParamSpec::new("transformer.ln_f.bias", &[hidden], Init::Zeros),
        ];
        let blocks = (0..config.n_layer).map(|layer| self.block_unit(layer));
        if config.tie_word_embeddings {
            let params = [wte.alias("lm_head.weight"), wpe].into_iter().chain(norm).collect();
            let root = UnitSpec { name: "root".into(), params, root: true };
            return std::iter::once(root).chain(blocks).collect();
        }
        let head = ParamSpec { name: "lm_head.weight".into(), ..wte.clone() };
        let first = UnitSpec { name: "transformer.embeddings".into(), params: vec![wte, wpe], root: false };
        let params = norm.into_iter().chain([head]).collect();
        let last = UnitSpec { name: "head".into(), params, root: false };
        std::iter::once(first).chain(blocks).chain(std::iter::once(last)).collect()
    }

    fn loss(&self, cx: &dyn Context, batch: &Batch) -> anyhow::Result<LossSum> {
        let x = self.hidden(cx, &batch.inputs, &batch.sequences.as_slice().into())?;
        let (eps, head) = (self.config.layer_norm_epsilon, self.head_name());
        let run: UnitFn = Arc::new(move |p, inputs| {
            let x = layer_norm(p, "ln_f", &inputs[0], eps)?;
            Ok(vec![ops::cross_entropy_sum(&x, p.get(head)?, &inputs[1])?])
        });
        let sum = single(cx.run(self.head(), &[x, batch.targets.shallow_clone()], run)?)?;
        Ok(LossSum { sum })
    }

    fn next_logits(&self, cx: &dyn Context, tokens: &Tensor) -> anyhow::Result<Tensor> {
        let count = tokens.size2().context("token ids must be [sequences, length]")?.0;
        let x = self.hidden(cx, tokens, &(0..count as u64).collect())?;
        let last = x.f_narrow(1, x.size3()?.1 - 1, 1)?.f_squeeze_dim(1)?;
        let (eps, head) = (self.config.layer_norm_epsilon, self.head_name());
        let run: UnitFn = Arc::new(move |p, inputs| {
            let x = layer_norm(p, "ln_f", &inputs[0], eps)?;
            Ok(vec![ops::logits(&x, p.get(head)?)?])
        });
        single(cx.run(self.head(), &[last], run)?)
    }

    fn vocabulary(&self) -> usize {
        self.config.vocab_size
    }

    fn max_length(&self) -> Option<usize> {
        Some(self.config.n_positions)
    }

    fn flops_per_token(&self, length: usize) -> f64 {
        let config = &self.config;
        let block = config.n_embd * (4 * config.n_embd + 2 * config.inner());
        let products = config.n_layer * block + config.vocab_size * config.n_embd;
        ops::flops(products, config.n_layer, config.n_embd, length)
    }

    fn export_files(&self) -> Vec<(String, Vec<u8>)> {
        vec![("config.json".into(), self.config.to_config_json())]
    }
}

/// The only output of a unit.
fn single(outputs: Vec<Tensor>) -> anyhow::Result<Tensor> {
    outputs.into_iter().next().context("a unit returned no tensor")
}
