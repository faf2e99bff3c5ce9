//! Resumed with another kind of offload in mid-window: what is open is applied first, and nothing is lost.

use std::collections::BTreeMap;
use std::path::Path;

use zf_core::checkpoint::Checkpoint;

use super::{at, from, offload, text, whole, zenflow};
use crate::lifecycle::history;

/// A rate that does not depend on the length of the run, so that runs of other lengths are parts of each other.
const CONSTANT: &str = "schedule.kind = \"constant\"\n";

fn constant(text: &str) -> String {
    let kept = text.lines().filter(|line| !line.starts_with("schedule."));
    kept.map(|line| format!("{line}\n")).chain([CONSTANT.to_owned()]).collect()
}

/// Bits of masters and moments, by name and kind.
fn state(checkpoint: &Path) -> BTreeMap<(String, String), Vec<u32>> {
    let checkpoint = Checkpoint::open(checkpoint).expect("whole");
    let kept = checkpoint.tensors().filter(|info| !info.kind.starts_with("aux."));
    let infos: Vec<_> = kept.map(|info| (info.name.to_owned(), info.kind.to_owned(), info.numel)).collect();
    let read = |(name, kind, numel): (String, String, usize)| {
        let mut values = vec![0f32; numel];
        checkpoint.read_f32(&name, &kind, 0..numel, &mut values).expect("readable");
        ((name, kind), values.iter().map(|value| value.to_bits()).collect())
    };
    infos.into_iter().map(read).collect()
}

/// With no step to make, a run under `other` that takes over a window left open has the state of one that was drained there.
fn like_drained(more: &str, others: &[String]) {
    let keys = |steps: u64| constant(&zenflow(4, &format!("run.steps = {steps}\n{more}")));
    let folder = tempfile::tempdir().expect("a folder");
    whole(&keys(12), folder.path());
    for step in [6, 8, 9] {
        let drained = tempfile::tempdir().expect("a folder");
        whole(&keys(step), drained.path());
        let expected = state(&at(drained.path(), step));
        // Draining did something, except that an update which was made but is not visible is in the masters.
        let made = step == 8 && !more.contains("\"late\"");
        assert_eq!(state(&at(folder.path(), step)) == expected, made, "{more} {step}");
        for other in others {
            let other = format!("{}run.steps = {step}\n", other.replace("run.steps = 16\n", ""));
            let taken = tempfile::tempdir().expect("a folder");
            let (_, notes) = from(&at(folder.path(), step), &constant(&other), taken.path());
            let note = notes.iter().find(|note| note.contains("open update window"));
            assert!(note.is_some(), "{notes:?}");
            assert!(notes.iter().any(|note| note.contains("differently often")), "{notes:?}");
            let found = state(&at(taken.path(), step));
            let worst: Vec<_> = expected.keys().filter(|key| found.get(*key) != expected.get(*key)).collect();
            assert!(
                found.len() == expected.len() && worst.is_empty(),
                "{more} {step}: {worst:?} differ under\n{other}"
            );
        }
    }
}

fn others() -> [String; 4] {
    [
        text(""),
        text("transport.ranks = 3\npartition.stage = 3\n"),
        text("offload.kind = \"host\"\ntransport.ranks = 2\npartition.stage = 2\n"),
        zenflow(4, "select.axis = \"output\"\n"),
    ]
}

#[test]
fn asynchronous() {
    like_drained("", &others());
}

#[test]
fn late_promotion() {
    like_drained("offload.promotion = \"late\"\nselect.ratio = 0.3\n", &others()[1..]);
}

#[test]
fn along_the_other_axis_with_sums_on_the_device() {
    let more = "select.axis = \"output\"\noffload.accumulate = \"device\"\noffload.learning_rate = \"mean\"\n";
    like_drained(more, &others()[..3]);
}

/// Where the new run can go on with the window it does: the same losses up to its end at least.
#[test]
fn windows_are_finished_as_they_began() {
    let keys = constant(&zenflow(4, ""));
    let folder = tempfile::tempdir().expect("a folder");
    whole(&keys, folder.path());
    let all = history(folder.path());
    for other in [
        zenflow(2, "offload.update_interval = 2\n"),
        zenflow(8, "offload.update_interval = 8\n"),
        zenflow(4, "offload.asynchronous = false\n"),
        zenflow(4, "offload.promotion = \"late\"\n"),
    ] {
        let parts = tempfile::tempdir().expect("a folder");
        let (_, notes) = from(&at(folder.path(), 6), &constant(&other), parts.path());
        assert!(!notes.iter().any(|note| note.contains("open update window")), "{notes:?}");
        let found = history(parts.path());
        // Where updates are visible at once, the pending one is so from the first step on.
        let same = if other.contains("asynchronous = false") { 0 } else { 2 };
        assert_eq!(found[..same], all[6..6 + same], "{other}");
        assert!(found != all[6..], "{other}");
        let interval = &offload(&at(parts.path(), 16))["clock"]["interval"];
        let wanted = other.lines().find_map(|line| line.strip_prefix("offload.update_interval = ")).expect("a length");
        assert_eq!(interval.to_string(), wanted, "{other}");
    }
}

/// All of these train on: the loss never jumps, and goes on falling. Two changes from each kind, with `ZF_TEST_CHANGES=all`
/// those to every other.
#[test]
fn from_one_kind_to_another_and_on() {
    let kinds = [
        ("none", text("")),
        ("host", text("offload.kind = \"host\"\n")),
        ("zenflow", zenflow(4, "")),
        ("late", zenflow(4, "offload.promotion = \"late\"\nselect.ratio = 0.3\n")),
        ("synchronous", zenflow(4, "offload.asynchronous = false\n")),
        ("output", zenflow(8, "select.axis = \"output\"\noffload.warmup = 9\n")),
        ("random", zenflow(4, "select.kind = \"random\"\n")),
        ("ema", zenflow(4, "select.wrap = [{ kind = \"ema\", beta = 0.7 }]\n")),
    ];
    let all = std::env::var("ZF_TEST_CHANGES").is_ok_and(|changes| changes == "all");
    for (place, (first, before)) in kinds.iter().enumerate().take(6).skip(1) {
        let folder = tempfile::tempdir().expect("a folder");
        whole(before, folder.path());
        let made = history(folder.path());
        // So that each kind is changed to.
        let few = [(place + 1) % kinds.len(), (place + 4) % kinds.len()];
        let others = kinds.iter().enumerate().filter(|(at, _)| *at != place && (all || few.contains(at)));
        for (_, (second, after)) in others {
            let parts = tempfile::tempdir().expect("a folder");
            from(&at(folder.path(), 7), after, parts.path());
            let losses: Vec<f64> = history(parts.path()).iter().map(|step| f64::from_bits(step.1)).collect();
            let before = f64::from_bits(made[6].1);
            assert!(losses.iter().all(|&loss| loss < before * 1.02), "{first} to {second}: {before}, {losses:?}");
            assert!(losses[8] < losses[0], "{first} to {second}: {losses:?}");
        }
    }
}

/// To a run without windows the change is exact: synchronous windows of one step are AdamW.
#[test]
fn equal_runs_stay_equal() {
    let one = zenflow(1, "offload.update_interval = 1\noffload.asynchronous = false\n");
    // The columns of a run that goes on stay chosen until the next choice.
    let every = zenflow(4, "select.ratio = 1.0\n");
    let kinds = [text(""), text("offload.kind = \"host\"\n"), every, one];
    let folder = tempfile::tempdir().expect("a folder");
    let expected = whole(&kinds[0], folder.path());
    for first in &kinds {
        let parts = tempfile::tempdir().expect("a folder");
        whole(first, parts.path());
        for second in kinds.iter().filter(|second| *first != kinds[3] || **second != kinds[2]) {
            let rest = tempfile::tempdir().expect("a folder");
            let (found, _) = from(&at(parts.path(), 5), second, rest.path());
            assert_eq!(found.state_hash, expected.state_hash, "from\n{first}to\n{second}");
        }
    }
}
