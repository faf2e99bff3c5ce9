//! The zf program of zenflow-rs, also as a library function.
