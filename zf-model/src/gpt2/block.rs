//! One block.

use std::sync::Arc;

use tch::Tensor;
use zf_core::model::{Noise, Params};
use zf_core::random::dropout;

use super::Gpt2Config;
use crate::ops::{AttentionDropout, causal_attention};

/// Where dropout happens: what its masks are keyed by.
#[derive(Debug, Clone)]
pub(super) struct Place {
    /// `None` where dropout does not apply.
    pub(super) noise: Option<Noise>,
    pub(super) unit: usize,
    pub(super) sequences: Arc<[u64]>,
}

impl Place {
    /// Dropout with probability `p` at place `site` of the unit.
    pub(super) fn dropout(&self, x: &Tensor, p: f64, site: u32) -> anyhow::Result<Tensor> {
        Ok(match self.noise {
            Some(noise) if p > 0.0 => dropout(x, p, noise, self.unit, site, &self.sequences)?,
            _ => x.shallow_clone(),
        })
    }
}

/// What a block's computation needs; its parameters come with each call.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) config: Arc<Gpt2Config>,
    pub(super) layer: usize,
    pub(super) place: Place,
}

impl Block {
    /// Hidden states `[B, T, C]` in and out.
    pub(super) fn forward(&self, p: &Params<'_>, x: &Tensor) -> anyhow::Result<Tensor> {
        let config = &self.config;
        let normed = layer_norm(p, "ln_1", x, config.layer_norm_epsilon)?;
        let mixed = self.place.dropout(&self.attention(p, &normed)?, config.resid_pdrop, 2)?;
        let x = mixed.f_add(x)?;
        let normed = layer_norm(p, "ln_2", &x, config.layer_norm_epsilon)?;
        let inner = product(p, "mlp.c_fc", &normed)?.f_gelu(config.activation_function.approximation())?;
        let out = self.place.dropout(&product(p, "mlp.c_proj", &inner)?, config.resid_pdrop, 3)?;
        Ok(x.f_add(&out)?)
    }

    fn attention(&self, p: &Params<'_>, x: &Tensor) -> anyhow::Result<Tensor> {
        let (batch, length, width) = x.size3()?;
        let config = &self.config;
        let heads = config.n_head as i64;
        let head_dim = width / heads;
        let parts = product(p, "attn.c_attn", x)?.f_view([batch, length, 3, heads, head_dim])?;
        let part = |index| parts.f_select(2, index);
        let mut scale = if config.scale_attn_weights { 1.0 / (head_dim as f64).sqrt() } else { 1.0 };
        if config.scale_attn_by_inverse_layer_idx {
            scale /= (self.layer + 1) as f64;
        }
        let drop = self.place.noise.filter(|_| config.attn_pdrop > 0.0).map(|noise| AttentionDropout {
            p: config.attn_pdrop,
            noise,
            unit: self.place.unit,
            site: 1,
            sequences: self.place.sequences.clone(),
        });
        let mixed = causal_attention(&part(0)?, &part(1)?, &part(2)?, scale, drop.as_ref())?;
        product(p, "attn.c_proj", &mixed)
    }
}

/// LayerNorm of the last dimension with weight and bias `name`.
pub(super) fn layer_norm(p: &Params<'_>, name: &str, x: &Tensor, eps: f64) -> anyhow::Result<Tensor> {
    let weight = p.get(&format!("{name}.weight"))?;
    let bias = p.get(&format!("{name}.bias"))?;
    Ok(x.f_layer_norm(weight.size(), Some(weight), Some(bias), eps, false)?)
}

/// `x W + b` with `W` stored `[in, out]`.
fn product(p: &Params<'_>, name: &str, x: &Tensor) -> anyhow::Result<Tensor> {
    let (batch, length, width) = x.size3()?;
    let bias = p.get(&format!("{name}.bias"))?;
    let flat = x.f_reshape([batch * length, width])?;
    Ok(bias.f_addmm(&flat, p.get(&format!("{name}.weight"))?)?.f_view([batch, length, -1])?)
}
