//! Training with the partitioner gives the bits of training without it.

use own_partitioner as _;
use zf_tests::{Ran, tiny, train};

fn run(ranks: usize, partition: &str, transport: &str) -> Ran {
    let keys = format!(
        "run.steps = 4\nrun.global_batch = 6\nrun.micro_batch = 1\nrun.exact = true\ntransport.ranks = {ranks}\n\
         {transport}\npartition = {{ {partition} }}\n"
    );
    train(&tiny("tiny-llama", &keys))
}

#[test]
fn whole_units_on_several_ranks_train_like_one_rank() {
    let base = run(1, "kind = \"zero\", stage = 0", "");
    assert!(base.losses()[3] < base.losses()[0], "the run learns nothing, so it can show nothing");
    let reordering = "transport.wrap = [{ kind = \"reordering\", seed = 3, window = \"1ms\" }]";
    for (ranks, split, transport) in [(2, "all", ""), (2, "states", ""), (3, "all", reordering)] {
        let ran = run(ranks, &format!("kind = \"whole-units\", split = {split:?}"), transport);
        let case = format!("{ranks} ranks, split = {split:?}");
        assert_eq!(ran.losses(), base.losses(), "{case}: losses");
        assert_eq!(ran.norms(), base.norms(), "{case}: norms");
        assert_eq!(ran.summary.state_hash, base.summary.state_hash, "{case}: state");
    }
}

#[test]
fn the_run_file_trains() {
    let folder = tempfile::tempdir().expect("a folder");
    assert_cmd::Command::new(env!("CARGO_BIN_EXE_own-partitioner"))
        .arg("train")
        .arg(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("run.toml"))
        .args(["-o", &format!("data.cache={}", folder.path().join("cache").display())])
        .arg("--out")
        .arg(folder.path().join("out"))
        .assert()
        .success();
    assert!(folder.path().join("out/summary.json").is_file(), "a run leaves a summary");
}
