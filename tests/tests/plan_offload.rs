//! What `zf plan` and the summary predict of states off the device, beside what real runs hold and carry.
//!
//! The tolerance is the prediction's own: `within` is 0 where a rank has whole columns of all weights (one rank, stage 0) and for
//! ZeRO-Offload, which chooses none. Else a rank's shard may have an element more or less of each chosen column; over all ranks the
//! figures of states and gradients are exact again. Parameters that come down are exact but for columns that are chosen again while
//! an update is pending, whose parameters come with their states where the host had not made them.

use serde_json::Value;
use zf_core::record::{Beside, Prediction};
use zf_tests::{Ran, tiny, train};

use crate::plan::{plan, planned, run_file};

/// Settings of `[offload]` and of columns; whether columns are chosen more than once while an update may be pending.
const KINDS: [(&str, bool); 8] = [
    ("offload = { kind = \"host\" }\n", false),
    ("offload = { kind = \"host\", tier = \"file\", wire = \"float32\", buffer = \"4KiB\" }\n", false),
    (
        "offload = { kind = \"zenflow\", update_interval = 1, asynchronous = false }\nselect = { ratio = 0.1, every = 2 }\n",
        false,
    ),
    ("offload = { kind = \"zenflow\", update_interval = 1 }\nselect = { ratio = 0.1, every = 100 }\n", false),
    (
        "offload = { kind = \"zenflow\", update_interval = 4, accumulate = \"host\", buffer = \"4KiB\" }\n\
         select = { ratio = 0.1, every = 100 }\n",
        false,
    ),
    (
        "offload = { kind = \"zenflow\", update_interval = 4, accumulate = \"device\", asynchronous = false, warmup = 2 }\n\
         select = { ratio = 0.1, every = 4 }\n",
        false,
    ),
    (
        "offload = { kind = \"zenflow\", update_interval = 4, accumulate = \"device\", tier = \"file\" }\n\
         select = { ratio = 0.1, every = 4 }\n",
        true,
    ),
    (
        "offload = { kind = \"zenflow\", update_interval = 2, promotion = \"late\" }\n\
         select = { kind = \"threshold\", share = 0.5, every = 4 }\n",
        true,
    ),
];

fn keys(stage: usize, ranks: usize, more: &str) -> String {
    format!(
        "partition.stage = {stage}\ntransport.ranks = {ranks}\nrun.steps = 6\nrun.micro_batch = 1\nrun.global_batch = {}\n{more}",
        2 * ranks
    )
}

/// Runs it and compares all figures of all ranks.
fn check(model: &str, keys: &str) -> Ran {
    let ran = train(&tiny(model, keys));
    for rank in &ran.summary.per_rank {
        for (what, figure) in rank.prediction.figures() {
            assert!(figure.agrees(), "{what} of rank {}: {figure:?} with\n{keys}", rank.rank);
        }
        let Prediction { link_bytes, memory, .. } = rank.prediction;
        assert!(link_bytes.to_host.measured > 0 && link_bytes.to_device.measured > 0, "{keys}");
        assert!(memory.host.measured > 0, "{keys}");
    }
    ran
}

fn summed(ran: &Ran, of: impl Fn(&Prediction) -> Beside) -> [u64; 3] {
    let figures = ran.summary.per_rank.iter().map(|rank| of(&rank.prediction));
    figures.fold([0; 3], |[a, b, c], Beside { predicted, measured, within }| [a + predicted, b + measured, c + within])
}

/// Bytes of states and of gradients on the link, and of parameters if `exactly`, of all ranks together.
fn check_sums(ran: &Ran, exactly: bool, keys: &str) {
    let [predicted, measured, _] = summed(ran, |prediction| prediction.memory.optimizer);
    assert_eq!(predicted, measured, "masters and states on all devices with\n{keys}");
    // Each rank's mean over the steps is rounded down.
    let ranks = ran.summary.ranks as u64;
    let [predicted, measured, _] = summed(ran, |prediction| prediction.link_bytes.to_host);
    assert!(predicted.abs_diff(measured) <= ranks, "gradients: {predicted} and {measured} with\n{keys}");
    let [predicted, measured, _] = summed(ran, |prediction| prediction.link_bytes.to_device);
    if exactly {
        assert!(predicted.abs_diff(measured) <= ranks, "parameters: {predicted} and {measured} with\n{keys}");
    }
}

/// Kinds on ranks under stages.
fn predicted(model: &str, run: &str, kinds: &[(&str, bool)], layouts: &[(usize, usize)]) {
    for (kind, pending) in kinds {
        for &(ranks, stage) in layouts {
            let keys = keys(stage, ranks, &format!("{kind}{run}"));
            let ran = check(model, &keys);
            // How many columns a threshold chooses is known as a range.
            if kind.contains("threshold") {
                continue;
            }
            check_sums(&ran, !pending, &keys);
            if ranks == 1 || stage == 0 || !kind.contains("zenflow") {
                let Prediction { memory, link_bytes, .. } = ran.summary.prediction;
                assert_eq!((memory.optimizer.within, link_bytes.to_host.within), (0, 0), "{keys}");
                assert_eq!(link_bytes.to_device.within > 0, *pending, "{keys}");
            }
        }
    }
}

#[test]
fn predictions_of_offloads_on_one_rank() {
    predicted("tiny-llama", "run.dtype = \"bfloat16\"\n", &KINDS, &[(1, 0), (1, 2)]);
}

#[test]
fn predictions_of_offloads_that_are_not_split() {
    predicted("tiny-llama", "run.dtype = \"bfloat16\"\n", &KINDS, &[(2, 0)]);
}

#[test]
fn predictions_of_offloads_on_two_ranks() {
    predicted("tiny-llama", "run.dtype = \"bfloat16\"\n", &KINDS, &[(2, 1), (2, 2), (2, 3)]);
}

/// GPT-2's columns lie in a row, so that a shard has whole ones.
#[test]
fn predictions_of_offloads_in_exact_mode() {
    predicted("tiny-gpt2", "run.exact = true\n", &KINDS[2..7], &[(1, 1), (2, 0), (2, 3)]);
}

/// Scopes other than stages: gradients take further hops, states have replicas.
#[test]
fn predictions_of_offloads_in_scopes() {
    let partitions = [
        "scope = { p = 1, g = 2, o = 4 }",
        "scope = { p = 2, g = 2, o = 2 }",
        "stage = 3, persist_below = 5000, reshard_after_forward = 2",
    ];
    for partition in partitions {
        for (kind, _) in [KINDS[0], KINDS[5]] {
            let keys = keys(0, 4, &format!("run.dtype = \"bfloat16\"\n{kind}"));
            check("tiny-llama", &keys.replace("partition.stage = 0", &format!("partition = {{ {partition} }}")));
        }
    }
}

/// Steps that are skipped advance no window; ZeRO-Offload sends their gradients all the same.
#[test]
fn predictions_of_offloads_know_of_skipped_steps() {
    let run = "run.dtype = \"float16\"\nrun.loss_scale = { initial = 16777216.0 }\n";
    for ((kind, _), [stage, ranks]) in [(KINDS[0], [2, 2]), (KINDS[0], [0, 2]), (KINDS[4], [2, 2]), (KINDS[6], [2, 2])]
    {
        let keys = keys(stage, ranks, &format!("{kind}{run}")).replace("run.steps = 6", "run.steps = 20");
        let skipped = check("tiny-llama", &keys).summary.totals.skipped;
        assert!((1..20).contains(&skipped), "{skipped} of 20 steps were skipped: a scale of 2^24 overflows in float16");
    }
}

/// Ranks that have no sequence in a validation send their part of updated parameters all the same.
#[test]
fn ranks_without_a_validation_batch() {
    let validates =
        "data.validation = 0.05\nrun.validate = { every = 1, sequences = 1 }\ntransport.timeout = \"20s\"\n";
    for kind in [KINDS[0].0, KINDS[3].0, KINDS[5].0, KINDS[6].0, KINDS[7].0] {
        for (ranks, stage) in [(2, 1), (3, 2), (2, 3)] {
            let ran = check("tiny-gpt2", &keys(stage, ranks, &format!("{kind}{validates}")));
            assert!(ran.records.iter().all(|record| record.validation_loss.is_some()), "{kind}");
        }
    }
}

/// Late columns and parameters of the host are published together at the end, wherever in a window that is.
#[test]
fn predictions_of_late_updates_at_the_end() {
    for interval in [2, 4] {
        for steps in [3, 4, 5, 7] {
            let kind = format!(
                "offload = {{ kind = \"zenflow\", update_interval = {interval}, promotion = \"late\" }}\n\
                 select = {{ ratio = 0.1, every = {interval} }}\n"
            );
            check("tiny-llama", &keys(1, 2, &kind).replace("run.steps = 6", &format!("run.steps = {steps}")));
        }
    }
}

/// What `zf plan` says of the run.
fn command(keys: &str) -> Value {
    let folder = tempfile::tempdir().expect("a folder");
    planned(&run_file(folder.path(), &tiny("tiny-llama", keys)), None, None)
}

/// Bytes of all categories.
fn total(states: &Value) -> u64 {
    ["parameters", "gradients", "optimizer", "buffers"].map(|what| states[what].as_u64().expect("bytes")).iter().sum()
}

/// The command and the summary of the run say the same, and the host never holds more than planned.
#[test]
fn the_command_plans_what_the_summary_predicts() {
    for (kind, _) in [KINDS[0], KINDS[1], KINDS[4], KINDS[5], KINDS[6]] {
        let keys = keys(2, 2, &format!("run.dtype = \"bfloat16\"\n{kind}"));
        let (ran, value) = (check("tiny-llama", &keys), command(&keys));
        for (rank, planned) in ran.summary.per_rank.iter().zip(value["per_rank"].as_array().expect("by rank")) {
            let memory = rank.prediction.memory;
            assert_eq!(planned["device"]["optimizer"], memory.optimizer.predicted, "{keys}");
            assert_eq!(planned["link"]["slack"]["optimizer"], memory.optimizer.within, "{keys}");
            assert_eq!(planned["host"]["optimizer"], memory.host.predicted, "{keys}");
            assert_eq!(planned["file"], memory.file.predicted, "{keys}");
        }
        // Columns on their way come on top, on the host at a choice alone; the records are of the ends of steps.
        let most = total(&value["per_rank"][0]["host"]);
        for record in &ran.records {
            let held = record.memory.host_live;
            assert!(held > 0 && held <= most, "step {}: {held} of {most} bytes with\n{keys}", record.step);
        }
    }
}

/// Staging buffers and sums on the device, by the allocator: runs that differ in nothing else.
#[test]
fn the_device_holds_what_is_planned() {
    let keys = |offload: &str| {
        let offload = format!("offload = {{ kind = \"zenflow\", update_interval = 4, {offload} }}\n");
        keys(1, 1, &format!("run.exact = true\nselect = {{ ratio = 0.1, every = 100 }}\n{offload}"))
    };
    let of = |offload: &str| {
        let keys = keys(offload);
        (train(&tiny("tiny-llama", &keys)), command(&keys)["per_rank"][0]["device"].take())
    };
    let bytes = |device: &Value, what: &str| device[what].as_u64().expect("bytes");
    let (few, few_planned) = of("accumulate = \"host\", buffer = \"4KiB\", buffers = 2");
    let (many, many_planned) = of("accumulate = \"host\", buffer = \"4KiB\", buffers = 7");
    let (sums, sums_planned) = of("accumulate = \"device\", buffer = \"4KiB\", buffers = 2");
    // In the first window, whose sums have not left.
    let live = |ran: &Ran| ran.records[1].memory.device_live;
    assert_eq!(live(&many) - live(&few), bytes(&many_planned, "buffers") - bytes(&few_planned, "buffers"));
    assert_eq!(bytes(&many_planned, "buffers") - bytes(&few_planned, "buffers"), 2 * 5 * 4096);
    assert_eq!(live(&sums) - live(&few), bytes(&sums_planned, "gradients") - bytes(&few_planned, "gradients"));
}

/// A model of 90 million parameters, of which only the sizes are read.
fn large(offload: &str) -> String {
    format!(
        "[model]\narch = \"llama\"\nhidden_size = 768\nintermediate_size = 2048\nnum_hidden_layers = 8\n\
         num_attention_heads = 12\nvocab_size = 16000\n[data]\npath = \"nowhere.txt\"\nsequence_length = 64\n\
         [run]\nsteps = 1\ndtype = \"bfloat16\"\nglobal_batch = 2\nmicro_batch = 1\n[transport]\nranks = 2\n\
         [partition]\nstage = 0\n{offload}"
    )
}

/// What does not fit as it is written does with an offload or another stage, and the plan says with which.
#[test]
fn the_command_says_what_would_fit() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = run_file(folder.path(), &large(""));
    let none = planned(&file, None, Some("80GB"));
    assert_eq!((&none["fits"], &none["would_fit"]), (&true.into(), &Value::Null), "{none:#}");
    let device = |name: &str| {
        let kinds = none["offload"].as_array().expect("kinds");
        total(&kinds.iter().find(|kind| kind["kind"] == name).expect("registered")["device"])
    };
    let (all, host) = (device("none"), device("host"));
    assert!(host < device("zenflow") && device("zenflow") < all, "{none:#}");
    assert_eq!(total(&none["worst"]["device"]), all);

    let memory = format!("{host}B");
    let value = planned(&file, None, Some(&memory));
    assert_eq!(value["fits"], false, "{value:#}");
    let fitting = value["would_fit"].as_array().expect("changes");
    assert!(fitting.iter().any(|change| change["offload"] == "host" && change["stage"].is_null()), "{value:#}");
    assert!(fitting.iter().all(|change| change["device"].as_u64() <= Some(host)), "{value:#}");

    let text = plan(&file, None, Some(&memory), false).expect("plans");
    for part in ["does not fit", "it would with", "`offload.kind = \"host\"`", "none (this run)", "link up, a step"] {
        assert!(text.contains(part), "`{part}` is not in\n{text}");
    }
    let text = plan(&file, None, Some("1KB"), false).expect("plans");
    assert!(text.contains("no stage and no offload makes it fit"), "{text}");
    let zenflow = "[offload]\nkind = \"zenflow\"\ntier = \"file\"\naccumulate = \"device\"\n";
    let text = plan(&run_file(folder.path(), &large(zenflow)), None, None, false).expect("plans");
    for part in ["in files", "gradients to the host", "an estimate", "added up on the device", "zenflow (this run)"] {
        assert!(text.contains(part), "`{part}` is not in\n{text}");
    }
}

/// A rule that looks at whole tensors cannot be offloaded, and the plan does not suggest it.
#[test]
fn the_command_suggests_no_offload_that_the_rule_refuses() {
    let text = tiny("tiny-llama", &keys(0, 2, "")).replace("optim.kind = \"adamw\"", "optim.kind = \"lamb\"");
    let folder = tempfile::tempdir().expect("a folder");
    let value = planned(&run_file(folder.path(), &text), None, Some("1KB"));
    let kinds: Vec<_> = value["offload"].as_array().expect("kinds").iter().map(|kind| &kind["kind"]).collect();
    assert_eq!(kinds, ["none"]);
}

/// ZeRO-Offload with the parameters in host memory: before each pass they cross the link, also those of a validation.
#[test]
fn parameters_with_the_host() {
    let kind = "offload = { kind = \"host\", parameters = \"host\" }\nrun.dtype = \"bfloat16\"\n";
    for model in ["tiny-llama", "tiny-gpt2"] {
        for (ranks, stage) in [(1, 0), (1, 3), (2, 0), (2, 3)] {
            for more in
                ["", "run.exact = true\n", "data.validation = 0.02\nrun.validate = { every = 3, sequences = 6 }\n"]
            {
                let keys = keys(stage, ranks, &format!("{kind}{more}"));
                let ran = check(model, &keys);
                check_sums(&ran, true, &keys);
                let Prediction { memory, link_bytes, .. } = ran.summary.prediction;
                assert_eq!((memory.parameters.measured, link_bytes.to_device.within), (0, 0), "{keys}");
                let worst = &command(&keys)["worst"];
                assert!(worst["host"]["parameters"].as_u64() > Some(0), "{keys}: {worst}");
                assert_eq!(worst["device"]["parameters"].as_u64(), Some(0), "{keys}");
            }
        }
    }
}
