# danlu: `make train` and `make test` are all that a fresh machine needs (Python 3.11+ and a C++ compiler).
#
#   make setup                 makes .venv; a torch that the Python already has is kept
#   make setup TORCH='torch --index-url URL'
#                              another build of torch (CUDA, ROCm, CPU): the URL that pytorch.org shows for it
#   make train ARGS='model.preset=30m train.duration=30min'

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
BIN := .venv/bin
ARGS ?=

.PHONY: help setup train test test-layouts check docs gpu-check bench clean
.DEFAULT_GOAL := help

help:  ## Show this.
	@sed -n 's/^#   \(.*\)/  \1/p' Makefile
	@sed -n 's/^\([a-z%-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|'

setup:  ## Make .venv and install danlu into it.
	@PYTHON='$(PYTHON)' TORCH='$(TORCH)' scripts/setup

train: setup  ## Train the default model on real text, in minutes.
	@$(BIN)/danlu train configs/default.yaml $(ARGS)

test: setup  ## Lint, types, imports, tests.
	@scripts/check
	@scripts/test $(ARGS)

test-layouts: setup  ## The long parity set: eight ranks, checkpoints of every layout into every other.
	@DANLU_LONG_TESTS=1 $(BIN)/python -m pytest -q tests/parity/test_layouts_long.py $(ARGS)

check: setup  ## Lint, types and imports only.
	@scripts/check

docs: setup  ## Generate docs/config.md and the editor schema from the config's models.
	@$(BIN)/python scripts/make_docs.py

gpu-check: setup  ## On a machine with a GPU: train in bf16 with compile, compare with the CPU.
	@$(BIN)/python scripts/gpu_check.py $(ARGS)

bench-%: setup  ## One benchmark: bench-peers, bench-parity, bench-plan …
	@$(BIN)/python -m benchmarks.$* $(ARGS)

bench: bench-peers bench-quality bench-plan  ## All benchmarks.

clean:  ## Remove what was built (not the runs, not the remembered kernels and text).
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache src/*.egg-info
