//! The pieces that the language models share. Shapes: `B` sequences, `T` tokens, `H` heads, `D` features of a head,
//! `C` hidden features, `V` vocabulary.

mod attention;
mod loss;
mod norm;
mod rotary;

pub use attention::{AttentionDropout, causal_attention};
pub use loss::{CHUNK_BYTES, cross_entropy_sum, cross_entropy_sum_within, logits};
pub use norm::rms_norm;
pub use rotary::{RopeScaling, Rotary};

/// Floating-point operations of forward and backward for one token: 6 for each weight of a matrix product (2 forward, 4
/// backward; embeddings are look-ups and do not count, the head does), and 6 times `layers * width * length` for causal
/// attention, half of the 12 that PaLM (Chowdhery et al., 2022, appendix B) counts without a mask.
pub fn flops(products: usize, layers: usize, width: usize, length: usize) -> f64 {
    6.0 * products as f64 + 6.0 * layers as f64 * width as f64 * length as f64
}
