//! States off the device.

pub use zf_core::cores;
pub mod kinds;
pub mod link;
mod precise;
pub mod throttle;
pub mod tier;
pub mod worker;
