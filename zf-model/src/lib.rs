//! Language models, Hugging Face folders, tokenisation and datasets for zenflow-rs.
//!
//! | module | holds |
//! |---|---|
//! | [`llama`] | Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3 |
//! | [`gpt2`] | GPT-2 |
//! | [`ops`] | what they share: attention, rotary positions, RMSNorm, cross-entropy in chunks |
//! | [`folder`] | Hugging Face folders in and out |
//! | [`plain`] | running a model without an engine |
//! | [`tokenizer`], [`data`] | text to tokens, tokens to sequences |
//!
//! A model implements [`zf_core::model::Model`] and holds no parameters; whoever runs it does. `examples/own-model` shows
//! one from outside this crate.
//!
//! # Limitations
//!
//! * Causal language models only, without key-value cache: a sampled token costs a whole forward pass.
//! * No mixture of experts, no quantised weights, no sliding windows (sequences that fit into the window are exact, longer
//!   ones are refused), no rotary stretching but `linear` and `llama3`, no biases in a Llama's attention or MLP.
//! * Weights are read from and written to safetensors files; export writes one file, and full names also where the folder
//!   it came from left out the prefix `transformer.`.
//!
//! # Example
//!
//! ```
//! use tch::{Device, Kind, Tensor};
//! use zf_core::model::{Batch, Model};
//! use zf_core::random::RandomWeights;
//! use zf_model::llama::{Family, Llama, LlamaConfig};
//! use zf_model::plain::PlainContext;
//!
//! # fn main() -> anyhow::Result<()> {
//! let config = LlamaConfig { hidden_size: 64, num_hidden_layers: 2, ..LlamaConfig::default() };
//! let model = Llama::new(Family::Llama, config)?;
//! let cx = PlainContext::new(&model, &RandomWeights { seed: 1 }, Kind::Float, Device::Cpu)?;
//! let ids = Tensor::from_slice(b"two households, both alike in dignity").to_kind(Kind::Int64).view([1, -1]);
//! let length = ids.size()[1] - 1;
//! let batch = Batch {
//!     inputs: ids.narrow(1, 0, length),
//!     targets: ids.narrow(1, 1, length),
//!     sequences: vec![0],
//!     target_tokens: length as u64,
//! };
//! let mean = model.loss(&cx, &batch)?.sum / length as f64;
//! // Before training every byte is about equally likely.
//! assert!((f64::try_from(&mean)? - 256f64.ln()).abs() < 0.5);
//! mean.backward();
//! # Ok(())
//! # }
//! ```

pub mod data;
pub mod folder;
pub mod gpt2;
pub mod llama;
pub mod ops;
pub mod plain;
mod register;
mod sizes;
pub mod tokenizer;

pub use register::FolderConfig;
