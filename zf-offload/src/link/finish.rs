//! The end of a transfer: `done` is called once, and a panic in it makes the link fail.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use zf_core::stage::{Arrived, Transfer};
use zf_core::{Error, Result};

use super::check::refuse;

/// Why a link no longer works, if so. The first reason stays.
#[derive(Debug)]
pub(super) struct Failure {
    stage: &'static str,
    reason: OnceLock<String>,
}

impl Failure {
    pub(super) fn new(stage: &'static str) -> Self {
        Self { stage, reason: OnceLock::new() }
    }

    /// Makes the link fail.
    pub(super) fn set(&self, reason: impl Into<String>) {
        // A later reason is a consequence of the first.
        let _ = self.reason.set(reason.into());
    }

    /// The error of everything that comes after a failure.
    pub(super) fn check(&self) -> Result<()> {
        match self.reason.get() {
            None => Ok(()),
            Some(reason) => Err(refuse(self.stage, format!("the link has failed: {reason}"))),
        }
    }

    /// Ends `transfer` with its tensors or with an error.
    pub(super) fn finish(&self, transfer: Transfer, outcome: Result<()>) {
        let Transfer { from, to, label, done, .. } = transfer;
        let outcome = outcome.map(|()| Arrived { from, to });
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| done(outcome))) {
            self.set(format!("what was to be done after transfer `{label}` panicked: {}", text(panic.as_ref())));
        }
    }

    /// Ends `transfer` with `error`, and gives back an error of the same text.
    pub(super) fn reject(&self, transfer: Transfer, error: Error) -> Error {
        let again = match &error {
            Error::Stage { slot, stage, message } => {
                Error::Stage { slot, stage: stage.clone(), message: message.clone() }
            }
            other => refuse(self.stage, other.to_string()),
        };
        self.finish(transfer, Err(error));
        again
    }
}

/// What a panic said.
pub(super) fn text(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
