//! Export and load.

use std::path::Path;

use tch::{Device, Kind, Tensor};
use zf_core::layout::DType;
use zf_core::model::{Model, ParamSpec};
use zf_core::random::RandomWeights;
use zf_core::weights::Weights;
use zf_model::folder::{HfFolder, export};
use zf_model::gpt2::{Gpt2, Gpt2Config};
use zf_model::llama::{Family, Llama, LlamaConfig};

use crate::golden::golden;

fn specs(model: &dyn Model) -> Vec<ParamSpec> {
    model.units().into_iter().flat_map(|unit| unit.params).collect()
}

fn same_bits(a: &Tensor, b: &Tensor) -> bool {
    a.kind() == b.kind() && a.size() == b.size() && {
        let width = a.kind().elt_size_in_bytes();
        let bytes = |tensor: &Tensor| {
            let mut bytes = vec![0u8; tensor.numel() * width];
            tensor.copy_data_u8(&mut bytes, tensor.numel());
            bytes
        };
        bytes(a) == bytes(b)
    }
}

fn export_from(dir: &Path, model: &dyn Model, weights: &dyn Weights, dtype: DType) {
    export(dir, model, dtype, &mut |spec| Ok(weights.load(spec)?.to_kind(dtype.kind()))).unwrap();
}

#[test]
fn a_folder_comes_back_with_the_same_bits_names_and_files() {
    for name in ["tiny-llama", "tiny-gpt2"] {
        let first = HfFolder::open(golden().join(name)).unwrap();
        let temp = tempfile::tempdir().unwrap();
        let out = temp.path().join("deep/out");
        export_from(&out, &*first.model(), &first, DType::Float32);
        let again = HfFolder::open(&out).unwrap();
        for spec in specs(&*first.model()) {
            assert!(same_bits(&first.load(&spec).unwrap(), &again.load(&spec).unwrap()), "{}", spec.name);
        }
        let read = |path: &Path, file: &str| std::fs::read(path.join(file)).unwrap();
        assert_eq!(read(first.path(), "config.json"), read(&out, "config.json"));
        let header = |path: &Path| {
            let bytes = read(path, "model.safetensors");
            let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
            let mut all: Vec<_> =
                metadata.tensors().into_iter().map(|(name, info)| (name, info.dtype, info.shape.clone())).collect();
            all.sort_by(|a, b| a.0.cmp(&b.0));
            (all, metadata.metadata().clone())
        };
        assert_eq!(header(first.path()), header(&out));
        // Nothing temporary stays.
        assert_eq!(std::fs::read_dir(temp.path().join("deep")).unwrap().count(), 1);
    }
}

#[test]
fn sixteen_bit_exports_round_once_and_say_so() {
    let first = HfFolder::open(golden().join("tiny-llama")).unwrap();
    for (dtype, name) in [(DType::Bfloat16, "bfloat16"), (DType::Float16, "float16")] {
        let temp = tempfile::tempdir().unwrap();
        let out = temp.path().join("out");
        export_from(&out, &*first.model(), &first, dtype);
        let again = HfFolder::open(&out).unwrap();
        for spec in specs(&*first.model()) {
            let expected = first.load(&spec).unwrap().to_kind(dtype.kind());
            assert!(same_bits(&expected, &again.load(&spec).unwrap()), "{}", spec.name);
        }
        let config = std::fs::read_to_string(out.join("config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_str(&config).unwrap();
        assert_eq!(config["dtype"], name);
        assert_eq!(config["num_hidden_layers"], 2);
    }
}

/// Every kind of model that can start from sizes: its generated configuration gives the same model.
#[test]
fn random_models_come_back_from_their_own_configuration() {
    let small = LlamaConfig {
        hidden_size: 32,
        num_hidden_layers: 2,
        num_key_value_heads: Some(2),
        vocab_size: 40,
        ..LlamaConfig::default()
    };
    let tied = LlamaConfig {
        tie_word_embeddings: true,
        rope_scaling: Some(zf_model::ops::RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 512,
        }),
        ..small.clone()
    };
    let gpt2 = Gpt2Config { n_embd: 32, n_layer: 1, n_positions: 16, ..Gpt2Config::default() };
    let llama = |family, config: &LlamaConfig| Box::new(Llama::new(family, config.clone()).unwrap()) as Box<dyn Model>;
    let models = [
        llama(Family::Llama, &small),
        llama(Family::Llama, &tied),
        llama(Family::Mistral, &small),
        llama(Family::Qwen2, &tied),
        llama(Family::Qwen3, &small),
        Box::new(Gpt2::new(gpt2.clone()).unwrap()),
        Box::new(Gpt2::new(Gpt2Config { tie_word_embeddings: false, ..gpt2 }).unwrap()),
    ];
    for model in models {
        let temp = tempfile::tempdir().unwrap();
        let out = temp.path().join("out");
        let weights = RandomWeights { seed: 3 };
        export_from(&out, &*model, &weights, DType::Float32);
        let folder = HfFolder::open(&out).unwrap();
        let strip = |model: &dyn Model| {
            let specs = specs(model).into_iter();
            specs.map(|spec| (spec.name, spec.aliases, spec.shape, spec.input_dim)).collect::<Vec<_>>()
        };
        assert_eq!(strip(&*model), strip(&*folder.model()));
        for spec in specs(&*model) {
            assert!(same_bits(&weights.load(&spec).unwrap(), &folder.load(&spec).unwrap()), "{}", spec.name);
        }
        // The same model, not only the same names.
        let run = |model: &dyn Model, weights: &dyn Weights| {
            let cx = zf_model::plain::PlainContext::new(model, weights, Kind::Float, Device::Cpu).unwrap();
            tch::no_grad(|| model.next_logits(&cx, &Tensor::from_slice(&[3i64, 1, 2, 9]).view([1, 4])).unwrap())
        };
        assert_eq!(run(&*model, &weights), run(&*folder.model(), &folder));
    }
}

#[test]
fn export_refuses_what_would_lose_something() {
    let folder = HfFolder::open(golden().join("tiny-llama")).unwrap();
    let model = folder.model();
    let temp = tempfile::tempdir().unwrap();
    std::fs::write(temp.path().join("notes.txt"), "kept").unwrap();
    let error = export(temp.path(), &*model, DType::Float32, &mut |spec| folder.load(spec)).unwrap_err();
    assert!(error.to_string().contains("already holds files"), "{error}");
    let out = temp.path().join("out");
    let error = export(&out, &*model, DType::Bfloat16, &mut |spec| folder.load(spec)).unwrap_err();
    assert!(error.to_string().contains("model.embed_tokens.weight"), "{error}");
    // A failed export leaves nothing behind.
    assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 1);
}
