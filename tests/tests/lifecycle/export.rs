//! From a run to a Hugging Face folder and back.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use serde_json::Value;
use tch::Tensor;
use zf_core::checkpoint::Checkpoint;
use zf_core::model::ParamSpec;
use zf_core::train::Silent;
use zf_core::weights::Weights;
use zf_model::folder::HfFolder;
use zf_tests::golden;

use super::{finish, newest, program, run_file, shown, write_run, zf_train};

const KEYS: &str = "run.steps = 4\nrun.global_batch = 8\nrun.micro_batch = 2\ndata.sequence_length = 32\n\
     transport.ranks = 2\npartition.stage = 1\n";

/// Dtype and shape of every tensor, from the header of the file.
fn header(folder: &Path) -> BTreeMap<String, (String, Vec<i64>)> {
    let bytes = std::fs::read(folder.join("model.safetensors")).expect("a weight file");
    let (length, rest) = bytes.split_first_chunk::<8>().expect("a length");
    let header = &rest[..usize::try_from(u64::from_le_bytes(*length)).expect("small")];
    let tensors: BTreeMap<String, Value> = serde_json::from_slice(header).expect("JSON");
    let of = |value: Value| {
        let shape = value["shape"].as_array().expect("a list").iter().map(|d| d.as_i64().expect("a size")).collect();
        (value["dtype"].as_str().expect("a name").to_string(), shape)
    };
    tensors.into_iter().filter(|(name, _)| name != "__metadata__").map(|(name, value)| (name, of(value))).collect()
}

/// The masters of a checkpoint as initial values.
struct Masters(Checkpoint);

impl Weights for Masters {
    fn load(&self, spec: &ParamSpec) -> zf_core::Result<Tensor> {
        let (shape, values) = self.0.read_tensor_f32(&spec.name)?;
        Ok(Tensor::from_slice(&values).view(shape.as_slice()))
    }
}

fn check(model: &str, dtype: &str, code: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let (run, exported) = (folder.path().join("run"), folder.path().join("exported"));
    let file = write_run(folder.path(), &run_file(model, &format!("{KEYS}run.dtype = {dtype:?}\n")));
    zf_train(&file, &run, &[]);
    let export = || Command::new(program()).arg("export").arg(&run).arg("--to").arg(&exported).output();
    let output = export().expect("the program starts");
    assert!(output.status.success(), "{}", shown(&output));

    // Names, shapes, types and configuration of the original.
    let mut expected = header(&golden(model));
    expected.values_mut().for_each(|(dtype, _)| *dtype = code.into());
    assert_eq!(header(&exported), expected);
    let config = |folder: &Path| -> BTreeMap<String, Value> {
        serde_json::from_slice(&std::fs::read(folder.join("config.json")).expect("a file")).expect("JSON")
    };
    let mut wanted = config(&golden(model));
    wanted.insert("dtype".into(), dtype.into());
    assert_eq!(config(&exported), wanted);

    // Loading gives the run's parameters, to the bit.
    let checkpoint = Checkpoint::open(&newest(&run).expect("a checkpoint")).expect("whole");
    let masters = Masters(checkpoint);
    let opened = HfFolder::open(&exported).expect("our own folder");
    let original = HfFolder::open(golden(model)).expect("a golden folder");
    let mut moved = 0;
    for spec in opened.model().units().into_iter().flat_map(|unit| unit.params) {
        let loaded = opened.load(&spec).expect("exported");
        let kind = loaded.kind();
        let trained = masters.load(&spec).expect("saved").to_kind(kind);
        assert!(loaded == trained, "{}", spec.name);
        moved += usize::from(loaded.to_kind(tch::Kind::Float) != original.load(&spec).expect("golden"));
    }
    assert!(moved > 10, "only {moved} parameters were trained");

    // Training from the export is training from these parameters.
    let mut from_export = run_file(model, &format!("{KEYS}run.dtype = {dtype:?}\nmodel.path = {exported:?}\n"));
    from_export.push('\n');
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    let from_export = finish(&from_export, &a);
    let mut training = zf_tests::training(&run_file(model, &format!("{KEYS}run.dtype = {dtype:?}\n")), &b);
    training.model.weights = Arc::new(Rounded(masters, opened_kind(code)));
    let from_masters = training.run(&mut Silent).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(from_export.state_hash, from_masters.state_hash);

    // A folder that holds something is not written over.
    let again = export().expect("the program starts");
    assert_eq!(again.status.code(), Some(2), "{}", shown(&again));
}

/// What the export rounded to.
struct Rounded(Masters, tch::Kind);

impl Weights for Rounded {
    fn load(&self, spec: &ParamSpec) -> zf_core::Result<Tensor> {
        Ok(self.0.load(spec)?.to_kind(self.1))
    }
}

fn opened_kind(code: &str) -> tch::Kind {
    match code {
        "BF16" => tch::Kind::BFloat16,
        "F16" => tch::Kind::Half,
        _ => tch::Kind::Float,
    }
}

#[test]
fn llama_in_float32() {
    check("tiny-llama", "float32", "F32");
}

#[test]
fn gpt2_in_float32() {
    check("tiny-gpt2", "float32", "F32");
}

#[test]
fn llama_in_bfloat16() {
    check("tiny-llama", "bfloat16", "BF16");
}
