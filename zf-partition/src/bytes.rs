//! Sizes in bytes, under the name that plugins of this crate know.

pub use zf_core::bytes::{ByteSize, ByteSizeError};
