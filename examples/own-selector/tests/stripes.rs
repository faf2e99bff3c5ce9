//! The selector is found by name, gives every column its turn, and goes on where it was saved.

use std::path::Path;

use own_selector as _;
use zf_cli as _;
use zf_core::config::Run;
use zf_core::registry::{BuildContext, Registry};
use zf_core::slots;
use zf_core::stage::{Candidates, Every, Selector};

fn build(table: &toml::Table) -> Box<dyn Selector> {
    let registry = Registry::global().expect("no duplicates");
    registry.build::<slots::Select>(table, &BuildContext::default()).expect("valid")
}

/// `kind = "stripes"` with these settings.
fn stripes(settings: &str) -> Box<dyn Selector> {
    build(&format!("kind = 'stripes'\n{settings}").parse().expect("the test's own TOML"))
}

fn choose(selector: &mut dyn Selector, name: &str, columns: usize, update: u64) -> Vec<u32> {
    let weight = Candidates { name, columns, scores: &[], previous: &[], update };
    selector.choose(&weight).expect("any weight has an answer")
}

#[test]
fn every_column_has_its_turn() {
    let mut selector = stripes("n = 3");
    let mut times = [0; 8];
    for selection in 0..6 {
        let columns = choose(&mut *selector, "a", 8, 4 * selection);
        assert_eq!(columns, [vec![0, 3, 6], vec![1, 4, 7], vec![2, 5]][selection as usize % 3]);
        columns.iter().for_each(|&column| times[column as usize] += 1);
        // Another weight of the same update has the same stripes.
        assert_eq!(choose(&mut *selector, "b", 4, 4 * selection)[0], columns[0]);
    }
    assert_eq!(times, [2; 8]);
    assert_eq!(choose(&mut *stripes("n = 1"), "a", 3, 0), [0, 1, 2]);
    assert_eq!(choose(&mut *stripes("n = 9"), "a", 3, 0), [0]);
}

#[test]
fn a_state_goes_on_where_it_was_saved() {
    let mut whole = stripes("n = 3");
    choose(&mut *whole, "a", 8, 0);
    let text = whole.state().to_string();
    let mut resumed = stripes("n = 3");
    resumed.restore(&serde_json::from_str(&text).expect("JSON")).expect("its own state");
    for update in [0, 4, 8] {
        assert_eq!(choose(&mut *resumed, "a", 8, update), choose(&mut *whole, "a", 8, update));
    }
    let mut narrower = stripes("n = 1");
    for state in [whole.state(), serde_json::Value::Null, serde_json::json!({ "turn": "next" })] {
        let error = narrower.restore(&state).expect_err("not of n = 1").to_string();
        assert!(error.starts_with("the checkpoint's selector is not `stripes` with n = 1"), "{error}");
    }
}

#[test]
fn the_run_file_builds_it() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("run.toml");
    let run: toml::Table = std::fs::read_to_string(path).expect("there").parse().expect("TOML");
    let mut selector = build(run["select"].as_table().expect("a section"));
    assert_eq!(selector.every(), Every::Updates(2), "the decorator's");
    assert!(selector.score().is_none());
    assert_eq!(choose(&mut *selector, "a", 8, 0), [0, 4]);
    assert_eq!(choose(&mut *selector, "a", 8, 2), [1, 5]);
}

/// Errors have the line and the caret of the setting: of this selector, and of a built-in one's score.
#[test]
fn wrong_settings_show_the_line() {
    let registry = Registry::global().expect("no duplicates");
    let rest = "[model]\npath = 'm'\n[data]\npath = 'd.txt'\nsequence_length = 8\n[run]\nsteps = 1\n[select]\n";
    for (lines, expected) in [
        ("kind = 'stripes'\nn = 0", "own.toml:10:5: `n` in [select] stripes: must be at least 1, found 0"),
        ("kind = 'stripes'\nn = 2\nevery = 0", "own.toml:11:9: `every` in [select] stripes: must be \"auto\""),
        ("kind = 'topk'\nscore = { kind = 'adam', eps = 0 }", "own.toml:10:32: `score.eps` in [select] topk: must be"),
        ("kind = 'topk'\nscore = 'l3'", "own.toml:10:9: unknown value `l3` for `score` in [select] topk"),
        ("kind = 'topk'\nevery = { turnover = 2 }", "own.toml:10:22: `every.turnover` in [select] topk: must be"),
    ] {
        let run = Run::from_toml_str(&format!("{rest}{lines}\n"), "own.toml").expect("the form is right");
        let error = run.build::<slots::Select>(registry, &run.context()).expect_err(lines).to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    let error = Run::from_toml_str(&format!("{rest}kind = 'stripes'\nn = 2\nratio = 0.1\n"), "own.toml");
    let error = error.expect_err("unknown key").to_string();
    assert!(error.starts_with("own.toml:11:1: unknown key `ratio` in [select] stripes"), "{error}");
}

#[test]
fn the_program_lists_it() {
    let listed =
        assert_cmd::Command::new(env!("CARGO_BIN_EXE_own-selector")).args(["stages", "select"]).assert().success();
    let listed = String::from_utf8_lossy(&listed.get_output().stdout).into_owned();
    assert!(listed.contains("stripes") && listed.contains("(own-selector)"), "{listed}");
    assert!(listed.contains("topk") && listed.contains("(zf-select)"), "{listed}");
}
