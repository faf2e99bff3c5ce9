//! Tests across the crates of zenflow-rs.
