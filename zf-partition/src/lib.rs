//! Partitioners of zenflow-rs: which rank owns what.
