//! The `zf` program, also as a library function, so that a binary with stages of one's own is three lines:
//!
//! ```no_run
//! use my_stages as _; // a crate with `zf_core::register!` lines
//! # mod my_stages {}
//!
//! fn main() -> std::process::ExitCode {
//!     zf_cli::main()
//! }
//! ```
//!
//! # Limitations
//!
//! Commands print to standard output and report errors as one or two lines on standard error; what they do is in the
//! library crates.

mod args;
mod builtin;
pub mod commands;
mod exit;
mod open;
mod presets;
mod progress;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;

pub use commands::train::training;
pub use progress::Progress;

/// Runs the program with the arguments of the process and returns its exit code: 0; 1 failed while running; 2
/// configuration or input; 130 interrupted.
pub fn main() -> ExitCode {
    let args = match args::Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    let filter = tracing_subscriber::EnvFilter::try_from_env("ZF_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .try_init();
    exit::report(args.command.run())
}
