//! States off the device.

pub mod cores;
pub mod link;
mod precise;
pub mod throttle;
pub mod tier;
