//! The numbers of plain PyTorch (`golden/reference.json`) from our engine, over all steps.

use serde_json::Value;
use zf_core::checkpoint::{Checkpoint, newest_whole};
use zf_tests::{Ran, golden, largest_difference, tiny, train};

fn reference(model: &str, run: &str) -> Value {
    let text = std::fs::read_to_string(golden("reference.json")).expect("golden file");
    let all: Value = serde_json::from_str(&text).expect("JSON");
    all["models"][model]["runs"][run].clone()
}

fn series(value: &Value) -> Vec<f64> {
    value.as_array().expect("a list").iter().map(|v| v.as_f64().expect("a number")).collect()
}

/// Sum and norm of every master (or its rounding) of the last checkpoint.
fn check_checksums(ran: &Ran, expected: &Value, round: impl Fn(f32) -> f32, tolerance: f64) {
    let root = ran.folder.path().join("checkpoints");
    let (_, newest) = newest_whole(&root).expect("readable").expect("a run ends with a checkpoint");
    let checkpoint = Checkpoint::open(&newest).expect("whole");
    for (name, expected) in expected.as_object().expect("an object by name") {
        let (_, values) = checkpoint.read_tensor_f32(name).expect("every parameter is saved");
        let l2 = values.iter().map(|&v| f64::from(round(v)).powi(2)).sum::<f64>().sqrt();
        let sum = values.iter().map(|&v| f64::from(round(v))).sum::<f64>();
        let expected_l2 = expected["l2"].as_f64().expect("a number");
        let expected_sum = expected["sum"].as_f64().expect("a number");
        assert!((l2 / expected_l2 - 1.0).abs() < tolerance, "{name}: l2 {l2}, expected {expected_l2}");
        // Addends of both signs cancel, so the sum is judged against the size of the addends: at most sqrt(n) l2 in all.
        // (Between the reference's own two ways of adding in bfloat16 some sums differ by 2 % of themselves.)
        let scale = expected_sum.abs().max((values.len() as f64).sqrt() * expected_l2);
        assert!((sum - expected_sum).abs() / scale < tolerance, "{name}: sum {sum}, expected {expected_sum}");
    }
}

struct Case {
    model: &'static str,
    run: &'static str,
    keys: &'static str,
    /// Largest differences of the loss: in step 0, over all steps.
    tolerance: (f64, f64),
}

const FLOAT32: (f64, f64) = (3e-6, 3e-6);
const BFLOAT16: (f64, f64) = (6e-4, 2e-3);

fn check(case: &Case, layout: &str) {
    let Case { model, run, keys, tolerance } = case;
    let expected = reference(model, run);
    let ran = train(&tiny(model, &format!("run.steps = 30\nrun.global_batch = 8\n{keys}{layout}")));
    let (losses, wanted) = (ran.losses(), series(&expected["loss"]));
    assert!((losses[0] - wanted[0]).abs() <= tolerance.0, "{model} {run} {layout}: step 0 {} {}", losses[0], wanted[0]);
    let worst = largest_difference(&losses, &wanted);
    assert!(worst <= tolerance.1, "{model} {run} {layout}: losses differ by {worst}");
    let norms = ran.norms();
    for (step, (norm, wanted)) in norms.iter().zip(series(&expected["grad_norm"])).enumerate() {
        let relative = (norm / wanted - 1.0).abs();
        let limit = if tolerance.1 > 1e-3 { 2e-2 } else { 2e-5 };
        assert!(relative < limit, "{model} {run} {layout}: norm of step {step} is {norm}, expected {wanted}");
    }
    if tolerance.1 > 1e-3 {
        let round = |v: f32| half::bf16::from_f32(v).to_f32();
        check_checksums(&ran, &expected["final_checksum"], |v| v, 1e-4);
        // One element of 64 that rounds the other way moves a norm by 1.4e-4, which is how far the reference's own two
        // bfloat16 runs lie apart.
        check_checksums(&ran, &expected["final_checksum_bf16_params"], round, 2e-4);
    } else {
        check_checksums(&ran, &expected["final_checksum"], |v| v, 1e-4);
    }
    if let Some(rates) = expected.get("lr") {
        let rates: Vec<f64> = series(rates);
        let ours: Vec<f64> = ran.records.iter().map(|record| record.lr).collect();
        assert!(largest_difference(&ours, &rates) < 1e-12, "learning rates differ");
    }
}

const ONE: &str = "run.micro_batch = 8\n";
const TWO_STAGE_1: &str = "run.micro_batch = 2\ntransport.ranks = 2\npartition.stage = 1\n";

/// Ranks, stages, and when gradients are summed, each in some layout; `scripts/accept.py` runs all of them.
const LAYOUTS: [&str; 5] = [
    "run.micro_batch = 2\ntransport.ranks = 2\npartition.stage = 2\n",
    "run.micro_batch = 4\ntransport.ranks = 2\npartition.stage = 3\n",
    "run.micro_batch = 1\ntransport.ranks = 4\npartition.stage = 3\nreduce.when = \"boundary\"\n",
    "run.micro_batch = 1\ntransport.ranks = 4\npartition.stage = 1\nreduce.when = \"micro-batch\"\n",
    "run.micro_batch = 4\npartition.stage = 3\n",
];

const ADAMW: &str = "run.clip = 0\n";
const CLIP: &str = "run.clip = 1.0\n";
const COSINE: &str = "run.clip = 0\nschedule.kind = \"cosine\"\nschedule.warmup = 5\nschedule.min_ratio = 0.1\n";
const BF16: &str = "run.clip = 0\nrun.dtype = \"bfloat16\"\n";

fn both(model: &'static str, run: &'static str, keys: &'static str, tolerance: (f64, f64)) {
    let case = Case { model, run, keys, tolerance };
    check(&case, ONE);
    check(&case, TWO_STAGE_1);
}

#[test]
fn llama_adamw() {
    both("tiny-llama", "adamw", ADAMW, FLOAT32);
}

#[test]
fn llama_adamw_sharded() {
    for layout in LAYOUTS {
        check(&Case { model: "tiny-llama", run: "adamw", keys: ADAMW, tolerance: FLOAT32 }, layout);
    }
}

#[test]
fn llama_bf16_sharded() {
    for layout in LAYOUTS {
        check(&Case { model: "tiny-llama", run: "bf16_adamw", keys: BF16, tolerance: BFLOAT16 }, layout);
    }
}

#[test]
fn gpt2_adamw_clip_sharded() {
    for layout in &LAYOUTS[..4] {
        check(&Case { model: "tiny-gpt2", run: "adamw_clip", keys: CLIP, tolerance: FLOAT32 }, layout);
    }
}

#[test]
fn llama_adamw_clip() {
    both("tiny-llama", "adamw_clip", CLIP, FLOAT32);
}

#[test]
fn llama_adamw_cosine() {
    both("tiny-llama", "adamw_cosine", COSINE, FLOAT32);
}

#[test]
fn llama_adamw_two_shards() {
    let keys = "run.clip = 0\n";
    let case = Case { model: "tiny-llama", run: "adamw_2shard", keys, tolerance: FLOAT32 };
    check(&case, "run.micro_batch = 4\ntransport.ranks = 2\npartition.stage = 0\n");
}

#[test]
fn llama_sgd() {
    let expected = reference("tiny-llama", "sgd_momentum");
    let text = tiny("tiny-llama", "run.steps = 30\nrun.global_batch = 8\nrun.micro_batch = 4\nrun.clip = 0\n");
    let text: String =
        text.lines().filter(|line| !line.starts_with("optim.")).map(|line| format!("{line}\n")).collect();
    let sgd = "optim.kind = \"sgd\"\noptim.lr = 0.05\noptim.momentum = 0.9\n";
    let ran = train(&format!("{text}{sgd}transport.ranks = 2\npartition.stage = 1\n"));
    let worst = largest_difference(&ran.losses(), &series(&expected["loss"]));
    assert!(worst <= 3e-6, "losses differ by {worst}");
    check_checksums(&ran, &expected["final_checksum"], |v| v, 1e-4);
}

#[test]
fn llama_bf16() {
    both("tiny-llama", "bf16_adamw", BF16, BFLOAT16);
}

#[test]
fn llama_bf16_two_shards() {
    let case = Case { model: "tiny-llama", run: "bf16_adamw_2shard", keys: BF16, tolerance: BFLOAT16 };
    check(&case, "run.micro_batch = 4\ntransport.ranks = 2\npartition.stage = 1\n");
}

#[test]
fn gpt2_adamw() {
    both("tiny-gpt2", "adamw", ADAMW, FLOAT32);
}

#[test]
fn gpt2_adamw_clip() {
    both("tiny-gpt2", "adamw_clip", CLIP, FLOAT32);
}

/// The tolerance of bfloat16 tells it from float32.
#[test]
fn a_float32_run_is_no_bf16_run() {
    let expected = reference("tiny-llama", "bf16_adamw");
    let ran = train(&tiny("tiny-llama", "run.steps = 1\nrun.global_batch = 8\nrun.micro_batch = 8\nrun.clip = 0\n"));
    let wanted = series(&expected["loss"])[0];
    assert!((ran.losses()[0] - wanted).abs() > BFLOAT16.0, "float32 passes for bfloat16");
}
