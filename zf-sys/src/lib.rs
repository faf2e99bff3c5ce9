//! The C++ shim over libtorch that zenflow-rs stands on, with safe wrappers.
