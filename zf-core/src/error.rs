//! What can go wrong, naming the slot, stage, rank and step where it happened.

/// The error of every library function of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A run file, preset or override is wrong. The text already names file, line and key. Exit code 2.
    #[error("{0}")]
    Config(String),
    /// Input (data, model folder, checkpoint) is missing or wrong. Exit code 2.
    #[error("{0}")]
    Input(String),
    /// A stage failed while running. Exit code 1.
    #[error("{slot} stage `{stage}`: {message}")]
    Stage {
        /// The slot, for example `partition`.
        slot: &'static str,
        /// The registered name of the stage.
        stage: String,
        /// What happened and what to do.
        message: String,
    },
    /// A collective did not complete: a peer failed, never arrived, or the transport broke. Exit code 1.
    #[error("{0}")]
    Comm(String),
    /// The run was told to stop (signal). Exit code 130.
    #[error("interrupted")]
    Interrupted,
    /// An error of one rank, with its rank and step.
    #[error("rank {rank}, step {step}: {source}")]
    At {
        /// The rank that failed.
        rank: usize,
        /// The step (from 0) in which it failed.
        step: u64,
        /// What failed.
        #[source]
        source: Box<Error>,
    },
    /// The engine's own rules were broken, by a model or a stage. Exit code 1.
    #[error("{0}")]
    Engine(String),
    /// The memory of an emulated device is full. Exit code 1.
    #[error("{0}")]
    OutOfMemory(Box<crate::device::OutOfMemory>),
    /// libtorch reported an error.
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
    /// The shim over libtorch reported an error.
    #[error("libtorch: {0}")]
    Sys(#[from] zf_sys::Error),
    /// Reading or writing a file failed.
    #[error("{path}: {source}")]
    Io {
        /// The file or folder.
        path: std::path::PathBuf,
        /// The reason.
        #[source]
        source: std::io::Error,
    },
    /// An error of a plugin.
    #[error("{0:#}")]
    Plugin(#[from] anyhow::Error),
}

/// A result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// The exit code of the program for this error: 2 for configuration and input, 130 when interrupted, else 1.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::Config(_) | Self::Input(_) => 2,
            Self::Interrupted => 130,
            Self::At { source, .. } => source.exit_code(),
            _ => 1,
        }
    }

    /// An [`Error::Io`] for `path`.
    pub fn io(path: impl Into<std::path::PathBuf>, source: std::io::Error) -> Self {
        Self::Io { path: path.into(), source }
    }
}
