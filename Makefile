# For a new user:  make demo  (the shipped model generates text)   and   make test  (all tests).
# Both make their own environment in .venv from a bare Python 3.11 or newer; a second run reuses it.
#
#   make test PYTHON=/path/to/python3.12     another Python            make test VENV=.venv-312     another folder
#   make test TESTS="-k paged -x"            some of the tests         make clean                   start afresh

PYTHON ?=
VENV ?= .venv
TESTS ?=
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help demo test lint format clean
.DELETE_ON_ERROR:

help:
	@echo "make demo     set up, then let the shipped model answer a passkey prompt from a sparse KV cache"
	@echo "make test     set up, then run all tests"
	@echo "make lint     ruff and mypy, as CI runs them"
	@echo "make format   format the code and sort the imports"
	@echo "make clean    remove $(VENV) and the caches"

demo: $(VENV)/.installed
	$(BIN)/sparse-jax generate --demo passkey --method quest --budget 256

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(TESTS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

# Editable installs: only a change of pyproject.toml needs another one.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing sparse-jax and what it needs into $(VENV) (some minutes the first time)"
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "Installing sparse-jax, what it needs and the test tools into $(VENV) (some minutes the first time)"
	$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.installed

# A candidate must run (a shim may point nowhere), be new enough, and be able to make an environment (Debian packs that apart).
$(BIN)/python:
	@for python in $(or $(PYTHON),python3.11 python3.12 python3.13 python3); do \
	  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "Making $(VENV) with $$("$$python" --version)"; \
	    exec "$$python" -m venv $(VENV); \
	  fi; \
	  tried="$$tried\n  $$python: $$("$$python" --version 2>&1 | tail -n 1)"; \
	done; \
	printf "sparse-jax needs Python 3.11 or newer, with its venv module. Tried:$$tried\n" >&2; \
	printf "Install one (on Debian: apt-get install python3.11 python3.11-venv), or name one: make PYTHON=/path/to/python3.12\n" >&2; \
	exit 1
