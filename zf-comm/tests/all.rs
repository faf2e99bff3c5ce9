//! Tests of the transports, from outside.

#[path = "all/collectives.rs"]
mod collectives;
#[path = "all/common.rs"]
mod common;
#[path = "all/failures.rs"]
mod failures;
#[path = "all/wrappers.rs"]
mod wrappers;
