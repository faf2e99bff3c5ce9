//! The command line.

use std::io::stdout;
use std::path::PathBuf;

use clap::{CommandFactory, Parser, Subcommand};

use zf_core::record::Mode;

use crate::commands;

/// Trains language models on data-parallel ranks, with stages that mix
#[derive(Debug, Parser)]
#[command(name = "zf", version, arg_required_else_help = true, max_term_width = 110)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a model as a run file says
    Train {
        /// The run file (TOML)
        run: PathBuf,
        /// Override one key of the run file, for example -o run.steps=10
        #[arg(short = 'o', value_name = "KEY=VALUE")]
        overrides: Vec<String>,
        /// The run folder; by default runs/<file>-<date>
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// Go on from a checkpoint: `auto` (the newest whole one of the run folder, or from the start), or a folder
        #[arg(long, value_name = "auto|DIR")]
        resume: Option<String>,
    },
    /// Run all cases of a sweep one after the other and compare each with a baseline
    Ablate {
        /// The sweep: a run file with a section [sweep]
        sweep: PathBuf,
        /// Override one key of the run file in all cases
        #[arg(short = 'o', value_name = "KEY=VALUE")]
        overrides: Vec<String>,
        /// The folder of all runs and results; by default runs/<file>-<date>
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// Go on with the sweep in --out: what is done stays, what was interrupted goes on
        #[arg(long, requires = "out")]
        resume: bool,
    },
    /// Start processes on this machine, each one rank of a run whose transport is `c10d`
    Launch {
        /// Number of processes
        #[arg(short = 'n', long, value_name = "N")]
        processes: usize,
        /// Seconds that the others have to end once one has failed
        #[arg(long, value_name = "SECONDS", default_value_t = 30)]
        timeout: u64,
        /// The command of each process, after `--`: train RUN.toml ...
        #[arg(last = true, required = true, value_name = "COMMAND")]
        command: Vec<String>,
    },
    /// Loss and perplexity of a run or model on a text
    Eval {
        /// A run folder, a checkpoint, or a Hugging Face folder
        model: PathBuf,
        /// The text: .txt, .jsonl, .bin or a folder
        #[arg(long)]
        data: PathBuf,
        /// Tokens of a sequence; by default the run's own, or 256
        #[arg(long)]
        sequence_length: Option<usize>,
    },
    /// Sample text from a run or model
    Generate {
        /// A run folder, a checkpoint, or a Hugging Face folder
        model: PathBuf,
        /// How the text begins
        #[arg(long, default_value = "")]
        prompt: String,
        /// Tokens to sample
        #[arg(long, default_value_t = 200)]
        tokens: usize,
        /// Randomness: 0 takes the most likely token each time
        #[arg(long, default_value_t = 0.8)]
        temperature: f64,
        /// Sample among the K most likely tokens only; 0: all
        #[arg(long, default_value_t = 0)]
        top_k: usize,
        /// Key of the randomness
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Write a run's model as a Hugging Face folder
    Export {
        /// A run folder or a checkpoint
        run: PathBuf,
        /// The folder to make
        #[arg(long, value_name = "DIR")]
        to: PathBuf,
    },
    /// What a checkpoint holds, and whether it is whole
    Inspect {
        /// A checkpoint, or a run folder for its newest one
        checkpoint: PathBuf,
    },
    /// Compare two run folders: losses, norms, state, time, memory, bytes
    Compare {
        /// The first run folder
        a: PathBuf,
        /// The second run folder
        b: PathBuf,
        /// Fail unless losses, norms and state are the same bits
        #[arg(long, conflicts_with = "tolerance")]
        equal: bool,
        /// Fail where losses or norms differ by more than this part of the larger one
        #[arg(long, value_name = "X")]
        tolerance: Option<f64>,
    },
    /// Draw what device, links and host did in some steps (SVG), several runs one above the other
    Timeline {
        /// Run folders, or folders of ablations for all their cases
        #[arg(required = true, value_name = "RUN")]
        runs: Vec<PathBuf>,
        /// The steps A to B-1; by default four from the middle of the slowest run, and as many of the others as fit
        #[arg(long, value_name = "A..B", value_parser = commands::timeline::steps)]
        steps: Option<std::ops::Range<u64>>,
        /// The rank
        #[arg(long, value_name = "R", default_value_t = 0)]
        rank: usize,
        /// The picture; by default timeline.svg in the first folder
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// What a run will hold and move: bytes by category and tier, traffic, each ZeRO stage; no tensor is made
    Plan {
        /// The run file
        run: PathBuf,
        /// Override one key of the run file
        #[arg(short = 'o', value_name = "KEY=VALUE")]
        overrides: Vec<String>,
        /// Plan for this many ranks instead of the file's
        #[arg(long, value_name = "N")]
        ranks: Option<usize>,
        /// Say whether it fits, for example 80GB
        #[arg(long, value_name = "SIZE")]
        device_memory: Option<zf_partition::ByteSize>,
        /// As JSON, with every rank
        #[arg(long)]
        json: bool,
    },
    /// What is registered; help, example and settings of one entry
    Stages {
        /// Only this slot
        slot: Option<String>,
        /// Only this entry
        name: Option<String>,
        /// As JSON, with schemas
        #[arg(long)]
        json: bool,
    },
    /// A run file resolved: every key, its value and where it comes from
    Explain {
        /// The run file
        file: PathBuf,
        /// Override one key of the run file
        #[arg(short = 'o', value_name = "KEY=VALUE")]
        overrides: Vec<String>,
    },
    /// What works on this machine, and what to do about the rest
    Doctor {
        /// The folder whose file system is tried
        #[arg(default_value = ".")]
        folder: PathBuf,
    },
    /// Completions for a shell
    Completions {
        /// bash, zsh, fish, elvish or powershell
        shell: clap_complete::Shell,
    },
}

impl Command {
    /// Runs the command.
    pub(crate) fn run(self) -> anyhow::Result<()> {
        // Not locked: while a run goes on, its own threads print.
        let out = &mut stdout();
        match self {
            Self::Train { run, overrides, out, resume } => {
                commands::train::run(&run, &overrides, out.as_deref(), resume.as_deref())
            }
            Self::Ablate { sweep, overrides, out: folder, resume } => {
                commands::ablate::run(&sweep, &overrides, folder.as_deref(), resume, out)
            }
            Self::Launch { processes, timeout, command } => {
                commands::launch::run(processes, std::time::Duration::from_secs(timeout), command)
            }
            Self::Eval { model, data, sequence_length } => commands::eval::run(&model, &data, sequence_length, out),
            Self::Generate { model, prompt, tokens, temperature, top_k, seed } => {
                let sampling = commands::generate::Sampling { tokens, temperature, top_k, seed };
                commands::generate::run(&model, &prompt, &sampling, out)
            }
            Self::Export { run, to } => commands::export::run(&run, &to, out),
            Self::Inspect { checkpoint } => commands::inspect::run(&checkpoint, out),
            Self::Compare { a, b, equal, tolerance } => {
                let mode = match tolerance {
                    Some(tolerance) => Mode::Tolerance(tolerance),
                    None if equal => Mode::Equal,
                    None => Mode::Report,
                };
                commands::compare::run(&a, &b, mode, out)
            }
            Self::Timeline { runs, steps, rank, out: file } => {
                commands::timeline::run(&runs, steps, rank, file.as_deref(), out)
            }
            Self::Plan { run, overrides, ranks, device_memory, json } => {
                commands::plan::run(&run, &overrides, ranks, device_memory, json, out)
            }
            Self::Stages { slot, name, json } => commands::stages::run(slot.as_deref(), name.as_deref(), json, out),
            Self::Explain { file, overrides } => commands::explain::run(&file, &overrides, out),
            Self::Doctor { folder } => commands::doctor::run(&folder, out),
            Self::Completions { shell } => commands::completions::run(shell, Args::command(), out),
        }
    }
}
