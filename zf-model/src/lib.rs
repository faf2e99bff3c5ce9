//! Language models, Hugging Face folders, tokenisation and datasets for zenflow-rs.
