//! From every step on, a resumed run ends in the bits of the one that was never stopped.

use super::{at, from, offload, text, whole};
use crate::lifecycle::history;

/// Three windows of four steps.
fn zenflow(every: u64, more: &str) -> String {
    super::zenflow(every, &format!("run.steps = 12\n{more}"))
}

/// Runs once with a checkpoint a step, then from each of `steps` on under each of `others` by turn (itself, if none).
fn check(keys: &str, others: &[String], steps: impl Iterator<Item = u64>) {
    let folder = tempfile::tempdir().expect("a folder");
    let expected = whole(keys, folder.path());
    let all = history(folder.path());
    assert!(all.windows(2).all(|pair| pair[0].1 != pair[1].1), "steps are not told apart");
    let own = [keys.to_owned()];
    let others = if others.is_empty() { &own[..] } else { others };
    for (turn, step) in steps.enumerate() {
        let parts = tempfile::tempdir().expect("a folder");
        let other = &others[turn % others.len()];
        let (found, notes) = from(&at(folder.path(), step), other, parts.path());
        let case = format!("from step {step} on, with {}", &other[other.find("run.steps").unwrap_or(0)..]);
        assert!(history(parts.path()) == all[step as usize..], "{case}: other losses");
        assert_eq!(found.state_hash, expected.state_hash, "{case}: state");
        assert!(!notes.iter().any(|note| note.contains("open update window")), "{case}: {notes:?}");
    }
}

/// In the first window, in the middle of the second, at its end, where its update is on its way, and when columns have moved.
fn each(keys: &str) {
    check(keys, &[], [3, 6, 8, 9].into_iter());
}

/// The run of the promise: `ZF_TEST_RESUMES=41` resumes from each of 40 consecutive steps, instead of those of one window.
#[test]
fn asynchronous_from_consecutive_steps() {
    let (steps, from) = match std::env::var("ZF_TEST_RESUMES") {
        Ok(end) => (44, 1..end.parse::<u64>().expect("ZF_TEST_RESUMES is a number").min(44)),
        Err(_) => (20, 9..13),
    };
    for every in [4, 8] {
        check(&super::zenflow(every, &format!("run.steps = {steps}\n")), &[], from.clone());
    }
}

#[test]
fn synchronous() {
    each(&zenflow(4, "offload.asynchronous = false\n"));
}

#[test]
fn late_promotion() {
    let keys = zenflow(4, "offload.promotion = \"late\"\nselect.ratio = 0.3\n");
    each(&keys);
    // Both kinds of an open update were among them: held, and of columns that moved to the device.
    let folder = tempfile::tempdir().expect("a folder");
    whole(&keys, folder.path());
    let (held, late) = (offload(&at(folder.path(), 8)), offload(&at(folder.path(), 9)));
    assert_eq!((&held["held"], &late["held"]), (&true.into(), &false.into()));
    assert!(late["late"].as_object().is_some_and(|late| !late.is_empty()), "{late}");
}

#[test]
fn sums_on_the_device() {
    each(&zenflow(8, "offload.accumulate = \"device\"\n"));
}

/// Where sums are kept is no part of the state.
#[test]
fn sums_move_between_device_and_host() {
    let on = |place: &str| zenflow(4, &format!("offload.accumulate = \"{place}\"\n"));
    check(&on("device"), &[on("host")], 5..9);
    check(&on("host"), &[on("device")], 5..9);
}

#[test]
fn states_in_files() {
    each(&zenflow(4, "offload.tier = \"file\"\n"));
    check(&zenflow(4, "offload.tier = \"file\"\n"), &[zenflow(4, "")], 5..9);
}

#[test]
fn float16_whose_scale_grows() {
    each(&zenflow(4, "run.dtype = \"float16\"\nrun.loss_scale = { initial = 256, window = 3 }\n"));
}

#[test]
fn float16_whose_first_steps_are_skipped() {
    let keys = "run.dtype = \"float16\"\nrun.loss_scale = { initial = 16777216, window = 100 }\n";
    each(&super::zenflow(4, keys));
}

#[test]
fn bfloat16() {
    each(&zenflow(8, "run.dtype = \"bfloat16\"\n"));
}

#[test]
fn about_the_end_of_warm_up() {
    for warmup in [3, 6] {
        check(&zenflow(4, &format!("offload.warmup = {warmup}\n")), &[], (1..9).filter(|s| s + 3 > warmup));
    }
}

#[test]
fn windows_of_one_step() {
    each(&zenflow(1, "offload.update_interval = 1\n"));
    each(&zenflow(2, "offload.update_interval = 1\noffload.promotion = \"late\"\n"));
}

#[test]
fn mean_learning_rate() {
    each(&zenflow(4, "offload.learning_rate = \"mean\"\n"));
}

#[test]
fn selectors_with_a_memory() {
    each(&zenflow(4, "select.wrap = [{ kind = \"ema\", beta = 0.7 }, { kind = \"hysteresis\", margin = 0.3 }]\n"));
    each(&zenflow(4, "select.wrap = [{ kind = \"hysteresis\", margin = 0.3 }, { kind = \"every\", updates = 8 }]\n"));
}

#[test]
fn zero_offload() {
    each(&text("offload.kind = \"host\"\nrun.steps = 12\n"));
    each(&text("offload.kind = \"host\"\noffload.tier = \"file\"\nrun.dtype = \"bfloat16\"\nrun.steps = 12\n"));
}

#[test]
fn sgd_and_lion() {
    each(&zenflow(4, "optim.kind = \"lion\"\noptim.lr = 1e-4\n"));
    each(&zenflow(4, "optim.kind = \"sgd\"\noptim.lr = 0.05\noptim.momentum = 0.9\n"));
}

/// Ranks and stages change with an update on its way.
fn other_layouts(more: &str) {
    let of = |ranks: usize, partition: &str| {
        let keys = format!("{more}transport.ranks = {ranks}\npartition = {{ {partition} }}\n");
        zenflow(4, &keys)
    };
    let others = [
        of(2, "stage = 1"),
        of(3, "stage = 2, bucket = \"7KB\""),
        of(2, "stage = 3"),
        of(1, "stage = 0"),
        of(3, "stage = 1"),
        of(2, "stage = 0"),
        of(6, "stage = 3, bucket = \"3KB\""),
        of(2, "stage = 2"),
    ];
    check(&of(1, "stage = 0"), &others, 4..12);
    check(&of(3, "stage = 2"), &[of(1, "stage = 1"), of(2, "stage = 3")], 6..11);
}

#[test]
fn other_ranks_and_stages() {
    other_layouts("");
}

#[test]
fn other_ranks_and_stages_with_late_promotion() {
    other_layouts("offload.promotion = \"late\"\nselect.ratio = 0.3\nrun.dtype = \"bfloat16\"\n");
}

#[test]
fn other_ranks_and_stages_of_zero_offload() {
    let of = |ranks: usize, stage: usize, more: &str| {
        text(&format!("{more}transport.ranks = {ranks}\npartition.stage = {stage}\nrun.steps = 10\n"))
    };
    let host = "offload.kind = \"host\"\n";
    // Without an offload it is the same training.
    let others = [of(2, 1, host), of(3, 3, ""), of(1, 0, host), of(2, 0, ""), of(3, 2, host)];
    check(&of(1, 0, host), &others, 2..7);
    check(&of(2, 3, ""), &others, 2..7);
}
