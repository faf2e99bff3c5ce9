//! The schedule is found by name, its errors show the run file's line, and training uses it.

use std::path::Path;

use zf_core::config::{self, Run};
use zf_core::registry::Registry;
use zf_core::slots;

use own_schedule as _;
use zf_cli as _;

fn run_file() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("run.toml")
}

/// What a run needs beside its schedule.
const REST: &str = "\n[model]\npath = 'm'\n[data]\npath = 'd.txt'\nsequence_length = 8\n";

fn program() -> assert_cmd::Command {
    assert_cmd::Command::new(env!("CARGO_BIN_EXE_own-schedule"))
}

#[test]
fn the_run_file_builds_the_schedule() {
    let registry = Registry::global().expect("no duplicates");
    let run = config::load(Some(&run_file()), &[], registry).expect("valid");
    let schedule = run.build::<slots::Schedule>(registry, &run.context()).expect("valid");
    let factors: Vec<f64> = [0, 1, 3, 15, 9999].iter().map(|&step| schedule.factor(step, 0)).collect();
    assert_eq!(factors, [0.25, 0.5, 1.0, 0.5, 0.1]);
}

#[test]
fn a_wrong_setting_shows_the_line() {
    let text = "[run]\nsteps = 1\n[schedule]\nkind = 'inverse-sqrt'\nwarmpu = 3";
    let error = Run::from_toml_str(&format!("{text}{REST}"), "own.toml").expect_err("unknown key").to_string();
    assert_eq!(
        error,
        "own.toml:5:1: unknown key `warmpu` in [schedule] inverse-sqrt\n   5 | warmpu = 3\n     \
         | ^^^^^^ did you mean `warmup`? expected one of: min_ratio, warmup"
    );
    let text = "[run]\nsteps = 1\n[schedule]\nkind = 'inverse-sqrt'\nwarmup = 0";
    let run = Run::from_toml_str(&format!("{text}{REST}"), "own.toml").expect("the file itself is right");
    let registry = Registry::global().expect("no duplicates");
    let error = run.build::<slots::Schedule>(registry, &run.context()).err().expect("refused").to_string();
    assert!(error.starts_with("own.toml:5:10: `warmup` in [schedule] inverse-sqrt: must be at least 1"), "{error}");
}

#[test]
fn the_program_lists_and_trains_with_it() {
    let listed = program().args(["stages", "schedule"]).assert().success();
    let listed = String::from_utf8_lossy(&listed.get_output().stdout).into_owned();
    assert!(listed.contains("inverse-sqrt") && listed.contains("(own-schedule)"), "{listed}");

    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("out");
    program()
        .arg("train")
        .arg(run_file())
        .args(["-o", "log.tensorboard=false"])
        .args(["-o", &format!("data.cache={}", folder.path().join("cache").display())])
        .arg("--out")
        .arg(&out)
        .assert()
        .success();
    let metrics = std::fs::read_to_string(out.join("metrics.jsonl")).expect("written by the run");
    let rates: Vec<String> = metrics
        .lines()
        .filter_map(|line| line.split("\"lr\":").nth(1)?.split([',', '}']).next().map(|rate| rate.trim().to_owned()))
        .collect();
    // lr x 1/4 and lr x sqrt(4/12).
    assert_eq!(rates.len(), 12);
    assert_eq!(rates[0].parse::<f64>().expect("a number"), 0.0025);
    assert_eq!(rates[11].parse::<f64>().expect("a number"), 1e-2 * (4.0_f64 / 12.0).sqrt());
}
