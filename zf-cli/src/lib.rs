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
//! The stages of a run file are plain structs, and [`Training`](zf_core::train::Training) runs them without any file:
//!
//! ```
//! use std::sync::Arc;
//!
//! use zf_comm::{Threads, ThreadsConfig};
//! use zf_core::config::{DeviceSection, LogSection, ReduceSection, RunSection};
//! use zf_core::engine::Stages;
//! use zf_core::registry::{Build, BuildContext};
//! use zf_core::train::{Silent, Stop, Training};
//! use zf_model::{data::DataConfig, llama::LlamaConfig};
//! use zf_optim::{AdamWConfig, CosineConfig};
//! use zf_partition::ZeroConfig;
//!
//! # fn main() -> anyhow::Result<()> {
//! let folder = tempfile::tempdir()?;
//! std::fs::write(folder.path().join("text.txt"), "To be, or not to be, that is the question. ".repeat(100))?;
//! let cx = BuildContext { base: folder.path().into(), seed: 1, vocabulary: Some(256), ..Default::default() };
//! let model = LlamaConfig { hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, ..Default::default() };
//! let data = DataConfig { cache: Some("cache".into()), ..DataConfig::new("text.txt", 32) };
//! let training = Training {
//!     run: RunSection { steps: Some(20), global_batch: 4, micro_batch: 2, ..Default::default() },
//!     device: DeviceSection::default(),
//!     reduce: ReduceSection::default(),
//!     log: LogSection::default(),
//!     stages: Stages {
//!         partitioner: Arc::new(ZeroConfig::stage(1).partitioner()?),
//!         optimizer: Arc::new(AdamWConfig { lr: 1e-2, ..Default::default() }.rule()?),
//!         schedule: Arc::new(CosineConfig::default().schedule()?),
//!         offload: None,
//!     },
//!     host: Default::default(),
//!     cores: Default::default(),
//!     fabric: Arc::new(Threads::new(&ThreadsConfig { ranks: 2, ..Default::default() })?),
//!     model: model.build(&cx)?,
//!     data: data.build(&cx)?,
//!     folder: folder.path().join("run"),
//!     resolved: String::new(),
//!     command: Vec::new(),
//!     resume: None,
//!     stop: Stop::default(),
//! };
//! let summary = training.run(&mut Silent)?;
//! assert!(summary.final_loss < 4.0); // from ln 256 = 5.5
//! # Ok(())
//! # }
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
mod process;
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
