//! `zf ablate`: sweeps of the tiny models by the real program.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use zf_tests::tiny;

use crate::lifecycle::program;

const KEYS: &str = "run.steps = 2\nrun.global_batch = 4\nrun.micro_batch = 2\nrun.exact = true\ntransport.ranks = 2\n";

/// A sweep in a folder of its own.
struct Place(tempfile::TempDir);

impl Place {
    /// Of the tiny Llama with `keys`; `sweep` begins with its section's head.
    fn new(keys: &str, sweep: &str) -> Self {
        let place = Self(tempfile::tempdir().expect("a folder"));
        place.write(keys, sweep);
        place
    }

    fn write(&self, keys: &str, sweep: &str) {
        let text = tiny("tiny-llama", keys).replace("length = 64", "length = 32").replace("sequential", "shuffled");
        fs::write(self.path("s.toml"), format!("{text}\n{sweep}\n")).expect("writable");
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, more: &[&str]) -> Command {
        let mut command = Command::new(program());
        command.args(["ablate", "s.toml", "--out", "out"]).args(more).current_dir(self.0.path());
        command.env("XDG_CACHE_HOME", self.path(".cache")).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn ablate(&self, more: &[&str]) -> (Option<i32>, String, String) {
        said(self.command(more).output().expect("the program starts"))
    }

    /// `ablation.json`.
    fn results(&self) -> Value {
        let text = fs::read(self.path("out/ablation.json")).expect("results");
        serde_json::from_slice(&text).expect("JSON")
    }

    fn verdicts(&self) -> Vec<(String, String)> {
        let results = self.results();
        let cases = results["cases"].as_array().expect("cases").iter();
        cases.map(|case| (text(&case["name"]), text(&case["verdict"]))).collect()
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("a text, not {value}")).to_owned()
}

fn said(output: Output) -> (Option<i32>, String, String) {
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn own(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|&(a, b)| (a.to_owned(), b.to_owned())).collect()
}

/// The state of a run folder, which a run that is repeated writes anew.
fn written(folder: &Path) -> (Vec<u8>, std::time::SystemTime) {
    let path = folder.join("summary.json");
    let time = fs::metadata(&path).and_then(|data| data.modified()).expect("a summary");
    (fs::read(path).expect("a summary"), time)
}

#[test]
fn stages_are_equal_in_exact_mode_and_resuming_repeats_nothing() {
    let place = Place::new(KEYS, "[sweep]\n\"partition.stage\" = [0, 1, 2, 3]\nexpect = \"equal\"\n");
    let (code, out, err) = place.ablate(&[]);
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(out.contains("4 cases, in out\n") && out.contains("[4/4] partition.stage=3: 2 steps in "), "{out}");
    let stage = |stage: u64, verdict: &str| (format!("partition.stage={stage}"), verdict.to_owned());
    assert_eq!(place.verdicts(), [stage(0, "baseline"), stage(1, "met"), stage(2, "met"), stage(3, "met")]);
    let results = place.results();
    let sent = |case: usize| results["cases"][case]["mean"]["comm_bytes"].as_f64().expect("bytes");
    assert!(sent(0) < sent(3), "stage 3 gathers parameters: {} and {}", sent(0), sent(3));

    // Without --resume the results are safe; with it nothing is repeated.
    let (code, _, err) = place.ablate(&[]);
    assert_eq!(code, Some(2));
    assert!(err.contains("out already holds a sweep; go on with --resume"), "{err}");
    let case = place.path("out/cases/partition.stage=2");
    let before = written(&case);
    let (code, out, err) = place.ablate(&["--resume"]);
    assert_eq!(code, Some(0), "{out}{err}");
    assert_eq!(out.matches("was done before").count(), 4, "{out}");
    assert_eq!(written(&case), before);
    assert_eq!(place.results(), results);

    // One that has lost its summary goes on from its checkpoint, which is that of its end.
    fs::remove_file(case.join("summary.json")).expect("there");
    let (code, out, err) = place.ablate(&["--resume"]);
    assert_eq!((code, out.matches("was done before").count()), (Some(0), 3), "{out}{err}");
    assert_eq!(place.verdicts()[2], stage(2, "met"));
}

#[test]
fn seeds_are_compared_each_with_its_own_and_changed_cases_make_room() {
    let sweep = |rate: &str| {
        format!(
            "[sweep]\nseeds = [1, 2]\n[[sweep.case]]\nname = \"a\"\n[[sweep.case]]\nname = \"b\"\n\
        expect = {{ tolerance = 0.5 }}\n\"optim.lr\" = {rate}\n"
        )
    };
    let place = Place::new(KEYS, &sweep("1e-3"));
    let (code, out, err) = place.ablate(&[]);
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(out.contains("2 cases with 2 seeds each, in out") && out.contains("[3/4] a,seed=2: "), "{out}");
    let results = place.results();
    let run = |case: usize, seed: usize| &results["cases"][case]["runs"][seed];
    assert_eq!((&run(1, 1)["seed"], &run(1, 1)["difference"]["loss"]), (&2.into(), &0.0.into()));
    assert_ne!(run(0, 0)["figures"]["final_loss"], run(0, 1)["figures"]["final_loss"], "seeds are told apart");
    let csv = fs::read_to_string(place.path("out/ablation.csv")).expect("results");
    assert_eq!(csv.lines().count(), 5, "{csv}");
    assert!(csv.starts_with("case,seed,optim.lr,verdict,baseline,"), "{csv}");
    assert!(csv.contains("\nb,2,0.001,met,a,"), "{csv}");

    place.write(KEYS, &sweep("2e-3"));
    let (code, out, err) = place.ablate(&["--resume"]);
    assert_eq!((code, out.matches("was done before").count()), (Some(0), 2), "{out}{err}");
    assert!(out.contains("b,seed=2: `optim.lr` has changed; the old run is kept as out/cases/b,seed=2.old-1"), "{out}");
    assert!(place.path("out/cases/b,seed=2.old-1/summary.json").is_file());
    assert_ne!(place.results()["cases"][1]["loss_difference"], 0.0);
}

#[test]
fn what_is_not_as_expected_or_fails_is_named_and_the_others_run() {
    let sweep = r#"
        [sweep]
        baseline = "plain"
        [[sweep.case]]
        name = "other rate"
        optim.lr = 0.01
        expect = "equal"
        [[sweep.case]]
        name = "plain"
        [[sweep.case]]
        name = "too long"
        "data.sequence_length" = 4096
        [[sweep.case]]
        name = "near"
        optim = { lr = 1.001e-3 }
        expect = { tolerance = 0.01 }
        [[sweep.case]]
        name = "same"
        expect = "different"
        [[sweep.case]]
        name = "free"
        run.steps = 1
    "#;
    let place = Place::new(KEYS, sweep);
    let (code, out, err) = place.ablate(&[]);
    assert_eq!(code, Some(1), "{out}{err}");
    assert_eq!(err, "error: 1 of 6 runs failed, 2 of 6 runs are not what is expected\n", "{out}");
    let expected = [
        ("other rate", "unmet"),
        ("plain", "baseline"),
        ("too long", "failed"),
        ("near", "met"),
        ("same", "unmet"),
        ("free", "compared"),
    ];
    assert_eq!(place.verdicts(), own(&expected));
    assert!(out.contains("other rate: expected the same as `plain`, but losses differ by at most "), "{out}");
    assert!(out.contains("same: expected something else than `plain`, but losses are equal"), "{out}");
    // The failure with its reason and its log.
    assert!(out.contains("too long: failed with exit code 2\n    error: "), "{out}");
    assert!(out.contains("log: out/cases/too-long/log.txt"), "{out}");
    let log = fs::read_to_string(place.path("out/cases/too-long/log.txt")).expect("a log");
    assert!(log.contains("4096"), "{log}");
}

#[test]
fn without_its_baseline_nothing_is_as_expected() {
    let cases = "[[sweep.case]]\nname = \"a\"\n\"data.sequence_length\" = 4096\n[[sweep.case]]\nname = \"b\"\n";
    let place = Place::new(KEYS, &format!("[sweep]\nexpect = \"equal\"\n{cases}"));
    let (code, out, err) = place.ablate(&[]);
    assert_eq!(code, Some(1), "{out}{err}");
    assert_eq!(place.verdicts(), own(&[("a", "failed"), ("b", "no-baseline")]));
    assert!(out.contains("b: its baseline `a` has failed"), "{out}");
}

#[test]
fn an_interrupted_sweep_goes_on_to_the_same_bits() {
    let keys = KEYS.replace("steps = 2", "steps = 40");
    let place = Place::new(&keys, "[sweep]\npartition.stage = [0, 2]\nexpect = \"equal\"\n");
    let child = Guard(Some(place.command(&[]).spawn().expect("the program starts")));
    let case = place.path("out/cases/partition.stage=0");
    let lines = || fs::read(case.join("metrics.jsonl")).map_or(0, |all| all.iter().filter(|&&b| b == b'\n').count());
    let until = Instant::now() + Duration::from_secs(60);
    while lines() < 3 {
        assert!(Instant::now() < until, "no step within a minute");
        std::thread::sleep(Duration::from_millis(1));
    }
    child.interrupt();
    let (code, out, err) = said(child.finish());
    assert_eq!((code, err.as_str()), (Some(130), "interrupted\n"), "{out}");
    assert!(out.contains("0 of 2 runs are done\ngo on with: zf ablate s.toml --out out --resume"), "{out}");
    let stopped = lines();
    assert!(stopped < 40, "the signal came too late");
    assert!(case.join(format!("checkpoints/step-{stopped}")).is_dir(), "{out}");
    assert!(!place.path("out/cases/partition.stage=2").exists(), "nothing begins after the signal");
    assert_eq!(place.results()["complete"], false);

    let (code, out, err) = place.ablate(&["--resume"]);
    assert_eq!(code, Some(0), "{out}{err}");
    assert_eq!(place.results()["complete"], true);
    assert_eq!(place.verdicts()[1], ("partition.stage=2".to_owned(), "met".to_owned()));
    let log = fs::read_to_string(case.join("log.txt")).expect("a log");
    assert!(log.contains("interrupted") && log.contains(&format!("going on after step {stopped} of 40")), "{log}");
}

#[test]
fn sweeps_that_make_no_sense_start_nothing() {
    let rows = [
        ("", "s.toml: no [sweep] section"),
        ("[sweep]\n\"partition.stage\" = [0, 4]\n", "must be 0, 1, 2 or 3, found 4"),
        ("[[sweep.case]]\nname = \"a\"\nselekt.ratio = 0.1\n", "unknown section [selekt]"),
        ("[[sweep.case]]\nname = \"a\"\n[[sweep.case]]\nname = \"b\"\ntransport.ranks = 3\n", "micro_batch"),
    ];
    let place = Place::new("", "");
    for (sweep, says) in rows {
        place.write(KEYS, sweep);
        let (code, out, err) = place.ablate(&[]);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{sweep}: {err}");
        assert!(err.starts_with("error: s.toml") && err.contains(says), "{sweep}\nexpected: {says}\nfound: {err}");
        assert!(!place.path("out").exists(), "{sweep}");
    }
    // The place is that of the sweep, and the case has its name.
    place.write(KEYS, "[sweep]\n\"partition.stagee\" = [0]\n");
    let (_, _, err) = place.ablate(&[]);
    assert!(err.contains(": unknown key `stagee` in [partition] zero\n"), "{err}");
    assert!(err.contains("| \"partition.stagee\" = [0]\n"), "{err}");
    assert!(err.contains("in case `partition.stagee=0`"), "{err}");
    let (code, _, err) = said(
        Command::new(place.command(&[]).get_program()).args(["ablate", "s.toml", "--resume"]).output().expect("starts"),
    );
    assert_eq!(code, Some(2));
    assert!(err.contains("--out <DIR>"), "{err}");
}

/// A test that fails leaves no program behind.
struct Guard(Option<Child>);

impl Guard {
    fn interrupt(&self) {
        let id = self.0.as_ref().expect("running").id().to_string();
        let status = Command::new("kill").args(["-INT", &id]).status();
        assert!(status.is_ok_and(|status| status.success()), "kill -INT failed");
    }

    fn finish(mut self) -> Output {
        self.0.take().expect("running").wait_with_output().expect("it ends")
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
