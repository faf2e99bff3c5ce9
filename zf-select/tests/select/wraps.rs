//! What decorators change, and what they leave alone.

use zf_core::stage::{Axis, Candidates, Every, Selector};

use crate::support::{build, chosen, weight};

#[test]
fn axis_interval_and_score_pass_through() {
    let inner = "kind = 'topk'\naxis = 'output'\nevery = 8\nscore = { kind = 'adam', eps = 1e-6 }\n";
    let bare = build(inner);
    for decorators in ["{ kind = 'ema' }", "{ kind = 'hysteresis' }", "{ kind = 'hysteresis' }, { kind = 'ema' }"] {
        let wrapped = build(&format!("{inner}wrap = [{decorators}]"));
        assert_eq!((wrapped.axis(), wrapped.every()), (Axis::Output, Every::Updates(8)));
        assert_eq!(format!("{:?}", wrapped.score()), format!("{:?}", bare.score()), "{decorators}");
        assert!(wrapped.score().expect("of topk").needs().second_moment);
    }
    let every = build(&format!("{inner}wrap = [{{ kind = 'every', updates = 3 }}]"));
    assert_eq!((every.axis(), every.every()), (Axis::Output, Every::Updates(3)));
    assert!(every.score().is_some());
    assert!(build("kind = 'random'\nwrap = [{ kind = 'every', updates = 3 }]").score().is_none());
}

#[test]
fn a_mean_of_scores_is_corrected() {
    let mut selector = build("kind = 'threshold'\nshare = 1\nmax_ratio = 1\nwrap = [{ kind = 'ema', beta = 0.75 }]");
    chosen(&mut *selector, &[4.0, 0.0]);
    chosen(&mut *selector, &[0.0, 8.0]);
    let mean = &selector.state()["means"]["w"];
    assert_eq!(mean["values"], serde_json::json!([0.75, 2.0]));
    assert_eq!(mean["weight"], serde_json::json!(0.4375), "1 - 0.75^2");
}

#[test]
fn a_mean_outlives_one_odd_step() {
    let usual = [9.0, 8.0, 1.0, 1.0];
    let odd = [0.0, 0.0, 5.0, 5.0];
    let mut plain = build("kind = 'topk'\nratio = 0.5");
    let mut smooth = build("kind = 'topk'\nratio = 0.5\nwrap = [{ kind = 'ema', beta = 0.9 }]");
    for selector in [&mut plain, &mut smooth] {
        assert_eq!(chosen(&mut **selector, &usual), [0, 1]);
    }
    assert_eq!(chosen(&mut *plain, &odd), [2, 3]);
    // Of two calls the second counts for 0.1 / 0.19: the mean of column 0 is 4.3, of column 2 is 3.1.
    assert_eq!(chosen(&mut *smooth, &odd), [0, 1]);
    assert_eq!(chosen(&mut *smooth, &odd), [2, 3], "but not two");
}

#[test]
fn means_are_apart_by_name_and_survive_what_is_no_number() {
    let mut selector = build("kind = 'topk'\nratio = 0.5\nwrap = [{ kind = 'ema', beta = 0.9 }]");
    assert_eq!(chosen(&mut *selector, &[5.0, 1.0]), [0]);
    let other = Candidates { name: "v", ..weight(&[1.0, 5.0]) };
    assert_eq!(selector.choose(&other).expect("an answer"), [1]);
    assert_eq!(chosen(&mut *selector, &[f64::NAN, f64::INFINITY]), [0]);
    assert_eq!(chosen(&mut *selector, &[5.0, 1.0]), [0]);
    let error = selector.choose(&weight(&[1.0; 3])).expect_err("another number of columns").to_string();
    assert!(error.starts_with("weight `w` has 3 columns; the means of its scores are of 2"), "{error}");
}

#[test]
fn a_beta_of_zero_changes_nothing() {
    let mut plain = build("kind = 'threshold'\nshare = 0.7");
    let mut smooth = build("kind = 'threshold'\nshare = 0.7\nwrap = [{ kind = 'ema', beta = 0 }]");
    for shift in 0..20 {
        let scores: Vec<f64> = (0..30).map(|column| f64::from((column * 7 + shift * 5) % 30) / 7.0).collect();
        assert_eq!(chosen(&mut *plain, &scores), chosen(&mut *smooth, &scores));
    }
}

#[test]
fn a_newcomer_has_to_be_better_by_the_margin() {
    let mut selector = build("kind = 'topk'\nratio = 0.5\nwrap = [{ kind = 'hysteresis', margin = 0.25 }]");
    let mut choose = |scores: &[f64], previous: &[u32]| {
        selector.choose(&Candidates { previous, ..weight(scores) }).expect("an answer")
    };
    // 0.25 and all scores are exact, so that equality is.
    assert_eq!(choose(&[4.9, 9.0, 4.0, 1.0], &[1, 2]), [1, 2], "below the margin");
    assert_eq!(choose(&[5.0, 9.0, 4.0, 1.0], &[1, 2]), [1, 2], "at the margin, though its index is lower");
    assert_eq!(choose(&[5.1, 9.0, 4.0, 1.0], &[1, 2]), [0, 1], "above it");
    assert_eq!(choose(&[5.0, 9.0, 4.0, 1.0], &[]), [0, 1], "nothing is present at the start");
    assert_eq!(choose(&[0.0, 0.0, 0.0, 0.0], &[2, 3]), [2, 3], "nothing moves for nothing");
    assert_eq!(choose(&[f64::NAN, 1.0, f64::NAN, 2.0], &[0, 2]), [1, 3]);
    let error = selector.choose(&Candidates { previous: &[4], ..weight(&[1.0; 4]) }).expect_err("no column 4");
    assert_eq!(error.to_string(), "weight `w` has 4 columns and column 4 in its present set");
}

/// The list runs from the inside out: the last one sees the scores as they are.
#[test]
fn the_order_of_decorators_counts() {
    let text = |list| format!("kind = 'topk'\nratio = 0.5\nwrap = [{list}]");
    let (ema, hysteresis) = ("{ kind = 'ema', beta = 0.5 }", "{ kind = 'hysteresis', margin = 1.0 }");
    let mean = |mut selector: Box<dyn Selector>| {
        selector.choose(&Candidates { previous: &[1], ..weight(&[3.0, 2.0]) }).expect("an answer");
        let state = selector.state();
        state["means"]["w"]["values"][1].as_f64().expect("a mean")
    };
    assert_eq!(mean(build(&text(format!("{hysteresis}, {ema}")))), 1.0, "the mean is of plain scores");
    assert_eq!(mean(build(&text(format!("{ema}, {hysteresis}")))), 2.0_f64.next_up(), "the mean is of raised scores");
}
