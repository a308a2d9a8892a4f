# make train    learn something in minutes: the quickstart experiment (ARGS is passed on)
# make test     every CPU test (ARGS is passed on to pytest)
# make check    format, lint, types, import directions
#
# The first run of each makes a virtual environment in $(VENV); later ones start at once.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: help train test check format docs clean

help:
	@sed -n 's/^# \{0,1\}//; /^$$/q; p' Makefile

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# One stamp per set of packages; the installation is editable, so only pyproject.toml makes it stale.
$(VENV)/installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --editable .
	@touch $@

$(VENV)/installed-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --editable '.[$*]'
	@touch $@ $(VENV)/installed

train: $(VENV)/installed
	$(BIN)/rollover train $(if $(ARGS),$(ARGS),quickstart)

test: $(VENV)/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)

check: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/installed
	$(BIN)/python docs/generate_configuration.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
