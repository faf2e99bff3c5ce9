//! Language models, Hugging Face folders, tokenisation and datasets for zenflow-rs.
pub mod data;
pub mod folder;
pub mod gpt2;
pub mod llama;
pub mod ops;
pub mod plain;
mod sizes;
pub mod tokenizer;
