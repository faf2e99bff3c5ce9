//! From an error to one or two lines and an exit code.

use std::io::{Write, stderr};
use std::process::ExitCode;

use crate::commands::launch::Failed;

/// Prints what went wrong on standard error and returns the exit code.
pub(crate) fn report(result: anyhow::Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    if is_broken_pipe(&error) {
        return ExitCode::SUCCESS;
    }
    let launched = error.downcast_ref::<Failed>().map(|failed| i32::from(failed.code));
    let own = error.chain().find_map(|cause| cause.downcast_ref::<zf_core::Error>()).map(zf_core::Error::exit_code);
    let code = launched.or(own).unwrap_or(1);
    // Where nobody reads them there is nothing more to do.
    let _ = match code {
        130 => writeln!(stderr(), "interrupted"),
        _ => writeln!(stderr(), "error: {}", text(&error)),
    };
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

/// The messages of an error and its causes, without repetition.
fn text(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let message = cause.to_string();
        if !text.contains(&message) {
            text = if text.is_empty() { message } else { format!("{text}: {message}") };
        }
    }
    text
}

/// A reader such as `head` that went away is no error.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let broken = |error: &std::io::Error| error.kind() == std::io::ErrorKind::BrokenPipe;
    error.chain().filter_map(|cause| cause.downcast_ref::<std::io::Error>()).any(broken)
}
