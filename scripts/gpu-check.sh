#!/usr/bin/env bash
# Checks what needs a GPU: side streams, pinned memory and transfers both ways with their speed, then the engine's equivalences on
# the device (training with states off the device against training without, by the hashes of the final state in exact mode).
# Needs one NVIDIA GPU, a PyTorch 2.11 with CUDA in this Python (or in LIBTORCH), a compiler and cargo. The bindings are built
# first; the checks take under five minutes.
#
# THIS SCRIPT WAS NEVER RUN ON A GPU: no machine with one has seen it, nor the CUDA parts of the engine and of the link. The
# equivalences were run by it on an emulated device, which is a CPU (the second form below).
#
#   scripts/gpu-check.sh            # builds in target/gpu, then checks
#   PYTHON=python3.12 scripts/gpu-check.sh
#   scripts/gpu-check.sh emulated   # the equivalences alone, on an emulated device with an emulated link: needs no GPU
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'gpu-check: %s\n' "$*" >&2; }

python=${PYTHON:-python3}
device=${1:-cuda}
[ $# -le 1 ] || { say "expected at most one argument, found $#"; exit 2; }
case $device in
  cuda | emulated) ;;
  *) say "expected no argument or \`emulated\`, found \`$device\`"; exit 2 ;;
esac

# What returns at the end: the link that cargo's settings name, if it was moved; the runs of this script.
before=
moved=
runs=$(mktemp -d)
restore() {
  rm -rf "$runs"
  if [ -n "$moved" ]; then
    rm -f .libtorch
    if [ -n "$before" ]; then ln -s "$before" .libtorch; fi
  fi
}
trap restore EXIT

# Points cargo at a libtorch with CUDA.
use_cuda() {
  command -v nvidia-smi >/dev/null && nvidia-smi -L | grep -q '^GPU' || { say "this machine has no NVIDIA GPU (nvidia-smi finds none)"; exit 2; }
  torch=${LIBTORCH:-$("$python" -c 'import os, torch; print(os.path.dirname(torch.__file__))' 2>/dev/null || true)}
  [ -n "$torch" ] || { say "$python has no PyTorch: pip install torch==2.11.0, or name its folder in LIBTORCH"; exit 2; }
  [ -e "$torch/lib/libtorch_cuda.so" ] || { say "$torch has no lib/libtorch_cuda.so: a PyTorch with CUDA is needed"; exit 2; }
  [ -L .libtorch ] || [ ! -e .libtorch ] || { say ".libtorch is not a link; move it away first"; exit 2; }
  before=$(readlink .libtorch || true)
  moved=yes
  ln -sfn "$torch" .libtorch

  # An environment variable would win over the link.
  unset LIBTORCH
  export CARGO_TARGET_DIR=target/gpu
  # CUDA's own libraries lie beside PyTorch's, where its libraries look for them.
  export LD_LIBRARY_PATH="$torch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
  # Nothing of the program names libtorch_cuda, so that the linker has to be told to keep it.
  export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS="-Clink-arg=-Wl,--no-as-needed -Clink-arg=-L$torch/lib \
-Clink-arg=-ltorch_cuda -Clink-arg=-ltorch -Clink-arg=-Wl,--allow-shlib-undefined"
}

# What the operators need to add in one order on every run.
export CUBLAS_WORKSPACE_CONFIG=:4096:8

link_and_streams() {
  say "side streams and pinned memory"
  timeout 60 cargo test --release -p zf-sys --test it side_stream
  say "transfers"
  timeout 60 cargo test --release -p zf-offload --lib link::
  say "speed"
  timeout 120 cargo bench --profile release -p zf-offload --bench links | tee /dev/stderr | grep -q '^ *cuda ' \
    || { say "the link \`cuda\` was not measured: libtorch sees no CUDA device"; exit 1; }
}

# run_file MODEL DTYPE SETTINGS: a run file in exact mode.
run_file() {
  case $1 in
    llama) model='arch = "llama"
vocab_size = 256
hidden_size = 64
intermediate_size = 172
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 64
rope_theta = 10000.0
rms_norm_eps = 1e-5
tie_word_embeddings = false' ;;
    gpt2) model='arch = "gpt2"
vocab_size = 256
n_embd = 64
n_layer = 2
n_head = 4
n_positions = 64' ;;
  esac
  case $device in
    cuda) place='kind = "cuda"
link = { kind = "cuda" }' ;;
    emulated) place='kind = "emulated"
memory = "256MiB"
link = { kind = "emulated", bandwidth = "4GB/s", latency = "10us" }' ;;
  esac
  cat <<TOML
[model]
$model
[data]
path = "text.txt"
sequence_length = 64
[run]
steps = 11
global_batch = 4
micro_batch = 2
dtype = "$2"
exact = true
checkpoint = { every = 0, best = false }
[optim]
kind = "adamw"
lr = 2e-3
[device]
$place
[log]
tensorboard = false
trace = false
TOML
  printf '%s\n' "$3"
}

# hash MODEL DTYPE NAME SETTINGS: trains, and prints the hash of the final state.
hash() {
  local folder="$runs/$1-$2-$3"
  run_file "$1" "$2" "$4" >"$runs/$1-$2-$3.toml"
  timeout 60 "$zf" train "$runs/$1-$2-$3.toml" --out "$folder" >"$folder.log" 2>&1 \
    || { say "$1 in $2, $3: the run failed"; tail -n 5 "$folder.log" >&2; return 1; }
  "$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["state_hash"])' "$folder/summary.json"
}

failed=0
# same|other MODEL DTYPE NAME SETTINGS: whether the state is that of no offload.
same() { compare "$1" "$2" "$3" "$4" same; }
other() { compare "$1" "$2" "$3" "$4" other; }
compare() {
  local found verdict=other
  found=$(hash "$1" "$2" "$3" "$4") || { failed=1; return 0; }
  [ "$found" != "$plain" ] || verdict=same
  if [ "$verdict" = "$5" ]; then
    printf '  %-6s %-9s %-28s %s state, as expected\n' "$1" "$2" "$3" "$verdict" >&2
  else
    printf '  %-6s %-9s %-28s %s state, EXPECTED %s\n' "$1" "$2" "$3" "$verdict" "$5" >&2
    failed=1
  fi
}

equivalences() {
  say "the engine's equivalences on $device, against training without an offload"
  seq 1 4000 | tr '\n' ' ' >"$runs/text.txt"
  for pair in "llama float32" "llama bfloat16" "gpt2 bfloat16"; do
    read -r model dtype <<<"$pair"
    plain=$(hash "$model" "$dtype" none "") || { failed=1; continue; }
    again=$(hash "$model" "$dtype" none-again "") || { failed=1; continue; }
    [ "$plain" = "$again" ] || { say "$model in $dtype: two runs without an offload differ: the operators do not repeat"; failed=1; continue; }
    same "$model" "$dtype" "host" '[offload]
kind = "host"'
    same "$model" "$dtype" "k = 1, S = 4" '[offload]
kind = "zenflow"
update_interval = 4
[select]
ratio = 1.0
every = 4'
    same "$model" "$dtype" "S = 1, synchronous" '[offload]
kind = "zenflow"
update_interval = 1
asynchronous = false
[select]
ratio = 0.1
every = 1'
    same "$model" "$dtype" "S = 1, sums on the device" '[offload]
kind = "zenflow"
update_interval = 1
asynchronous = false
accumulate = "device"
[select]
ratio = 0.1
every = 2'
    # What has to differ, so that the comparison shows something.
    other "$model" "$dtype" "k = 0.1, S = 4" '[offload]
kind = "zenflow"
update_interval = 4
[select]
ratio = 0.1
every = 4'
  done
  return $failed
}

if [ "$device" = cuda ]; then
  use_cuda
  say "building"
  cargo test --release -p zf-sys -p zf-offload --no-run
  cargo bench --profile release -p zf-offload --bench links --no-run
  cargo build --release -p zf-cli
  link_and_streams
else
  say "building"
  cargo build --release -p zf-cli
fi
zf=$PWD/${CARGO_TARGET_DIR:-target}/release/zf
case ${CARGO_TARGET_DIR:-} in /*) zf=$CARGO_TARGET_DIR/release/zf ;; esac
equivalences || { say "failed"; exit 1; }
say "passed"
