//! What a checkpoint made within an update window is good for beside resuming: its masters, with a line that says so.

use std::path::Path;
use std::process::{Command, Output};

use tch::Tensor;
use zf_core::checkpoint::Checkpoint;
use zf_core::weights::Weights;
use zf_model::folder::HfFolder;

use super::{at, whole, zenflow};
use crate::lifecycle::{program, shown};

fn zf(words: &[&str], paths: &[&Path]) -> Output {
    let output = Command::new(program()).args(words).args(paths).output().expect("the program starts");
    assert!(output.status.success(), "{words:?}: {}", shown(&output));
    output
}

fn notes(output: &Output) -> Vec<String> {
    let lines = String::from_utf8_lossy(&output.stderr).into_owned();
    lines.lines().filter(|line| line.starts_with("note: ")).map(str::to_owned).collect()
}

#[test]
fn export_eval_and_generate() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().join("run");
    whole(&zenflow(4, "run.steps = 8\nrun.dtype = \"bfloat16\"\n"), &run);
    for (step, says) in [(6, "gradients of 2 steps"), (4, "made and is not visible")] {
        let (checkpoint, exported) = (at(&run, step), folder.path().join(format!("exported-{step}")));
        let output = zf(&["export", checkpoint.to_str().expect("UTF-8"), "--to"], &[&exported]);
        assert!(matches!(&notes(&output)[..], [one] if one.contains(says)), "{}", shown(&output));
        let (checkpoint, opened) =
            (Checkpoint::open(&checkpoint).expect("whole"), HfFolder::open(&exported).expect("ours"));
        for spec in opened.model().units().into_iter().flat_map(|unit| unit.params) {
            let (_, masters) = checkpoint.read_tensor_f32(&spec.name).expect("saved");
            let masters = Tensor::from_slice(&masters).view(&spec.shape[..]).to_kind(tch::Kind::BFloat16);
            assert!(opened.load(&spec).expect("exported") == masters, "{}", spec.name);
        }
    }
    let tokens = zf_tests::golden("tokens.bin");
    let output = zf(&["eval", "--data"], &[&tokens, &at(&run, 6)]);
    assert_eq!(notes(&output).len(), 1, "{}", shown(&output));
    let output = zf(&["inspect"], &[&at(&run, 6)]);
    assert!(shown(&output).contains("update window"), "{}", shown(&output));
    // A run that came to its end has none.
    let output = zf(&["export", run.to_str().expect("UTF-8"), "--to"], &[&folder.path().join("end")]);
    assert_eq!(notes(&output), Vec::<String>::new());
}
