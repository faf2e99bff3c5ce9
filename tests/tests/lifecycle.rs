//! Resuming, rebuilding, exporting.
