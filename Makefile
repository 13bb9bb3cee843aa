# Every target sets up what it needs: a virtual environment in .venv with the package, built once.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
export PIP_DISABLE_PIP_VERSION_CHECK := 1

RUST_SOURCES := $(shell find rust -name '*.rs' -o -name Cargo.toml) Cargo.toml Cargo.lock

.PHONY: help
help:  ## List the commands
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The runtime: the package itself, editable, with its Rust core.
$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt $(RUST_SOURCES)
	@echo "Installing into $(VENV): downloads torch and compiles the Rust core; the first time takes minutes."
	$(PIP) install --quiet -c constraints.txt 'maturin>=1.9.4,<2'
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

.PHONY: serve
serve: $(VENV)/.installed  ## Install, fetch the default model and serve it on port 30000 (ARGS="--port 8000 ...")
	$(BIN)/engine-serve $(ARGS)

.PHONY: test
test: $(VENV)/.installed-dev  ## Run all quick tests, Rust and Python
	cargo test --quiet --workspace --exclude bindings
	$(BIN)/python -m pytest

.PHONY: test-slow
test-slow: $(VENV)/.installed-dev  ## Run the long tests: fuzzing, big matrices, comparisons
	cargo test --quiet --release --workspace --exclude bindings -- --include-ignored
	$(BIN)/python -m pytest -m slow --timeout 3600

.PHONY: test-schemathesis
test-schemathesis: $(VENV)/.installed-dev $(VENV)-schemathesis/.installed  ## Fuzz the API by its OpenAPI document for 10 minutes
	$(BIN)/python tests/schemathesis_run.py --schemathesis $(VENV)-schemathesis/bin/schemathesis

# Apart, because its dependencies are many and pin ours.
$(VENV)-schemathesis/.installed:
	$(PYTHON) -m venv $(VENV)-schemathesis
	$(VENV)-schemathesis/bin/python -m pip install --quiet 'schemathesis>=4.32,<5'
	@touch $@

# Environments of other programs are kept here, and made again when what they need has changed.
CLIENTS_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/trunkline/clients

.PHONY: test-clients
test-clients: $(VENV)/.installed-dev  ## Run other people's clients against a server (CLIENTS="llm ..." for some)
	$(BIN)/python tests/clients/run.py --cache $(CLIENTS_CACHE) $(CLIENTS)

.PHONY: test-lm-eval
test-lm-eval: $(VENV)/.installed-dev  ## Compare lm-eval's scores through the API with those of transformers
	$(BIN)/python tests/evaluation/run.py --cache $(CLIENTS_CACHE)

.PHONY: lint
lint: $(VENV)/.installed-dev  ## Check formatting, lints and types
	cargo fmt --all --check
	cargo clippy --quiet --workspace --all-targets -- -D warnings
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	MYPYPATH=src $(BIN)/python -m mypy.stubtest trunkline._core --mypy-config-file pyproject.toml
	$(BIN)/python tests/file_sizes.py

.PHONY: format
format: $(VENV)/.installed-dev  ## Format everything
	cargo fmt --all
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: bench
bench: $(VENV)/.installed-dev  ## Run the benchmarks that need no peer
	cargo bench --quiet -p radix_tree -p router -p text
	$(BIN)/python bench/scheduler_step.py

.PHONY: clean
clean:  ## Remove build outputs and the virtual environment
	rm -rf target $(VENV) $(VENV)-schemathesis python/_core*.so
