//! The process of a case.

use std::fs::OpenOptions;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use zf_core::Error;

use super::job::Job;
use crate::process;

const POLL: Duration = Duration::from_millis(20);

/// Between two looks at the progress.
const TICK: Duration = Duration::from_millis(200);

/// Bytes at the end of a log in which its last words are looked for.
const TAIL: u64 = 8 << 10;

/// How a process ended.
pub(super) enum Ended {
    /// With exit code 0.
    Well,
    /// Otherwise, in words.
    Badly(String),
}

/// Signals that ask this program to stop.
pub(super) struct Interrupts {
    signals: Signals,
    seen: bool,
}

impl Interrupts {
    /// From now on.
    pub(super) fn new() -> Result<Self, Error> {
        let signals = Signals::new([SIGINT, SIGTERM, SIGHUP]);
        let signals = signals.map_err(|error| Error::Engine(format!("listening for signals: {error}")))?;
        Ok(Self { signals, seen: false })
    }

    /// Whether there was one.
    pub(super) fn seen(&mut self) -> bool {
        self.new_ones();
        self.seen
    }

    fn new_ones(&mut self) -> Vec<i32> {
        let new: Vec<i32> = self.signals.pending().collect();
        self.seen |= !new.is_empty();
        new
    }
}

/// Runs `zf train` for a case and waits for its end. Signals are passed on: after the first the case writes a
/// checkpoint and ends, a second one ends it at once. What it prints goes to its log. Should this program be killed, the
/// system asks the case to stop as well.
///
/// # Errors
/// A process that cannot be started, a log that cannot be written.
pub(super) fn train(
    job: &Job,
    goes_on: bool,
    interrupts: &mut Interrupts,
    tick: &mut dyn FnMut(),
) -> Result<Ended, Error> {
    let mut command = command(job, goes_on)?;
    let program = command.get_program().to_owned();
    let child = command.spawn().map_err(|error| Error::io(program, error))?;
    let mut child = Guard(child);
    let mut looked: Option<Instant> = None;
    loop {
        for signal in interrupts.new_ones() {
            // A run knows two signals that ask for a checkpoint.
            process::pass_on(if signal == SIGINT { SIGINT } else { SIGTERM }, &child.0);
        }
        if let Some(status) = child.0.try_wait().map_err(|error| Error::io(job.file(), error))? {
            return Ok(ended(status));
        }
        if looked.is_none_or(|at| at.elapsed() >= TICK) {
            tick();
            looked = Some(Instant::now());
        }
        std::thread::sleep(POLL);
    }
}

/// The last error in a log, or else its last line; at most some lines.
pub(super) fn last_words(log: &Path) -> String {
    let read = || -> std::io::Result<String> {
        let mut file = std::fs::File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))?;
        let mut bytes = Vec::new();
        file.take(TAIL).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let text = read().unwrap_or_default();
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let error = lines.iter().rposition(|line| line.starts_with("error: "));
    let from = error.unwrap_or(lines.len().saturating_sub(1));
    lines.iter().skip(from).take(4).copied().collect::<Vec<_>>().join("\n")
}

fn command(job: &Job, goes_on: bool) -> Result<Command, Error> {
    let path = job.log();
    let mut options = OpenOptions::new();
    let log = options.create(true).write(true).append(goes_on).truncate(!goes_on).open(&path);
    let log = log.map_err(|error| Error::io(&path, error))?;
    let errors = log.try_clone().map_err(|error| Error::io(&path, error))?;
    let program = std::env::current_exe().map_err(|error| Error::io("this program", error))?;
    // By this name it is the program that is running, whatever has since been built in its place: all cases run the same.
    let mut command = Command::new("/proc/self/exe");
    command.arg0(program).arg("train").arg(job.file()).arg("--out").arg(&job.folder);
    if goes_on {
        command.args(["--resume", "auto"]);
    }
    command.stdin(Stdio::null()).stdout(log).stderr(errors);
    process::tie(&mut command, Signal::TERM);
    Ok(command)
}

fn ended(status: ExitStatus) -> Ended {
    match (status.code(), status.signal()) {
        (Some(0), _) => Ended::Well,
        (Some(code), _) => Ended::Badly(format!("failed with exit code {code}")),
        (None, signal) => Ended::Badly(format!("was killed by signal {}", signal.unwrap_or(0))),
    }
}

/// Leaves no process behind when waiting for it fails.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None) | Err(_)) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_words_are_the_last_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let log = folder.path().join("log.txt");
        assert_eq!(last_words(&log), "");
        for (text, expected) in [
            ("one\ntwo\n\n", "two"),
            ("error: a\nmore\nerror: b\n  c\n", "error: b\n  c"),
            (&*format!("error: far away\n{}\nend\n", "x".repeat(TAIL as usize)), "end"),
        ] {
            std::fs::write(&log, text).expect("writable");
            assert_eq!(last_words(&log), expected);
        }
    }
}
