//! `zf launch` with real processes: the program itself where its own commands suffice, else shells.

use std::fs::read_to_string;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use zf_cli::commands::launch::Launch;

const ZF: &str = env!("CARGO_BIN_EXE_zf");
const PATIENCE: Duration = Duration::from_secs(40);

/// Not a test: the process that launches a shell script, so that it can be killed and its output read.
#[test]
fn launcher_process() {
    let (Ok(script), Ok(count)) = (std::env::var("ZF_TEST_SCRIPT"), std::env::var("ZF_TEST_COUNT")) else { return };
    let launch = Launch {
        program: "/bin/sh".into(),
        arguments: vec!["-c".into(), script],
        processes: count.parse().expect("a number"),
        grace: Duration::from_millis(500),
    };
    match launch.run() {
        Ok(()) => std::process::exit(0),
        Err(error) => {
            eprintln!("launch: {error}");
            std::process::exit(77);
        }
    }
}

fn launcher(script: &str, count: usize, folder: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a test has a binary"));
    // The processes must be children of a thread that lives until the end, so the test runs on the main one.
    command.args(["launcher_process", "--exact", "--nocapture", "--test-threads=1"]);
    command.env("ZF_TEST_SCRIPT", script).env("ZF_TEST_COUNT", count.to_string()).current_dir(folder);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn launch(script: &str, count: usize, folder: &Path) -> Output {
    launcher(script, count, folder).output().expect("it starts")
}

/// Waits until every rank has written its process number into its file.
fn numbers(folder: &Path, count: usize) -> Vec<Pid> {
    let begin = Instant::now();
    loop {
        let read = |rank| read_to_string(folder.join(format!("pid{rank}"))).ok()?.trim().parse().ok();
        let found: Option<Vec<i32>> = (0..count).map(read).collect();
        if let Some(found) = found {
            return found.into_iter().map(|pid| Pid::from_raw(pid).expect("a process")).collect();
        }
        assert!(begin.elapsed() < PATIENCE, "the processes have not started");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn await_end(pids: &[Pid]) {
    let begin = Instant::now();
    while pids.iter().any(|pid| test_kill_process(*pid).is_ok()) {
        assert!(begin.elapsed() < PATIENCE, "a process outlives its launcher");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn output(child: Child) -> (Option<i32>, String) {
    let output = child.wait_with_output().expect("it is our child");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn every_process_gets_its_place() {
    let folder = tempfile::tempdir().expect("a folder");
    let script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT > out$RANK";
    assert!(launch(script, 3, folder.path()).status.success());
    let lines: Vec<String> = (0..3)
        .map(|rank| read_to_string(folder.path().join(format!("out{rank}"))).expect("each wrote its file"))
        .collect();
    let port = lines[0].split_whitespace().last().expect("six words").to_owned();
    assert!(port.parse::<u16>().is_ok_and(|port| port > 0));
    for (rank, line) in lines.iter().enumerate() {
        assert_eq!(line.trim(), format!("{rank} {rank} 3 3 127.0.0.1 {port}"));
    }
}

#[test]
fn rank_0_is_shown_and_errors_of_the_others() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = launch("echo out $RANK; echo err $RANK >&2; printf half$RANK >&2", 2, folder.path());
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(out.contains("out 0\n") && !out.contains("out 1"), "{out}");
    assert!(err.contains("[rank 1] err 1\n[rank 1] half1\n"), "{err}");
    assert!(err.contains("err 0\n") && !err.contains("[rank 0]"), "{err}");
}

#[test]
fn the_first_failure_ends_the_others() {
    let folder = tempfile::tempdir().expect("a folder");
    let script = "echo $$ > pid$RANK; if [ $RANK = 1 ]; then while [ ! -s pid2 -o ! -s pid0 ]; do sleep 0.01; done; exit 5; \
                  fi; trap '' TERM; sleep 1000 & wait";
    let output = launch(script, 3, folder.path());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(77));
    assert!(errors.contains("launch: rank 1 ended with exit code 5"), "{errors}");
    await_end(&numbers(folder.path(), 3));
}

#[test]
fn a_killed_process_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = launch("[ $RANK = 1 ] && kill -9 $$; exit 0", 2, folder.path());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("launch: rank 1 was killed by signal 9"), "{errors}");
}

#[test]
fn signals_are_passed_on_once() {
    for (signal, name) in [(Signal::INT, "INT"), (Signal::TERM, "TERM")] {
        let folder = tempfile::tempdir().expect("a folder");
        let script = format!(
            "trap 'echo {name} >> got$RANK; sleep 0.1; exit 0' {name}; echo $$ > pid$RANK; while :; do sleep 0.02; done"
        );
        let child = launcher(&script, 2, folder.path()).spawn().expect("it starts");
        numbers(folder.path(), 2);
        kill_process(Pid::from_child(&child), signal).expect("it is our child");
        assert_eq!(output(child).0, Some(0));
        for rank in 0..2 {
            let got = read_to_string(folder.path().join(format!("got{rank}"))).expect("the trap wrote it");
            assert_eq!(got, format!("{name}\n"));
        }
    }
}

#[test]
fn no_process_outlives_a_killed_launcher() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut child = launcher("echo $$ > pid$RANK; exec sleep 1000", 2, folder.path()).spawn().expect("it starts");
    let pids = numbers(folder.path(), 2);
    child.kill().expect("it is our child");
    child.wait().expect("it is our child");
    await_end(&pids);
}

#[test]
fn the_program_ends_as_its_processes_do() {
    let zf = |arguments: &[&str]| Command::new(ZF).args(arguments).output().expect("it starts");
    let good = zf(&["launch", "-n", "2", "--", "completions", "bash"]);
    assert!(good.status.success());
    let out = String::from_utf8_lossy(&good.stdout);
    assert_eq!(out.matches("_zf() {").count(), 1, "only rank 0 is shown");
    let bad = zf(&["launch", "-n", "2", "--", "explain", "missing.toml"]);
    let errors = String::from_utf8_lossy(&bad.stderr);
    assert_eq!(bad.status.code(), Some(2), "{errors}");
    assert!(errors.contains("ended with exit code 2") && errors.contains("missing.toml"), "{errors}");
    let none = zf(&["launch", "-n", "0", "--", "stages"]);
    assert_eq!(none.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&none.stderr).contains("-n 0: expected 1 to 1024 processes"));
    assert_eq!(zf(&["launch", "-n", "2"]).status.code(), Some(2));
}
