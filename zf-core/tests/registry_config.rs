//! Run files: every error message, the order of layers, the resolved run.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::config::{self, Run};
use zf_core::layout::DType;
use zf_core::registry::{Build, BuildContext, Registry, setting};
use zf_core::slots;
use zf_core::stage::Schedule;
use zf_core::{register, register_preset};

/// A schedule that multiplies by its ratio.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Zero {
    /// The factor on the rate.
    #[serde(default = "one")]
    ratio: f64,
    /// How many.
    #[serde(default)]
    stage: u8,
    /// Its shape.
    #[serde(default)]
    shape: Shape,
    /// A part with settings of its own.
    #[serde(default)]
    part: Part,
    /// A file.
    #[serde(default)]
    path: PathBuf,
    /// Another file.
    #[serde(default)]
    #[schemars(extend("format" = "path"))]
    notes: Option<PathBuf>,
}

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Shape {
    #[default]
    Round,
    Square,
}

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct Part {
    /// How deep.
    depth: u32,
    /// A list.
    list: Vec<u32>,
}

fn one() -> f64 {
    1.0
}

struct Fixed(f64);

impl Schedule for Fixed {
    fn factor(&self, _step: u64, _total: u64) -> f64 {
        self.0
    }
}

impl Build<slots::Schedule> for Zero {
    fn build(self, cx: &BuildContext) -> anyhow::Result<Arc<dyn Schedule>> {
        if self.part.depth > 5 {
            return Err(setting("part.depth", "must be at most 5"));
        }
        if self.stage == 3 {
            anyhow::bail!("{} cannot be read", cx.path(&self.path).display());
        }
        Ok(Arc::new(Fixed(self.ratio)))
    }
}

register!(slots::Schedule, "zero", Zero, "multiplies", "ratio = 0.5");

/// Needs its key.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Needy {
    /// The needed one.
    ratio: f64,
}

impl Build<slots::Schedule> for Needy {
    fn build(self, _cx: &BuildContext) -> anyhow::Result<Arc<dyn Schedule>> {
        Ok(Arc::new(Fixed(self.ratio)))
    }
}

register!(slots::Schedule, "needy", Needy, "needs", "ratio = 0.5");

register_preset!("fast", "a test preset", "[schedule]\nkind = \"zero\"\nratio = 0.25\nstage = 2\n[run]\nclip = 0.5");

fn read(text: &str, overrides: &[&str]) -> zf_core::Result<Run> {
    let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_owned()).collect();
    Run::from_toml_str_with(text, "demo.toml", &overrides, Registry::global()?)
}

const BASE: &str = "[run]\nsteps = 10\n[schedule]\nkind = 'zero'\n";

/// A file that must be refused with this text.
#[track_caller]
fn refused(text: &str, expected: &str) {
    let error = read(text, &[]).expect_err("must be refused");
    assert_eq!(error.to_string(), expected, "for\n{text}");
    assert_eq!(error.exit_code(), 2);
}

#[track_caller]
fn refused_override(text: &str, expected: &str) {
    let error = read(BASE, &[text]).expect_err("must be refused");
    assert_eq!(error.to_string(), expected);
}

#[test]
fn errors_in_stage_settings_show_line_and_caret() {
    refused(
        "[run]\nsteps = 10\n\n[schedule]\nkind = 'zero'\n  ratoi = 2\n",
        "demo.toml:6:3: unknown key `ratoi` in [schedule] zero\n   \
            6 |   ratoi = 2\n     \
              |   ^^^^^ did you mean `ratio`? expected one of: notes, part, path, ratio, shape, stage",
    );
    refused(
        "[run]\nsteps = 10\n[schedule]\nkind = 'zero'\nratio = 'x'\n",
        "demo.toml:5:9: `ratio` in [schedule] zero: expected a number, found string \"x\"\n   \
            5 | ratio = 'x'\n     \
              |         ^^^",
    );
    refused(
        "[run]\nsteps = 10\n[schedule]\nkind = 'zero'\nstage = 300",
        "demo.toml:5:9: `stage` in [schedule] zero: expected a whole number, 0 or more, found integer `300`\n   \
            5 | stage = 300\n     \
              |         ^^^",
    );
    refused(
        "[run]\nsteps = 10\n[schedule]\nkind = 'zero'\nshape = 'sqare'",
        "demo.toml:5:9: unknown value `sqare` for `shape` in [schedule] zero\n   \
            5 | shape = 'sqare'\n     \
              |         ^^^^^^^ did you mean `square`? expected one of: round, square",
    );
    refused(
        "[run]\nsteps = 10\n[schedule]\nkind = 'zero'\npart = { depht = 1 }",
        "demo.toml:5:10: unknown key `part.depht` in [schedule] zero\n   \
            5 | part = { depht = 1 }\n     \
              |          ^^^^^ did you mean `depth`? expected one of: depth, list",
    );
    refused(
        "[run]\nsteps = 10\n[schedule]\nkind = 'zero'\npart.list = [1,\n2, -3]",
        "demo.toml:6:4: `part.list[2]` in [schedule] zero: expected a whole number, 0 or more, found integer `-3`\n   \
            6 | 2, -3]\n     \
              |    ^^",
    );
    refused(
        "[run]\nsteps = 10\n\n[schedule]\nkind = 'needy'\n",
        "demo.toml:4:2: missing key `ratio` in [schedule] needy\n   \
            4 | [schedule]\n     \
              |  ^^^^^^^^",
    );
    refused(
        "[run]\nsteps = 10\n[schedule]\nkind = 'zoro'",
        "demo.toml:4:8: unknown schedule stage `zoro`\n   \
            4 | kind = 'zoro'\n     \
              |        ^^^^^^ did you mean `zero`? registered are: needy, zero; is the crate that defines it linked?",
    );
    refused(
        "[run]\nsteps = 10\n[schedule]\nkind = 7",
        "demo.toml:4:8: `kind` in [schedule]: expected the name of a stage, found integer\n   \
            4 | kind = 7\n     \
              |        ^",
    );
}

#[test]
fn errors_of_build_point_at_the_file() {
    let registry = Registry::global().expect("no duplicates");
    let build = |text: &str| {
        let run = read(text, &[]).expect("the file itself is right");
        let built = run.build::<slots::Schedule>(registry, &run.context());
        built.err().expect("refused").to_string()
    };
    assert_eq!(
        build("[run]\nsteps = 10\n[schedule]\nkind = 'zero'\npart.depth = 6"),
        "demo.toml:5:14: `part.depth` in [schedule] zero: must be at most 5\n   \
            5 | part.depth = 6\n     \
              |              ^",
    );
    assert_eq!(
        build("[run]\nsteps = 10\n[schedule]\nkind = 'zero'\nstage = 3\npath = 'no.txt'"),
        "demo.toml:3: [schedule] zero: no.txt cannot be read",
    );
    let error = read("[run]\nsteps = 1", &[])
        .expect("a stage that no file names may be missing")
        .build::<slots::Partition>(registry, &BuildContext::default())
        .err()
        .expect("nothing is registered");
    assert_eq!(
        error.to_string(),
        "unknown partition stage `zero`: none is registered; is the crate that defines it linked?"
    );
}

#[test]
fn errors_in_fixed_sections_show_line_and_caret() {
    refused(
        "[run]\nstep = 10",
        "demo.toml:2:1: unknown key `step` in [run]\n   \
            2 | step = 10\n     \
              | ^^^^ did you mean `steps`? expected one of: checkpoint, clip, dtype, epochs, exact, global_batch, \
         loss_scale, micro_batch, seed, steps, tokens, unused, validate",
    );
    refused(
        "[run]\nsteps = 'ten'",
        "demo.toml:2:9: `steps` in [run]: expected a whole number, 0 or more, found string \"ten\"\n   \
            2 | steps = 'ten'\n     \
              |         ^^^^^",
    );
    refused(
        "[run]\nsteps = 10\ndtype = 'bf16'",
        "demo.toml:3:9: unknown value `bf16` for `dtype` in [run]\n   \
            3 | dtype = 'bf16'\n     \
              |         ^^^^^^ expected one of: float32, bfloat16, float16",
    );
    refused(
        "[run]\nsteps = 10\ncheckpoint = { evry = 3 }",
        "demo.toml:3:16: unknown key `checkpoint.evry` in [run]\n   \
            3 | checkpoint = { evry = 3 }\n     \
              |                ^^^^ did you mean `every`? expected one of: async, best, every, keep",
    );
    refused(
        "[run]\nsteps = 1\n[rum]\nx = 1",
        "demo.toml:3:2: unknown section [rum]\n   \
            3 | [rum]\n     \
              |  ^^^ did you mean `run`? sections are: data, device, host, log, model, offload, optim, partition, \
         reduce, run, schedule, select, transport",
    );
    refused(
        "steps = 1",
        "demo.toml:1:1: unknown key `steps` outside of a section\n   \
            1 | steps = 1\n     \
              | ^^^^^ sections are: data, device, host, log, model, offload, optim, partition, reduce, run, schedule, \
         select, transport",
    );
    refused(
        "run = 3",
        "demo.toml:1:7: expected a section [run], found integer\n   \
            1 | run = 3\n     \
              |       ^",
    );
    refused(
        "[activation]\nkind = 'keep'",
        "demo.toml:1:2: [activation] is not in this version, which has no recomputation and stores for activations\n   \
            1 | [activation]\n     \
              |  ^^^^^^^^^^",
    );
    refused(
        "[mesh]\ntensor = 2",
        "demo.toml:1:2: [mesh] is not in this version, which has no axes beside data parallelism\n   \
            1 | [mesh]\n     \
              |  ^^^^",
    );
}

#[test]
fn text_that_is_no_toml_shows_line_and_caret() {
    for text in [
        "[run\nsteps = 1",
        "[run]\nsteps = ",
        "[run]\nsteps = 1\nsteps = 2",
        "[run]\nsteps = 99999999999999999999",
        "[run]\nx = \"\u{e9}",
    ] {
        let error = read(text, &[]).expect_err("no TOML").to_string();
        assert!(error.starts_with("demo.toml:"), "{error}");
        assert!(error.contains('^'), "{error}");
    }
}

#[test]
fn rules_across_keys_say_what_to_do() {
    refused(
        "[run]\nexact = true",
        "demo.toml:1:2: [run] needs one of `steps`, `epochs` and `tokens`\n   \
            1 | [run]\n     \
              |  ^^^ for example `steps = 200`",
    );
    refused("", "demo.toml: [run] needs one of `steps`, `epochs` and `tokens`; for example `steps = 200`");
    refused(
        "[run]\nsteps = 1\nepochs = 2.0",
        "demo.toml:3:10: `epochs` in [run]: only one of `steps`, `epochs` and `tokens` can be given\n   \
            3 | epochs = 2.0\n     \
              |          ^^^ take the others out",
    );
    refused(
        "[run]\nsteps = 1\nclip = -1",
        "demo.toml:3:8: `clip` in [run]: must be a finite number, 0 or more, found -1\n   \
            3 | clip = -1\n     \
              |        ^^ 0 turns clipping off",
    );
    refused(
        "[run]\nsteps = 1\nexact = true\n[reduce]\nwhen = 'boundary'",
        "demo.toml:5:8: `when` in [reduce]: \"boundary\" cannot be combined with `run.exact`: exact mode adds micro-batch \
         after micro-batch\n   \
            5 | when = 'boundary'\n     \
              |        ^^^^^^^^^^ use \"micro-batch\" or \"auto\"",
    );
    refused(
        "[run]\nsteps = 1\nexact = true\n[device]\nthreads = 2",
        "demo.toml:5:11: `threads` in [device]: 2 cannot be combined with `run.exact`: exact mode runs operators on one \
         thread\n   \
            5 | threads = 2\n     \
              |           ^ use 1",
    );
    refused(
        "[run]\nsteps = 1\nglobal_batch = 16\nmicro_batch = 3",
        "demo.toml:3:16: `global_batch` in [run]: global_batch = 16 is not micro_batch x accumulation x ranks: \
         micro_batch 3 x ranks 1 = 3 does not divide it\n   \
            3 | global_batch = 16\n     \
              |                ^^ global_batch 15 or 18 fits, or micro_batch 1, 2, 4, 8, 16",
    );
    for (text, part) in [
        ("steps = 0", "`steps` in [run]: must be at least 1"),
        ("tokens = 0", "`tokens` in [run]: must be at least 1"),
        ("epochs = nan", "`epochs` in [run]: must be a finite number"),
        ("steps = 1\nclip = inf", "`clip` in [run]: must be a finite number"),
        ("steps = 1\nglobal_batch = 0", "`global_batch` in [run]: must be at least 1"),
        ("steps = 1\nmicro_batch = 0", "`micro_batch` in [run]: must be at least 1"),
        ("steps = 1\nloss_scale = 8", "`loss_scale` in [run]: has no effect unless"),
        ("steps = 1\nloss_scale = 'static'", "unknown value `static` for `loss_scale`"),
        ("steps = 1\ndtype = 'float16'\nloss_scale = { windw = 1 }", "unknown key `loss_scale.windw`"),
        ("steps = 1\ndtype = 'float16'\nloss_scale = -1", "loss_scale.fixed must be"),
        ("steps = 1\ncheckpoint.keep = 0", "`checkpoint.keep` in [run]: must be"),
        ("steps = 1\n[log]\nevery = 0", "`every` in [log]: must be at least 1"),
        ("steps = 1\n[device]\nkind = 'emulated'", "`kind` in [device]: \"emulated\" needs `memory`"),
        ("steps = 1\n[device]\nkind = 'cpu'\nmemory = '1GB'", "`memory` in [device]: has no effect unless"),
        ("steps = 1\n[device]\nmemory = '1GB'", "`memory` in [device]: has no effect unless"),
        ("steps = 1\n[device]\nkind = 'emulated'\nmemory = 4095", "`memory` in [device]: must be at least 4096"),
        ("steps = 1\n[device]\nkind = 'emulated'\nmemory = 'much'", "expected a size such as \"25MB\""),
        ("steps = 1\n[device]\nthreads = 0", "must be from 1 to 1024"),
        (
            "steps = 1\nexact = true\n[reduce]\naccumulate = 'model'",
            "`accumulate` in [reduce]: \"model\" cannot be combined",
        ),
    ] {
        let error = read(&format!("[run]\n{text}"), &[]).expect_err(text);
        assert!(error.to_string().contains(part), "{error}");
        assert_eq!(error.exit_code(), 2);
    }
}

#[test]
fn batches_are_checked_against_the_ranks() {
    let run = read("[run]\nsteps = 1\nglobal_batch = 12\nmicro_batch = 1", &[]).expect("valid");
    let accumulations: Vec<usize> = (1..=4).map(|n| run.accumulation(n).expect("divides")).collect();
    assert_eq!(accumulations, [12, 6, 4, 3]);
    let error = run.accumulation(5).expect_err("12 / 5").to_string();
    assert!(error.contains("ranks 5 = 5 does not divide it"), "{error}");
    assert!(error.ends_with("global_batch 10 or 15 fits"), "{error}");
}

#[test]
fn overrides_are_checked_like_the_file() {
    refused_override(
        "schedule.stag=1",
        "-o schedule.stag=1: unknown key `stag` in [schedule] zero; did you mean `stage`? expected one of: notes, part, \
         path, ratio, shape, stage",
    );
    refused_override(
        "run.steps=many",
        "-o run.steps=many: `steps` in [run]: expected a whole number, 0 or more, found string \"many\"",
    );
    refused_override("run.steps", "-o run.steps: expected key=value, for example -o run.steps=100");
    refused_override("=1", "-o =1: expected a key such as run.steps before `=`, found ``");
    refused_override("run..x=1", "-o run..x=1: expected a key such as run.steps before `=`, found `run..x`");
    refused_override("extends=a.toml", "-o extends=a.toml: `extends` can be set in a file only");
    refused_override(
        "preset=fats",
        "-o preset=fats: unknown preset `fats`; did you mean `fast`? registered are: fast; is the crate that defines it \
         linked?",
    );
    let run = read(BASE, &["schedule.part.list=[1, 2]", "run.dtype=bfloat16", "run.seed = 7"]);
    let run = run.expect("valid");
    assert_eq!((run.run.dtype, run.run.seed), (DType::Bfloat16, 7));
}

#[test]
fn later_layers_win() {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().expect("has a parent")).expect("made");
        std::fs::write(&path, text).expect("written");
        path
    };
    write("base/grand.toml", "[run]\nsteps = 1\nseed = 2\nclip = 0.75\n[schedule]\npath = 'a.txt'\nnotes = 'n.txt'");
    write("base/parent.toml", "extends = 'grand.toml'\n[run]\nseed = 3\nmicro_batch = 2");
    let file = write(
        "run.toml",
        "preset = 'fast'\nextends = 'base/parent.toml'\n[run]\nmicro_batch = 8\n[schedule]\nstage = 1",
    );
    let registry = Registry::global().expect("no duplicates");
    let run = config::load(Some(&file), &["run.global_batch=32".to_owned()], registry).expect("valid");
    assert_eq!(run.run.steps, Some(1));
    assert_eq!(run.run.seed, 3);
    assert_eq!(run.run.clip, 0.75);
    assert_eq!((run.run.micro_batch, run.run.global_batch), (8, 32));
    assert_eq!(run.name(), "run");
    let rows = run.explain();
    let row = |key: &str| rows.iter().find(|row| row.key == key).expect(key);
    let at = |name: &str, line: u32| format!("{}:{line}", folder.path().join(name).display());
    assert_eq!(row("schedule.ratio").source, "preset fast");
    assert_eq!(row("schedule.ratio").value, "0.25");
    assert_eq!(row("schedule.ratio").help, "The factor on the rate.");
    assert_eq!(row("schedule.stage").source, at("run.toml", 6));
    assert_eq!(row("schedule.shape").source, "default");
    assert_eq!(row("run.seed").source, at("base/parent.toml", 3));
    assert_eq!(row("run.clip").source, at("base/grand.toml", 4));
    assert_eq!(row("run.global_batch").source, "-o run.global_batch=32");
    assert_eq!(row("preset").source, at("run.toml", 1));
    // Paths are relative to the file that holds them.
    let path = |name: &str| format!("{:?}", folder.path().join(name)).replace('"', "");
    assert_eq!(row("schedule.path").value.trim_matches('"'), path("base/a.txt"));
    assert_eq!(row("schedule.notes").value.trim_matches('"'), path("base/n.txt"));

    let cycle = write("cycle.toml", "extends = 'cycle.toml'\n");
    let error = config::load(Some(&cycle), &[], registry).expect_err("a cycle").to_string();
    assert!(error.contains("cycle.toml:1:11: ") && error.contains("extends itself"), "{error}");
    let lost = write("lost.toml", "extends = 'no.toml'\n");
    let error = config::load(Some(&lost), &[], registry).expect_err("no file").to_string();
    assert!(error.contains("lost.toml:1:11: ") && error.contains("no.toml: cannot be read"), "{error}");
    for number in 0..20 {
        write(&format!("chain{number}.toml"), &format!("extends = 'chain{}.toml'", number + 1));
    }
    let error = config::load(Some(&folder.path().join("chain0.toml")), &[], registry);
    let error = error.expect_err("too deep").to_string();
    assert!(error.contains("more than 16 files"), "{error}");
    let error = config::load(Some(Path::new("no/such.toml")), &[], registry).expect_err("no file");
    assert!(error.to_string().starts_with("no/such.toml: cannot be read: "), "{error}");
    let broken = folder.path().join("latin.toml");
    std::fs::write(&broken, b"[run]\n# \xe9").expect("written");
    let error = config::load(Some(&broken), &[], registry).expect_err("not UTF-8").to_string();
    assert!(error.ends_with("not UTF-8 at byte 8"), "{error}");
}

#[test]
fn naming_another_stage_drops_the_settings_of_the_old_one() {
    let text = "preset = 'fast'\n[run]\nsteps = 1\n[schedule]\nkind = 'needy'\nratio = 3";
    let run = read(text, &[]).expect("`stage` of the preset is gone");
    assert_eq!(run.stage::<slots::Schedule>(), Some("needy"));
    let run = read(text, &["run.epochs=2"]).expect("replaces `steps`");
    assert_eq!((run.run.steps, run.run.epochs), (None, Some(2.0)));
}

#[test]
fn the_resolved_run_gives_the_same_run() {
    let text = "preset = 'fast'\n[run]\nepochs = 1.5\ndtype = 'float16'\nloss_scale = 128\n\
                checkpoint = { every = 7 }\n[schedule]\npart = { list = [1, 2] }";
    let run = read(text, &["schedule.shape=square"]).expect("valid");
    let resolved = run.resolved_toml();
    let again = Run::from_toml_str(&resolved, "demo.toml").expect(&resolved);
    assert_eq!((&again.run, &again.device), (&run.run, &run.device));
    assert_eq!((&again.reduce, &again.log), (&run.reduce, &run.log));
    assert_eq!(again.resolved(), run.resolved());
    for line in ["ratio = 0.25", "depth = 0", "tensorboard = true", "keep = 3", "async = true", "shape = \"square\""] {
        assert!(resolved.contains(line), "{line} is not in\n{resolved}");
    }
}

/// Failing inputs are printed; they become tests of their own, not files.
fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

#[test]
fn whatever_is_overridden_arrives_and_survives_resolving() {
    proptest!(cases(64), |(
        seed in 0..i64::MAX,
        ratio in -1e9..1e9_f64,
        clip in 0.0..1e6_f64,
        stage in 0..3_u8,
        name in "[ -~éλ]{0,12}",
        list in prop::collection::vec(0..9_u32, 0..4),
    )| {
        let quoted = toml::Value::from(name.as_str());
        let overrides = [
            format!("run.seed={seed}"),
            format!("schedule.ratio={ratio:?}"),
            format!("run.clip={clip:?}"),
            format!("schedule.stage={stage}"),
            format!("schedule.part.list={list:?}"),
            format!("schedule.notes={quoted}"),
        ];
        let overrides: Vec<&str> = overrides.iter().map(String::as_str).collect();
        let run = read(BASE, &overrides)?;
        prop_assert_eq!(run.run.seed, seed as u64);
        prop_assert_eq!(run.run.clip, clip);
        let built = run.build::<slots::Schedule>(Registry::global()?, &run.context())?;
        prop_assert_eq!(built.factor(0, 1), ratio);
        let again = Run::from_toml_str(&run.resolved_toml(), "demo.toml")?;
        prop_assert_eq!(again.resolved(), run.resolved());
    });
}

#[test]
fn no_text_makes_the_reader_panic() {
    proptest!(cases(256), |(
        text in "(\\[(run|schedule|x)\\]\n)?([a-z.]{1,8} = ['\"{0-9a-z\\[é,]{0,6}\n?){0,3}",
        over in "[a-z.=\\[\\]{}'\" é0-9]{0,16}",
    )| {
        let _ = read(&text, &[&over]);
    });
}

#[test]
fn deep_and_large_texts_are_refused() {
    let keys = vec!["a"; 70].join(".");
    let error = read(&format!("{keys} = 1"), &[]).expect_err("too deep").to_string();
    assert!(error.contains("nested more than 64 deep"), "{error:.200}");
    let keys = vec!["a"; 2000].join(".");
    let error = read(&format!("{keys} = 1"), &[]).expect_err("too deep").to_string();
    assert!(error.starts_with("demo.toml:1:1: recursion limit"), "{error:.200}");
    assert!(error.len() < 400, "{error}");
    let error = read(BASE, &[&format!("{keys}=1")]).expect_err("too deep").to_string();
    assert!(error.contains("nested more than 64 deep"), "{error:.200}");
    let error = read(&format!("a = {}", "[".repeat(100_000)), &[]).expect_err("too deep").to_string();
    assert!(error.starts_with("demo.toml:1:"), "{error:.200}");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("model.safetensors");
    std::fs::write(&file, vec![b' '; (4 << 20) + 1]).expect("written");
    let error = config::load(Some(&file), &[], Registry::global().expect("no duplicates")).expect_err("too large");
    assert!(error.to_string().ends_with("larger than 4 MiB, which is no run file"), "{error}");
    let error = config::load(Some(folder.path()), &[], Registry::global().expect("no duplicates"));
    assert!(error.expect_err("a folder").to_string().contains("cannot be read"));
}
