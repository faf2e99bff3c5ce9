//! What the tests across crates share: the golden files, and runs described by a few lines of TOML.

use std::path::{Path, PathBuf};

use zf_core::config::Run;
use zf_core::record::{METRICS, StepRecord, Summary, read_metrics};
use zf_core::registry::Registry;
use zf_core::stage::Fabric;
use zf_core::train::{Silent, Stop, Training};

/// A file of `tests/golden`.
pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(name)
}

/// What a run left behind.
#[derive(Debug)]
pub struct Ran {
    /// One record a step.
    pub records: Vec<StepRecord>,
    /// The summary.
    pub summary: Summary,
    /// The run folder, deleted with this value.
    pub folder: tempfile::TempDir,
}

impl Ran {
    /// Losses by step.
    pub fn losses(&self) -> Vec<f64> {
        self.records.iter().map(|record| record.loss).collect()
    }

    /// Norms by step.
    pub fn norms(&self) -> Vec<f64> {
        self.records.iter().map(|record| record.grad_norm).collect()
    }
}

/// The run file of a tiny reference model on the reference data, with `keys` (lines `section.key = value`) on top.
pub fn tiny(model: &str, keys: &str) -> String {
    let mut lines = format!(
        "model.path = {:?}\ndata.path = {:?}\ndata.sequence_length = 64\ndata.order = \"sequential\"\n\
         optim.kind = \"adamw\"\noptim.lr = 1e-3\noptim.betas = [0.9, 0.95]\noptim.weight_decay = 0.1\n\
         log.tensorboard = false\nlog.trace = false\nrun.checkpoint = {{ every = 0, best = false }}\n",
        golden(model),
        golden("tokens.bin")
    );
    lines.push_str(keys);
    lines
}

/// Puts a run together without starting it.
///
/// # Panics
/// When the run file is wrong, with its error.
pub fn training(text: &str, folder: &Path) -> Training {
    let registry = Registry::global().expect("the built-in stages are registered once");
    let run = Run::from_toml_str(text, "test").unwrap_or_else(|error| panic!("{error}"));
    zf_cli::training(&run, registry, folder.to_path_buf(), None, Stop::default())
        .unwrap_or_else(|error| panic!("{error:#}"))
}

/// Runs to the end.
///
/// # Panics
/// When the run fails, with its error.
pub fn train(text: &str) -> Ran {
    train_with(text, |fabric| fabric)
}

/// Runs to the end over a wrapped fabric.
///
/// # Panics
/// When the run fails, with its error.
pub fn train_with(text: &str, wrap: impl FnOnce(std::sync::Arc<dyn Fabric>) -> std::sync::Arc<dyn Fabric>) -> Ran {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut training = training(text, folder.path());
    training.fabric = wrap(training.fabric);
    let summary = training.run(&mut Silent).unwrap_or_else(|error| panic!("{error}"));
    let records = read_metrics(&folder.path().join(METRICS)).expect("a run leaves metrics");
    Ran { records, summary, folder }
}

/// Whether this process runs the test `name` (its whole path) and no other, as each does under nextest. If not, the test
/// runs in a process of its own, which has passed when this returns: for tests that look at what a process has only once.
///
/// # Panics
/// When the test fails there, or there is none of that name.
pub fn alone(name: &str) -> bool {
    if std::env::args().any(|argument| argument == "--exact") {
        return true;
    }
    let program = std::env::current_exe().expect("a test has a path");
    let output = std::process::Command::new(program)
        .args([name, "--exact", "--test-threads=1", "--nocapture"])
        .output()
        .expect("the test starts again");
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(output.status.success() && said.contains("1 passed"), "{name}: {said}");
    false
}

/// The largest absolute difference of two series of equal length.
///
/// # Panics
/// When the lengths differ.
pub fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len(), "series of different length");
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}
