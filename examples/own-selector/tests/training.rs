//! The example's run file trains, and the selector decides what is on the device.

use std::path::Path;

use zf_core::record::{METRICS, read_metrics};

#[test]
fn the_run_file_trains() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("out");
    assert_cmd::Command::new(env!("CARGO_BIN_EXE_own-selector"))
        .arg("train")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("run.toml"))
        .args(["-o", &format!("data.cache={}", folder.path().join("cache").display())])
        .arg("--out")
        .arg(&out)
        .assert()
        .success();
    let turnover: Vec<Option<f64>> =
        read_metrics(&out.join(METRICS)).expect("a run leaves metrics").iter().map(|record| record.turnover).collect();
    // Every second update another stripe, which shares no column with the one before.
    let expected: Vec<Option<f64>> = (0..12).map(|step| (step % 2 == 0).then_some(1.0)).collect();
    assert_eq!(turnover, expected);
}
