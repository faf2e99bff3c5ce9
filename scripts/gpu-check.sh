#!/usr/bin/env bash
# Tests what needs a GPU, and measures its link: side streams, pinned memory, transfers both ways. Needs a PyTorch 2.11 with
# CUDA in this Python (or in LIBTORCH), a compiler and cargo. The bindings are built first; the checks take under five minutes.
#
#   scripts/gpu-check.sh            # builds in target/gpu, then checks
#   PYTHON=python3.12 scripts/gpu-check.sh
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'gpu-check: %s\n' "$*" >&2; }

command -v nvidia-smi >/dev/null && nvidia-smi -L | grep -q '^GPU' || { say "this machine has no NVIDIA GPU (nvidia-smi finds none)"; exit 2; }

python=${PYTHON:-python3}
torch=${LIBTORCH:-$("$python" -c 'import os, torch; print(os.path.dirname(torch.__file__))' 2>/dev/null || true)}
[ -n "$torch" ] || { say "$python has no PyTorch: pip install torch==2.11.0, or name its folder in LIBTORCH"; exit 2; }
[ -e "$torch/lib/libtorch_cuda.so" ] || { say "$torch has no lib/libtorch_cuda.so: a PyTorch with CUDA is needed"; exit 2; }

# The link that cargo's settings name. What it pointed to before returns at the end.
before=$(readlink .libtorch || true)
restore() {
  rm -f .libtorch
  if [ -n "$before" ]; then ln -s "$before" .libtorch; fi
}
[ -L .libtorch ] || [ ! -e .libtorch ] || { say ".libtorch is not a link; move it away first"; exit 2; }
trap restore EXIT
ln -sfn "$torch" .libtorch

# An environment variable would win over the link.
unset LIBTORCH
export CARGO_TARGET_DIR=target/gpu
# CUDA's own libraries lie beside PyTorch's, where its libraries look for them.
export LD_LIBRARY_PATH="$torch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
# Nothing of the program names libtorch_cuda, so that the linker has to be told to keep it.
export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS="-Clink-arg=-Wl,--no-as-needed -Clink-arg=-L$torch/lib \
-Clink-arg=-ltorch_cuda -Clink-arg=-ltorch -Clink-arg=-Wl,--allow-shlib-undefined"

say "building"
cargo test --release -p zf-sys -p zf-offload --no-run
cargo bench --profile release -p zf-offload --bench links --no-run

say "side streams and pinned memory"
timeout 60 cargo test --release -p zf-sys --test it side_stream
say "transfers"
timeout 60 cargo test --release -p zf-offload --lib link::
say "speed"
timeout 120 cargo bench --profile release -p zf-offload --bench links | tee /dev/stderr | grep -q '^ *cuda ' \
  || { say "the link \`cuda\` was not measured: libtorch sees no CUDA device"; exit 1; }
say "passed"
