//! One block.

use tch::Tensor;
use zf_core::model::Params;

use crate::ops::{AttentionDropout, Rotary, causal_attention, rms_norm};

/// The numbers a block's computation needs; its parameters come with each call.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) heads: i64,
    /// Key and value heads.
    pub(super) groups: i64,
    pub(super) head_dim: i64,
    pub(super) eps: f64,
    /// Biases of queries, keys and values (Qwen2).
    pub(super) qkv_bias: bool,
    /// RMSNorm of each query and key head (Qwen3).
    pub(super) qk_norm: bool,
}

impl Block {
    /// Hidden states `[B, T, C]` in and out; rotary tables `[T, 1, D]`.
    pub(super) fn forward(
        &self,
        p: &Params<'_>,
        x: &Tensor,
        cos: &Tensor,
        sin: &Tensor,
        drop: Option<&AttentionDropout>,
    ) -> anyhow::Result<Tensor> {
        let normed = rms_norm(x, p.get("input_layernorm.weight")?, self.eps)?;
        let x = x.f_add(&self.attention(p, &normed, cos, sin, drop)?)?;
        let normed = rms_norm(&x, p.get("post_attention_layernorm.weight")?, self.eps)?;
        let gate = normed.f_linear(p.get("mlp.gate_proj.weight")?, None::<Tensor>)?.f_silu()?;
        let up = normed.f_linear(p.get("mlp.up_proj.weight")?, None::<Tensor>)?;
        let down = gate.f_mul(&up)?.f_linear(p.get("mlp.down_proj.weight")?, None::<Tensor>)?;
        Ok(x.f_add(&down)?)
    }

    fn attention(
        &self,
        p: &Params<'_>,
        x: &Tensor,
        cos: &Tensor,
        sin: &Tensor,
        drop: Option<&AttentionDropout>,
    ) -> anyhow::Result<Tensor> {
        let (batch, length, _) = x.size3()?;
        let project = |part: &str, heads: i64| -> anyhow::Result<Tensor> {
            let weight = p.get(&format!("self_attn.{part}_proj.weight"))?;
            let bias = if self.qkv_bias { Some(p.get(&format!("self_attn.{part}_proj.bias"))?) } else { None };
            let y = x.f_linear(weight, bias)?.f_view([batch, length, heads, self.head_dim])?;
            if self.qk_norm && part != "v" {
                return Ok(rms_norm(&y, p.get(&format!("self_attn.{part}_norm.weight"))?, self.eps)?);
            }
            Ok(y)
        };
        let q = Rotary::rotate(&project("q", self.heads)?, cos, sin)?;
        let k = Rotary::rotate(&project("k", self.groups)?, cos, sin)?;
        let v = project("v", self.groups)?;
        let scale = 1.0 / (self.head_dim as f64).sqrt();
        let mixed = causal_attention(&q, &k, &v, scale, drop)?;
        Ok(mixed.f_linear(p.get("self_attn.o_proj.weight")?, None::<Tensor>)?)
    }
}
