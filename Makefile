# Headrace: `make run` serves a small real model on this machine, `make test` tests every package.
#
#   PYTHON=python3.12     which Python makes .venv (3.11 or newer)
#   TORCH_INDEX=ADDRESS   index of PyTorch's CPU build, asked when pip's own sources do not have it; empty: none
#   ARGS="..."            passed on by run, test, chaos and bench

SHELL := /bin/bash
.DEFAULT_GOAL := help

# The first of these that is new enough; without one, python3, so that the check below can say what it is.
ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && exit; done; echo python3)
endif
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
LOCKS := compose/deploy/locks
CODE := contracts gateway scheduler worker ledger compose

.PHONY: help .venv run test test-all pictures lint format audit sbom chaos explore bench official clean

help: ## show this list
	@grep -hE '^[.a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([.a-z]+):.*## (.*)/\1\t\2/' | expand -t 12

.venv: $(STAMP) ## everything installed: services, CPU engine, tests

# .venv/.installing exists while files are being written: an environment that was left in that state is made anew.
$(STAMP): pyproject.toml $(wildcard $(LOCKS)/*.txt) compose/deploy/install.sh
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Headrace needs Python 3.11 or newer, and '$(PYTHON)' is not: install it (Debian, Ubuntu: apt install python3 python3-venv), or name one with make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "'$(PYTHON)' has no venv: install it (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@if [ -e .venv/.installing ] || ! $(BIN)/python -m pip --version > /dev/null 2>&1; then \
		rm -rf .venv; $(PYTHON) -m venv .venv; fi
	@touch .venv/.installing
	@echo "the first time: 3.6 GB in .venv, 2 minutes with a fast connection, 10 with a slow one"
	@for step in torch services engine; do TORCH_INDEX=$(TORCH_INDEX) compose/deploy/install.sh .venv $$step || exit 1; done
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@rm .venv/.installing
	@touch $@

run: .venv ## serve on this machine, chat at http://127.0.0.1:8080 (ARGS="--engine simulated ...")
	@exec $(BIN)/headrace up $(ARGS)

test: .venv ## every package and the main job with the real vLLM (ARGS="-k name", ARGS=tests/bus)
	@$(BIN)/python -m tests.support.suite $(ARGS)

test-all: .venv ## every test that needs no GPU: the long ones and all of vLLM too
	@$(BIN)/python -m tests.support.suite --all $(ARGS)

pictures: .venv ## the README's pictures of the pages, by their tests: docs/*.png (needs Chromium)
	@HEADRACE_SCREENSHOTS=$(CURDIR)/docs $(BIN)/python -m tests.support.suite tests/e2e/test_pages.py

lint: .venv ## ruff, mypy, and what may import what
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo --no-cache

format: .venv ## let ruff put the code into shape
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

# In an environment of their own: what is looked at holds only what runs.
.tools/.installed: $(LOCKS)/tools.txt
	@rm -rf .tools && $(PYTHON) -m venv .tools
	@.tools/bin/python -m pip install -q --disable-pip-version-check --no-deps --require-hashes -r $<
	@touch $@

audit: .venv .tools/.installed ## known vulnerabilities of what the locks pin
	@$(BIN)/python -m tests.support.audit

sbom: .venv .tools/.installed ## what is installed, as CycloneDX: build/sbom.cdx.json
	@mkdir -p build
	@.tools/bin/cyclonedx-py environment $(BIN)/python --output-reproducible --output-file build/sbom.cdx.json
	@echo "build/sbom.cdx.json"

chaos: .venv ## a long run with random failures, checked from outside (ARGS="--requests 10000 --seed 1")
	@$(BIN)/python -m tests.chaos.long_run $(ARGS)

explore: .venv ## search the protocol's states for broken rules, as long as one likes (ARGS="--seconds 3600")
	@$(BIN)/python -m tests.explore $(ARGS)

bench: .venv ## measure: streams, scheduler, overload, ledger (tests/bench)
	@$(BIN)/python -m tests.bench $(ARGS)

official: .venv ## official clients and load generators against the stack that runs (ARGS="--data-dir DIR ai-sdk guidellm")
	@$(BIN)/python -m tests.official $(ARGS)

clean: ## remove what was built here, .venv too; models stay in the cache
	rm -rf .venv .tools build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(CODE) tests -name __pycache__ -type d -prune -exec rm -rf {} +
