//! A run is not alone in the world: other runs, readers that go away, stages that change between two starts.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;

use zf_core::checkpoint::Checkpoint;
use zf_core::train::{Observer, Silent};

use super::{checkpoints, finish, newest, prepare, resume_from, run_file, train_command, write_run};

const KEYS: &str = "run.steps = 4\nrun.global_batch = 4\nrun.micro_batch = 2\ndata.sequence_length = 32\n\
     transport.ranks = 2\npartition.stage = 1\n";

/// In the middle of a run, starts another in the same folder and keeps its error.
struct Intruder<'a> {
    folder: &'a std::path::Path,
    refused: Option<(String, i32)>,
}

impl Observer for Intruder<'_> {
    fn step(&mut self, _record: &zf_core::record::StepRecord) {
        let error = prepare(&run_file("tiny-llama", KEYS), self.folder).run(&mut Silent).err();
        self.refused = error.map(|error| (error.to_string(), error.exit_code()));
    }
}

#[test]
fn two_runs_do_not_share_a_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut intruder = Intruder { folder: folder.path(), refused: None };
    prepare(&run_file("tiny-llama", KEYS), folder.path()).run(&mut intruder).expect("the first run goes on");
    let (message, code) = intruder.refused.expect("the second run is refused");
    assert!(message.contains("another run is writing to this folder"), "{message}");
    assert_eq!(code, 2);
    // The first one is over: its folder is free again.
    finish(&run_file("tiny-llama", KEYS), folder.path());
}

#[test]
fn a_run_outlives_its_reader() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = write_run(folder.path(), &run_file("tiny-llama", KEYS));
    let out = folder.path().join("out");
    let mut child = train_command(&file, &out, &[]).spawn().expect("the program starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("a first line");
    let output = child.wait_with_output().expect("the run ends");
    assert!(output.status.success(), "{:?}: {}", output.status.signal(), String::from_utf8_lossy(&output.stderr));
    assert_eq!(checkpoints(&out), ["step-4"]);
}

/// Runs with `first`, then goes on with `second`; updates counted by then, by parameter.
fn gone_on(first: &str, second: &str) -> std::collections::BTreeMap<String, u64> {
    let folder = tempfile::tempdir().expect("a folder");
    finish(&run_file("tiny-llama", &format!("{KEYS}{first}")), folder.path());
    let keys = KEYS.replace("run.steps = 4", "run.steps = 6");
    finish(&run_file("tiny-llama", &format!("{keys}{second}")), folder.path());
    let newest = newest(folder.path()).expect("a checkpoint");
    Checkpoint::open(&newest).expect("whole").meta().counts.clone()
}

#[test]
fn new_moments_begin_with_a_new_count() {
    let counts = gone_on("optim.kind = \"sgd\"\noptim.lr = 0.1\n", "optim.kind = \"adamw\"\noptim.lr = 1e-3\n");
    assert!(counts.values().all(|&count| count == 2), "{counts:?}");
}

#[test]
fn parameters_freeze_and_thaw_between_two_starts() {
    let frozen = "optim.groups = [{ match = \"layers.0\", frozen = true }]\n";
    let thawed = gone_on(frozen, "optim.groups = []\n");
    for (name, &count) in &thawed {
        assert_eq!(count, if name.contains("layers.0") { 2 } else { 6 }, "{name}");
    }
    let froze = gone_on("optim.groups = []\n", frozen);
    assert!(froze.iter().all(|(name, &count)| count == 6 && !name.contains("layers.0")), "{froze:?}");
}

#[test]
fn a_finished_run_resumed_elsewhere_leaves_its_checkpoint_there() {
    let (first, second) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let text = run_file("tiny-llama", KEYS);
    let before = finish(&text, first.path());
    let mut training = prepare(&text, second.path());
    training.resume = newest(first.path()).map(|path| resume_from(&path));
    let after = training.run(&mut Silent).expect("nothing to do");
    assert_eq!(after.state_hash, before.state_hash);
    assert_eq!(checkpoints(second.path()), ["step-4"]);
}
