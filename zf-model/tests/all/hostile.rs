//! Broken and unsupported folders: each with its message.

use std::path::Path;

use serde_json::{Value, json};
use zf_model::folder::HfFolder;

use crate::golden::golden;

/// A copy of a tiny model's folder, changed by `change`.
fn broken(name: &str, change: impl FnOnce(&Path)) -> String {
    let temp = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden().join(name).join(file), temp.path().join(file)).unwrap();
    }
    change(temp.path());
    match HfFolder::open(temp.path()) {
        Ok(_) => String::new(),
        Err(error) => {
            assert!(matches!(error, zf_core::Error::Input(_) | zf_core::Error::Io { .. }), "{error:?}");
            error.to_string()
        }
    }
}

fn set(folder: &Path, keys: &[(&str, Value)]) {
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for (key, value) in keys {
        config[*key] = value.clone();
    }
    std::fs::write(path, config.to_string()).unwrap();
}

#[track_caller]
fn contains(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "expected `{part}` in: {message}");
    }
}

#[test]
fn unsupported_settings_of_a_llama_are_named() {
    let cases: &[(&str, Value, &[&str])] = &[
        ("model_type", json!("bert"), &["config.json", "`model_type` is \"bert\"", "llama"]),
        ("model_type", json!(null), &["`model_type` is missing"]),
        ("hidden_act", json!("gelu"), &["`hidden_act` is \"gelu\"", "silu"]),
        ("attention_bias", json!(true), &["`attention_bias` is true"]),
        ("mlp_bias", json!(true), &["`mlp_bias` is true"]),
        ("num_local_experts", json!(8), &["`num_local_experts` is 8"]),
        ("quantization_config", json!({"bits": 4}), &["quantization_config"]),
        (
            "rope_parameters",
            json!({"rope_type": "yarn", "factor": 4.0}),
            &["`rope_parameters.rope_type` is \"yarn\"", "llama3"],
        ),
        ("rope_parameters", json!({"rope_type": "linear"}), &["`rope_parameters.factor` is missing"]),
        ("rope_parameters", json!({"rope_type": "linear", "factor": 0.5}), &["rope_scaling", "0.5"]),
        ("rope_parameters", json!({"rope_type": "default", "partial_rotary_factor": 0.5}), &["partial_rotary_factor"]),
        ("rope_parameters", json!({"full_attention": {}}), &["full_attention"]),
        ("rope_parameters", json!(3), &["`rope_parameters` is 3", "object"]),
        ("layer_types", json!(["linear_attention"]), &["layer_types"]),
        ("num_hidden_layers", json!("two"), &["`num_hidden_layers` is \"two\"", "whole number"]),
        ("num_hidden_layers", json!(-1), &["`num_hidden_layers` is -1"]),
        ("num_hidden_layers", json!(0), &["num_hidden_layers", "is 0"]),
        ("num_hidden_layers", json!(null), &["`num_hidden_layers` is missing"]),
        ("num_attention_heads", json!(0), &["num_attention_heads", "is 0"]),
        ("num_key_value_heads", json!(3), &["num_key_value_heads", "not divisible by 3"]),
        ("head_dim", json!(15), &["head_dim", "15", "even"]),
        ("rms_norm_eps", json!(-1.0), &["rms_norm_eps", "-1"]),
        ("attention_dropout", json!(1.5), &["attention_dropout", "1.5"]),
        ("tie_word_embeddings", json!("no"), &["tie_word_embeddings", "true or false"]),
        ("vocab_size", json!(300), &["model.embed_tokens.weight has shape [256, 64]", "[300, 64]"]),
        ("intermediate_size", json!(100), &["mlp.gate_proj.weight", "[172, 64]"]),
        ("num_hidden_layers", json!(1), &["unexpected: model.layers.1.", "and 1 more"]),
        ("num_hidden_layers", json!(3), &["missing: model.layers.2."]),
        ("model_type", json!("qwen2"), &["missing: model.layers.0.self_attn.q_proj.bias"]),
        ("model_type", json!("qwen3"), &["q_norm.weight"]),
    ];
    for (key, value, parts) in cases {
        let message = broken("tiny-llama", |folder| set(folder, &[(key, value.clone())]));
        println!("{message}");
        contains(&message, parts);
    }
}

#[test]
fn unsupported_settings_of_a_gpt2_are_named() {
    let cases: &[(&str, Value, &[&str])] = &[
        ("activation_function", json!("relu"), &["`activation_function` is \"relu\"", "gelu_new"]),
        ("reorder_and_upcast_attn", json!(true), &["reorder_and_upcast_attn"]),
        ("add_cross_attention", json!(true), &["add_cross_attention"]),
        ("n_head", json!(5), &["n_head", "not divisible by 5"]),
        ("n_inner", json!(100), &["mlp.c_fc.weight", "[64, 100]"]),
        ("n_positions", json!(64), &["transformer.wpe.weight", "[128, 64]"]),
        ("resid_pdrop", json!(-0.1), &["resid_pdrop", "-0.1"]),
        ("tie_word_embeddings", json!(false), &["missing: lm_head.weight"]),
    ];
    for (key, value, parts) in cases {
        contains(&broken("tiny-gpt2", |folder| set(folder, &[(key, value.clone())])), parts);
    }
}

#[test]
fn broken_files_are_named() {
    let write = |file: &'static str, bytes: &'static [u8]| {
        move |folder: &Path| std::fs::write(folder.join(file), bytes).unwrap()
    };
    let llama = |change: &dyn Fn(&Path)| broken("tiny-llama", change);
    contains(&llama(&write("config.json", b"{")), &["config.json", "line 1"]);
    contains(&llama(&write("config.json", b"[]")), &["config.json", "JSON object"]);
    contains(&llama(&write("model.safetensors", b"")), &["model.safetensors", "not a whole"]);
    contains(&llama(&write("model.safetensors", &[255; 64])), &["model.safetensors", "not a whole"]);
    let cut = |folder: &Path| {
        let path = folder.join("model.safetensors");
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(path, &bytes[..bytes.len() - 1]).unwrap();
    };
    contains(&llama(&cut), &["model.safetensors", "not a whole"]);
    let no_config = |folder: &Path| std::fs::remove_file(folder.join("config.json")).unwrap();
    contains(&llama(&no_config), &["config.json"]);
    let no_weights = |folder: &Path| std::fs::remove_file(folder.join("model.safetensors")).unwrap();
    contains(&llama(&no_weights), &["no model.safetensors"]);
    let pickle = |folder: &Path| {
        no_weights(folder);
        std::fs::write(folder.join("pytorch_model.bin"), b"PK").unwrap();
    };
    contains(&llama(&pickle), &["pickle", "safe_serialization=True"]);
    let index = |map: Value| {
        move |folder: &Path| {
            no_weights(folder);
            std::fs::write(folder.join("model.safetensors.index.json"), json!({"weight_map": map}).to_string())
                .unwrap();
        }
    };
    contains(&llama(&index(json!({"a": "../x.safetensors"}))), &["../x.safetensors", "plain file name"]);
    contains(&llama(&index(json!({"a": "x.safetensors"}))), &["x.safetensors"]);
    contains(&llama(&index(json!(7))), &["index.json"]);
    let moved = |folder: &Path| {
        std::fs::rename(folder.join("model.safetensors"), folder.join("part.safetensors")).unwrap();
        let map = json!({"weight_map": {"not.there": "part.safetensors"}});
        std::fs::write(folder.join("model.safetensors.index.json"), map.to_string()).unwrap();
    };
    contains(&llama(&moved), &["`not.there` should be in part.safetensors"]);
}

#[test]
fn names_that_are_no_folders_get_advice() {
    let message = |path: &str| HfFolder::open(path).unwrap_err().to_string();
    contains(
        &message("some-org/Some-Model-7B"),
        &["hf download some-org/Some-Model-7B --local-dir models/Some-Model-7B"],
    );
    contains(&message("/nowhere/at/all"), &["no folder /nowhere/at/all"]);
    assert!(!message("/nowhere/at/all").contains("hf download"));
    let file = golden().join("tokens.bin");
    contains(&message(&file.to_string_lossy()), &["is a file"]);
}

/// Several files with an index, half precision, missing prefixes and stored buffers are all fine.
#[test]
fn what_hugging_face_writes_is_read() {
    use std::collections::{BTreeMap, HashMap};

    use safetensors::tensor::TensorView;
    use safetensors::{Dtype, SafeTensors, serialize_to_file};
    use zf_core::weights::Weights;

    let source = golden().join("tiny-gpt2");
    let bytes = std::fs::read(source.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let temp = tempfile::tempdir().unwrap();
    std::fs::copy(source.join("config.json"), temp.path().join("config.json")).unwrap();
    let mask = vec![1u8; 128 * 128];
    let mut parts: [BTreeMap<String, TensorView<'_>>; 2] = Default::default();
    for (index, name) in tensors.names().into_iter().enumerate() {
        let short = name.strip_prefix("transformer.").unwrap().to_owned();
        parts[index % 2].insert(short, tensors.tensor(name).unwrap());
    }
    let buffer = TensorView::new(Dtype::U8, vec![1, 1, 128, 128], &mask).unwrap();
    parts[0].insert("h.0.attn.bias".into(), buffer);
    let mut map = HashMap::new();
    for (index, part) in parts.iter().enumerate() {
        let file = format!("model-0000{}-of-00002.safetensors", index + 1);
        map.extend(part.keys().map(|name| (name.clone(), file.clone())));
        serialize_to_file(part, None, &temp.path().join(file)).unwrap();
    }
    let index = json!({"metadata": {}, "weight_map": map}).to_string();
    std::fs::write(temp.path().join("model.safetensors.index.json"), index).unwrap();
    let (whole, split) = (HfFolder::open(&source).unwrap(), HfFolder::open(temp.path()).unwrap());
    for spec in whole.model().units().iter().flat_map(|unit| &unit.params) {
        assert_eq!(whole.load(spec).unwrap(), split.load(spec).unwrap(), "{}", spec.name);
    }
}

#[test]
fn a_sliding_window_limits_the_length() {
    use tch::{Device, Kind, Tensor};
    use zf_model::plain::PlainContext;

    let temp = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden().join("tiny-llama").join(file), temp.path().join(file)).unwrap();
    }
    set(temp.path(), &[("model_type", json!("mistral")), ("sliding_window", json!(32))]);
    let folder = HfFolder::open(temp.path()).unwrap();
    let model = folder.model();
    assert_eq!(model.max_length(), Some(32));
    let cx = PlainContext::new(&*model, &folder, Kind::Float, Device::Cpu).unwrap();
    let ids = |length| Tensor::zeros([1, length], (Kind::Int64, Device::Cpu));
    assert!(model.next_logits(&cx, &ids(32)).is_ok());
    contains(&model.next_logits(&cx, &ids(33)).unwrap_err().to_string(), &["33 tokens", "sliding_window of 32"]);
    set(temp.path(), &[("sliding_window", json!(null))]);
    assert_eq!(HfFolder::open(temp.path()).unwrap().model().max_length(), Some(128));
}
