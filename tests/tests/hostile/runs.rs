//! Broken run files, overrides and command lines.

use zf_tests::golden;

use super::bench::{Place, Row, TRAIN, base, check, file};

/// The working run file with one `-o`.
fn over(name: &str, setting: &str, says: &[&str]) -> Row<'static> {
    Row::new(name, "train base.toml --out new -o", says, |place| place.base()).arg(setting)
}

#[test]
fn run_files_that_cannot_be_read() {
    check(&[
        Row::works("as it is", "train base.toml --out new", &["run folder: new"], |place| place.base()),
        Row::new("missing", TRAIN, &["run.toml: cannot be read", "No such file"], |_| {}),
        Row::new("folder", TRAIN, &["run.toml: cannot be read", "directory"], |place| {
            place.write("run.toml/x", "");
        }),
        Row::new("not UTF-8", TRAIN, &["run.toml: not UTF-8 at byte 11"], |place| {
            place.write("run.toml", b"[run]\n# cut\xff\n");
        }),
        Row::new("empty", TRAIN, &["run.toml: missing key `path` in [model]"], |place| {
            place.write("run.toml", "");
        }),
        file("not TOML", "[run]\nsteps == 1", &["run.toml:3:", "3 | steps == 1", "^"]),
        file("open table", "[run\nsteps = 1", &["run.toml:2:", "2 | [run", "^"]),
        file("binary", "\u{0}\u{1}\u{2}", &["run.toml:2:"]),
        file("duplicate key", "[run]\nsteps = 1\nsteps = 2", &["run.toml:4:1", "duplicate key", "4 | steps = 2", "^"]),
        file("duplicate section", "[run]\n[log]\n[run]", &["run.toml:4:", "duplicate", "[run]"]),
        file("deep nesting", DEEP, &["run.toml:2:"]),
        Row::new("extends itself", TRAIN, &["run.toml:1:11", "run.toml extends itself"], |place| {
            place.write("run.toml", "extends = \"run.toml\"\n");
        }),
        Row::new("extends in a circle", TRAIN, &["b.toml:1:11", "run.toml extends itself"], |place| {
            place.write("run.toml", "extends = \"b.toml\"\n");
            place.write("b.toml", "extends = \"run.toml\"\n");
        }),
        Row::new("extends what is missing", TRAIN, &["run.toml:1:11", "no.toml: cannot be read", "^"], |place| {
            place.write("run.toml", "extends = \"no.toml\"\n");
        }),
        Row::new("extends a number", TRAIN, &["run.toml:1:11", "expected the path of one file"], |place| {
            place.write("run.toml", "extends = 3\n");
        }),
        Row::new("an error in what it extends", TRAIN, &["base.toml:2:1", "2 | stepz = 3", "^^^^^"], |place| {
            place.write("base.toml", "[run]\nstepz = 3\n");
            place.write("run.toml", "extends = \"base.toml\"\n");
        }),
    ]);
}

/// Arrays in arrays, far deeper than any recursion should follow.
const DEEP: &str = match std::str::from_utf8(&[b'['; 100_000]) {
    Ok(text) => text,
    Err(_) => "",
};

#[test]
fn keys_and_values() {
    check(&[
        file("unknown section", "[optimizer]\nlr = 1", &["run.toml:2:2", "unknown section [optimizer]", "optim", "^"]),
        file("key outside of a section", "steps = 1", &["run.toml:2:1", "unknown key `steps` outside of a section"]),
        file("section as a value", "run = 3", &["run.toml:2:7", "expected a section [run], found integer"]),
        file("list of sections", "[[run]]\nsteps = 1", &["run.toml:2:", "expected a section [run]"]),
        file(
            "unknown key",
            "[run]\nglobal_bach = 4",
            &["run.toml:3:1", "unknown key `global_bach` in [run]", "did you mean `global_batch`?", "^^^^^^^^^^^"],
        ),
        file(
            "unknown key of a stage",
            "[optim]\nweight_decy = 0.1",
            &["run.toml:3:1", "unknown key `weight_decy` in [optim] adamw", "did you mean `weight_decay`?", "^"],
        ),
        file(
            "unknown key deep inside",
            "[run]\ncheckpoint = { evry = 3 }",
            &["run.toml:3:", "checkpoint.evry", "every"],
        ),
        file("key of another stage", "[optim]\nmomentum = 0.9", &["run.toml:3:1", "unknown key `momentum`", "adamw"]),
        file("wrong type", "[run]\nsteps = \"ten\"", &["run.toml:3:9", "`steps` in [run]", "string \"ten\"", "^^^^^"]),
        file("wrong type of a stage", "[optim]\nlr = \"high\"", &["run.toml:3:6", "`lr`", "string \"high\"", "^^^^^^"]),
        file("a list for a number", "[optim]\nlr = [1e-3]", &["run.toml:3:6", "`lr`", "sequence"]),
        file("a section for a number", "[run.seed]\na = 1", &["run.toml:2:", "`seed` in [run]", "map"]),
        file("negative count", "[run]\nsteps = -1", &["run.toml:3:9", "`steps`", "-1"]),
        file("fraction for a count", "[run]\nglobal_batch = 4.5", &["run.toml:3:16", "`global_batch`", "4.5"]),
        file("number beyond 64 bits", "[run]\nseed = 99999999999999999999", &["run.toml:3:8", "99999999999999999999"]),
        file("bad name of a list", "[device]\nkind = \"gpu\"", &["run.toml:3:8", "unknown value `gpu`", "cpu, cuda"]),
        file("bad dtype", "[run]\ndtype = \"bf16\"", &["run.toml:3:9", "unknown value `bf16`", "bfloat16"]),
        file("unknown stage", "[optim]\nkind = \"adamv\"", &["run.toml:3:8", "unknown optim stage `adamv`", "adamw"]),
        file(
            "stage by a number",
            "[partition]\nkind = 3",
            &["run.toml:3:8", "expected the name of a stage", "integer"],
        ),
        file("unknown preset", "preset = \"zero-7\"", &["run.toml:2:10", "unknown preset `zero-7`", "zero-1"]),
        file("preset by a number", "preset = 1", &["run.toml:2:10", "`preset`: expected a text"]),
        Row::new("missing key", TRAIN, &["run.toml:3:2", "missing key `sequence_length` in [data]"], |place| {
            let data = golden("tokens.bin");
            place.write("run.toml", format!("model.arch = \"llama\"\nrun.steps = 1\n[data]\npath = {data:?}\n"));
        }),
        Row::new("no data", TRAIN, &["run.toml", "missing key `path` in [data]"], |place| {
            place.write("run.toml", "model.arch = \"llama\"\nrun.steps = 1\n");
        }),
        Row::new("no model", TRAIN, &["run.toml", "missing key `path` in [model]"], |place| {
            place.write(
                "run.toml",
                format!("data = {{ path = {:?}, sequence_length = 8 }}\nrun.steps = 1\n", golden("tokens.bin")),
            );
        }),
        file("not here yet: mesh", "[mesh]\ntensor = 2", &["run.toml:2:2", "[mesh] is not in this version"]),
        file("a sweep", "[sweep]\nseeds = [1]", &["run.toml:2:2", "[sweep] lists several runs", "`zf ablate`"]),
        file(
            "not here yet: recomputation",
            "[activation]\nkind = \"keep\"",
            &["run.toml:2:2", "[activation] is not in"],
        ),
        file(
            "parameters split further than gradients",
            "[partition]\nscope = { p = 2, g = 1, o = 2 }",
            &["partition.scope", "size(o) >= size(g) >= size(p)", "p = 2"],
        ),
        file(
            "scopes that do not divide",
            "[partition]\nscope = { p = 1, g = 1, o = 3 }",
            &["partition.scope.o", "must divide", "o = 3"],
        ),
        file("no unit may live", "[partition]\nstage = 3\nmax_live_units = 0", &["run.toml:4:", "max_live_units"]),
        file("ZeRO 4", "[partition]\nstage = 4", &["run.toml:3:9", "must be 0, 1, 2 or 3, found 4"]),
    ]);
}

#[test]
fn values_that_make_no_sense() {
    check(&[
        Row::new("no length", TRAIN, &["run.toml", "needs one of `steps`, `epochs` and `tokens`"], |place| {
            place.write("run.toml", base().replace("steps = 1\n", ""));
        }),
        file(
            "two lengths",
            "[run]\nsteps = 1\ntokens = 9",
            &["run.toml:4:10", "only one of `steps`, `epochs` and `tokens`"],
        ),
        file("three lengths", "[run]\nsteps = 1\ntokens = 9\nepochs = 1", &["run.toml:5:10", "only one of"]),
        file("no steps", "[run]\nsteps = 0", &["run.toml:3:9", "must be at least 1, found 0"]),
        file("negative epochs", "[run]\nepochs = -1.0", &["run.toml:3:10", "a finite number above 0, found -1"]),
        file("endless epochs", "[run]\nepochs = inf", &["run.toml:3:10", "a finite number above 0, found inf"]),
        file("epochs that are none", "[run]\nepochs = nan", &["run.toml:3:10", "a finite number above 0, found NaN"]),
        file(
            "batch that does not divide",
            "[run]\nglobal_batch = 10\nmicro_batch = 4",
            &["run.toml:3:16", "micro_batch 4 x ranks 2 = 8 does not divide it", "global_batch 8 or 16 fits"],
        ),
        file("batch of none", "[run]\nglobal_batch = 0", &["run.toml:3:16", "must be", "found 0"]),
        file("micro-batch of none", "[run]\nmicro_batch = 0", &["run.toml:3:15", "must be at least 1, found 0"]),
        file(
            "batch beyond memory",
            "[run]\nglobal_batch = 4611686018427387904\nmicro_batch = 2305843009213693952",
            &["run.toml:3:16", "global_batch", "4611686018427387904"],
        ),
        file("negative clip", "[run]\nclip = -1.0", &["run.toml:3:8", "`clip` in [run]", "0 or more, found -1"]),
        file("clip that is none", "[run]\nclip = nan", &["run.toml:3:8", "`clip` in [run]", "found NaN"]),
        file(
            "exact at the boundary",
            "[run]\nexact = true\n[reduce]\nwhen = \"boundary\"",
            &["run.toml:5:8", "\"boundary\" cannot be combined with `run.exact`", "micro-batch"],
        ),
        file(
            "exact in the model's type",
            "[run]\nexact = true\n[reduce]\naccumulate = \"model\"",
            &["run.toml:5:14", "\"model\" cannot be combined with `run.exact`", "float32"],
        ),
        file("exact on two threads", "run.exact = true\ndevice.threads = 2", &["run.toml:3:18", "one thread", "use 1"]),
        file("no thread", "[device]\nthreads = 0", &["run.toml:3:11", "must be from 1 to 1024, found 0"]),
        file(
            "loss scale in float32",
            "[run]\nloss_scale = 8.0",
            &["run.toml:3:14", "no effect unless `dtype` is \"float16\""],
        ),
        file("loss scale of 0", "[run]\ndtype = \"float16\"\nloss_scale = 0.0", &["run.toml:4:14", "above 0"]),
        file("keep nothing", "[run]\ncheckpoint = { keep = 0 }", &["run.toml:3:23", "must be at least 1, found 0"]),
        file(
            "keep a text",
            "[run]\ncheckpoint = { every = \"10m\" }",
            &["run.toml:3:24", "`checkpoint.every`", "\"10m\""],
        ),
        file("checkpoint as a number", "[run]\ncheckpoint = 10", &["run.toml:3:14", "`checkpoint` in [run]", "10"]),
        file("log never", "[log]\nevery = 0", &["run.toml:3:9", "must be at least 1, found 0"]),
        file("negative rate", "[optim]\nlr = -1e-3", &["run.toml:3:6", "`lr`", "at least 0, found -0.001"]),
        file("rate that is none", "[optim]\nlr = nan", &["run.toml:3:6", "`lr`", "found NaN"]),
        file("infinite rate", "[optim]\nlr = inf", &["run.toml:3:6", "`lr`", "found inf"]),
        file("betas out of range", "[optim]\nbetas = [0.9, 1.0]", &["run.toml:3:", "`betas`", "0 to below 1, found 1"]),
        file("one beta", "[optim]\nbetas = [0.9]", &["run.toml:3:", "`betas`", "2"]),
        file("eps of 0", "[optim]\neps = 0.0", &["run.toml:3:7", "`eps`", "at least 1.2e-38"]),
        file("negative decay", "[optim]\nweight_decay = -0.1", &["run.toml:3:16", "`weight_decay`", "found -0.1"]),
        file("momentum of 1", "[optim]\nkind = \"sgd\"\nmomentum = 1.0", &["run.toml:4:12", "`momentum`", "found 1"]),
        file("group without a name", "[optim]\ngroups = [{ match = \"\" }]", &["run.toml:3:", "empty `match`"]),
        file("group that matches nothing", "[optim]\ngroups = [{ match = \"emebd\", lr = 1.0 }]", &["group", "emebd"]),
        file("nothing to train", "[optim]\ngroups = [{ match = \"*\", frozen = true }]", &["frozen"]),
        file(
            "rate of what is frozen",
            "[optim]\ngroups = [{ match = \"embed\", frozen = true, lr = 1.0 }]",
            &["run.toml:3:", "group 0 (\"embed\")", "no effect on frozen"],
        ),
        file(
            "ratio above 1",
            "[schedule]\nkind = \"cosine\"\nmin_ratio = 1.5",
            &["run.toml:4:13", "from 0 to 1, found 1.5"],
        ),
        file("negative warm-up", "[schedule]\nkind = \"linear\"\nwarmup = -3", &["run.toml:4:10", "`warmup`", "-3"]),
        file(
            "decay above 1",
            "[schedule]\nkind = \"wsd\"\ndecay = 20.0",
            &["run.toml:4:9", "`decay`", "number of updates"],
        ),
        file("bucket of nothing", "[partition]\nbucket = \"0B\"", &["run.toml:3:10", "at least 1 byte, found 0"]),
        file("bucket in no unit", "[partition]\nbucket = \"25 apples\"", &["run.toml:3:10", "expected a size such as"]),
        file("negative bucket", "[partition]\nbucket = -5", &["run.toml:3:10", "`bucket`", "-5"]),
        file(
            "stage and scope",
            "[partition]\nstage = 1\nscope = { p = 1, g = 1, o = 1 }",
            &["run.toml:4:9", "give one of them"],
        ),
        file(
            "scope that does not divide",
            "[partition]\nscope = { p = 1, g = 1, o = 3 }",
            &["partition.scope.o", "found o = 3"],
        ),
        file("scope inside out", "[partition]\nscope = { p = 2, g = 1, o = 1 }", &["size(o) >= size(g) >= size(p)"]),
        file("no rank", "[transport]\nranks = 0", &["run.toml:", "ranks", "found 0"]),
        file(
            "more ranks than a machine has",
            "[transport]\nranks = 1000000\n[run]\nglobal_batch = 2000000",
            &["run.toml:", "ranks", "found 1000000"],
        ),
        file(
            "timeout without a unit",
            "[transport]\ntimeout = \"60\"",
            &["run.toml:3:11", "expected a duration such as \"60s\""],
        ),
        file("timeout of 0", "[transport]\ntimeout = \"0s\"", &["run.toml:3:11", "expected a duration"]),
        file("timeout as a number", "[transport]\ntimeout = 60", &["run.toml:3:11", "`timeout`", "60"]),
        file(
            "launcher without one",
            "[transport]\nkind = \"c10d\"",
            &["run.toml:2", "no launcher started this process", "zf launch"],
        ),
        file("longer than the model", "[data]\nsequence_length = 256", &["sequence_length", "256", "128 positions"]),
        file(
            "sequence of none",
            "[data]\nsequence_length = 0",
            &["run.toml:", "sequence_length", "at least 1, found 0"],
        ),
        file("validation of everything", "[data]\nvalidation = 1.5", &["run.toml:", "validation", "1.5", "below 1"]),
        file("negative validation", "[data]\nvalidation = -0.1", &["run.toml:", "validation", "-0.1"]),
        file("unknown order", "[data]\norder = \"random\"", &["run.toml:3:9", "unknown value `random`", "shuffled"]),
        file("three bytes a token", "[data]\ntoken_bytes = 3", &["run.toml:", "token_bytes", "2 (u16) or 4 (u32)"]),
        over("CUDA that is not here", "device.kind=\"cuda\"", &["device.kind", "cuda", "CUDA libtorch"]),
    ]);
}

#[test]
fn overrides_and_command_lines() {
    let plain = |place: &Place| place.base();
    check(&[
        over("no value", "run.steps", &["-o run.steps", "expected key=value"]),
        over("no key", "=3", &["-o =3", "expected a key such as run.steps before `=`"]),
        over("half a key", "run.=3", &["-o run.=3", "expected a key such as run.steps"]),
        over(
            "unknown section over",
            "rum.steps=3",
            &["-o rum.steps=3", "unknown section [rum]", "did you mean `run`?"],
        ),
        over("unknown key over", "run.stesp=3", &["-o run.stesp=3", "unknown key `stesp`", "did you mean `steps`?"]),
        over("wrong type over", "run.steps=many", &["-o run.steps=many", "`steps` in [run]", "\"many\""]),
        over("extends over", "extends=x.toml", &["-o extends=x.toml", "can be set in a file only"]),
        over("section over a number", "run.seed.a=3", &["-o run.seed.a=3", "`seed` in [run]"]),
        over("unknown preset over", "preset=zen", &["-o preset=zen", "unknown preset `zen`", "zero-0"]),
        Row::new("unknown command", "trian base.toml", &["unrecognized subcommand 'trian'", "train"], plain),
        Row::new("unknown option", "train base.toml --outt x", &["unexpected argument '--outt'", "'--out'"], plain),
        Row::new("no run file", "train", &["required arguments were not provided", "<RUN"], plain),
        Row::new("number that is none", "generate new --tokens few", &["'few'", "--tokens"], plain),
        Row::new("negative temperature", "generate m --temperature=-1", &["--temperature must be 0 or more"], plain),
        Row::new(
            "temperature that is none",
            "generate m --temperature=nan",
            &["--temperature must be 0 or more"],
            plain,
        ),
        Row::new("out is a file", "train base.toml --out file", &["file", "not a folder"], |place| {
            place.base();
            place.write("file", "x");
        }),
        Row::new("out lies in a file", "train base.toml --out file/new", &["file/new"], |place| {
            place.base();
            place.write("file", "x");
        }),
        Row::new("explain what is missing", "explain no.toml", &["no.toml: cannot be read"], plain),
        Row::new("explain what is wrong", "explain run.toml", &["run.toml:3:1", "did you mean `steps`?"], |place| {
            place.run("[run]\nstepz = 1");
        }),
        Row::new("unknown slot", "stages optimiser", &["optimiser", "optim"], plain),
        Row::new("unknown stage in a slot", "stages optim adam", &["adam", "adamw"], plain),
        Row::new("compare what is missing", "compare a b", &["a", "run folder"], plain),
        Row::new("compare what is no run", "compare a b", &["a"], |place| {
            place.write("a/x", "");
            place.write("b/x", "");
        }),
        Row::new(
            "compare what is broken",
            "compare a b",
            &["a/metrics.jsonl:2: expected the record of a step"],
            |place| {
                for run in ["a", "b"] {
                    place.write(&format!("{run}/summary.json"), "{}");
                    place.write(&format!("{run}/metrics.jsonl"), "\n{\"step\": 0\n");
                }
            },
        ),
        Row::new("tolerance that is none", "compare a b --tolerance x", &["'x'", "--tolerance"], plain),
    ]);
}
