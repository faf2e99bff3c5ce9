//! Transports of zenflow-rs: how ranks exchange tensors.

mod duration;
mod kernel;
mod span;
mod threads;
mod work;

pub use threads::{Threads, ThreadsConfig};
