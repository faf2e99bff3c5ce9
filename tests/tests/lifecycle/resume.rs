//! Stopped and resumed, a run ends in the same bits.

use std::path::Path;

use zf_core::train::Silent;

use super::{
    assert_same_run, checkpoints, finish, history, newest, records, resume_from, run_file, stop_after, train_command,
    write_run, zf_train,
};

const COMMON: &str = "run.steps = 12\nrun.global_batch = 8\nrun.micro_batch = 2\nrun.clip = 0.5\n\
     data.sequence_length = 32\ndata.order = \"shuffled\"\ndata.validation = 0.05\n\
     run.validate = { every = 4, sequences = 3 }\nrun.checkpoint = { every = 3, keep = 9, best = true }\n\
     schedule.kind = \"cosine\"\nschedule.warmup = 3\nschedule.min_ratio = 0.1\n";

const SGD: &str = "optim.kind = \"sgd\"\noptim.lr = 0.05\noptim.momentum = 0.9\n";

fn check(model: &str, keys: &str) {
    let text = run_file(model, &format!("{COMMON}{keys}"));
    let (whole, parts) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let expected = finish(&text, whole.path());
    let losses: Vec<f64> = records(whole.path()).iter().map(|record| record.loss).collect();
    assert!(losses.windows(2).all(|pair| pair[0] != pair[1]), "steps are not told apart: {losses:?}");
    // After a step that validates, then after one that saves anyway.
    stop_after(&text, parts.path(), 4);
    stop_after(&text, parts.path(), 6);
    assert_eq!(history(parts.path()).len(), 6);
    let found = finish(&text, parts.path());
    assert_same_run((parts.path(), &found), (whole.path(), &expected), keys).expect("whole");
}

#[test]
fn float32_adamw() {
    check("tiny-llama", "transport.ranks = 2\npartition.stage = 1\n");
}

#[test]
fn bfloat16_adamw() {
    check("tiny-llama", "transport.ranks = 2\npartition.stage = 0\nrun.dtype = \"bfloat16\"\n");
}

#[test]
fn float16_adamw() {
    // The scale grows every third step, so that its state matters.
    let scale = "run.loss_scale = { initial = 256, window = 3 }\nrun.dtype = \"float16\"\n";
    check("tiny-llama", &format!("{scale}transport.ranks = 2\npartition.stage = 1\n"));
}

#[test]
fn float32_sgd() {
    check("tiny-gpt2", &format!("{SGD}transport.ranks = 2\npartition.stage = 1\n"));
}

#[test]
fn bfloat16_sgd_written_while_the_run_waits() {
    let keys = "run.dtype = \"bfloat16\"\nrun.checkpoint = { every = 3, keep = 9, best = true, async = false }\n";
    let text = COMMON.lines().filter(|line| !line.starts_with("run.checkpoint")).map(|line| format!("{line}\n"));
    let text: String = text.collect();
    let text = run_file("tiny-llama", &format!("{text}{SGD}{keys}transport.ranks = 2\npartition.stage = 1\n"));
    let (whole, parts) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let expected = finish(&text, whole.path());
    stop_after(&text, parts.path(), 5);
    let found = finish(&text, parts.path());
    assert_same_run((parts.path(), &found), (whole.path(), &expected), "sgd").expect("whole");
}

/// From one layout to the next in exact mode: ranks, scopes and bucket change at every stop.
fn chain(dtype: &str) {
    let layout = |ranks: usize, partition: &str| {
        run_file(
            "tiny-llama",
            &format!(
                "run.steps = 12\nrun.global_batch = 24\nrun.micro_batch = 1\nrun.exact = true\nrun.dtype = {dtype:?}\n\
                 run.clip = 1.0\ndata.sequence_length = 32\n\
                 data.order = \"shuffled\"\nschedule.kind = \"cosine\"\ntransport.ranks = {ranks}\n\
                 partition = {{ {partition} }}\n{}",
                if dtype == "float16" { "run.loss_scale = { initial = 256, window = 3 }\n" } else { "" }
            ),
        )
    };
    let (whole, parts) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let expected = finish(&layout(1, "stage = 0"), whole.path());
    stop_after(&layout(1, "stage = 0"), parts.path(), 2);
    stop_after(&layout(2, "stage = 3, bucket = \"7KB\""), parts.path(), 4);
    stop_after(&layout(3, "stage = 2, bucket = \"10KB\""), parts.path(), 6);
    stop_after(&layout(8, "scope = { p = 2, g = 4, o = 8 }"), parts.path(), 8);
    stop_after(&layout(4, "scope = { p = 2, g = 2, o = 2 }"), parts.path(), 10);
    let found = finish(&layout(1, "stage = 3, bucket = \"3KB\""), parts.path());
    assert_same_run((parts.path(), &found), (whole.path(), &expected), dtype).expect("whole");
}

#[test]
fn other_ranks_and_stages_in_float32() {
    chain("float32");
}

#[test]
fn other_ranks_and_stages_in_bfloat16() {
    chain("bfloat16");
}

#[test]
fn other_ranks_and_stages_in_float16() {
    chain("float16");
}

/// Resuming from an earlier checkpoint: what came after it is kept apart, and nothing stands twice.
#[test]
fn later_lines_and_checkpoints_are_set_aside() {
    let text = run_file("tiny-llama", &format!("{COMMON}transport.ranks = 2\n"));
    let (whole, parts) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let expected = finish(&text, whole.path());
    let folder = parts.path();
    stop_after(&text, folder, 8);
    let before = history(folder);
    let mut training = zf_tests::training(&text, folder);
    training.resume = Some(resume_from(&folder.join("checkpoints/step-3")));
    let found = training.run(&mut Silent).unwrap_or_else(|error| panic!("{error}"));
    assert_same_run((folder, &found), (whole.path(), &expected), "from step 3").expect("whole");
    let old = std::fs::read_to_string(folder.join("metrics.old.jsonl")).expect("later lines are kept");
    assert_eq!(old.lines().count(), 5, "steps 3 to 7");
    assert!(old.lines().next().is_some_and(|line| line.starts_with("{\"step\":3,")), "{old}");
    assert_eq!(before[..3], history(folder)[..3]);
    let names = checkpoints(folder);
    for name in ["old-step-6", "old-step-8", "step-3", "step-6", "step-9", "step-12"] {
        assert!(names.iter().any(|found| found == name), "no {name} in {names:?}");
    }
}

/// A checkpoint whose file was cut is passed over for the one before it.
#[test]
fn auto_takes_the_newest_whole_checkpoint() {
    let text = run_file("tiny-llama", &format!("{COMMON}transport.ranks = 2\n"));
    let (whole, parts) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let expected = finish(&text, whole.path());
    stop_after(&text, parts.path(), 8);
    let damaged = newest(parts.path()).expect("of step 8");
    cut_largest_file(&damaged);
    assert!(newest(parts.path()).is_some_and(|path| path.ends_with("step-6")));
    let found = finish(&text, parts.path());
    assert_same_run((parts.path(), &found), (whole.path(), &expected), "after damage").expect("whole");
}

fn cut_largest_file(folder: &Path) {
    let files = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let largest = files.max_by_key(|path| path.metadata().expect("a file").len()).expect("not empty");
    let file = std::fs::OpenOptions::new().write(true).open(&largest).expect("writable");
    let length = file.metadata().expect("a file").len();
    file.set_len(length - 1).expect("can be cut");
}

#[test]
fn auto_without_a_checkpoint_starts_afresh() {
    let keys = "run.steps = 3\nrun.global_batch = 4\nrun.micro_batch = 2\ndata.sequence_length = 32\n";
    let folder = tempfile::tempdir().expect("a folder");
    let file = write_run(folder.path(), &run_file("tiny-llama", keys));
    let first = zf_train(&file, &folder.path().join("a"), &["--resume", "auto"]);
    assert!(first.complete);
    // Without it, a folder that holds a run is left alone.
    let again = train_command(&file, &folder.path().join("a"), &[]).output().expect("starts");
    assert_eq!(again.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&again.stderr).contains("--resume auto"), "{again:?}");
    // Of a finished run nothing is left to do.
    let done = zf_train(&file, &folder.path().join("a"), &["--resume", "auto"]);
    assert_eq!(done.state_hash, first.state_hash);
    assert_eq!(records(&folder.path().join("a")).len(), 3);
}

/// More steps after the end: the same bits as if it had been so planned, where the schedule does not depend on the end.
#[test]
fn a_finished_run_can_go_on() {
    let keys = |steps: u64| {
        run_file(
            "tiny-llama",
            &format!(
                "run.steps = {steps}\nrun.global_batch = 4\nrun.micro_batch = 2\ndata.sequence_length = 32\n\
                 data.order = \"shuffled\"\ntransport.ranks = 2\n"
            ),
        )
    };
    let (whole, parts) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let expected = finish(&keys(7), whole.path());
    finish(&keys(4), parts.path());
    let found = finish(&keys(7), parts.path());
    assert_same_run((parts.path(), &found), (whole.path(), &expected), "longer").expect("whole");
}
