# Each target works alone on a machine with Python >= 3.11 (venv, ensurepip) and make:
# it installs first what it needs. `make help` lists them.

SHELL := /bin/sh
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# The interpreter that makes .venv; only looked up when .venv has to be made.
PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FUZZ_STAMP := $(VENV)/.installed-fuzz

# Worker processes of pytest: one for each core and one for the tests that wait, four at
# most, for a test has processes of its own; 0 runs the tests one after the other. One that
# has none left takes some of another's: else one works alone at the end, for minutes.
WORKERS ?= $(shell expr $$(nproc) + 1)
PARALLEL = -n $(WORKERS) --maxprocesses 4 --dist worksteal
# Set where `make test` comes after `make check`: the quick tests are in it.
TESTS_FOLLOW ?=
# Whose unit tests `make unit` runs: vfs, hostlib, supervisor/llm, ...
PKG ?=
# More arguments for pytest, as in `make test ARGS="-k relay"`.
ARGS ?=
# Rounds of random kill -9, and seconds of fuzzing.
CHAOS_ROUNDS ?= 400
FUZZ_SECONDS ?= 60
SOAK_SECONDS ?= 3600

# Where it is set, each worker would compile all tests, and each program that a test starts
# its modules: half of the collection.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PIP_NO_INPUT = 1

PIP_COMPILE = $(BIN)/pip-compile --quiet --generate-hashes --strip-extras \
  --allow-unsafe --no-header --no-emit-index-url --no-emit-trusted-host \
  --no-emit-find-links --no-emit-options --annotation-style=line

.PHONY: help install demo fleet-demo test check unit quick format lint types imports docs generate man cover \
  agents bench fuzz soak chaos lock clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

install: $(STAMP)  ## make .venv with everything pinned; .venv/bin/sandhost is the command

# Keyed on the two files that say what is installed: quick when neither changed. Wheels
# only, so that no compiler is needed; hashes are demanded. --no-deps, for the file names
# all there is to install, and pip 23 looks at `coverage[toml]`, which pytest-cov asks for,
# as at something else than the `coverage` that is pinned: once a newer one was published,
# it refused that as not pinned. `pip check` says if anything was missing after all.
# The project itself goes in as a link, built by the pinned hatchling. Its modules are
# compiled as pip compiles the others: where PYTHONDONTWRITEBYTECODE is set, each start
# would compile them again, which takes half of it.
$(STAMP): requirements-dev.txt pyproject.toml
	@set -e; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  python=; \
	  for candidate in $(or $(PYTHON),python3.11 python3 python3.12 python3.13 python3.14); do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	    then python=$$candidate; break; fi; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo "make: no Python >= 3.11 found; install one or name it: make install PYTHON=/path/to/python3" >&2; \
	    exit 1; \
	  fi; \
	  "$$python" -m venv $(VENV) || { \
	    echo "make: $$python cannot make a virtual environment; install its venv module (Debian: python3-venv)" >&2; \
	    rm -rf $(VENV); exit 1; }; \
	fi; \
	echo "installing what requirements-dev.txt pins into $(VENV)"; \
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --only-binary :all: -r requirements-dev.txt; \
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .; \
	$(BIN)/python -m pip check; \
	$(BIN)/python -m compileall -q sandhost supervisor vfs hostlib protocol; \
	touch $@

$(FUZZ_STAMP): $(STAMP) requirements-fuzz.txt
	@$(BIN)/python -m pip install --quiet --require-hashes --no-deps --only-binary :all: -r requirements-fuzz.txt
	@$(BIN)/python -m pip check
	@touch $@

demo: $(STAMP)  ## an agent mends a repository; you look, and take a part
	@sh demo/demo.sh

fleet-demo: $(STAMP)  ## four nodes, 200 children, a node is killed (CHILDREN)
	@sh demo/fleet.sh

test: $(STAMP)  ## every test, chaos in its short form
	CHAOS_ROUNDS=$(CHAOS_ROUNDS) $(BIN)/python -m pytest $(PARALLEL) $(ARGS)

check: format lint types imports docs cover $(if $(TESTS_FOLLOW),,quick)  ## format, lint, types, imports, docs, quick tests

unit: $(STAMP)  ## the quick tests of one directory of tests: make unit PKG=supervisor/llm
	@test -n "$(PKG)" -a -d "tests/$(PKG)" || \
	  { echo "make: there is no tests/$(PKG); name a directory of tests: PKG=vfs" >&2; exit 2; }
	$(BIN)/python -m pytest -q -m "not slow and not chaos" tests/$(PKG) $(ARGS)

quick: $(STAMP)  ## the quick tests of all packages
	$(BIN)/python -m pytest -q $(PARALLEL) -m "not slow and not chaos" \
	  --ignore=tests/system --ignore=tests/agents $(ARGS)

format: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

# What is generated from the tables of the code must be what is committed.
docs: $(STAMP)
	$(BIN)/python docs/generate.py --check

generate: $(STAMP)  ## renew what the documents take from the code
	$(BIN)/python docs/generate.py

man: $(STAMP)  ## manual pages, into build/man1
	$(BIN)/sandhost man build/man1

# The wire is the part that strangers reach first: every branch of it is covered.
cover: $(STAMP)
	$(BIN)/python -m pytest -q tests/protocol --cov=protocol --cov-branch \
	  --cov-report=term-missing:skip-covered --cov-fail-under=100

bench: $(STAMP)  ## the figures, with peers and limits in the same run
	$(BIN)/python -m benchmarks $(ARGS)

fuzz: $(FUZZ_STAMP)  ## coverage-guided fuzzing, a minute for each wire and the model's doors
	$(BIN)/python tests/fuzz/fuzz_protocol.py -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python tests/fuzz/fuzz_toolexec.py -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python tests/fuzz/fuzz_doors.py -max_total_time=$(FUZZ_SECONDS)

soak: $(STAMP)  ## children come and go for an hour; nothing may grow (SOAK_SECONDS)
	$(BIN)/python -m benchmarks.soak --seconds $(SOAK_SECONDS)

agents: $(STAMP)  ## real agents from their registries, each once (needs the network)
	$(BIN)/python -m tests.agents $(ARGS)

chaos: CHAOS_ROUNDS = 10000
chaos: $(STAMP)  ## the long form: 10,000 rounds of random kill -9
	CHAOS_ROUNDS=$(CHAOS_ROUNDS) $(BIN)/python -m pytest $(PARALLEL) -m chaos -o timeout=3600 $(ARGS)

lock: $(STAMP)  ## pin anew what pyproject.toml asks for (needs the network)
	$(BIN)/python -m pip install --quiet 'pip-tools>=7.6'
	$(PIP_COMPILE) --extra dev --extra all --output-file requirements-dev.txt pyproject.toml
	$(PIP_COMPILE) --extra all --constraint requirements-dev.txt \
	  --output-file requirements.txt pyproject.toml
	$(PIP_COMPILE) --extra fuzz --constraint requirements-dev.txt \
	  --output-file requirements-fuzz.txt pyproject.toml

clean:  ## remove caches and builds (rm -rf .venv to install anew)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  .import_linter_cache .coverage htmlcov benchmarks/.build
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
