//! The model is found by name, sees no later token, and learns.

use own_model::CausalConv;
use tch::{Device, Kind, Tensor};
use zf_core::model::{Batch, Model};
use zf_core::random::RandomWeights;
use zf_core::registry::{BuildContext, Registry};
use zf_core::slots;
use zf_model::plain::PlainContext;

fn batch(length: i64) -> Batch {
    let text = b"the rain in spain stays mainly in the plain; the rain in spain stays mainly";
    let ids = Tensor::from_slice(text).to_kind(Kind::Int64).view([1, -1]);
    Batch {
        inputs: ids.narrow(1, 0, length),
        targets: ids.narrow(1, 1, length),
        sequences: vec![0],
        target_tokens: length as u64,
    }
}

#[test]
fn a_later_token_changes_nothing_before() {
    let model = CausalConv { channels: 16, ..CausalConv::default() };
    let cx = PlainContext::new(&model, &RandomWeights { seed: 1 }, Kind::Float, Device::Cpu).expect("small");
    let _guard = tch::no_grad_guard();
    let loss = |length| f64::try_from(model.loss(&cx, &batch(length)).expect("fits").sum).expect("scalar");
    let last = |length| {
        let batch = batch(length);
        let logits = model.next_logits(&cx, &batch.inputs).expect("fits");
        f64::try_from(logits.cross_entropy_for_logits(&batch.targets.narrow(1, length - 1, 1).view([1])))
            .expect("scalar")
    };
    assert!((loss(40) - loss(39) - last(40)).abs() < 1e-3);
}

#[test]
fn it_learns_and_is_found_by_name() {
    let table: toml::Table = toml::from_str("arch = 'causal-conv'\nchannels = 32\nlayers = 4").expect("valid");
    let registry = Registry::global().expect("no duplicates");
    let bundle = registry.build::<slots::Model>(&table, &BuildContext::default()).expect("valid");
    let cx = PlainContext::new(&*bundle.model, &*bundle.weights, Kind::Float, Device::Cpu).expect("small");
    let mut losses = Vec::new();
    for _ in 0..30 {
        let loss = bundle.model.loss(&cx, &batch(70)).expect("fits").sum / 70.0;
        loss.backward();
        losses.push(f64::try_from(&loss).expect("scalar"));
        let _guard = tch::no_grad_guard();
        for (_, tensor) in cx.parameters() {
            let (mut tensor, mut grad) = (tensor.shallow_clone(), tensor.grad());
            let _ = tensor.g_sub_(&(&grad * 0.5));
            let _ = grad.zero_();
        }
    }
    assert!(losses[29] < 0.7 * losses[0], "{losses:?}");
}

#[test]
fn the_run_file_trains() {
    let folder = tempfile::tempdir().expect("a folder");
    assert_cmd::Command::new(env!("CARGO_BIN_EXE_own-model"))
        .arg("train")
        .arg(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("run.toml"))
        .args(["-o", &format!("data.cache={}", folder.path().join("cache").display())])
        .arg("--out")
        .arg(folder.path().join("out"))
        .assert()
        .success();
    assert!(folder.path().join("out/summary.json").is_file(), "a run leaves a summary");
}
