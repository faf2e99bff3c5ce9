//! Tests of the transports, from outside.

#[path = "all/collectives.rs"]
mod collectives;
#[path = "all/common.rs"]
mod common;
#[path = "all/failures.rs"]
mod failures;
#[path = "all/listed.rs"]
mod listed;
#[path = "all/orders.rs"]
mod orders;
#[path = "all/wrappers.rs"]
mod wrappers;
