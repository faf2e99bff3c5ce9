//! What holds for every selector and every score.

use proptest::collection::vec;
use proptest::prelude::*;
use zf_core::stage::Candidates;
use zf_select::{capacity, highest};

use crate::support::{build, chosen, weight};

/// Every selector, bare and decorated, that needs no file.
const ALL: [&str; 9] = [
    "kind = 'topk'\nratio = 0.3",
    "kind = 'topk'\nratio = 1",
    "kind = 'threshold'\nshare = 0.6\nmax_ratio = 0.5",
    "kind = 'threshold'\nshare = 1\nmax_ratio = 1",
    "kind = 'random'\nratio = 0.3",
    "kind = 'all'",
    "kind = 'none'",
    "kind = 'topk'\nratio = 0.3\nwrap = [{ kind = 'hysteresis', margin = 0.5 }, { kind = 'ema' }]",
    "kind = 'threshold'\nwrap = [{ kind = 'ema', beta = 0 }, { kind = 'hysteresis', margin = 0 }]",
];

/// Few different values, so that ties are frequent, and all that a float can be.
fn score() -> impl Strategy<Value = f64> {
    prop_oneof![
        8 => (0..6_u8).prop_map(f64::from),
        4 => 0.0..1e3_f64,
        1 => prop::sample::select(vec![f64::NAN, f64::INFINITY, -0.0, -1.0, f64::NEG_INFINITY, f64::MAX, 5e-324]),
    ]
}

/// The same as `highest`, by its definition.
fn by_sorting(scores: &[f64], count: usize) -> Vec<u32> {
    let mut columns: Vec<u32> = (0..scores.len() as u32).collect();
    let key =
        |column: &u32| Some(scores[*column as usize]).filter(|score| !score.is_nan()).unwrap_or(f64::NEG_INFINITY);
    // The sort keeps the order of equals.
    columns.sort_by(|a, b| key(b).partial_cmp(&key(a)).expect("no NaN is left"));
    columns.truncate(count);
    columns.sort_unstable();
    columns
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ascending_unique_and_in_range(scores in vec(score(), 1..60), seen in vec(any::<bool>(), 60), update in 0..99_u64) {
        let previous: Vec<u32> = (0..scores.len() as u32).filter(|&column| seen[column as usize]).collect();
        let weight = Candidates { previous: &previous, update, ..weight(&scores) };
        for text in ALL {
            let mut selector = build(text);
            // Twice, so that a state takes part.
            for _ in 0..2 {
                let columns = selector.choose(&weight).expect("any scores have an answer");
                prop_assert!(columns.is_sorted_by(|a, b| a < b), "{text}: {columns:?}");
                prop_assert!(columns.last().is_none_or(|&last| (last as usize) < scores.len()), "{text}: {columns:?}");
            }
        }
    }

    #[test]
    fn ratios_are_kept(scores in vec(score(), 1..60), ratio in 0.01..=1.0_f64) {
        let expected = ((ratio * scores.len() as f64 + 1e-9) as usize).max(1);
        prop_assert_eq!(capacity(ratio, scores.len()), expected);
        for kind in ["topk", "random"] {
            let mut selector = build(&format!("kind = '{kind}'\nratio = {ratio:?}"));
            prop_assert_eq!(chosen(&mut *selector, &scores).len(), expected);
        }
        let mut threshold = build(&format!("kind = 'threshold'\nshare = 1\nmax_ratio = {ratio:?}"));
        prop_assert!(chosen(&mut *threshold, &scores).len() <= expected);
    }

    #[test]
    fn the_highest_are_those_of_a_stable_sort(scores in vec(score(), 0..60), count in 0..70_usize) {
        prop_assert_eq!(highest(&scores, count), by_sorting(&scores, count));
    }

    /// Where no scores are equal, the order of columns does not matter: the chosen ones move with them.
    #[test]
    fn moved_columns_stay_chosen(order in Just((0..40_u32).collect::<Vec<_>>()).prop_shuffle()) {
        let scores: Vec<f64> = (0..40).map(|column| 1.0 / f64::from(3 * column + 1)).collect();
        let moved: Vec<f64> = order.iter().map(|&column| scores[column as usize]).collect();
        for text in [ALL[0], ALL[2], ALL[7]] {
            let plain = chosen(&mut *build(text), &scores);
            let mut back: Vec<u32> =
                chosen(&mut *build(text), &moved).iter().map(|&column| order[column as usize]).collect();
            back.sort_unstable();
            prop_assert_eq!(back, plain, "{}", text);
        }
    }

    /// The chosen columns hold the share, and would not without the least of them.
    #[test]
    fn a_threshold_is_reached_and_not_by_fewer(counts in vec(0..20_u32, 1..40), percent in 1..=100_u32) {
        // Whole scores, so that sums are exact.
        let scores: Vec<f64> = counts.iter().copied().map(f64::from).collect();
        let share = f64::from(percent) / 100.0;
        let columns = chosen(&mut *build(&format!("kind = 'threshold'\nshare = {share:?}\nmax_ratio = 1")), &scores);
        let goal = share * scores.iter().sum::<f64>();
        let held: f64 = columns.iter().map(|&column| scores[column as usize]).sum();
        let least = columns.iter().map(|&column| scores[column as usize]).fold(f64::INFINITY, f64::min);
        prop_assert!(goal <= held, "{held} of {goal}");
        prop_assert!(columns.is_empty() || held - least < goal, "{held} without {least} still reaches {goal}");
    }
}

#[test]
fn ties_go_to_the_lower_index() {
    let mut top = build("kind = 'topk'\nratio = 0.5");
    assert_eq!(chosen(&mut *top, &[1.0; 8]), [0, 1, 2, 3]);
    assert_eq!(chosen(&mut *top, &[0.0, 2.0, 1.0, 1.0, 2.0, 1.0]), [1, 2, 4]);
    assert_eq!(chosen(&mut *build("kind = 'threshold'\nshare = 0.5"), &[1.0; 10]), [0, 1], "max_ratio holds 2 of 10");
}

#[test]
fn a_threshold_by_hand() {
    let scores = [1.0, 50.0, 9.0, 30.0, 10.0];
    for (share, max_ratio, expected) in [
        (0.5, 1.0, vec![1]),
        (0.51, 1.0, vec![1, 3]),
        (0.9, 1.0, vec![1, 3, 4]),
        (1.0, 1.0, vec![0, 1, 2, 3, 4]),
        (1.0, 0.4, vec![1, 3]),
    ] {
        let text = format!("kind = 'threshold'\nshare = {share:?}\nmax_ratio = {max_ratio:?}");
        assert_eq!(chosen(&mut *build(&text), &scores), expected, "{text}");
    }
    assert_eq!(chosen(&mut *build("kind = 'threshold'"), &[0.0; 9]), [0; 0], "nothing holds any share of nothing");
}

#[test]
fn all_and_none() {
    assert_eq!(chosen(&mut *build("kind = 'all'"), &[0.0; 3]), [0, 1, 2]);
    assert_eq!(chosen(&mut *build("kind = 'none'"), &[0.0; 3]), [0; 0]);
}

#[test]
fn draws_depend_on_seed_name_and_update_only() {
    let text = "kind = 'random'\nratio = 0.25\nseed = 5";
    let draw = |text: &str, name: &str, update: u64| {
        let weight = Candidates { name, columns: 400, scores: &[], previous: &[], update };
        build(text).choose(&weight).expect("an answer")
    };
    let base = draw(text, "a", 0);
    assert_eq!(base, draw(text, "a", 0));
    for (text, name, update) in [(text, "b", 0), (text, "a", 1), ("kind = 'random'\nratio = 0.25\nseed = 6", "a", 0)] {
        assert_ne!(base, draw(text, name, update), "{text}, {name}, {update}");
    }
    // The calls before do not matter.
    let mut selector = build(text);
    chosen(&mut *selector, &[0.0; 400]);
    let weight = Candidates { name: "a", columns: 400, scores: &[], previous: &[3], update: 0 };
    assert_eq!(selector.choose(&weight).expect("an answer"), base);

    // Every column comes as often as another: 400 draws of a quarter, within five standard deviations (8.7).
    let mut times = [0_u32; 400];
    for update in 0..400 {
        draw(text, "a", update).iter().for_each(|&column| times[column as usize] += 1);
    }
    assert!(times.iter().all(|&times| (57..=143).contains(&times)), "{times:?}");
}

#[test]
fn the_run_seeds_what_has_no_seed() {
    use zf_core::registry::BuildContext;
    let draw = |text: &str, seed| {
        let cx = BuildContext { seed, ..BuildContext::default() };
        chosen(&mut *crate::support::build_in(text, &cx).expect("valid"), &[0.0; 100])
    };
    let text = "kind = 'random'\nratio = 0.5";
    assert_ne!(draw(text, 1), draw(text, 2));
    let seeded = "kind = 'random'\nratio = 0.5\nseed = 1";
    assert_eq!(draw(seeded, 7), draw(text, 1));
}

#[test]
fn what_the_engine_must_not_ask_is_an_error() {
    for text in ["kind = 'topk'", "kind = 'threshold'", "kind = 'topk'\nwrap = [{ kind = 'ema' }]"] {
        let odd = Candidates { columns: 3, ..weight(&[1.0, 2.0]) };
        let error = build(text).choose(&odd).expect_err("a score is missing").to_string();
        assert_eq!(error, "weight `w` has 3 columns and 2 scores; expected a score for each column");
    }
    for text in ALL {
        let error = build(text).choose(&weight(&[])).expect_err("no columns").to_string();
        assert!(error.starts_with("weight `w` has 0 columns; expected 1 to "), "{text}: {error}");
    }
}
