//! The whole program killed or interrupted while an update is on its way and states lie in files.

use std::path::Path;
use std::process::{Child, Command, Output};

use super::zenflow;
use crate::lifecycle::{assert_same_run, lines, newest, shown, train_command, wait_until, write_run, zf_train};

/// A slow host, so that an update is on its way at most times.
fn keys() -> String {
    zenflow(
        4,
        "run.steps = 24\ntransport.ranks = 2\npartition.stage = 2\noffload.tier = \"file\"\nhost.bandwidth = \"40MB/s\"\n\
         run.checkpoint = { every = 1, keep = 3, best = false }\n",
    )
}

/// Starts the run and waits until it has made some steps.
fn start(file: &Path, out: &Path) -> Running {
    let child = train_command(file, out, &[]).spawn().expect("the program starts");
    let child = Running(Some(child));
    assert!(wait_until(60, || lines(out) >= 8), "no eight steps within a minute");
    child
}

/// A test that fails leaves no program behind.
struct Running(Option<Child>);

impl Running {
    fn signal(mut self, name: &str) -> Output {
        let child = self.0.take().expect("running");
        let status = Command::new("kill").arg(format!("-{name}")).arg(child.id().to_string()).status();
        assert!(status.is_ok_and(|status| status.success()), "kill -{name} failed");
        child.wait_with_output().expect("it ends")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn folders_of_states(out: &Path) -> usize {
    std::fs::read_dir(out.join("states")).map_or(0, Iterator::count)
}

#[test]
fn killed_and_interrupted() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = write_run(folder.path(), &keys());
    let out = |name: &str| folder.path().join(name);
    let expected = zf_train(&file, &out("whole"), &[]);
    assert_eq!(folders_of_states(&out("whole")), 0);

    let output = start(&file, &out("killed")).signal("KILL");
    assert_eq!(output.status.code(), None, "{}", shown(&output));
    // The dead run left its files, which the next one removes.
    assert_eq!(folders_of_states(&out("killed")), 2);
    let found = zf_train(&file, &out("killed"), &["--resume", "auto"]);
    assert_same_run((&out("killed"), &found), (&out("whole"), &expected), "killed").expect("whole");
    assert_eq!(folders_of_states(&out("killed")), 0);

    let output = start(&file, &out("stopped")).signal("INT");
    assert_eq!(output.status.code(), Some(130), "{}", shown(&output));
    let done = lines(&out("stopped"));
    assert!(newest(&out("stopped")).is_some_and(|path| path.ends_with(format!("step-{done}"))), "{}", shown(&output));
    assert_eq!(folders_of_states(&out("stopped")), 0);
    let found = zf_train(&file, &out("stopped"), &["--resume", "auto"]);
    assert_same_run((&out("stopped"), &found), (&out("whole"), &expected), "stopped").expect("whole");
}

/// Files may not grow beyond a limit: the run ends before its first step, and says how much it needed.
#[test]
fn no_room_for_files() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = write_run(folder.path(), &keys());
    let out = folder.path().join("out");
    let train = train_command(&file, &out, &[]);
    // In blocks of 512 bytes. Without the trap a signal would end the program.
    let mut limited = Command::new("sh");
    limited
        .arg("-c")
        .arg("trap '' XFSZ; ulimit -f 60; exec \"$@\"")
        .arg("sh")
        .arg(train.get_program())
        .args(train.get_args());
    let output = limited.output().expect("a shell starts");
    let text = shown(&output);
    assert!(matches!(output.status.code(), Some(1 | 2)), "{text}");
    assert!(text.contains("states/states-") && text.contains("File too large"), "{text}");
    assert!(!text.contains("panicked"), "{text}");
    assert_eq!((newest(&out), folders_of_states(&out)), (None, 0), "{text}");
}
