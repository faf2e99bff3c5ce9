//! Tests across crates, one binary.

mod emulated;
mod exact;
mod float16;
mod hostile;
mod kinds;
mod lab;
mod ledger;
mod lifecycle;
mod plan;
mod reference;
