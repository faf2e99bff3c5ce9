use super::*;

const RUN: &str = "[run]\nsteps = 3\n";

fn load<T>(text: &str, overrides: &[&str], then: impl FnOnce(Sweep<'_>) -> T) -> Result<T> {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("s.toml");
    std::fs::write(&file, text).expect("writable");
    let registry = Registry::of([])?;
    let overrides: Vec<String> = overrides.iter().map(|&text| text.to_owned()).collect();
    Sweep::load(&file, &overrides, &registry).map(then)
}

fn names(text: &str) -> Vec<(String, usize)> {
    let list = |sweep: Sweep<'_>| sweep.cases.into_iter().map(|case| (case.name, case.baseline)).collect();
    load(&format!("{RUN}{text}"), &[], list).unwrap_or_else(|error| panic!("{error}"))
}

fn own(cases: &[(&str, usize)]) -> Vec<(String, usize)> {
    cases.iter().map(|&(name, baseline)| (name.to_owned(), baseline)).collect()
}

#[test]
fn lists_are_combined_and_the_last_changes_fastest() {
    let found = names("[sweep]\n\"run.clip\" = [0.5, 1]\nrun.dtype = [\"float32\", \"bfloat16\"]\n");
    let expected = [
        ("run.clip=0.5,run.dtype=float32", 0),
        ("run.clip=0.5,run.dtype=bfloat16", 0),
        ("run.clip=1,run.dtype=float32", 0),
        ("run.clip=1,run.dtype=bfloat16", 0),
    ];
    assert_eq!(found, own(&expected));
}

#[test]
fn named_cases_are_combined_with_lists_and_compared_within_them() {
    let cases = "[[sweep.case]]\nname = \"a\"\nrun.clip = 0\n[[sweep.case]]\nname = \"b\"\n\"run.clip\" = 2\n";
    assert_eq!(names(cases), own(&[("a", 0), ("b", 0)]));
    let lists = |baseline: &str| names(&format!("[sweep]\n{baseline}\nrun.micro_batch = [1, 2]\n{cases}"));
    let all = ["a,run.micro_batch=1", "a,run.micro_batch=2", "b,run.micro_batch=1", "b,run.micro_batch=2"];
    let with = |baselines: [usize; 4]| own(&std::array::from_fn::<_, 4, _>(|at| (all[at], baselines[at])));
    assert_eq!(lists(""), with([0, 1, 0, 1]));
    assert_eq!(lists("baseline = \"b\""), with([2, 3, 2, 3]));
    assert_eq!(lists("baseline = \"a,run.micro_batch=2\""), with([1; 4]));
}

#[test]
fn runs_have_the_settings_of_case_and_seed() {
    let text = "[sweep]\nseeds = [7, 9]\nexpect = \"different\"\nrun.clip = [0.5, 2.0]\n";
    load(&format!("{RUN}{text}"), &["run.steps=4"], |sweep| {
        assert_eq!(sweep.seeds(), [Some(7), Some(9)]);
        assert_eq!(sweep.cases[0].expect, None);
        let case = &sweep.cases[1];
        assert_eq!(case.expect, Some(Expect::Different));
        assert_eq!(case.settings, [("run.clip".to_owned(), toml::Value::Float(2.0))]);
        let run = sweep.run(case, Some(9)).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!((run.run.seed, run.run.clip, run.run.steps), (9, 2.0, Some(4)));
        let origin = run.explain().into_iter().find(|row| row.key == "run.clip").map(|row| row.source);
        assert!(origin.is_some_and(|origin| origin.ends_with("s.toml:6")), "the place is that of the list");
    })
    .unwrap_or_else(|error| panic!("{error}"));
    load(&format!("{RUN}[sweep]\nseeds = [3]\n"), &[], |sweep| assert_eq!(sweep.cases[0].name, "base"))
        .unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn a_case_replaces_a_stage_with_its_settings_in_one_layer() {
    load("[run]\nepochs = 1\n[sweep]\nrun.steps = [1, 2]\n", &[], |sweep| {
        let run = sweep.run(&sweep.cases[1], None).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!((run.run.steps, run.run.epochs), (Some(2), None));
    })
    .unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn errors_of_a_case_show_its_place_and_name() {
    let error = load("[run]\nsteps = 3\n[sweep]\n\"run.clipp\" = [0.5]\n", &[], |sweep| {
        sweep.run(&sweep.cases[0], None).map(drop).expect_err("unknown key").to_string()
    });
    let error = error.unwrap_or_else(|error| panic!("{error}"));
    assert!(error.contains("s.toml:4:1: unknown key `clipp` in [run]\n   4 | \"run.clipp\" = [0.5]\n"), "{error}");
    assert!(error.ends_with("in case `run.clipp=0.5`"), "{error}");
}

#[test]
fn what_makes_no_sense_is_refused_where_it_stands() {
    let case = |text: &str| format!("[[sweep.case]]\nname = \"a\"\n{text}\n");
    let rows = [
        (String::new(), "no [sweep] section"),
        ("sweep = 3".into(), "expected a section [sweep], found integer"),
        ("[sweep]".into(), "s.toml:1:2: [sweep] names no case"),
        ("[sweep]\nrun.clip = []".into(), "s.toml:2:12: `run.clip` in [sweep]: an empty list"),
        (
            "[sweep]\nrun.clip = 1".into(),
            "s.toml:2:12: `run.clip` in [sweep]: expected a list of values, found integer",
        ),
        ("[sweep]\nseed = [1]".into(), "did you mean `seeds`?"),
        ("[sweep]\nrun.seed = [1]".into(), "given by `seeds`"),
        ("[sweep]\nseeds = []".into(), "s.toml:2:9: `seeds` in [sweep]: an empty list"),
        ("[sweep]\nseeds = [1, 1]".into(), "s.toml:2:13: `seeds` in [sweep]: 1 is there twice"),
        ("[sweep]\nseeds = [-1]".into(), "expected whole numbers, 0 or more, found -1"),
        ("[sweep]\nseeds = 3".into(), "expected a list such as [1, 2, 3], found 3"),
        ("[sweep]\nrun.clip = [1, 1]".into(), "s.toml:2:16: `run.clip` in [sweep]: `1` has the folder of an earlier"),
        ("[sweep]\nrun.clip = [1]\n\"run.clip\" = [2]".into(), "`run.clip` has two lists"),
        ("[sweep]\nbaseline = \"run.clip=3\"\nrun.clip = [1]".into(), "did you mean `run.clip=1`?"),
        ("[sweep]\nexpect = \"same\"\nrun.clip = [1]".into(), "s.toml:2:10: `expect` in [sweep]: expected \"equal\""),
        (
            "[sweep]\nexpect = { tolerance = nan }\nrun.clip = [1]".into(),
            "expected a finite number, 0 or more, found nan",
        ),
        ("[sweep]\n\"run..clip\" = [1]".into(), "expected a key such as `partition.stage`, found `run..clip`"),
        ("[sweep]\n\"extends\" = [\"a.toml\"]".into(), "`extends` cannot be set by a sweep"),
        (format!("[sweep]\nrun.clip = [{}]", "1,".repeat(1001)), "a list of 1001, expected at most 1000"),
        (
            format!(
                "[sweep]\nrun.clip = [{0}]\nrun.steps = [{0}]",
                (1..40).map(|n| format!("{n},")).collect::<String>()
            ),
            "asks for 1521 runs, expected at most 1000",
        ),
        ("[[sweep.case]]\nrun.clip = 1".into(), "s.toml:1:1: missing key `name` in [[sweep.case]]"),
        ("[[sweep.case]]\nname = \" \"".into(), "1 to 64 printable characters, found \" \""),
        ("[[sweep.case]]\nname = 3".into(), "expected a text, found 3"),
        (format!("{0}{0}", case("")), "two cases are called `a`"),
        (format!("{}[[sweep.case]]\nname = \"x/y\"\n[[sweep.case]]\nname = \"x y\"", case("")), "one folder, `x-y`"),
        (case("expect = \"different\""), "the baseline and cannot differ from itself"),
        (case("run.clip = 1\n\"run.clip\" = 2"), "case `a` sets `run.clip` twice"),
        (format!("[sweep]\nseeds = [1]\n{}", case("run.seed = 2")), "`run.seed` is set by `seeds` in [sweep] too"),
        (format!("[sweep]\nrun.clip = [1]\n{}", case("run.clip = 2")), "set by this list and by case `a`"),
    ];
    for (text, says) in rows {
        let error = load(&text, &[], |_| ()).expect_err(&text);
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(says), "{text}\nexpected: {says}\nfound: {error}");
    }
    let error = load("[sweep]\nrun.clip = [1]", &["run.clip=3"], |_| ()).expect_err("no effect").to_string();
    assert_eq!(error, "-o run.clip=3: has no effect, the sweep sets `run.clip` itself");
}

#[test]
fn a_run_file_with_a_sweep_is_no_single_run() {
    let text = "[run]\nsteps = 3\n[sweep]\nseeds = [1]\n";
    let registry = Registry::of([]).expect("nothing twice");
    let error = Run::from_toml_str_with(text, "s.toml", &[], &registry).expect_err("a sweep").to_string();
    assert!(error.starts_with("s.toml:3:2: [sweep] lists several runs, which `zf ablate` starts"), "{error}");
}

#[test]
fn names_of_folders() {
    let cases = [("a/b c", "a-b-c"), ("..", "-."), ("x=0.5,y", "x=0.5,y"), ("ä", "-")];
    for (name, folder) in cases {
        assert_eq!(folder_name(name), folder);
    }
    let values = [toml::Value::from("x".repeat(99)), toml::Value::from(vec![1, 2]), toml::Value::from(true)];
    assert_eq!(label::labels(&values), ["#1", "1,2", "true"]);
}
