//! Exact mode: the same bits whatever the number of ranks, the stage and the bucket size.

use zf_tests::{Ran, tiny, train};

const STEPS: usize = 4;

fn run(model: &str, dtype: &str, ranks: usize, stage: u8, bucket: &str) -> Ran {
    let keys = format!(
        "run.steps = {STEPS}\nrun.global_batch = 12\nrun.micro_batch = 1\nrun.exact = true\nrun.dtype = {dtype:?}\n\
         transport.ranks = {ranks}\npartition.stage = {stage}\npartition.bucket = {bucket:?}\n"
    );
    train(&tiny(model, &keys))
}

fn check(model: &str, dtype: &str) {
    let base = run(model, dtype, 1, 0, "25MB");
    assert_eq!(base.losses().len(), STEPS);
    assert!(base.losses()[STEPS - 1] < base.losses()[0], "the run learns nothing, so it can show nothing");
    for ranks in [1, 2, 3, 4] {
        for stage in [0, 1] {
            for bucket in ["25MB", "7KB"] {
                let ran = run(model, dtype, ranks, stage, bucket);
                let case = format!("{model} {dtype} N={ranks} stage {stage} bucket {bucket}");
                assert_eq!(ran.losses(), base.losses(), "{case}: losses");
                assert_eq!(ran.norms(), base.norms(), "{case}: norms");
                assert_eq!(ran.summary.state_hash, base.summary.state_hash, "{case}: state");
            }
        }
    }
}

#[test]
fn llama_float32() {
    check("tiny-llama", "float32");
}

#[test]
fn gpt2_float32() {
    check("tiny-gpt2", "float32");
}

#[test]
fn llama_bfloat16() {
    check("tiny-llama", "bfloat16");
}

#[test]
fn another_seed_of_data_gives_another_state() {
    let base = run("tiny-llama", "float32", 1, 0, "25MB");
    let keys = "run.steps = 4\nrun.global_batch = 12\nrun.micro_batch = 1\nrun.exact = true\nrun.seed = 2\ndata.order = \"shuffled\"\n";
    let text: String =
        tiny("tiny-llama", "").lines().filter(|l| !l.starts_with("data.order")).map(|l| format!("{l}\n")).collect();
    assert_ne!(train(&format!("{text}{keys}")).summary.state_hash, base.summary.state_hash);
}
