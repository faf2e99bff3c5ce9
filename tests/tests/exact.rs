//! Exact mode: the same bits whatever is sharded over which ranks, and however tensors travel.

use zf_tests::{Ran, tiny, train};

const STEPS: usize = 3;

fn run(model: &str, dtype: &str, ranks: usize, partition: &str) -> Ran {
    let keys = format!(
        "run.steps = {STEPS}\nrun.global_batch = 12\nrun.micro_batch = 1\nrun.exact = true\nrun.dtype = {dtype:?}\n\
         transport.ranks = {ranks}\npartition = {{ {partition} }}\n"
    );
    train(&tiny(model, &keys))
}

/// Stages, groups of two on four ranks, and ways to travel; each with the ranks it is run on.
const CASES: &[(&[usize], &str)] = &[
    (&[2, 3], "stage = 0"),
    (&[4], "stage = 0, bucket = \"7KB\""),
    (&[2, 4], "stage = 1, bucket = \"7KB\""),
    (&[3], "stage = 1"),
    (&[1, 3], "stage = 2"),
    (&[2, 4], "stage = 2, bucket = \"40KB\""),
    (&[1, 2, 3], "stage = 3"),
    (&[4], "stage = 3, bucket = \"7KB\""),
    (&[2], "stage = 3, prefetch = 0, max_live_units = 1"),
    (&[3], "stage = 3, prefetch = 3, max_live_units = 4"),
    (&[2], "stage = 3, reshard_after_forward = false"),
    (&[4], "stage = 3, reshard_after_forward = 2"),
    (&[2], "stage = 3, reshard_after_forward = 1"),
    (&[2], "stage = 3, persist_below = 9000"),
    (&[4], "scope = { p = 2, g = 2, o = 2 }"),
    (&[4], "scope = { p = 2, g = \"world\", o = \"world\" }"),
    (&[4], "scope = { p = 1, g = 2, o = 4 }, bucket = \"7KB\""),
    (&[4], "scope = { p = 1, g = 1, o = 2 }"),
    (&[4], "scope = { p = 2, g = 2, o = 4 }"),
];

fn check(model: &str, dtype: &str) {
    let base = run(model, dtype, 1, "stage = 0");
    assert_eq!(base.losses().len(), STEPS);
    assert!(base.losses()[STEPS - 1] < base.losses()[0], "the run learns nothing, so it can show nothing");
    for (ranks, partition) in CASES.iter().flat_map(|(ranks, partition)| ranks.iter().map(move |n| (*n, partition))) {
        let ran = run(model, dtype, ranks, partition);
        let case = format!("{model} {dtype} N={ranks} {partition}");
        assert_eq!(ran.losses(), base.losses(), "{case}: losses");
        assert_eq!(ran.norms(), base.norms(), "{case}: norms");
        assert_eq!(ran.summary.state_hash, base.summary.state_hash, "{case}: state");
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
    let base = run("tiny-llama", "float32", 1, "stage = 0");
    let keys = "run.steps = 3\nrun.global_batch = 12\nrun.micro_batch = 1\nrun.exact = true\nrun.seed = 2\ndata.order = \"shuffled\"\n";
    let text: String =
        tiny("tiny-llama", "").lines().filter(|l| !l.starts_with("data.order")).map(|l| format!("{l}\n")).collect();
    assert_ne!(train(&format!("{text}{keys}")).summary.state_hash, base.summary.state_hash);
}
