# Each command creates the environment it needs and is quick when that is there already.
#
#   make quickstart   train a small model, dense and sparse, and compare
#   make test         the test suite without its slow tests (GPU tests too where there is a GPU)
#   make test-all     the whole test suite
#   make smoke        a few minutes of it: what another Python, torch or Megatron-Core could break
#   make lint         ruff, mypy and shellcheck
#   make clean        remove the environment and what the commands wrote
#
# Variables: PYTHON (an interpreter, 3.10 to 3.13; found by itself), VENV (where the environment
# goes), MCORE and TORCH (versions of Megatron-Core and torch; by default the newest that fit), JOBS (test
# processes; one a core), ARGS (options of the command: make quickstart ARGS="--steps 20",
# make test ARGS="tests/test_layout.py -x").

VENV ?= .venv
PYTHON ?=
MCORE ?=
TORCH ?=
ARGS ?=
JOBS ?= logical
BIN := $(VENV)/bin
READY := $(VENV)/.ready$(if $(MCORE),-mcore-$(MCORE))$(if $(TORCH),-torch-$(TORCH))

.PHONY: quickstart test test-all smoke lint clean env
.DEFAULT_GOAL := help

.PHONY: help
help:
	@sed -n 's/^#   //p' Makefile

quickstart: $(READY)
	$(BIN)/python -m megatron_mtraining quickstart --overwrite $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" $(ARGS)

test-all: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

MEGATRON := arguments backend checkpoint checks core_attention gpt_model layer_spec recompute registration \
  rotary_embedding wrapping
TRANSFORMERS := checkpointing interface prices
SMOKE := tests/config tests/test_attention.py tests/test_cp_group.py tests/test_package.py \
  $(TRANSFORMERS:%=tests/transformers/test_%.py) $(MEGATRON:%=tests/megatron/test_%.py)

smoke: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" $(SMOKE) $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck --external-sources --source-path=SCRIPTDIR examples/*.sh examples/*/*.sh

env: $(READY)

clean:
	rm -rf $(VENV) build dist quickstart-out .pytest_cache .ruff_cache .mypy_cache *.egg-info

# An interpreter counts only if it runs and can make environments: version managers leave commands
# such as python3.12 on the PATH that fail, and some systems ship Python without venv.
# pip compiles the packages' modules on one core, which takes two minutes: here it takes all. Some packages have
# files of other Python versions, which do not compile.
$(READY): setup.py pyproject.toml
	@usable() { "$$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' >/dev/null 2>&1; }; \
	set -e; \
	if [ -n "$(PYTHON)" ]; then \
	  usable "$(PYTHON)" || { echo "make: PYTHON=$(PYTHON) is not a working Python 3.10 to 3.13 with venv" >&2; exit 1; }; \
	  python="$(PYTHON)"; \
	else \
	  python=; \
	  for name in python3 python3.12 python3.11 python3.13 python3.10 "$$HOME"/.pyenv/versions/3.1[0-3]*/bin/python; do \
	    if usable "$$name"; then python="$$name"; break; fi; \
	  done; \
	  [ -n "$$python" ] || { echo "make: found no Python 3.10 to 3.13 that can make environments; install one (with its venv module) or name it: make PYTHON=/path/to/python" >&2; exit 1; }; \
	fi; \
	if [ -x "$(BIN)/python" ] && ! usable "$(BIN)/python"; then rm -rf "$(VENV)"; fi; \
	if [ ! -x "$(BIN)/python" ]; then \
	  echo "Creating $(VENV) with $$($$python --version)"; "$$python" -m venv "$(VENV)"; \
	fi; \
	echo "Installing into $(VENV) (torch is large: this takes a minute or more)"; \
	"$(BIN)/python" -m pip install -qq --no-compile --disable-pip-version-check --editable ".[quickstart,test,lint]" $(if $(MCORE),"megatron-core==$(MCORE)") $(if $(TORCH),"torch==$(TORCH)"); \
	"$(BIN)/python" -m compileall -qq -j 0 "$(VENV)"/lib >/dev/null 2>&1 || true; \
	rm -f "$(VENV)"/.ready*; touch $@
