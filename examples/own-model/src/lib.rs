//! A model that is no transformer, in a crate of one's own: `causal-conv`, gated causal convolutions over tokens
//! (Dauphin et al., "Language Modeling with Gated Convolutional Networks", 2017; dilation as in WaveNet, 2016).
//!
//! What a model consists of: settings, an ordered list of units with their parameters, a forward pass that runs each
//! unit through the engine's context, and one `register!` line. The engine then trains it like any other: sharded,
//! recomputed, in any type, on any number of ranks.

use std::sync::Arc;

use anyhow::{Context as _, ensure};
use tch::Tensor;
use zf_core::model::{Batch, Context, Init, LossSum, Model, ParamSpec, UnitFn, UnitSpec};
use zf_core::random::RandomWeights;
use zf_core::registry::{Build, BuildContext, ModelBundle, setting};
use zf_core::slots;

/// Sizes of the model.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CausalConv {
    /// Number of token ids; 256 suits bytes.
    pub vocab_size: usize,
    /// Features of a token.
    pub channels: usize,
    /// Tokens that one convolution sees.
    pub kernel: usize,
    /// Convolutions; number `i` looks back in steps of `2^i` tokens.
    pub layers: usize,
}

impl Default for CausalConv {
    fn default() -> Self {
        Self { vocab_size: 256, channels: 128, kernel: 4, layers: 6 }
    }
}

impl CausalConv {
    /// Features `[B, T, C]` after the last convolution. Every unit is run through `cx`, in the order of `units`.
    fn features(&self, cx: &dyn Context, tokens: &Tensor) -> anyhow::Result<Tensor> {
        let embed: UnitFn =
            Arc::new(|p, inputs| Ok(vec![Tensor::f_embedding(p.get("embed.weight")?, &inputs[0], -1, false, false)?]));
        let mut x = single(cx.run(0, &[tokens.shallow_clone()], embed)?)?;
        for layer in 0..self.layers {
            // The closure may run again for recomputation, on another thread: it captures plain numbers only.
            let (kernel, step) = (self.kernel as i64, 1i64 << layer);
            let run: UnitFn = Arc::new(move |p, inputs| {
                let x = &inputs[0];
                let normed = x.f_rms_norm(p.get("norm.weight")?.size(), Some(p.get("norm.weight")?), 1e-5)?;
                // Zeros on the left only: position t sees t and before.
                let padded = normed.f_transpose(1, 2)?.f_constant_pad_nd([(kernel - 1) * step, 0])?;
                let (weight, bias) = (p.get("conv.weight")?, Some(p.get("conv.bias")?));
                let mixed = padded.f_conv1d(weight, bias, [1i64], [0i64], [step], 1)?;
                Ok(vec![x.f_add(&mixed.f_glu(1)?.f_transpose(1, 2)?)?])
            });
            x = single(cx.run(layer + 1, &[x], run)?)?;
        }
        Ok(x)
    }
}

impl Model for CausalConv {
    fn units(&self) -> Vec<UnitSpec> {
        let (vocabulary, channels, kernel) = (self.vocab_size as i64, self.channels as i64, self.kernel as i64);
        let std = 1.0 / ((channels * kernel) as f64).sqrt();
        let unit = |name: String, params| UnitSpec { name, params, root: false };
        let embed = ParamSpec::new("embed.weight", &[vocabulary, channels], Init::Normal { std: 0.1 });
        let head = ParamSpec::new("head.weight", &[vocabulary, channels], Init::Normal { std: 0.02 });
        let layer = |i: usize| {
            let conv = [2 * channels, channels, kernel];
            let params = vec![
                ParamSpec::new(format!("layers.{i}.norm.weight"), &[channels], Init::Ones),
                ParamSpec::new(format!("layers.{i}.conv.weight"), &conv, Init::Normal { std }),
                ParamSpec::new(format!("layers.{i}.conv.bias"), &[2 * channels], Init::Zeros),
            ];
            unit(format!("layers.{i}"), params)
        };
        std::iter::once(unit("embed".into(), vec![embed]))
            .chain((0..self.layers).map(layer))
            .chain(std::iter::once(unit("head".into(), vec![head])))
            .collect()
    }

    fn loss(&self, cx: &dyn Context, batch: &Batch) -> anyhow::Result<LossSum> {
        let x = self.features(cx, &batch.inputs)?;
        let run: UnitFn = Arc::new(|p, inputs| {
            Ok(vec![zf_model::ops::cross_entropy_sum(&inputs[0], p.get("head.weight")?, &inputs[1])?])
        });
        Ok(LossSum { sum: single(cx.run(self.layers + 1, &[x, batch.targets.shallow_clone()], run)?)? })
    }

    fn next_logits(&self, cx: &dyn Context, tokens: &Tensor) -> anyhow::Result<Tensor> {
        let last = self.features(cx, tokens)?.f_select(1, -1)?;
        let run: UnitFn = Arc::new(|p, inputs| Ok(vec![zf_model::ops::logits(&inputs[0], p.get("head.weight")?)?]));
        single(cx.run(self.layers + 1, &[last], run)?)
    }

    fn vocabulary(&self) -> usize {
        self.vocab_size
    }
}

impl Build<slots::Model> for CausalConv {
    fn build(self, cx: &BuildContext) -> anyhow::Result<ModelBundle> {
        let sizes = [("vocab_size", self.vocab_size), ("channels", self.channels), ("kernel", self.kernel)];
        if let Some((key, _)) = sizes.into_iter().find(|&(_, size)| size == 0 || size > 1 << 20) {
            return Err(setting(key, "must be from 1 to 2^20"));
        }
        ensure!(self.layers <= 20, setting("layers", "must be at most 20: the last one looks back 2^20 tokens"));
        let weights = Arc::new(RandomWeights { seed: cx.seed });
        Ok(ModelBundle { model: Arc::new(self), weights, folder: None })
    }
}

zf_core::register!(
    slots::Model,
    "causal-conv",
    CausalConv,
    "gated causal convolutions with growing dilation, random start",
    "channels = 128\nkernel = 4\nlayers = 6"
);

/// The only output of a unit.
fn single(outputs: Vec<Tensor>) -> anyhow::Result<Tensor> {
    outputs.into_iter().next().context("a unit returned no tensor")
}
