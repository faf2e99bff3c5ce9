//! What a run file can name, and what it is told about settings that are wrong.

use std::fs;

use zf_core::registry::{BuildContext, Registry};
use zf_core::stage::{Axis, Candidates, Every};
use zf_select::{Interval, TopKConfig};

use crate::support::{build, build_in, refused, table};

#[test]
fn all_names_are_there() {
    let registry = Registry::global().expect("no duplicates");
    assert_eq!(registry.names("select"), ["all", "fixed", "none", "random", "threshold", "topk"]);
    assert_eq!(registry.names("select.wrap"), ["ema", "every", "hysteresis"]);
    assert_eq!(registry.names("select.score"), ["adam", "l1", "l2", "weight-gradient"]);
}

#[test]
fn every_example_builds() {
    let registry = Registry::global().expect("no duplicates");
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("columns.json"), "{}").expect("written");
    let cx = BuildContext::new(folder.path());
    for kind in registry.names("select") {
        let example = registry.get("select", kind).expect("listed").example;
        build_in(&format!("kind = '{kind}'\n{example}"), &cx).expect(kind);
    }
    // These show a whole section.
    for slot in ["select.score", "select.wrap"] {
        for name in registry.names(slot) {
            let section = table(registry.get(slot, name).expect("listed").example);
            let section = section["select"].as_table().expect("a section").to_string();
            assert!(section.contains(&format!("\"{name}\"")), "{section}");
            build(&section);
        }
    }
}

#[test]
fn what_a_section_says_by_itself() {
    let selector = build("");
    assert_eq!((selector.axis(), selector.every()), (Axis::Input, Every::Turnover(0.3)));
    assert_eq!(format!("{:?}", selector.score()), "Some(L1)");
    assert_eq!(selector.clone_box().choose(&crate::support::weight(&[1.0; 30])).expect("an answer"), [0, 1, 2]);
}

#[test]
fn intervals() {
    for (text, every) in [
        ("'auto'", Every::Turnover(0.3)),
        ("1", Every::Updates(1)),
        ("16", Every::Updates(16)),
        ("{ turnover = 0.5 }", Every::Turnover(0.5)),
        ("{ turnover = 0 }", Every::Turnover(0.0)),
    ] {
        for kind in ["topk", "threshold", "random", "all", "none"] {
            assert_eq!(build(&format!("kind = '{kind}'\nevery = {text}")).every(), every);
        }
    }
}

#[test]
fn scores_by_name_or_by_table() {
    let score = |text: &str| format!("{:?}", build(&format!("score = {text}")).score().expect("topk has one"));
    assert_eq!(score("'l2'"), "L2");
    assert_eq!(score("{ kind = 'l2' }"), "L2");
    assert_eq!(score("'adam'"), "Adam { eps: 1e-8 }");
    assert_eq!(score("{ kind = 'adam', eps = 0.5 }"), "Adam { eps: 0.5 }");
    assert_eq!(score("'weight-gradient'"), "WeightGradient");
}

#[test]
fn what_is_written_reads_back() {
    for text in ["", "every = 7\naxis = 'output'", "every = { turnover = 0.25 }\nscore = { kind = 'adam', eps = 1e-6 }"]
    {
        let config: TopKConfig = toml::from_str(text).expect(text);
        let written = toml::to_string(&config).expect("a table");
        assert_eq!(toml::from_str::<TopKConfig>(&written).expect("written"), config, "{written}");
    }
    assert_eq!(toml::from_str::<TopKConfig>("every = 7").expect("valid").every, Interval::Updates(7));
}

#[test]
fn wrong_settings_are_named() {
    for (text, expected) in [
        ("ratio = 0", "`ratio` in [select] topk: must be above 0, found 0; for no columns at all use kind = \"none\""),
        ("ratio = -0.1", "`ratio` in [select] topk: must be above 0 and at most 1, found -0.1"),
        ("ratio = 1.5", "`ratio` in [select] topk: must be above 0 and at most 1, found 1.5"),
        ("ratio = nan", "`ratio` in [select] topk: must be above 0 and at most 1, found NaN"),
        ("ratio = inf", "`ratio` in [select] topk: must be above 0 and at most 1, found inf"),
        ("ratio = 'most'", "`ratio` in [select] topk: expected a number, found string \"most\""),
        ("ratoi = 0.1", "unknown key `ratoi` in [select] topk; did you mean `ratio`?"),
        ("axis = 'inputs'", "unknown value `inputs` for `axis` in [select] topk; did you mean `input`?"),
        (
            "every = 0",
            "`every` in [select] topk: must be \"auto\", a number of updates from 1 on, or { turnover = 0.3 }, found 0",
        ),
        (
            "every = -4",
            "`every` in [select] topk: expected \"auto\", a number of updates from 1 on, or { turnover = 0.3 }, \
             found integer `-4`",
        ),
        (
            "every = 'often'",
            "`every` in [select] topk: expected \"auto\", a number of updates from 1 on, or { turnover = 0.3 }, \
             found string \"often\"",
        ),
        ("every = 4.0", "found floating point `4.0`"),
        ("every = { turnover = 1 }", "`every.turnover` in [select] topk: must be from 0 to below 1, found 1"),
        ("every = { turnover = nan }", "`every.turnover` in [select] topk: must be from 0 to below 1, found NaN"),
        ("every = { turnovr = 0.1 }", "unknown key `every.turnovr` in [select] topk; did you mean `turnover`?"),
        ("every = {}", "missing key `every.turnover` in [select] topk"),
        (
            "score = 'l3'",
            "unknown value `l3` for `score` in [select] topk; did you mean `l1`? expected one of: adam, l1, l2, \
             weight-gradient",
        ),
        ("score = { kind = 'adma' }", "unknown value `adma` for `score.kind` in [select] topk; did you mean `adam`?"),
        ("score = { eps = 1 }", "unknown key `score.eps` in [select] topk; nothing can be set here"),
        ("score = { kind = 3 }", "`score.kind` in [select] topk: expected the name of a stage, found integer `3`"),
        ("score = 3", "expected the name of a stage or a table with the key `kind`, found integer `3`"),
        ("score = { kind = 'adam', eps = 0 }", "`score.eps` in [select] topk: must be finite and at least 1.2e-38"),
        ("score = { kind = 'adam', eps = nan }", "`score.eps` in [select] topk: must be finite"),
        ("score = { kind = 'l1', eps = 1 }", "unknown key `score.eps` in [select] topk; nothing can be set here"),
        ("kind = 'random'\nratio = 0", "`ratio` in [select] random: must be above 0"),
        ("kind = 'random'\nscore = 'l1'", "unknown key `score` in [select] random"),
        ("kind = 'random'\nseed = -1", "`seed` in [select] random: expected a whole number, 0 or more"),
        ("kind = 'threshold'\nshare = 0", "`share` in [select] threshold: must be above 0 and at most 1, found 0"),
        ("kind = 'threshold'\nshare = 1.01", "`share` in [select] threshold: must be above 0 and at most 1"),
        ("kind = 'threshold'\nmax_ratio = 0", "`max_ratio` in [select] threshold: must be above 0"),
        ("kind = 'all'\nratio = 1", "unknown key `ratio` in [select] all"),
        ("kind = 'none'\nevery = 0", "`every` in [select] none: must be"),
        ("kind = 'fixed'", "missing key `path` in [select] fixed"),
        ("kind = 'fixed'\npath = 'nowhere.json'", "`path` in [select] fixed: nowhere.json: No such file"),
        ("kind = 'top-k'", "did you mean `topk`?"),
        ("wrap = [{ kind = 'ema', beta = 1 }]", "`wrap[0].beta` in [select] topk: must be from 0 to below 1, found 1"),
        ("wrap = [{ kind = 'ema', beta = nan }]", "`wrap[0].beta` in [select] topk: must be from 0 to below 1"),
        ("wrap = [{ kind = 'hysteresis', margin = -1 }]", "`wrap[0].margin` in [select] topk: must be finite"),
        ("wrap = [{ kind = 'hysteresis', margin = inf }]", "`wrap[0].margin` in [select] topk: must be finite"),
        (
            "wrap = [{ kind = 'ema' }, { kind = 'every', updates = 0 }]",
            "`wrap[1].updates` in [select] topk: must be at",
        ),
        ("wrap = [{ kind = 'every' }]", "missing key `wrap[0].updates` in [select] topk"),
        ("wrap = [{ kind = 'emma' }]", "did you mean `ema`?"),
        (
            "kind = 'random'\nwrap = [{ kind = 'ema' }]",
            "wrap[0] ema: changes scores, and the selector within uses none",
        ),
        (
            "kind = 'all'\nwrap = [{ kind = 'every', updates = 2 }, { kind = 'hysteresis' }]",
            "wrap[1] hysteresis: changes scores, and the selector within uses none",
        ),
    ] {
        let error = refused(text);
        assert!(error.contains(expected), "{text}:\n  {error}\n  {expected}");
    }
}

#[test]
fn columns_from_a_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let with = |text: &str| {
        fs::write(folder.path().join("columns.json"), text).expect("written");
        build_in("kind = 'fixed'\npath = 'columns.json'", &BuildContext::new(folder.path()))
    };
    let mut selector = with(r#"{"a": [0, 2, 7], "b": [], "c": [7, 4294967295], "d": [8]}"#).expect("valid");
    assert!(selector.score().is_none());
    let mut choose =
        |name: &str| selector.choose(&Candidates { name, columns: 8, scores: &[], previous: &[], update: 9 });
    assert_eq!(choose("a").expect("listed"), [0, 2, 7]);
    assert_eq!(choose("b").expect("listed"), [0; 0]);
    assert_eq!(choose("not listed").expect("none"), [0; 0]);
    let error = choose("d").expect_err("one too far").to_string();
    assert!(error.contains("column 8 of `d`, which has columns 0 to 7"), "{error}");
    let error = choose("c").expect_err("out of range").to_string();
    assert!(
        error.ends_with(
            "columns.json: column 4294967295 of `c`, which has columns 0 to 7; select.axis decides which dimension they count"
        ),
        "{error}"
    );

    for (text, expected) in [
        ("", "EOF while parsing"),
        ("[1, 2]", "expected an object of lists at line 1"),
        (r#"{"a": 3}"#, "at line 1 column 7"),
        (r#"{"a": [0.5]}"#, "expected u32 at line 1"),
        (r#"{"a": [-1]}"#, "expected u32 at line 1"),
        (r#"{"a": [4294967296]}"#, "expected u32 at line 1"),
        (r#"{"a": [1]} x"#, "trailing characters"),
        (r#"{"a": [1], "b": [], "a": [2]}"#, "`a` comes twice"),
        (r#"{"a": [1, 3, 3]}"#, "the columns of `a` must ascend without repetition, found 3 after 3"),
        (r#"{"ok": [1], "b": [5, 1]}"#, "the columns of `b` must ascend without repetition, found 1 after 5"),
    ] {
        let error = with(text).expect_err(text).to_string();
        assert!(error.starts_with("`path` in [select] fixed: "), "{error}");
        assert!(error.contains("columns.json: ") && error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn columns_of_weights_that_there_are() {
    let folder = tempfile::tempdir().expect("a folder");
    let check = |text: &str, weights: &[(&str, usize)]| {
        fs::write(folder.path().join("columns.json"), text).expect("written");
        let weights = weights.iter().copied().collect();
        // Selectors around it pass the question on.
        ["", "wrap = [{ kind = 'every', updates = 2 }]"].into_iter().try_for_each(|wrap| {
            let section = format!("kind = 'fixed'\npath = 'columns.json'\n{wrap}");
            let selector = build_in(&section, &BuildContext::new(folder.path())).expect("valid");
            selector.check(&weights).map_err(|error| error.to_string())
        })
    };
    let weights = [("layers.0.up", 8), ("layers.0.down", 16)];
    assert_eq!(check(r#"{"layers.0.down": [15], "layers.0.up": []}"#, &weights), Ok(()));
    for (text, expected) in [
        (r#"{"layers.0.uq": [1]}"#, "`layers.0.uq` is no weight whose columns are chosen; did you mean `layers.0.up`?"),
        (r#"{"norm": [1]}"#, "`norm` is no weight whose columns are chosen; those are: layers.0.down, layers.0.up"),
        (r#"{"layers.0.up": [8]}"#, "column 8 of `layers.0.up`, which has columns 0 to 7"),
    ] {
        let error = check(text, &weights).expect_err(text);
        assert!(error.contains("columns.json: ") && error.contains(expected), "{text}: {error}");
    }
}
