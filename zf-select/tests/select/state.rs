//! A state that was saved and restored, through JSON text, continues to the bit.

use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Value, json};
use zf_core::stage::Selector;

use crate::support::{build, chosen};

const SMOOTH: &str = "kind = 'topk'\nratio = 0.4\n\
    wrap = [{ kind = 'ema', beta = 0.7 }, { kind = 'hysteresis' }, { kind = 'ema', beta = 0.9 }, { kind = 'every', updates = 2 }]";

fn through_text(state: &Value) -> Value {
    serde_json::from_str(&state.to_string()).expect("the text of a value")
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_restored_selector_goes_on_the_same(rows in vec(vec(0.0..1.0_f64, 12), 2..8), at in 1..7_usize) {
        let mut whole = build(SMOOTH);
        let mut resumed: Option<Box<dyn Selector>> = None;
        for (step, scores) in rows.iter().enumerate() {
            if step == at {
                let mut fresh = build(SMOOTH);
                fresh.restore(&through_text(&whole.state())).expect("its own state");
                resumed = Some(fresh);
            }
            let expected = chosen(&mut *whole, scores);
            if let Some(resumed) = &mut resumed {
                prop_assert_eq!(chosen(&mut **resumed, scores), expected);
                prop_assert_eq!(resumed.state().to_string(), whole.state().to_string());
            }
        }
    }
}

#[test]
fn states_nest() {
    let mut selector = build(SMOOTH);
    chosen(&mut *selector, &[1.0, 3.0]);
    let state = selector.state();
    assert!(state["means"]["w"]["values"].is_array() && state["inner"]["means"]["w"]["values"].is_array(), "{state}");
    assert_eq!(state["inner"]["inner"], Value::Null);
}

#[test]
fn a_copy_has_the_state_and_its_own_future() {
    let mut selector = build(SMOOTH);
    chosen(&mut *selector, &[1.0, 3.0, 2.0]);
    let mut copy = selector.clone_box();
    assert_eq!(copy.state(), selector.state());
    chosen(&mut *copy, &[9.0, 3.0, 2.0]);
    assert_ne!(copy.state(), selector.state());
}

#[test]
fn selectors_without_state() {
    for kind in ["topk", "threshold", "random", "all", "none"] {
        let mut selector = build(&format!("kind = '{kind}'"));
        chosen(&mut *selector, &[1.0, 2.0]);
        assert_eq!(selector.state(), Value::Null, "{kind}");
        selector.restore(&Value::Null).expect("its own state");
    }
}

#[test]
fn what_is_no_state_is_refused_and_changes_nothing() {
    let mut selector = build("kind = 'topk'\nwrap = [{ kind = 'ema' }]");
    chosen(&mut *selector, &[1.0, 2.0]);
    let before = selector.state();
    for state in [
        Value::Null,
        json!([]),
        json!({ "inner": null }),
        json!({ "means": { "w": { "weight": 0.1, "values": [null] } }, "inner": null }),
        json!({ "means": { "w": { "weight": 0.1, "values": "many" } }, "inner": null }),
        json!({ "means": {}, "inner": null, "more": 1 }),
    ] {
        let error = selector.restore(&state).expect_err("no state").to_string();
        assert!(error.starts_with("the checkpoint holds no state of the decorator `ema` of [select] ("), "{error}");
        assert_eq!(selector.state(), before);
    }
}
