//! States off the device.
