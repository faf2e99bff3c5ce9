//! Losses and end states of an independent simulation of ZenFlow (`golden/zenflow_reference.json`).
//!
//! The other layouts of every run: `scripts/accept.py`.

use serde_json::Value;
use zf_core::checkpoint::{Checkpoint, newest_whole};
use zf_tests::{Ran, golden, largest_difference, tiny};

use super::{beyond, train_recorded};

fn runs() -> Vec<Value> {
    let text = std::fs::read_to_string(golden("zenflow_reference.json")).expect("golden file");
    let all: Value = serde_json::from_str(&text).expect("JSON");
    all["runs"].as_array().expect("a list").clone()
}

/// Trains as the reference says, and counts the columns that were chosen after the first time.
fn train(run: &Value, layout: &str) -> (Ran, usize) {
    let of = |key: &str| &run[key];
    let keys = format!(
        "run.steps = 40\nrun.global_batch = 8\nrun.clip = 0\n{layout}\n\
         offload = {{ kind = \"zenflow\", update_interval = {}, asynchronous = {}, promotion = {} }}\n\
         select = {{ kind = \"topk\", ratio = {}, axis = {}, every = {} }}\n",
        of("interval"),
        of("asynchronous"),
        of("promotion"),
        of("ratio"),
        of("axis"),
        of("every"),
    );
    let (ran, choices, _) = train_recorded(&tiny("tiny-llama", &keys));
    let promoted = choices.iter().filter(|(update, _)| **update > 0).flat_map(|(_, weights)| weights.values());
    let promoted = promoted.map(|[before, after]| beyond(after, before)).sum();
    (ran, promoted)
}

fn check(name: &str, layout: &str) {
    let run = runs().into_iter().find(|run| run["name"] == name).unwrap_or_else(|| panic!("no run {name}"));
    let case = format!("{name}, {layout}");
    let (ran, promoted) = train(&run, layout);
    let number = |value: &Value| value.as_f64().expect("a number");
    let wanted: Vec<f64> = run["loss"].as_array().expect("a list").iter().map(number).collect();
    let apart = largest_difference(&ran.losses(), &wanted);
    assert!(apart <= 3e-6, "{case}: losses differ by {apart:.2e}");
    // The reference counts columns whose pending update is flushed.
    if let Some(wanted) = run["promoted"].as_u64().filter(|_| run["promotion"] == "flush") {
        assert_eq!(promoted as u64, wanted, "{case}: promoted columns");
    }
    let (_, newest) = newest_whole(&ran.folder.path().join("checkpoints")).expect("readable").expect("a checkpoint");
    let checkpoint = Checkpoint::open(&newest).expect("whole");
    for (name, wanted) in run["checksum"].as_object().expect("by name") {
        let (_, values) = checkpoint.read_tensor_f32(name).expect("every parameter is saved");
        let norm = values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
        let sum: f64 = values.iter().map(|&v| f64::from(v)).sum();
        let (wanted_norm, wanted_sum) = (number(&wanted["l2"]), number(&wanted["sum"]));
        assert!((norm / wanted_norm - 1.0).abs() < 1e-5, "{case}: {name}: norm {norm}, expected {wanted_norm}");
        // Addends of both signs cancel: the sum is judged by their size.
        let scale = (values.len() as f64).sqrt() * wanted_norm;
        assert!((sum - wanted_sum).abs() < 1e-5 * scale, "{case}: {name}: sum {sum}, expected {wanted_sum}");
    }
}

fn on(ranks: usize, stage: u8) -> String {
    format!("run.micro_batch = {}\ntransport.ranks = {ranks}\npartition.stage = {stage}", 8 / ranks)
}

#[test]
fn small_part_asynchronous() {
    check("axis1 ratio0.05 S4 async", &on(1, 0));
    check("axis1 ratio0.05 S4 async", &on(2, 2));
}

#[test]
fn windows_of_one() {
    check("axis1 ratio0.1 S1 sync", &on(2, 1));
    check("axis1 ratio0.1 S1 async", &on(1, 3));
    check("axis1 ratio0.1 S1 async", &on(2, 3));
}

#[test]
fn synchronous() {
    check("axis1 ratio0.1 S4 sync", &on(1, 2));
    check("axis1 ratio0.1 S4 sync", &on(2, 0));
}

#[test]
fn asynchronous() {
    for (ranks, stage) in [(1, 1), (2, 0), (2, 1), (2, 2), (2, 3)] {
        check("axis1 ratio0.1 S4 async", &on(ranks, stage));
    }
}

#[test]
fn everything_chosen() {
    check("axis1 ratio1.0 S1 sync", &on(2, 3));
    check("axis1 ratio1.0 S4 async", &on(2, 1));
}

#[test]
fn rows() {
    check("axis0 ratio0.1 S4 async", &on(1, 0));
    check("axis0 ratio0.1 S4 async", &on(2, 3));
}

#[test]
fn late_promotion() {
    check("axis1 ratio0.1 S4 async promotion=late", &on(1, 0));
    check("axis1 ratio0.1 S4 async promotion=late", &on(2, 2));
}

/// One window more of delay, or one less, is far beyond the tolerance.
#[test]
fn the_tolerance_tells_the_modes_apart() {
    let runs = runs();
    let of = |name: &str| {
        let run = runs.iter().find(|run| run["name"] == name).expect("there");
        run["loss"].as_array().expect("a list").iter().map(|v| v.as_f64().expect("a number")).collect::<Vec<_>>()
    };
    let late = of("axis1 ratio0.1 S4 async promotion=late");
    assert!(largest_difference(&of("axis1 ratio0.1 S4 async"), &late) > 3e-4);
    assert!(largest_difference(&of("axis1 ratio0.1 S4 async"), &of("axis1 ratio0.1 S4 sync")) > 3e-2);
}
