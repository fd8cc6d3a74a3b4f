# The commands of this project. Each does its own set-up the first time.
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
BIN := .venv/bin
# What becomes of MkDocs one day is no news for every build.
export NO_MKDOCS_2_WARNING := 1

# A server takes every core, so that tests with one run alone. Eight workers are enough, and each may hold a gigabyte.
PARALLEL := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

TASK ?= art_gym/Lookup-v0
SEED ?= 0
RUN ?= runs/$(notdir $(TASK))-seed$(SEED)

.PHONY: help setup train test test-fast check format docs clean

help: ## Show this list
	@echo "Usage: make TARGET [VARIABLE=value …]"; echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo; echo "Variables of train: TASK=$(TASK) SEED=$(SEED) RUN=$(RUN)"
	@echo "  RESUME=1 goes on with the run in RUN, FRESH=1 moves it aside and starts anew."
	@echo "Variables of setup: PYTHON=python3, TORCH_INDEX=URL of an extra index with PyTorch's CPU builds."

setup: ## Make .venv with everything in it; again: nothing, or the rest
	@./scripts/setup.sh

train: setup ## Teach the bundled 135M model a task, and show that it learned
	@$(BIN)/art-gym train $(TASK) --seed $(SEED) --run-dir $(RUN) $(if $(RESUME),--resume) $(if $(FRESH),--fresh)

test: setup ## Run every test, with real vLLM servers and real training
	@$(PARALLEL) -m "not vllm"
	@$(BIN)/python -m pytest -m vllm

test-fast: setup ## Run the quick tests, those that need neither vLLM nor torch
	@$(PARALLEL) -m "not vllm and not train and not slow"

check: setup ## Lint, check types and the layering of imports, build the docs strictly
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/mkdocs build --strict --quiet

format: setup ## Format the code and mend what the linter can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: setup ## Build the documentation into site/
	$(BIN)/mkdocs build --strict

clean: ## Remove build outputs and caches; .venv and runs stay
	rm -rf site dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
