//! A run's life: stopped and resumed, killed, failed on one rank, rebuilt under other stages, exported.

mod company;
mod export;
mod failures;
mod kill;
mod processes;
mod rebuild;
mod refusals;
mod resume;
mod signals;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use zf_core::Result;
use zf_core::checkpoint::{Checkpoint, newest_whole};
use zf_core::record::{METRICS, StepRecord, Summary, read_metrics};
use zf_core::train::{Observer, Resume, Silent, Stop, Training};
use zf_tests::{tiny, training};

/// The run file of a tiny model, in which `keys` replace the usual ones; another `optim.kind` replaces all of `optim`.
pub(crate) fn run_file(model: &str, keys: &str) -> String {
    let key = |line: &str| line.split_once(" =").map_or(String::new(), |(key, _)| key.trim().to_string());
    let given: Vec<String> = keys.lines().map(key).collect();
    let other_rule = given.iter().any(|key| key == "optim.kind");
    let replaced = |line: &str| given.contains(&key(line)) || (other_rule && line.starts_with("optim."));
    tiny(model, "").lines().filter(|line| !replaced(line)).chain(keys.lines()).map(|line| format!("{line}\n")).collect()
}

/// Asks to stop when `after` steps are done, however far the run would go.
pub(crate) struct StopAfter {
    pub(crate) stop: Stop,
    pub(crate) after: u64,
}

impl Observer for StopAfter {
    fn step(&mut self, record: &StepRecord) {
        // What is asked for now, before the next step, is done after it.
        if record.step + 2 == self.after {
            self.stop.request();
        }
    }
}

/// A run in `folder`, from its newest checkpoint where it has one.
pub(crate) fn prepare(text: &str, folder: &Path) -> Training {
    let mut training = training(text, folder);
    training.resume = newest(folder).map(|path| resume_from(&path));
    training
}

/// Runs to the end.
pub(crate) fn finish(text: &str, folder: &Path) -> Summary {
    prepare(text, folder).run(&mut Silent).unwrap_or_else(|error| panic!("{error}"))
}

/// Runs until `after` steps are done (at least 2 more than before), as if a signal had come.
pub(crate) fn stop_after(text: &str, folder: &Path, after: u64) {
    let training = prepare(text, folder);
    let mut observer = StopAfter { stop: training.stop.clone(), after };
    let error = training.run(&mut observer).expect_err("the run was to be stopped");
    assert_eq!(error.exit_code(), 130, "{error}");
    assert!(newest(folder).is_some_and(|path| path.ends_with(format!("step-{after}"))), "no checkpoint of {after}");
}

pub(crate) fn newest(folder: &Path) -> Option<PathBuf> {
    newest_whole(&folder.join("checkpoints")).expect("readable").map(|(_, path)| path)
}

pub(crate) fn resume_from(checkpoint: &Path) -> Resume {
    Resume::new(Checkpoint::open(checkpoint).expect("whole")).expect("undamaged")
}

pub(crate) fn records(folder: &Path) -> Vec<StepRecord> {
    read_metrics(&folder.join(METRICS)).expect("a run leaves metrics")
}

/// What does not depend on time: step, loss, norm, rate, tokens, validation loss, all by bits.
pub(crate) fn history(folder: &Path) -> Vec<(u64, u64, u64, u64, u64, bool, Option<u64>)> {
    let of = |r: &StepRecord| {
        let validation = r.validation_loss.map(f64::to_bits);
        (r.step, r.loss.to_bits(), r.grad_norm.to_bits(), r.lr.to_bits(), r.tokens, r.skipped, validation)
    };
    records(folder).iter().map(of).collect()
}

/// The program, beside the folder of the test executable.
pub(crate) fn program() -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let release = test.ancestors().nth(2).expect("target/PROFILE/deps/TEST");
    let zf = release.join("zf");
    assert!(zf.is_file(), "{} is missing: build it with `cargo build --release -p zf-cli`", zf.display());
    zf
}

/// `zf train` for a run file, not yet started.
pub(crate) fn train_command(file: &Path, out: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.arg("train").arg(file).arg("--out").arg(out).args(more);
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    command
}

pub(crate) fn shown(output: &Output) -> String {
    format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Runs the program to its end.
pub(crate) fn zf_train(file: &Path, out: &Path, more: &[&str]) -> Summary {
    let output = train_command(file, out, more).output().expect("the program starts");
    assert!(output.status.success(), "{:?}: {}", output.status, shown(&output));
    Summary::read(&out.join("summary.json")).expect("a run ends with a summary")
}

/// Puts a run file into `folder`.
pub(crate) fn write_run(folder: &Path, text: &str) -> PathBuf {
    let file = folder.join("run.toml");
    std::fs::write(&file, text).expect("a temporary folder");
    file
}

/// A wait that ends: true as soon as `done` is.
pub(crate) fn wait_until(seconds: u64, mut done: impl FnMut() -> bool) -> bool {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(seconds);
    while !done() {
        if std::time::Instant::now() > end {
            return false;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    true
}

/// Whole lines of the metrics so far.
pub(crate) fn lines(folder: &Path) -> usize {
    std::fs::read(folder.join(METRICS)).map_or(0, |bytes| bytes.iter().filter(|&&b| b == b'\n').count())
}

/// Names in the folder of checkpoints.
pub(crate) fn checkpoints(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder.join("checkpoints")).expect("a folder");
    let mut names: Vec<String> =
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Compares two runs in every bit that does not depend on time.
pub(crate) fn assert_same_run(found: (&Path, &Summary), expected: (&Path, &Summary), case: &str) -> Result<()> {
    assert_eq!(history(found.0), history(expected.0), "{case}: steps");
    assert_eq!(found.1.state_hash, expected.1.state_hash, "{case}: state");
    assert_eq!(found.1.best, expected.1.best, "{case}: best validation");
    assert!(found.1.complete && expected.1.complete, "{case}");
    // The hash of the files is that of the run.
    let checkpoint = Checkpoint::open(&newest(found.0).expect("a run ends with a checkpoint"))?;
    assert_eq!(checkpoint.meta().state_hash, found.1.state_hash, "{case}: checkpoint");
    Ok(())
}
