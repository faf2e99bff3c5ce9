//! Ranks as processes: the same run as with threads, and what the others do when one of them is gone.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use zf_core::record::Summary;

use super::{assert_same_run, finish, history, newest, program, run_file, shown, stop_after, write_run};

const STEPS: usize = 4;

fn keys(partition: &str) -> String {
    format!(
        "run.steps = {STEPS}\nrun.global_batch = 12\nrun.micro_batch = 2\nrun.exact = true\nrun.dtype = \"bfloat16\"\n\
         data.sequence_length = 32\ndata.order = \"shuffled\"\ndata.validation = 0.05\n\
         run.validate = {{ every = 2, sequences = 5 }}\nrun.checkpoint = {{ every = 1, keep = 9, best = true }}\n\
         partition = {{ {partition} }}\n"
    )
}

/// `zf launch` of `ranks` processes of a run, not yet started.
fn launch(ranks: usize, file: &Path, out: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.args(["launch", "-n", &ranks.to_string(), "--timeout", "5", "--", "train"]).arg(file);
    command.arg("--out").arg(out).args(["-o", "transport.kind=c10d"]).args(more);
    command
}

/// Validation on five sequences leaves some ranks without a batch, and three ranks are not a power of two.
#[test]
fn processes_give_the_bits_of_threads() {
    for (ranks, partition) in [(2, "stage = 3"), (3, "stage = 2"), (2, "stage = 1")] {
        let (threads, processes) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        let text = run_file("tiny-llama", &keys(partition));
        let expected = finish(&format!("{text}transport.ranks = {ranks}\n"), threads.path());
        let out = processes.path().join("run");
        let file = write_run(processes.path(), &text);
        let output = launch(ranks, &file, &out, &[]).output().expect("the program starts");
        assert!(output.status.success(), "{partition}: {}", shown(&output));
        let found = Summary::read(&out.join("summary.json")).expect("rank 0 writes it");
        assert_same_run((&out, &found), (threads.path(), &expected), partition).expect("whole");
        let traffic = |summary: &Summary| summary.per_rank.iter().map(|rank| rank.comm_bytes).collect::<Vec<_>>();
        assert_eq!(traffic(&found), traffic(&expected), "{partition}");
    }
}

/// The fault comes at a call in the middle of a step; what a step's calls are differs with the stage. The others end in
/// time, name the rank, and the run goes on from its last checkpoint to the same bits.
fn breaks(partition: &str, how: &str, issue: usize) {
    let (whole, parts) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let text = run_file("tiny-llama", &keys(partition));
    let expected = finish(&format!("{text}transport.ranks = 2\n"), whole.path());
    let file = write_run(parts.path(), &text);
    let out = parts.path().join("run");
    let fault = format!("transport.wrap=[{{ kind = \"failing\", rank = 1, issue = {issue}, how = \"{how}\" }}]");
    let start = Instant::now();
    let output =
        launch(2, &file, &out, &["-o", "transport.timeout=8s", "-o", &fault]).output().expect("the program starts");
    let case = format!("{partition}, {how} at call {issue}");
    let text = shown(&output);
    assert!(!output.status.success(), "{case}: {text}");
    assert!(text.contains("rank 1"), "{case}: {text}");
    assert!(start.elapsed().as_secs() < 100, "{case} took {:?}", start.elapsed());
    let output = launch(2, &file, &out, &["--resume", "auto"]).output().expect("the program starts");
    assert!(output.status.success(), "{case}: {}", shown(&output));
    let found = Summary::read(&out.join("summary.json")).expect("rank 0 writes it");
    assert_eq!(history(&out), history(whole.path()), "{case}");
    assert_eq!(found.state_hash, expected.state_hash, "{case}");
    assert!(newest(&out).is_some(), "{case}");
}

#[test]
fn a_killed_process_ends_the_others() {
    breaks("stage = 3", "kill", 150);
    breaks("stage = 1", "kill", 31);
}

#[test]
fn a_stopped_process_ends_the_others() {
    breaks("stage = 3", "stop", 100);
}

#[test]
fn a_panic_ends_the_other_processes() {
    breaks("stage = 2", "panic", 40);
}

#[test]
fn a_run_moves_from_threads_to_processes() {
    let (whole, parts) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let of = |partition: &str| run_file("tiny-llama", &keys(partition));
    let expected = finish(&format!("{}transport.ranks = 2\n", of("stage = 1")), whole.path());
    let out = parts.path().join("run");
    stop_after(&format!("{}transport.ranks = 2\n", of("stage = 3")), &out, 2);
    let file = write_run(parts.path(), &of("stage = 2"));
    let output = launch(3, &file, &out, &["--resume", "auto"]).output().expect("the program starts");
    assert!(output.status.success(), "{}", shown(&output));
    let found = Summary::read(&out.join("summary.json")).expect("rank 0 writes it");
    assert_same_run((&out, &found), (whole.path(), &expected), "from threads to processes").expect("whole");
}
