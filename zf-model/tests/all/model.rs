//! Properties of the models.

use std::sync::Arc;

use tch::{Device, Kind, Tensor};
use zf_core::model::{Batch, IGNORE, Model, Noise};
use zf_core::random::RandomWeights;
use zf_core::registry::{BuildContext, Registry};
use zf_core::slots;
use zf_model::gpt2::{Gpt2, Gpt2Config};
use zf_model::llama::{Family, Llama, LlamaConfig};
use zf_model::ops::{AttentionDropout, causal_attention};
use zf_model::plain::PlainContext;

fn small() -> LlamaConfig {
    LlamaConfig {
        vocab_size: 50,
        hidden_size: 32,
        num_hidden_layers: 2,
        num_key_value_heads: Some(2),
        max_position_embeddings: 64,
        ..LlamaConfig::default()
    }
}

fn models() -> Vec<(&'static str, Arc<dyn Model>)> {
    let llama = |family, config| Arc::new(Llama::new(family, config).unwrap()) as Arc<dyn Model>;
    let gpt2 = Gpt2Config { vocab_size: 50, n_embd: 32, n_layer: 2, n_positions: 64, ..Gpt2Config::default() };
    vec![
        ("llama", llama(Family::Llama, small())),
        ("tied llama", llama(Family::Llama, LlamaConfig { tie_word_embeddings: true, ..small() })),
        ("qwen2", llama(Family::Qwen2, small())),
        ("qwen3", llama(Family::Qwen3, LlamaConfig { head_dim: Some(24), ..small() })),
        ("gpt2", Arc::new(Gpt2::new(gpt2.clone()).unwrap())),
        ("untied gpt2", Arc::new(Gpt2::new(Gpt2Config { tie_word_embeddings: false, ..gpt2 }).unwrap())),
    ]
}

fn batch(rows: &[u64], length: i64) -> Batch {
    let row = |row: &u64| {
        let ids: Vec<i64> = (0..=length).map(|i| (i * i + 7 * i64::try_from(*row).unwrap() + 3) % 50).collect();
        Tensor::from_slice(&ids)
    };
    let ids = Tensor::stack(&rows.iter().map(row).collect::<Vec<_>>(), 0);
    Batch {
        inputs: ids.narrow(1, 0, length),
        targets: ids.narrow(1, 1, length),
        sequences: rows.to_vec(),
        target_tokens: rows.len() as u64 * length as u64,
    }
}

fn plain(model: &dyn Model) -> PlainContext {
    PlainContext::new(model, &RandomWeights { seed: 1 }, Kind::Float, Device::Cpu).unwrap()
}

fn value(tensor: &Tensor) -> f64 {
    tensor.double_value(&[])
}

#[test]
fn every_parameter_gets_a_gradient_and_a_later_token_changes_nothing_before() {
    for (name, model) in models() {
        let cx = plain(&*model);
        let whole = batch(&[0, 1], 20);
        model.loss(&cx, &whole).unwrap().sum.backward();
        for (spec, tensor) in cx.parameters() {
            let grad = tensor.grad();
            assert!(
                grad.defined() && value(&grad.abs().sum(Kind::Float)) > 0.0,
                "{name}: {} has no gradient",
                spec.name
            );
        }
        // Sampling from the first ten tokens does not see the others, and agrees with the loss at that position.
        let logits = tch::no_grad(|| model.next_logits(&cx, &whole.inputs.narrow(1, 0, 10)).unwrap());
        let only = whole.targets.narrow(1, 9, 1);
        let by_logits =
            value(&logits.cross_entropy_loss::<Tensor>(&only.view([-1]), None, tch::Reduction::Sum, IGNORE, 0.0));
        let targets = whole.targets.full_like(IGNORE);
        targets.narrow(1, 9, 1).copy_(&only);
        let masked = Batch { targets, ..batch(&[0, 1], 20) };
        let by_loss = value(&tch::no_grad(|| model.loss(&cx, &masked).unwrap().sum));
        assert!((by_logits - by_loss).abs() < 1e-4, "{name}: {by_logits} and {by_loss}");
    }
}

#[test]
fn a_batch_is_the_sum_of_its_parts_also_with_dropout() {
    let gpt2 = Gpt2Config {
        vocab_size: 50,
        n_embd: 32,
        n_layer: 2,
        n_positions: 64,
        resid_pdrop: 0.2,
        embd_pdrop: 0.1,
        attn_pdrop: 0.3,
        ..Gpt2Config::default()
    };
    let llama = LlamaConfig { attention_dropout: 0.3, ..small() };
    let mut all = models();
    all.push(("gpt2 with dropout", Arc::new(Gpt2::new(gpt2).unwrap())));
    all.push(("llama with dropout", Arc::new(Llama::new(Family::Llama, llama).unwrap())));
    for (name, model) in all {
        let mut cx = plain(&*model);
        cx.noise = Noise { seed: 3, step: 4 };
        let loss = |cx: &PlainContext, rows: &[u64]| value(&model.loss(cx, &batch(rows, 12)).unwrap().sum);
        let whole = loss(&cx, &[5, 0, 9]);
        let parts = loss(&cx, &[5]) + loss(&cx, &[0, 9]);
        assert!((whole - parts).abs() < 2e-3, "{name}: {whole} and {parts}");
        assert_eq!(whole, loss(&cx, &[5, 0, 9]), "{name}: the same twice");
        cx.noise.step = 5;
        let other = loss(&cx, &[5, 0, 9]);
        assert_eq!(name.contains("dropout"), other != whole, "{name}: another step");
        cx.training = false;
        let still = loss(&cx, &[5, 0, 9]);
        cx.noise.step = 4;
        assert_eq!(still, loss(&cx, &[5, 0, 9]), "{name}: no dropout outside training");
    }
}

#[test]
fn the_fused_kernel_is_used_and_agrees_with_separate_operators() {
    let make = |heads: i64, shift: f64| {
        let shape = [2, 33, heads, 16];
        (Tensor::arange(2 * 33 * heads * 16, (Kind::Float, Device::Cpu)) * 0.37 + shift).sin().view(shape)
    };
    let (q, k, v) = (make(4, 0.0), make(2, 1.0), make(2, 2.0));
    let heads = |x: &Tensor| x.transpose(1, 2);
    // 1 is the fused kernel, 0 separate operators (`SDPBackend`); with equal head counts, as this crate calls it.
    let choice =
        Tensor::internal_fused_sdp_choice::<Tensor>(&heads(&q), &heads(&q), &heads(&q), None, 0.0, true, None, false);
    assert_eq!(choice, 1);
    let fused = causal_attention(&q, &k, &v, 0.25, None).unwrap();
    let drop =
        AttentionDropout { p: 0.0, noise: Noise { seed: 0, step: 0 }, unit: 0, site: 0, sequences: vec![0, 1].into() };
    let separate = causal_attention(&q, &k, &v, 0.25, Some(&drop)).unwrap();
    assert!(value(&(fused - separate).abs().max()) < 2e-6);
}

#[test]
fn lengths_and_ids_beyond_the_model_are_refused() {
    for (name, model) in models() {
        let cx = plain(&*model);
        assert_eq!(model.max_length(), Some(64));
        let error = model.loss(&cx, &batch(&[0], 65)).unwrap_err().to_string();
        assert!(error.contains("65 tokens") && error.contains("64"), "{name}: {error}");
        let far = Tensor::full([1, 4], 50, (Kind::Int64, Device::Cpu));
        assert!(model.next_logits(&cx, &far).is_err(), "{name}");
        assert!(model.next_logits(&cx, &far.view([4])).is_err(), "{name}");
    }
}

#[test]
fn work_is_counted() {
    let model = Llama::new(Family::Llama, small()).unwrap();
    // Per block: q and o 32 x 32, k and v 16 x 32, three of 96 x 32; head 50 x 32.
    let products = 2 * (2 * 1024 + 2 * 512 + 3 * 96 * 32) + 50 * 32;
    assert_eq!(model.flops_per_token(10), (6 * products + 6 * 2 * 32 * 10) as f64);
}

#[test]
fn models_are_found_by_name() {
    let registry = Registry::global().unwrap();
    let build = |text: &str| {
        let table: toml::Table = toml::from_str(text).unwrap();
        registry.build::<slots::Model>(&table, &BuildContext { seed: 1, ..BuildContext::default() })
    };
    let sizes = "hidden_size = 32\nnum_hidden_layers = 1\nnum_attention_heads = 2\n";
    for arch in ["llama", "mistral", "qwen2", "qwen3"] {
        let bundle = build(&format!("arch = \"{arch}\"\n{sizes}")).unwrap();
        assert!(bundle.folder.is_none());
        assert_eq!(bundle.model.vocabulary(), 256);
        assert_eq!(
            arch == "qwen2",
            bundle.model.units()[1].params.iter().any(|spec| spec.name.ends_with("q_proj.bias"))
        );
        assert_eq!(
            arch == "qwen3",
            bundle.model.units()[1].params.iter().any(|spec| spec.name.ends_with("q_norm.weight"))
        );
    }
    assert_eq!(build("arch = \"gpt2\"\nn_embd = 32\nn_layer = 1").unwrap().model.units().len(), 2);
    let golden = crate::golden::golden().join("tiny-llama");
    let bundle = build(&format!("path = {:?}", golden.to_str().unwrap())).unwrap();
    assert_eq!(bundle.folder, Some(golden));
    let refused = |text: &str| build(text).unwrap_err().to_string();
    assert!(refused("arch = \"llama\"\nhidden_size = 30").contains("num_attention_heads"));
    assert!(refused("arch = \"llama\"\nhiden_size = 32").contains("hiden_size"));
    assert!(refused("path = \"org/model\"").contains("hf download org/model"));
}

/// Both passes over 4096 positions of 4096 ids: 64 MiB of logits at once, or a sixteenth of it.
#[test]
fn chunks_bound_the_memory_of_the_loss() {
    use zf_model::ops::cross_entropy_sum_within;
    use zf_sys::heap::Heap;

    let heap = Heap::new("loss").unwrap();
    let _inside = heap.enter();
    let make = || Tensor::ones([4096, 8], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let (hidden, weight, targets) = (make(), make(), Tensor::zeros([4096], (Kind::Int64, Device::Cpu)));
    let peak = |limit: usize| {
        heap.reset_peak();
        cross_entropy_sum_within(limit, &hidden, &weight, &targets).unwrap().backward();
        heap.stats().peak >> 20
    };
    let (whole, chunked) = (peak(64 << 20), peak(4 << 20));
    assert!(whole >= 128, "{whole} MiB");
    assert!(chunked <= 16, "{chunked} MiB");
}
