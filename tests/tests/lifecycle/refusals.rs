//! What must not change between a checkpoint and the run that goes on from it.

use zf_core::train::Observer;

use super::{finish, prepare, run_file};

const KEYS: &str = "run.steps = 4\nrun.global_batch = 4\nrun.micro_batch = 2\ndata.sequence_length = 32\n\
     transport.ranks = 2\npartition.stage = 1\n";

/// Keeps what the run says at its start.
struct Notes(Vec<String>);

impl Observer for Notes {
    fn start(&mut self, _first: u64, _steps: u64, notes: &[String]) {
        self.0 = notes.to_vec();
    }
}

/// A run of four steps, then the same folder with `key` replaced; what the second says at its start, or its error and
/// exit code.
fn resumed_with(model: &str, replaced: &str) -> Result<Vec<String>, (String, i32)> {
    let folder = tempfile::tempdir().expect("a folder");
    finish(&run_file("tiny-llama", KEYS), folder.path());
    let key = replaced.split(" =").next().expect("a key");
    let steps = "run.steps = 6\n";
    let kept = KEYS.lines().filter(|line| !line.starts_with(key) && !line.starts_with("run.steps"));
    let keys: String = kept.map(|line| format!("{line}\n")).chain([steps.into(), format!("{replaced}\n")]).collect();
    let mut notes = Notes(Vec::new());
    let result = prepare(&run_file(model, &keys), folder.path()).run(&mut notes);
    result.map(|_| notes.0).map_err(|error| (error.to_string(), error.exit_code()))
}

fn refused(model: &str, replaced: &str, what: &str) {
    let (message, code) = resumed_with(model, replaced).expect_err(what);
    assert_eq!(code, 2, "{message}");
    assert!(message.contains("cannot resume") && message.contains(what), "{message}");
}

#[test]
fn another_model_is_refused() {
    refused("tiny-gpt2", "log.every = 1", "the model differs");
}

#[test]
fn other_data_are_refused() {
    refused("tiny-llama", "data.sequence_length = 16", "the data differs");
    refused("tiny-llama", "data.validation = 0.1", "the data differs");
}

#[test]
fn another_seed_is_refused() {
    refused("tiny-llama", "run.seed = 2", "`run.seed` differs: the checkpoint has 1, this run has 2");
}

#[test]
fn other_batches_are_refused() {
    refused("tiny-llama", "run.global_batch = 8", "the batch differs");
    refused("tiny-llama", "run.micro_batch = 1", "the batch differs");
}

#[test]
fn the_rest_may_change_and_is_listed() {
    for (replaced, listed) in [
        ("optim.lr = 1e-4", "optim.lr = 0.0001, before 0.001"),
        ("transport.ranks = 1", "transport.ranks = 1, before 2"),
        ("partition.stage = 0", "partition.stage = 0, before 1"),
        ("run.clip = 0.1", "run.clip = 0.1, before 1.0"),
        ("run.dtype = \"bfloat16\"", "run.dtype = \"bfloat16\", before \"float32\""),
    ] {
        let notes = resumed_with("tiny-llama", replaced).unwrap_or_else(|(message, _)| panic!("{replaced}: {message}"));
        let changes: Vec<&str> = notes.iter().filter_map(|note| note.strip_prefix("resumed with ")).collect();
        assert_eq!(
            changes,
            [listed, "run.steps = 6, before 4"]
                .into_iter()
                .collect::<std::collections::BTreeSet<_>>()
                .into_iter()
                .collect::<Vec<_>>(),
            "{replaced}"
        );
    }
}
