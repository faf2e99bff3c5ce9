//! Where masters and optimizer states lie off the device: [`MemoryTier`] in host memory.

mod memory;

pub use memory::MemoryTier;
