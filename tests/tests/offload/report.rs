//! What a run says about itself: how late gradients are, and how much of the choice changes.

use zf_tests::tiny;

use super::{Choices, beyond, train_recorded};

fn keys(offload: &str, every: u64) -> String {
    let keys = "run.steps = 11\nrun.global_batch = 2\nrun.micro_batch = 1\nrun.exact = true\n";
    let select = match offload.contains("zenflow") {
        true => format!("select = {{ kind = \"topk\", ratio = 0.2, every = {every} }}\n"),
        false => String::new(),
    };
    tiny("tiny-llama", &format!("{keys}{select}offload = {{ {offload} }}\n"))
}

/// By step, the updates since the oldest gradient that forward did not see the effect of.
#[test]
fn staleness() {
    let cases: [(&str, [u64; 11]); 5] = [
        ("kind = \"zenflow\", update_interval = 3", [0, 1, 2, 3, 4, 5, 3, 4, 5, 3, 4]),
        ("kind = \"zenflow\", update_interval = 3, warmup = 2", [0, 0, 0, 1, 2, 3, 4, 5, 3, 4, 5]),
        ("kind = \"zenflow\", update_interval = 3, asynchronous = false", [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]),
        ("kind = \"zenflow\", update_interval = 1", [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("kind = \"host\"", [0; 11]),
    ];
    for (offload, expected) in cases {
        let (ran, _, _) = train_recorded(&keys(offload, 3));
        let found: Vec<u64> = ran.records.iter().map(|record| record.staleness).collect();
        assert_eq!(found, expected, "{offload}");
    }
}

/// 1 - |both| / |either| over the columns of all weights.
fn turnover(choices: &Choices, update: u64) -> f64 {
    let (mut both, mut either) = (0, 0);
    for [before, now] in choices[&update].values() {
        let new = beyond(now, before);
        both += now.len() - new;
        either += before.len() + new;
    }
    1.0 - both as f64 / either as f64
}

#[test]
fn turnover_of_the_chosen() {
    for (offload, every, warmup) in [
        ("kind = \"zenflow\", update_interval = 2", 4, 0),
        ("kind = \"zenflow\", update_interval = 1, warmup = 3, asynchronous = false", 2, 3),
    ] {
        let (ran, choices, _) = train_recorded(&keys(offload, every));
        let mut some = 0;
        for record in &ran.records {
            let update = record.step.checked_sub(warmup);
            let expected = update.filter(|update| update % every == 0).map(|update| turnover(&choices, update));
            assert_eq!(record.turnover, expected, "{offload}, step {}", record.step);
            some += usize::from(expected.is_some_and(|part| 0.0 < part && part < 1.0));
        }
        assert_eq!(
            ran.records[usize::try_from(warmup).expect("few")].turnover,
            Some(1.0),
            "the first choice is all new"
        );
        assert!(some > 0, "{offload}: the choice changes in part");
    }
}
