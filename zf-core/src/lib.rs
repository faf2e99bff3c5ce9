//! Stage traits, registry, configuration, layout, engine and step loop of zenflow-rs.
//!
//! A training strategy is a row of stages: a [`stage::Partitioner`] says which rank owns what, a [`stage::Transport`]
//! exchanges tensors, an [`stage::Optimizer`] is the update rule, a [`stage::Schedule`] the learning rate. This crate
//! knows the traits and assembles pipelines from them; it never names a strategy.

pub mod bandwidth;
pub mod bytes;
pub mod calendar;
pub mod checkpoint;
pub mod config;
pub mod cores;
pub mod data;
pub mod device;
pub mod duration;
pub mod engine;
pub mod error;
pub mod files;
pub mod layout;
pub mod loss_scale;
pub mod mesh;
pub mod model;
pub mod norm;
pub mod plan;
pub mod random;
pub mod record;
pub mod registry;
pub mod slots;
pub mod stage;
pub mod trace;
pub mod train;
pub mod weights;

pub use error::{Error, Result};
#[doc(hidden)]
pub use inventory;
