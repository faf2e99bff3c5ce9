//! The one error type of this crate.

/// What went wrong in a call into libtorch, or why a request was refused before it got there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// libtorch raised an exception, or a callback that it ran returned an error or panicked.
    #[error("{call}: {message}")]
    Libtorch {
        /// The function of this crate that failed.
        call: &'static str,
        /// The exception's or the callback's own message.
        message: String,
    },
    /// A tensor is not of the kind the function needs.
    #[error("{call}: expected {expected}, found {found}")]
    Tensor {
        /// The function of this crate that refused.
        call: &'static str,
        /// What the function needs.
        expected: String,
        /// What the tensor is.
        found: String,
    },
    /// Two arguments contradict each other.
    #[error("{call}: {message}")]
    Argument {
        /// The function of this crate that refused.
        call: &'static str,
        /// Which arguments, and what would be right.
        message: String,
    },
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;
