# Tidemill. `make` alone lists what there is.
#
# Variables:
#   PYTHON       Python 3.11 or 3.12; found by itself when not given.
#   VLLM         cpu, cuda or none; by default what .venv has, at first cuda with an NVIDIA GPU, cpu on other Linux
#                machines, else none.
#   TORCH_INDEX  Extra pip arguments for PyTorch. Empty, because pip's own settings may know where to look. On a
#                Linux machine without a GPU give it PyTorch's own index of CPU wheels, else pip fetches the CUDA build:
#                make demo TORCH_INDEX="--index-url https://download.pytorch.org/whl/cpu"
#   MINUTES      Length of make chaos, and of make soak; SEED: the seed of make chaos.
#   JOBS         Processes that run tests, by default 4 for make test, whose tests wait for much (3 with less than 16 GB
#                of memory), and 2 for others; 0 runs them in one, for a debugger.
#   ARGS         Passed on: make test ARGS="-k ledger", make demo ARGS="trainer.steps=50".

VENV := .venv
BIN := $(VENV)/bin
# What a run needs, and what is added to work on Tidemill itself.
STAMP := $(VENV)/.set-up
DEV := $(VENV)/.set-up-dev
VLLM ?= auto
TORCH_INDEX ?=
ARGS ?=
JOBS ?= 2
MINUTES ?= 3
SEED ?= 1
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c '$(SUPPORTED)' >/dev/null 2>&1 && { echo $$p; break; }; done)

.DEFAULT_GOAL := help
INSTALL = $(BIN)/python scripts/install.py --vllm '$(VLLM)' --torch-index '$(TORCH_INDEX)' --record $(VENV)/.vllm
.PHONY: help setup dev demo check test test-all unit system sglang environments chaos soak lint types docs pins clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|' 2>/dev/null \
		|| grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST)

setup: $(STAMP) ## Set up .venv with all that a run needs, once; make demo does it by itself

dev: $(DEV) ## Add the tools of development to .venv, once; make test, lint and docs do it by themselves

$(STAMP): pyproject.toml scripts/install.py
	@test -n '$(PYTHON)' || { echo 'Tidemill needs Python 3.11 or 3.12, none was found: install one, or give it: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@$(PYTHON) -c '$(SUPPORTED)' || { echo 'Tidemill needs Python 3.11 or 3.12, $(PYTHON) is another version or does not run' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo '$(PYTHON) cannot make virtual environments: install its venv module (Debian: python3-venv)' >&2; exit 1; }
	@$(INSTALL) --extras train
	@touch $@

# Everything again, so that what is added agrees with what is there.
$(DEV): $(STAMP)
	@$(INSTALL) --extras dev
	@touch $@

demo: $(STAMP) ## A small model learns arithmetic on this machine: an embedded Redis and real vLLM
	$(BIN)/tidemill up --fresh examples/arithmetic/config.yaml $(ARGS)

check: $(DEV) ## Style, types and unit tests side by side: the minute before a commit
	@$(MAKE) --no-print-directory -k -j 2 $(if $(filter output-sync,$(.FEATURES)),-O) lint unit

PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

MANY = $(firstword $(shell awk '/MemTotal/ {many = $$2 > 15e6} END {print 3 + many}' /proc/meminfo 2>/dev/null || echo 3))
test: JOBS := $(if $(filter file,$(origin JOBS)),$(MANY),$(JOBS))
test: $(DEV) ## Run the tests: every promise once
	$(PYTEST) -m 'not matrix' $(ARGS)

test-all: $(DEV) ## Run the matrices that make test leaves out: every engine, layout, launcher and fault, long chaos
	$(PYTEST) -m matrix $(ARGS)

unit: $(DEV) ## Run the unit tests
	$(PYTEST) --hypothesis-profile quick -m 'not matrix' tests/unit $(ARGS)

system: ## Install the programs that tests drive: Chromium, Slurm, kubectl and others (Debian, Ubuntu; as root)
	@tests/system.sh

sglang: $(STAMP) ## Fetch SGLang's packages for the tests with its real server on a CPU, into .sglang
	@tests/support/sglang_cpu/install.sh

environments: $(STAMP) ## Fetch verifiers, OpenEnv, TextArena, torchao and lm-eval for the tests that use them, into .environments
	@tests/support/environments/install.sh

chaos: $(DEV) ## Break a running system in every way for MINUTES (default 3), with SEED (default 1), and count what was lost
	$(BIN)/python -m tools.chaos --minutes $(MINUTES) --seed $(SEED) $(ARGS)

soak: $(DEV) ## Train without an end for MINUTES, 60 are fair (default 3), and name whatever grows
	$(BIN)/python -m tools.soak --minutes $(MINUTES) $(ARGS)

lint: $(DEV) types ## Check style, words, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell

types: $(DEV) ## Check types
	$(BIN)/mypy

docs: $(DEV) ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pins: $(DEV) ## Write down the versions of .venv, which images are built with
	$(BIN)/python -m scripts.pins >deploy/constraints.txt.new && mv deploy/constraints.txt.new deploy/constraints.txt

clean: ## Remove .venv and everything that was built; runs/ stays
	rm -rf $(VENV) site dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
