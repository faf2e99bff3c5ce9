//! Where masters and optimizer states lie off the device: [`MemoryTier`] in host memory, [`FileTier`] in files. Both keep
//! the same bits.

mod file;
mod memory;

pub use file::{FileSettings, FileTier};
pub use memory::MemoryTier;
