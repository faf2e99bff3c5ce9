//! Tests across crates, one binary.

mod ablate;
mod build;
mod devices;
mod emulated;
mod exact;
mod float16;
mod hostile;
mod kinds;
mod lab;
mod ledger;
mod lifecycle;
mod offload;
mod offload_life;
mod optimizers;
mod plan;
mod plan_offload;
mod random;
mod reference;
mod stages;
