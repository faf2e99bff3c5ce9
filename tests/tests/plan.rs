//! `zf plan`, and its figures beside what runs measure.

use std::path::Path;

use serde_json::Value;
use zf_core::record::{Prediction, SUMMARY, Summary};
use zf_partition::ByteSize;
use zf_sys::heap::Heap;
use zf_tests::{Ran, golden, tiny, train};

/// What `[partition]` may say on four ranks.
const PARTITIONS: [&str; 8] = [
    "stage = 0",
    "stage = 1",
    "stage = 2",
    "stage = 3",
    "stage = 3, persist_below = 5000, reshard_after_forward = 2",
    "scope = { p = 1, g = 2, o = 4 }",
    "scope = { p = 2, g = 2, o = 4 }, reshard_after_forward = false",
    "scope = { p = 2, g = 2, o = 2 }",
];

/// Runs it and compares all figures of all ranks.
fn check(keys: &str) -> Ran {
    check_of("tiny-llama", keys)
}

fn check_of(model: &str, keys: &str) -> Ran {
    let ran = train(&tiny(model, keys));
    assert_eq!(ran.summary.prediction, ran.summary.per_rank[0].prediction, "{keys}");
    for rank in &ran.summary.per_rank {
        for (what, figure) in rank.prediction.figures() {
            assert!(figure.agrees(), "{what} of rank {}: {figure:?} with\n{keys}", rank.rank);
        }
        let Prediction { memory, comm_bytes, .. } = rank.prediction;
        assert!(memory.parameters.measured > 0 && memory.optimizer.measured > 0, "{keys}");
        let sent = comm_bytes.all_reduce.measured + comm_bytes.reduce_scatter.measured;
        assert_eq!(sent > 0, ran.summary.ranks > 1, "{keys}");
    }
    ran
}

fn keys(partition: &str, ranks: usize, more: &str) -> String {
    format!(
        "partition = {{ {partition} }}\ntransport.ranks = {ranks}\nrun.steps = 2\nrun.micro_batch = 1\n\
         run.global_batch = {}\n{more}",
        2 * ranks
    )
}

/// Predicted and measured bytes are the same, whatever the types and however gradients are summed.
#[test]
fn predictions_are_what_is_measured() {
    let cases = [
        "run.dtype = \"bfloat16\"\nreduce.accumulate = \"model\"",
        "run.dtype = \"bfloat16\"\nrun.exact = true\ndata.validation = 0.02",
        "run.dtype = \"bfloat16\"\nreduce.when = \"micro-batch\"",
    ];
    for partition in PARTITIONS {
        for case in cases {
            check(&keys(partition, 4, case));
        }
    }
}

/// A root unit that runs first and last: nothing is gathered in vain after it.
#[test]
fn predictions_of_tied_models() {
    for ranks in [2, 3] {
        check_of(
            "tiny-gpt2",
            &keys("stage = 3", ranks, "run.validate = { every = 1, sequences = 5 }\ndata.validation = 0.02"),
        );
    }
}

/// The same on one rank, and where ranks divide nothing.
#[test]
fn predictions_on_other_ranks() {
    for stage in 0..=3 {
        for ranks in [1, 3] {
            check(&keys(&format!("stage = {stage}"), ranks, "run.exact = true\ndata.validation = 0.02"));
        }
    }
}

/// Gradients that are summed once a step are held whole, whatever the scope.
#[test]
fn predictions_at_the_boundary() {
    for partition in PARTITIONS {
        check(&keys(partition, 4, "run.dtype = \"bfloat16\"\nreduce.when = \"boundary\"\n"));
    }
}

/// Other rules have other states; frozen parameters have none; buckets that ranks do not divide round alike.
#[test]
fn predictions_follow_rules_groups_and_buckets() {
    for partition in ["stage = 0, bucket = \"1001B\"", "stage = 3, bucket = \"1001B\""] {
        check(&keys(partition, 3, "optim.groups = [{ match = \"embed\", frozen = true }]\n"));
    }
    let text = tiny("tiny-llama", &keys("stage = 1", 2, "")).replace("optim.kind = \"adamw\"", "optim.kind = \"sgd\"");
    let text = text.replace("optim.betas = [0.9, 0.95]\n", "");
    let ran = train(&text);
    assert!(ran.summary.prediction.figures().iter().all(|(_, figure)| figure.agrees()), "{:?}", ran.summary.prediction);
}

/// A skipped step publishes nothing, and the prediction knows.
#[test]
fn predictions_know_of_skipped_steps() {
    for partition in PARTITIONS {
        let more = "run.dtype = \"float16\"\nrun.loss_scale = { initial = 16777216.0 }\n";
        let ran = check(&keys(partition, 4, more));
        assert!(ran.summary.totals.skipped > 0, "a scale of 2^24 overflows in float16");
    }
}

/// The summary's JSON has the documented names.
#[test]
fn the_summary_shows_the_prediction() {
    let ran = check(&keys("stage = 1", 2, ""));
    let text = std::fs::read_to_string(ran.folder.path().join(SUMMARY)).expect("a summary");
    let value: Value = serde_json::from_str(&text).expect("JSON");
    for part in [&value["prediction"], &value["per_rank"][1]["prediction"]] {
        let parameters = &part["memory"]["parameters"];
        assert_eq!(parameters["predicted"], parameters["measured"], "{part:#}");
        assert!(part["comm_bytes"]["reduce_scatter"]["measured"].as_u64() > Some(0), "{part:#}");
    }
    // A summary of an earlier version has none.
    let mut old = value;
    old.as_object_mut().expect("an object").remove("prediction");
    old["predicted"] = Value::Null;
    let path = ran.folder.path().join("old.json");
    std::fs::write(&path, old.to_string()).expect("writes");
    assert_eq!(Summary::read(&path).expect("reads").prediction, Prediction::default());
}

pub(crate) fn plan(file: &Path, ranks: Option<usize>, memory: Option<&str>, json: bool) -> anyhow::Result<String> {
    let memory = memory.map(|text| text.parse::<ByteSize>().expect("a size"));
    let mut out = Vec::new();
    zf_cli::commands::plan::run(file, &[], ranks, memory, json, &mut out)?;
    Ok(String::from_utf8(out)?)
}

pub(crate) fn planned(file: &Path, ranks: Option<usize>, memory: Option<&str>) -> Value {
    serde_json::from_str(&plan(file, ranks, memory, true).expect("plans")).expect("JSON")
}

pub(crate) fn run_file(folder: &Path, text: &str) -> std::path::PathBuf {
    let file = folder.join("run.toml");
    std::fs::write(&file, text).expect("writes");
    file
}

/// The command and the summary of the run it plans say the same.
#[test]
fn the_command_predicts_the_run() {
    let folder = tempfile::tempdir().expect("a folder");
    for partition in PARTITIONS {
        let keys = keys(partition, 4, "run.dtype = \"bfloat16\"\n");
        let ran = check(&keys);
        let value = planned(&run_file(folder.path(), &tiny("tiny-llama", &keys)), None, None);
        assert_eq!(value["parameters"], ran.summary.parameters);
        for (rank, planned) in ran.summary.per_rank.iter().zip(value["per_rank"].as_array().expect("by rank")) {
            let (memory, comm) = (rank.prediction.memory, rank.prediction.comm_bytes);
            assert_eq!(planned["device"]["parameters"], memory.parameters.measured);
            assert_eq!(planned["gradients_between_steps"], memory.gradients.measured);
            assert_eq!(planned["device"]["optimizer"], memory.optimizer.measured);
            // Ranks of one machine.
            let inside = &planned["traffic"]["inside_node"];
            assert_eq!(inside["all_reduce"], comm.all_reduce.measured);
            assert_eq!(inside["reduce_scatter"], comm.reduce_scatter.measured);
            assert_eq!(inside["all_gather"], comm.all_gather.measured);
        }
    }
}

/// A thousand ranks of a model of a billion parameters are planned without a tensor, a weight or a text.
#[test]
fn nothing_is_made_or_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model");
    std::fs::create_dir(&model).expect("makes");
    std::fs::copy(golden("tiny-llama").join("config.json"), model.join("config.json")).expect("copies");
    let rest = "[data]\npath = \"nowhere.txt\"\nsequence_length = 64\n[run]\nsteps = 1\n[partition]\nstage = 1\n";
    let bare = format!("[model]\npath = \"model\"\n{rest}");
    let large = "[model]\narch = \"llama\"\nhidden_size = 2048\nintermediate_size = 5504\nnum_hidden_layers = 24\n\
                 num_attention_heads = 16\nvocab_size = 32000\n";
    let heap = Heap::new("plan").expect("installs");
    let _inside = heap.enter();
    let value = planned(&run_file(folder.path(), &bare), None, None);
    assert!(value["parameters"].as_u64() > Some(1000), "{value:#}");
    let value = planned(&run_file(folder.path(), &format!("{large}{rest}")), Some(1024), Some("80GB"));
    assert_eq!(value["per_rank"].as_array().map(Vec::len), Some(1024));
    assert!(value["parameters"].as_u64() > Some(1_000_000_000), "{value:#}");
    assert_eq!(value["fits"], true);
    assert_eq!(heap.stats().peak, 0, "bytes of tensors");
}

/// Each stage needs less of the kind that it splits, and the table says so.
#[test]
fn stages_are_compared() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = run_file(folder.path(), &tiny("tiny-llama", &keys("stage = 1", 4, "run.dtype = \"bfloat16\"\n")));
    let value = planned(&file, None, Some("1MB"));
    let stages = value["stages"].as_array().expect("stages");
    let psi = value["parameters_with_padding"].as_u64().expect("a number");
    let held = |stage: usize, what: &str| stages[stage]["device"][what].as_u64().expect("a number");
    for (stage, expected) in [[2, 4, 12], [2, 4, 3], [2, 1, 3]].iter().enumerate() {
        let found = ["parameters", "gradients", "optimizer"].map(|what| held(stage, what));
        assert_eq!(found, expected.map(|bytes| bytes * psi), "stage {stage}");
    }
    assert_eq!(2 * held(3, "parameters"), psi);
    assert!(stages[0]["largest_model"].as_u64() < stages[3]["largest_model"].as_u64(), "{stages:?}");

    let text = plan(&file, None, Some("1GB"), false).expect("plans");
    for part in
        ["parameters in bfloat16", "4, 4 a node", "1GB a device: fits", "reduce_scatter", "Activations come on top"]
    {
        assert!(text.contains(part), "`{part}` is not in\n{text}");
    }
    let text = plan(&file, None, Some("1KB"), false).expect("plans");
    assert!(text.contains("1KB a device: does not fit"), "{text}");
}

/// Other ranks than the file's may not divide its batch, which the plan says instead of refusing.
#[test]
fn ranks_of_the_command_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = run_file(folder.path(), &tiny("tiny-llama", &keys("stage = 1", 2, "")));
    let value = planned(&file, Some(7), None);
    assert_eq!((&value["ranks"], &value["micro_batches"]), (&7.into(), &2.into()));
    assert!(value["notes"][0].as_str().is_some_and(|note| note.contains("which makes it 14")), "{value:#}");
    let error = plan(&file, Some(0), None, false).expect_err("no ranks").to_string();
    assert!(error.contains("--ranks 0"), "{error}");
}
