//! Broken model folders, and sizes of which no model can be made.

use serde_json::{Value, json};
use zf_tests::golden;

use super::bench::{Place, Row, TRAIN, check};
use super::tensors::Tensors;

const EVAL: &str = "eval m --data tokens.bin --sequence-length 64";
const EMBEDDING: &str = "model.embed_tokens.weight";

/// A folder `m` with the tiny Llama, and data to look at.
fn whole(place: &Place) {
    place.copy(&golden("tiny-llama"), "m");
    place.write("tokens.bin", [7, 0].repeat(200));
}

/// The tiny Llama with `key` of its config set to a value, `null` to none.
fn config(name: &str, key: &'static str, value: Value, says: &[&str]) -> Row<'static> {
    edited(name, says, move |config| {
        config[key] = value.clone();
    })
}

/// The tiny Llama with an edited config.
fn edited(name: &str, says: &[&str], edit: impl Fn(&mut Value) + Send + Sync + 'static) -> Row<'static> {
    Row::new(name, EVAL, says, move |place| {
        whole(place);
        let text = std::fs::read(place.path("m/config.json")).expect("a config");
        let mut config: Value = serde_json::from_slice(&text).expect("JSON");
        edit(&mut config);
        place.write("m/config.json", config.to_string());
    })
}

/// The tiny Llama with edited tensors.
fn tensors(name: &str, says: &[&str], edit: impl Fn(&mut Tensors) + Send + Sync + 'static) -> Row<'static> {
    bytes(name, says, move |bytes| {
        let mut tensors = Tensors::parse(bytes);
        edit(&mut tensors);
        *bytes = tensors.to_bytes();
    })
}

/// The tiny Llama with an edited weights file.
fn bytes(name: &str, says: &[&str], edit: impl Fn(&mut Vec<u8>) + Send + Sync + 'static) -> Row<'static> {
    Row::new(name, EVAL, says, move |place| {
        whole(place);
        let mut bytes = std::fs::read(place.path("m/model.safetensors")).expect("weights");
        edit(&mut bytes);
        place.write("m/model.safetensors", bytes);
    })
}

/// The tiny Llama whose weights are replaced by other files of the folder.
fn instead(name: &str, says: &[&str], files: &'static [(&'static str, &'static str)]) -> Row<'static> {
    Row::new(name, EVAL, says, move |place| {
        whole(place);
        std::fs::remove_file(place.path("m/model.safetensors")).expect("weights");
        for (name, contents) in files {
            place.write(&format!("m/{name}"), contents);
        }
    })
}

#[test]
fn folders() {
    check(&[
        Row::works("as it is", EVAL, &["perplexity"], whole),
        Row::new("missing", EVAL, &["m: no such folder", "Hugging Face folder"], |_| {}),
        Row::new("a file", EVAL, &["m is a file", "Hugging Face folder"], |place| place.write("m", "x")),
        Row::new("without config", EVAL, &["m", "config.json"], |place| {
            place.write("m/model.safetensors", "");
        }),
        Row::new("name on the Hub", TRAIN, &["run.toml:3:8", "hf download org/name"], |place| {
            place.run("[model]\npath = \"org/name\"");
        }),
        Row::new("path that is not there", TRAIN, &["run.toml:3:8", "models/none", "no folder"], |place| {
            place.run("[model]\npath = \"./models/none\"");
        }),
        Row::new("broken in a run", TRAIN, &["run.toml:2", "m/config.json", "line 1 column 1"], |place| {
            whole(place);
            place.write("m/config.json", "{");
            place.run("[model]\npath = \"m\"");
        }),
        instead("without weights", &["m: no model.safetensors and no model.safetensors.index.json in it"], &[]),
        instead(
            "pickles only",
            &["m: its weights are Python pickles", "safe_serialization=True"],
            &[("pytorch_model.bin", "\u{2}\u{1}")],
        ),
        instead(
            "broken index",
            &["m/model.safetensors.index.json", "weight_map"],
            &[("model.safetensors.index.json", "{}")],
        ),
        instead(
            "index of a missing shard",
            &["m/model-2.safetensors", "No such file"],
            &[("model.safetensors.index.json", "{\"weight_map\": {\"lm_head.weight\": \"model-2.safetensors\"}}")],
        ),
        instead(
            "index out of the folder",
            &["m/model.safetensors.index.json", "`../x` is no plain file name"],
            &[("model.safetensors.index.json", "{\"weight_map\": {\"lm_head.weight\": \"../x\"}}")],
        ),
        Row::new("index of what is elsewhere", EVAL, &["`a.weight` should be in w.safetensors and is not"], |place| {
            whole(place);
            std::fs::rename(place.path("m/model.safetensors"), place.path("m/w.safetensors")).expect("weights");
            place.write("m/model.safetensors.index.json", "{\"weight_map\": {\"a.weight\": \"w.safetensors\"}}");
        }),
        Row::new("broken tokenizer", EVAL, &["m/tokenizer.json"], |place| {
            whole(place);
            place.write("m/tokenizer.json", "{\"version\": 1}");
        }),
        Row::new("generate with nothing", "generate m --prompt x", &["m: no such folder"], |_| {}),
        Row::new("export of nothing", "export m --to new", &["m: no such folder"], |_| {}),
    ]);
}

#[test]
fn configs() {
    let raw = |name: &str, text: &'static [u8], says: &[&str]| {
        Row::new(name, EVAL, says, move |place| {
            whole(place);
            place.write("m/config.json", text);
        })
    };
    check(&[
        raw("no JSON", b"{\"model_type\": ", &["m/config.json", "line 1 column 15"]),
        raw("a list", b"[]", &["m/config.json", "expected a JSON object"]),
        raw("not UTF-8", b"{\"model_type\": \"\xff\"}", &["m/config.json", "line 1"]),
        raw("empty", b"", &["m/config.json", "line 1 column 0"]),
        raw("nothing said", b"{}", &["m/config.json: `model_type` is missing"]),
        config("unknown model", "model_type", json!("mamba"), &["`model_type` is \"mamba\"", "llama, mistral"]),
        config("model by a number", "model_type", json!(3), &["`model_type` is 3", "expected a string"]),
        config("missing size", "hidden_size", Value::Null, &["m/config.json: `hidden_size` is missing"]),
        config("size as a text", "hidden_size", json!("64"), &["`hidden_size` is \"64\"", "whole number"]),
        config("negative size", "num_hidden_layers", json!(-2), &["`num_hidden_layers` is -2", "whole number"]),
        config("no layers", "num_hidden_layers", json!(0), &["m/config.json", "num_hidden_layers", "is 0"]),
        config("size beyond libtorch", "vocab_size", json!(1_u64 << 40), &["vocab_size", "1099511627776"]),
        config("size beyond all", "hidden_size", json!(u64::MAX), &["m/config.json", "hidden_size"]),
        edited(
            "heads that do not divide",
            &["m/config.json", "hidden_size 64 is not divisible by 5 heads"],
            |config| {
                config["num_attention_heads"] = json!(5);
                config["num_key_value_heads"] = json!(5);
                config["head_dim"] = Value::Null;
            },
        ),
        config("groups that do not divide", "num_key_value_heads", json!(3), &["4 attention heads", "3 key and value"]),
        config("odd heads", "head_dim", json!(15), &["head_dim", "15", "even number"]),
        config("another activation", "hidden_act", json!("gelu"), &["`hidden_act` is \"gelu\"", "expected \"silu\""]),
        config("bias", "attention_bias", json!(true), &["`attention_bias` is true", "expected false"]),
        config("experts", "num_local_experts", json!(8), &["`num_local_experts` is 8", "mixtures of experts"]),
        config("quantised", "quantization_config", json!({"bits": 4}), &["quantization_config", "unquantised"]),
        config(
            "rope of another kind",
            "rope_parameters",
            json!({"rope_type": "yarn", "factor": 4.0}),
            &["`rope_parameters.rope_type` is \"yarn\"", "\"llama3\""],
        ),
        config(
            "rope without a factor",
            "rope_parameters",
            json!({"rope_type": "linear"}),
            &["`rope_parameters.factor` is missing"],
        ),
        config("rope of 0", "rope_parameters", json!({"rope_theta": 0.0}), &["rope_theta", "above 0"]),
        config("partly rotary", "partial_rotary_factor", json!(0.5), &["`partial_rotary_factor` is 0.5"]),
        config("dropout above 1", "attention_dropout", json!(1.5), &["attention_dropout", "1.5", "probability"]),
        Row::new("window that matters", TRAIN, &["data.sequence_length", "longer than the 16 positions"], |place| {
            whole(place);
            let text = std::fs::read_to_string(place.path("m/config.json")).expect("a config");
            let text = text.replace("\"model_type\": \"llama\"", "\"model_type\": \"mistral\", \"sliding_window\": 16");
            place.write("m/config.json", text);
            place.run("[model]\npath = \"m\"");
        }),
    ]);
}

#[test]
fn weights() {
    check(&[
        tensors("missing tensor", &["m: the tensors do not fit", "missing: model.norm.weight"], |tensors| {
            tensors.rename("model.norm.weight", "model.layers.0.rotary_emb.inv_freq");
        }),
        tensors("misspelt tensor", &["missing: lm_head.weight", "unexpected: lm_haed.weight"], |tensors| {
            tensors.rename("lm_head.weight", "lm_haed.weight");
        }),
        tensors("unexpected tensor", &["m: the tensors do not fit", "unexpected: extra.weight"], |tensors| {
            tensors.add("extra.weight");
        }),
        tensors("wrong shape", &[EMBEDDING, "[64, 256]", "[256, 64]"], |tensors| {
            tensors.set(EMBEDDING, "shape", json!([64, 256]));
        }),
        tensors("integers", &[EMBEDDING, "I32", "supported are F32, F16 and BF16"], |tensors| {
            tensors.set(EMBEDDING, "dtype", json!("I32"));
        }),
        tensors("type of the future", &["m/model.safetensors", "not a whole safetensors file"], |tensors| {
            tensors.set(EMBEDDING, "dtype", json!("F3"));
        }),
        tensors("offsets beyond the end", &["m/model.safetensors", "not a whole safetensors file"], |tensors| {
            tensors.set(EMBEDDING, "data_offsets", json!([0, 1_u64 << 40]));
        }),
        tensors("shape that overflows", &["m/model.safetensors", "not a whole safetensors file"], |tensors| {
            tensors.set(EMBEDDING, "shape", json!([u64::MAX, u64::MAX]));
        }),
        config(
            "another size than the weights",
            "intermediate_size",
            json!(128),
            &["[172, 64]", "asks for [128, 64]", "down_proj"],
        ),
        bytes("truncated", &["m/model.safetensors", "not a whole safetensors file", "fetch it again"], |bytes| {
            bytes.truncate(300_000);
        }),
        bytes("truncated in the header", &["m/model.safetensors", "not a whole safetensors file"], |bytes| {
            bytes.truncate(100);
        }),
        bytes("empty", &["m/model.safetensors", "not a whole safetensors file"], Vec::clear),
        bytes("header too long", &["m/model.safetensors", "not a whole safetensors file"], |bytes| {
            bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
        }),
        bytes("header that is no JSON", &["m/model.safetensors", "not a whole safetensors file"], |bytes| {
            bytes[8] = b'x';
        }),
        bytes("pointer of large file storage", &["m/model.safetensors", "not a whole safetensors file"], |bytes| {
            *bytes = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 496992\n".to_vec();
        }),
    ]);
}

#[test]
fn sizes() {
    let sized = |name: &str, text: &'static str, says: &[&str]| {
        Row::new(name, TRAIN, says, move |place| {
            place.run(&format!("[model]\narch = \"llama\"\n{text}"));
        })
    };
    check(&[
        Row::new("unknown architecture", TRAIN, &["run.toml:3:8", "unknown model stage `lama`", "llama"], |place| {
            place.run("[model]\narch = \"lama\"");
        }),
        sized("sizes and a folder", "path = \"m\"", &["run.toml:4:1", "unknown key `path` in [model] llama"]),
        sized("unknown size", "hiden_size = 64", &["run.toml:4:1", "unknown key `hiden_size`", "`hidden_size`?"]),
        sized(
            "heads that do not divide",
            "hidden_size = 100\nnum_attention_heads = 3",
            &["run.toml:5:23", "`num_attention_heads`", "hidden_size 100 is not divisible by 3 heads"],
        ),
        sized("no heads", "num_attention_heads = 0", &["run.toml:4:23", "num_attention_heads", "is 0"]),
        sized(
            "too wide",
            "hidden_size = 9000000000000000000",
            &["run.toml:4:15", "hidden_size", "9000000000000000000"],
        ),
        sized("too large for any machine", "hidden_size = 2147483644\nvocab_size = 2147483647", &["run.toml", "model"]),
        sized(
            "vocabulary below the data's",
            "vocab_size = 16\nhidden_size = 32",
            &["tokens.bin", "beyond the model's vocabulary of 16"],
        ),
        sized("spread that is none", "initializer_range = nan", &["run.toml:4:21", "initializer_range", "finite"]),
    ]);
}
