# make train    learn something in minutes: the quickstart experiment (ARGS is passed on)
# make compare  how fast and how well three schedules learn: ten minutes on a quiet machine, drawn in build/compare.svg
# make test     the tests to run before every commit, in $(JOBS) processes (ARGS is passed on to pytest)
# make test-deep   the tests that start processes or need seconds: ranks, servers, workers, clusters, kills; they wait
#                  a third of their time, so there are $(DEEP_JOBS) processes for two cores
# make test-vllm  the vLLM engine before real vLLM servers, installed in $(VLLM_VENV) for it (3.4 GB)
# make test-sglang   the SGLang engine before a real SGLang server, installed in $(SGLANG_VENV) for it (3.3 GB)
# make test-agents  agents of openai-agents and smolagents, environments of TextArena and OpenEnv, installed in $(AGENTS_VENV) (0.4 GB)
# make test-verl  the verl integration with the real verl on a CPU, installed in $(VERL_VENV) for it (2 GB)
# make test-slime SLIME=path   the slime integration before slime's own contract tests, in a checkout of it
# make test-wheel   the wheel in empty environments: the core alone, inside TRL, and with all extras
# make test-resolver  pip's answer whether it can be installed beside TRL, verl, slime and miles
# make docs     the documentation site, in build/site
# make check    format, lint, types, import directions, and the house's own rules
#
# The first run of each makes a virtual environment in $(VENV); later ones start at once.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
SGLANG_VENV ?= .venv-sglang
VERL_VENV ?= .venv-verl
AGENTS_VENV ?= .venv-agents
SLIME ?=
ARGS ?=
JOBS ?= 2
DEEP_JOBS ?= 3

# Modules are compiled once, when they are first imported, not by each of the hundreds of processes that tests start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help train compare test test-deep test-vllm test-sglang test-agents test-verl test-slime test-wheel test-resolver check format docs clean

help:
	@sed -n 's/^# \{0,1\}//; /^$$/q; p' Makefile

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# One stamp per set of packages; the installation is editable, so only these two files make it stale.
$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing Rollover into $(VENV), a few minutes the first time"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all]'
	@touch $@

$(VENV)/installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing Rollover into $(VENV), a few minutes the first time"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$*]'
	@touch $@ $(VENV)/installed

train: $(VENV)/installed
	$(BIN)/rollover train $(if $(ARGS),$(ARGS),quickstart)

compare: $(VENV)/installed-dev
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/compare.py $(ARGS)

test: $(VENV)/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile $(ARGS)

test-deep: $(VENV)/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m deep --numprocesses $(DEEP_JOBS) --dist loadgroup \
	  --no-loadscope-reorder --durations 20 $(ARGS)

test-vllm: $(VENV)/installed-test
	tests/real/vllm_env.sh $(VLLM_VENV)
	VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m vllm tests/real $(ARGS)

test-sglang: $(VENV)/installed-test
	tests/real/sglang_env.sh $(SGLANG_VENV)
	SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m sglang tests/real $(ARGS)

test-agents: $(VENV)/installed-test
	tests/real/agents_env.sh $(AGENTS_VENV)
	AGENTS_PYTHON=$(abspath $(AGENTS_VENV))/bin/python OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m agents --numprocesses 3 tests/real $(ARGS)

test-verl: $(VENV)/installed-test
	tests/real/verl_env.sh $(VERL_VENV)
	VERL_PYTHON=$(abspath $(VERL_VENV))/bin/python OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m verl tests/real $(ARGS)

test-slime: $(VENV)/installed-test
	@test -n "$(SLIME)" || { echo "make test-slime SLIME=path: name a checkout of slime"; exit 2; }
	PYTHON=$(BIN)/python tests/real/slime_contracts.sh $(SLIME) $(ARGS)

test-wheel:
	PYTHON=$(PYTHON) tests/wheel.sh

test-resolver:
	PYTHON=$(PYTHON) tests/resolver.sh

check: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.house

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/installed-docs
	$(BIN)/python docs/generate_configuration.py
	$(BIN)/python docs/generate_reference.py
	$(BIN)/python docs/generate_figures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
