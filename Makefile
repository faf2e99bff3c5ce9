# Everything a person needs after cloning: `make demo`, `make test`. Each target prepares what it needs, libtorch included.

SHELL := /bin/bash
PYTHON ?= python3
CARGO ?= cargo
CARGO_FLAGS ?=
PROMPT := KING HENRY.

# `.libtorch` is where cargo finds libtorch (.cargo/config.toml). Whatever LIBTORCH names becomes the target of that
# link, and cargo itself never sees the variable: a build with it and one without would each rebuild the bindings.
USER_LIBTORCH := $(LIBTORCH)
unexport LIBTORCH
# These would replace the run path from .cargo/config.toml or move the program to where the run path does not lead.
unexport RUSTFLAGS CARGO_ENCODED_RUSTFLAGS CARGO_BUILD_TARGET CARGO_BUILD_RUSTFLAGS
# `make TARGET=NAME` builds in another folder, which has to lie in the repository's root for the same reason.
TARGET := target
export CARGO_TARGET_DIR := $(CURDIR)/$(TARGET)

ZF := $(TARGET)/release/zf

.DEFAULT_GOAL := help
.PHONY: help build demo test smollm2 bench bench-peer bench-stall bench-spikes bench-adam bench-quality accept clean prerequisites libtorch data

help: ## this list
	@echo "make targets:"
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## \(.*\)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 17

build: libtorch ## the program, target/release/zf
	$(CARGO) build --release $(CARGO_FLAGS) -p zf-cli

demo: build data ## train a small language model on two ranks for at most three minutes, and sample from it
	@run="runs/demo-$$(date +%Y%m%d-%H%M%S)" && \
	$(ZF) train recipes/demo.toml --out "$$run" && \
	echo && echo "Sample:" && \
	$(ZF) generate "$$run" --prompt "$(PROMPT)" && \
	echo && $(PYTHON) scripts/demo_text.py --describe && \
	echo "Run folder: $$run"

test: libtorch ## format, lints, all tests, doc tests
	$(CARGO) fmt --all --check
	$(CARGO) clippy --release $(CARGO_FLAGS) --workspace --all-targets -- -D warnings
	@# Tests run the program as a user would. Those of zf-cli have cargo build it along with them; built by itself, it and
	@# all of our crates would be compiled once more, with fewer features of getrandom, which only proptest asks for.
	@# A process of nextest loads libtorch, a fifth of a second: unit tests share one for each crate. One test more than there
	@# are cores, since some wait for processes that were killed.
	@if $(CARGO) nextest --version >/dev/null 2>&1; then \
		set -ex; $(CARGO) nextest run --release $(CARGO_FLAGS) --workspace -E 'kind(test)' \
			--test-threads $$(($$(getconf _NPROCESSORS_ONLN) + 1)); \
		$(CARGO) test --release $(CARGO_FLAGS) --workspace --lib --bins --examples; \
	else \
		set -x; $(CARGO) test --release $(CARGO_FLAGS) --workspace --lib --bins --tests --examples; \
	fi
	@# Doc tests run from temporary folders, where the relative run path leads nowhere.
	LD_LIBRARY_PATH="$(CURDIR)/.libtorch/lib$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH}" \
		$(CARGO) test --release $(CARGO_FLAGS) --workspace --doc

smollm2: build data ## a pretrained model in models/smollm2, for recipes/smollm2.toml
	@$(PYTHON) scripts/smollm2.py
	@echo "Fine-tune it: $(ZF) train recipes/smollm2.toml"

bench: libtorch ## the benchmarks
	$(CARGO) bench $(CARGO_FLAGS) --workspace

bench-peer: build ## beside PyTorch's FSDP2, which is installed into the cache folder; twelve minutes on a quiet machine
	$(PYTHON) benchmarks/fsdp2.py --zf $(ZF) $(BENCH_FLAGS)

bench-stall: build data ## stalls of a device that waits for its host: no offload, ZeRO-Offload, ZenFlow; ten minutes on a quiet machine
	$(PYTHON) benchmarks/stall.py --zf $(ZF) $(BENCH_FLAGS)

bench-spikes: build data ## whether choosing columns, or a host that is held up, shows in the steps; ten minutes on a quiet machine
	$(PYTHON) benchmarks/spikes.py --zf $(ZF) $(BENCH_FLAGS)

bench-adam: libtorch ## the host's AdamW beside PyTorch's fused one and DeepSpeed's CPUAdam
	CARGO="$(CARGO)" $(PYTHON) benchmarks/host_adam.py $(BENCH_FLAGS)

bench-quality: build data ## what ZenFlow keeps of AdamW's gain; fifteen minutes of one core; goes on where it stopped
	$(PYTHON) benchmarks/quality.py --zf $(ZF) $(QUALITY_FLAGS)

accept: build data ## the long checks, with figures in docs/accept.md; goes on where it stopped
	$(PYTHON) scripts/accept.py $(ACCEPT_FLAGS)

clean: ## remove what was built; libtorch, data, models and runs stay
	$(CARGO) clean

prerequisites:
	@command -v $(CARGO) >/dev/null || { echo "error: cargo is missing; install Rust 1.95 or newer with rustup" >&2; exit 2; }
	@command -v "$${CXX:-c++}" >/dev/null || { echo "error: a C++ compiler is missing; on Debian and Ubuntu: apt-get install g++" >&2; exit 2; }
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is missing; on Debian and Ubuntu: apt-get install python3 python3-pip" >&2; exit 2; }

libtorch: prerequisites
	@LIBTORCH="$(USER_LIBTORCH)" $(PYTHON) scripts/libtorch.py

data: prerequisites ## the text of the demo, data/shakespeare.txt
	@$(PYTHON) scripts/demo_text.py
