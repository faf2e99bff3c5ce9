//! SIGINT and SIGTERM: a checkpoint, exit code 130, and nothing lost.

use std::path::Path;
use std::process::{Child, Command};

use zf_core::record::Summary;

use super::{assert_same_run, lines, newest, run_file, shown, train_command, wait_until, write_run, zf_train};

const KEYS: &str = "run.steps = 60\nrun.global_batch = 8\nrun.micro_batch = 2\ndata.sequence_length = 32\n\
     data.order = \"shuffled\"\ntransport.ranks = 2\npartition.stage = 1\nschedule.kind = \"cosine\"\n";

fn signal(child: &Child, name: &str) {
    let status = Command::new("kill").arg(format!("-{name}")).arg(child.id().to_string()).status();
    assert!(status.is_ok_and(|status| status.success()), "kill -{name} failed");
}

fn interrupted_by(name: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = write_run(folder.path(), &run_file("tiny-llama", KEYS));
    let (whole, stopped) = (folder.path().join("whole"), folder.path().join("stopped"));
    let expected = zf_train(&file, &whole, &[]);
    let child = train_command(&file, &stopped, &[]).spawn().expect("the program starts");
    let child = KilledAtEnd(Some(child));
    assert!(wait_until(60, || lines(&stopped) >= 3), "no step within a minute");
    signal(child.0.as_ref().expect("running"), name);
    let output = child.finish();
    assert_eq!(output.status.code(), Some(130), "{}", shown(&output));
    assert!(String::from_utf8_lossy(&output.stderr).contains("interrupted"), "{}", shown(&output));

    let done = lines(&stopped);
    assert!((3..60).contains(&done), "the signal came after {done} steps");
    assert!(newest(&stopped).is_some_and(|path| path.ends_with(format!("step-{done}"))), "{}", shown(&output));
    let summary = Summary::read(&stopped.join("summary.json")).expect("an interrupted run leaves a summary");
    assert!(!summary.complete);
    assert_eq!(summary.totals.steps, done as u64);

    let found = zf_train(&file, &stopped, &["--resume", "auto"]);
    assert_same_run((&stopped, &found), (Path::new(&whole), &expected), name).expect("whole");
}

/// A test that fails leaves no program behind.
struct KilledAtEnd(Option<Child>);

impl KilledAtEnd {
    fn finish(mut self) -> std::process::Output {
        self.0.take().expect("running").wait_with_output().expect("it ends")
    }
}

impl Drop for KilledAtEnd {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn sigint() {
    interrupted_by("INT");
}

#[test]
fn sigterm() {
    interrupted_by("TERM");
}
