//! Tests across crates, one binary.

mod exact;
mod float16;
mod lifecycle;
mod reference;
