# Every command of the repository. `make` alone lists them; CI runs .ci/run, which runs these.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup check fmt test browser litellm test-slow planted-bugs test-oldest demo up down clean

VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell command -v python3.11 || command -v python3)
SEEDS ?= 20000
SHARE ?= 1
SOAK_S ?= 1200

help: ## List the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/make \1\t\2/p' Makefile | expand -t 18

setup: $(VENV)/.installed ## Create .venv and install Twinpool with its development tools, versions pinned

# Runs again only when the dependencies change. The last line is reached only when every step before it succeeded.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, got " + sys.version.split()[0] + "; hint: make setup PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

check: setup ## Formatting, lint, strict types, import rules; changes no file
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo

fmt: setup ## Format the code and apply the safe lint fixes
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

test: setup ## The tests that every change must pass
	$(BIN)/pytest -m 'not slow' -n 2 --dist loadfile

browser: ## Install Chromium from Debian's packages when there is none, for the tests of the page
	@if ! command -v chromium chromium-browser google-chrome >/dev/null; then \
	    as_root=""; [ "$$(id -u)" = 0 ] || as_root="sudo -n"; \
	    if ! command -v apt-get >/dev/null || ! $$as_root true 2>/dev/null; then \
	        echo "make browser: there is no Chromium, and installing it needs apt-get and root; hint: install chromium yourself" >&2; \
	        exit 1; \
	    fi; \
	    $$as_root apt-get update -q && $$as_root apt-get install -q -y --no-install-recommends chromium; \
	fi

# A client that brings 200 MB: in a folder of its own, which only the test that runs it puts on a path.
LITELLM := $(VENV)/litellm

$(LITELLM)/.installed: $(VENV)/.installed
	$(BIN)/python -m pip install --no-deps --upgrade --target $(LITELLM) litellm==1.110.2 tiktoken==0.14.0 \
	    python-dotenv==1.2.4 fastuuid==0.14.0 importlib_metadata==8.9.0 zipp==4.1.2 pydantic-settings==2.16.3 \
	    h2==4.4.1 hpack==4.2.0 hyperframe==6.1.0
	touch $@

litellm: $(LITELLM)/.installed ## Install the client litellm for its test

# The long tests that start processes come one after another: each is a load for both cores.
ONE_BY_ONE := tests/end_to_end tests/cluster/test_launch.py tests/cluster/test_cli.py

test-slow: setup browser litellm ## The long suites; less with SEEDS=N of the simulation, SOAK_S=N seconds, SHARE=0.1 of the faults
	TWINPOOL_SEEDS=$(SEEDS) $(BIN)/pytest -m slow -n 2 $(ONE_BY_ONE:%=--ignore=%)
	TWINPOOL_SOAK_S=$(SOAK_S) TWINPOOL_SHARE=$(SHARE) $(BIN)/pytest -m slow $(ONE_BY_ONE)

planted-bugs: setup ## Plant each bug of tests/planted_bugs in a copy, and see the tests named for it fail; BUGS=NAME
	$(BIN)/python tests/support/planted_bugs.py $(BUGS)

# The oldest transformers lies beside the pinned one, with the hub client it needs, and goes first on the path.
OLDEST := $(VENV)/oldest

$(OLDEST)/.installed: $(VENV)/.installed
	$(BIN)/python -m pip install --no-deps --upgrade --target $(OLDEST) transformers==5.17.0 huggingface_hub==1.33.0
	touch $@

test-oldest: $(OLDEST)/.installed ## The engine's and the exactness tests on the oldest transformers that is supported
	PYTHONPATH=$(OLDEST) $(BIN)/pytest -m 'not slow' tests/engine tests/kernels tests/end_to_end/test_exactness.py

demo: setup ## Start both pools, ask a question, show where the time went, stop
	$(BIN)/twinpool demo

up: setup ## Start a cluster on this machine; it runs until Ctrl-C or `make down`
	$(BIN)/twinpool up

down: setup ## Stop it
	$(BIN)/twinpool down

clean: ## Remove .venv and everything that was built or cached here
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
