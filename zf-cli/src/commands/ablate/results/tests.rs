use zf_core::record::{MetricsWriter, RankSummary, Seconds};
use zf_core::stage::CommBytes;

use super::*;

/// A run folder of `losses` whose steps take `seconds`, the first one a hundred times as long.
fn folder(root: &Path, name: &str, losses: &[f64], seconds: f64, hash: &str) -> PathBuf {
    let folder = root.join(name);
    std::fs::create_dir(&folder).expect("a new folder");
    let mut metrics = MetricsWriter::create(&folder.join(METRICS)).expect("writable");
    let records: Vec<StepRecord> = losses
        .iter()
        .enumerate()
        .map(|(step, &loss)| StepRecord {
            step: step as u64,
            loss,
            seconds: Seconds {
                step: seconds * if step == 0 { 100.0 } else { 1.0 },
                stall: seconds / 4.0,
                ..Seconds::default()
            },
            comm_bytes: CommBytes { all_gather: 10, control: 2, ..CommBytes::default() },
            ..StepRecord::default()
        })
        .collect();
    records.iter().for_each(|record| metrics.write(record).expect("writable"));
    let mut summary = Summary::from_records(&records);
    summary.state_hash = hash.to_owned();
    summary.per_rank = vec![RankSummary::default(); 2];
    summary.per_rank[1].memory.device_peak = 7;
    summary.write(&folder.join(SUMMARY)).expect("writable");
    folder
}

#[test]
fn figures_leave_the_first_step_out() {
    let root = tempfile::tempdir().expect("a folder");
    let figures = Figures::read(&folder(root.path(), "a", &[3.0, 2.0, 1.0], 0.5, "h")).expect("a run");
    assert_eq!((figures.steps, figures.final_loss, figures.validation_loss), (3.0, 1.0, None));
    assert_eq!((figures.step_seconds, figures.step_seconds_median, figures.stall_share), (0.5, 0.5, 0.25));
    assert_eq!((figures.device_peak, figures.comm_bytes, figures.link_bytes), (7.0, 12.0, 0.0));
    let one = Figures::read(&folder(root.path(), "b", &[3.0], 0.5, "h")).expect("a run");
    assert_eq!(one.step_seconds, 50.0);
}

#[test]
fn expectations_are_met_or_not() {
    let root = tempfile::tempdir().expect("a folder");
    let base = folder(root.path(), "base", &[4.0, 2.0], 1.0, "h");
    let rows: [(&str, &[f64], &str, [bool; 3], &str); 6] = [
        ("same", &[4.0, 2.0], "h", [true, true, false], "losses are equal, final states are equal"),
        ("state", &[4.0, 2.0], "i", [false, true, true], "losses are equal, final states are different"),
        ("near", &[4.0, 2.001], "i", [false, true, true], "differ by at most 5.00e-4 (relative), at step 1, final"),
        ("far", &[2.0, 2.0], "h", [false, false, true], "differ by at most 5.00e-1 (relative), at step 0, final"),
        ("shorter", &[4.0], "h", [false, false, true], "losses are equal, steps in one of them only: 1"),
        ("nan", &[4.0, f64::NAN], "h", [false, false, true], "differ by at most inf (relative), at step 1"),
    ];
    for (name, losses, hash, expected, says) in rows {
        let difference = Difference::between(&base, &folder(root.path(), name, losses, 1.0, hash)).expect("two runs");
        let met = [Expect::Equal, Expect::Tolerance(1e-3), Expect::Different].map(|expect| difference.meets(expect));
        assert_eq!(met, expected, "{name}");
        assert!(difference.to_string().contains(says), "{name}: {difference}");
    }
    let silent = [folder(root.path(), "x", &[1.0], 1.0, ""), folder(root.path(), "y", &[1.0], 1.0, "")];
    let difference = Difference::between(&silent[0], &silent[1]).expect("two runs");
    assert!(!difference.meets(Expect::Equal), "an unknown state equals nothing");
}

#[test]
fn a_case_has_the_worst_verdict_and_the_mean_of_its_seeds() {
    let root = tempfile::tempdir().expect("a folder");
    let run = |seed: u64, loss: f64, verdict| RunResult {
        name: String::new(),
        seed,
        folder: PathBuf::new(),
        verdict,
        error: None,
        figures: Figures::read(&folder(root.path(), &seed.to_string(), &[loss, loss], 1.0, "h")).ok(),
        speed: Some(loss),
        difference: Some(Difference { loss, step: None, state_equal: true, unmatched_steps: 0 }),
    };
    let mut case = CaseResult {
        name: String::new(),
        settings: serde_json::Map::new(),
        baseline: String::new(),
        expect: serde_json::Value::Null,
        verdict: Verdict::Stopped,
        mean: None,
        speed: None,
        loss_difference: None,
        runs: vec![run(1, 1.0, Verdict::Met), run(2, 3.0, Verdict::Unmet), run(3, 2.0, Verdict::Met)],
    };
    case.combine();
    assert_eq!((case.verdict, case.speed, case.loss_difference), (Verdict::Unmet, Some(2.0), Some(3.0)));
    assert_eq!(case.mean.map(|mean| mean.final_loss), Some(2.0));
}
