//! Transports of zenflow-rs: how ranks exchange tensors.
