//! Causal self-attention.

use std::sync::Arc;

use tch::{Kind, Tensor};
use zf_core::model::Noise;
use zf_core::random::dropout;

/// Dropout of attention weights: what the counter-based generator needs to know.
#[derive(Debug, Clone)]
pub struct AttentionDropout {
    /// Probability.
    pub p: f64,
    /// Key of the step.
    pub noise: Noise,
    /// Index of the unit.
    pub unit: usize,
    /// Number of the place within the unit.
    pub site: u32,
    /// Global indices of the sequences.
    pub sequences: Arc<[u64]>,
}

/// Causal attention of queries `[B, T, H, D]` to keys and values `[B, T, G, D]`, `G` a divisor of `H` (grouped queries,
/// Ainslie et al., 2023: query head `h` reads key head `h / (H/G)`). Returns `[B, T, H * D]`.
///
/// Without dropout by libtorch's fused kernel, which holds no `T` x `T` matrix; with dropout by separate operators, since
/// the fused kernel's own generator is not repeatable between rank threads.
///
/// # Errors
/// Shapes that do not fit.
pub fn causal_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f64,
    drop: Option<&AttentionDropout>,
) -> anyhow::Result<Tensor> {
    let (batch, length, heads, width) = q.size4()?;
    let groups = k.size4()?.2;
    let turn = |x: &Tensor| x.f_transpose(1, 2);
    let mixed = match drop {
        None => {
            let (q, k, v) = (turn(q)?, turn(k)?, turn(v)?);
            Tensor::f_scaled_dot_product_attention(&q, &k, &v, None::<Tensor>, 0.0, true, scale, groups != heads)?
        }
        Some(drop) => {
            let (q, k, v) = (turn(q)?, turn(&repeat(k, heads / groups)?)?, turn(&repeat(v, heads / groups)?)?);
            let scores = q.f_matmul(&k.f_transpose(2, 3)?)?.f_mul_scalar(scale)?;
            let future = Tensor::f_ones([length, length], (Kind::Bool, q.device()))?.f_triu(1)?;
            let weights =
                scores.f_masked_fill(&future, f64::NEG_INFINITY)?.f_softmax(-1, Kind::Float)?.f_to_kind(q.kind())?;
            dropout(&weights, drop.p, drop.noise, drop.unit, drop.site, &drop.sequences)?.f_matmul(&v)?
        }
    };
    Ok(mixed.f_transpose(1, 2)?.f_reshape([batch, length, heads * width])?)
}

/// Each head of `[B, T, G, D]` `times` times in a row.
fn repeat(x: &Tensor, times: i64) -> anyhow::Result<Tensor> {
    let (batch, length, groups, width) = x.size4()?;
    Ok(x.f_unsqueeze(3)?.f_expand([batch, length, groups, times, width], false)?.f_reshape([
        batch,
        length,
        groups * times,
        width,
    ])?)
}
