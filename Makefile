# Lockstep. `make help` lists the targets; everything lives in .venv, nothing is installed elsewhere.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.lockstep-setup
PIP_VERSION := 26.3
# The first interpreter that works and is new enough; `make setup PYTHON=...` chooses another.
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3,$(shell $(p) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $(p))))

UNITS := proto libs/common libs/kernels services/router services/scheduler services/worker deploy/local deploy/bench
PACKAGES := libs/common/lockstep_common libs/kernels/lockstep_kernels services/router/lockstep_router \
	services/scheduler/lockstep_scheduler services/worker/lockstep_worker deploy/local/lockstep_cli deploy/bench/lockstep_bench
PROTOS := $(wildcard proto/lockstep_proto/v1/*.proto)
STUBS := $(PROTOS:.proto=_pb2.py) $(PROTOS:.proto=_pb2_grpc.py)
MODEL := smollm2-135m-instruct

.PHONY: help setup proto serve model test test-all test-gpu check lint bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) $(STUBS)  ## virtual environment with every package and Lockstep itself (editable)

proto: $(STAMP) $(STUBS)  ## generate the gRPC stubs whose .proto files have changed

serve: setup  ## serve a chat model here: http://127.0.0.1:8000 (options: make serve ARGS="--port 9000")
	@exec $(VENV)/bin/lockstep up $(ARGS)

model: setup  ## fetch the chat model that `serve` and the tests use into the user's cache
	@$(VENV)/bin/lockstep model get $(MODEL)

# First what needs no machine of its own, side by side, then what starts services; 5: ARGS selected no test there.
test: setup model  ## every test that takes seconds (options: make test ARGS="-k router")
	$(PY) -m pytest tests/unit tests/kernels -m "not slow and not gpu" -n auto --maxprocesses 4 $(ARGS) || test $$? = 5
	$(PY) -m pytest tests --ignore tests/unit --ignore tests/kernels -m "not slow and not gpu" $(ARGS) || test $$? = 5

test-all: setup model  ## every test, also those that take minutes
	$(PY) -m pytest tests -m "not gpu" $(ARGS)

# Not what is compiled ahead of time: that needs no GPU, but all cores that the others would have.
test-gpu: setup  ## tests of kernels, models and workers on this machine's GPU: four minutes
	$(PY) -m pytest tests/kernels tests/system/test_cuda.py tests/system/test_cuda_group.py --ignore tests/kernels/test_aot.py \
		-n auto --maxprocesses 14 $(ARGS)

check: lint  ## lint, types, import laws and the unit tests: two minutes
	$(PY) -m pytest tests/unit -m "not slow and not gpu" -n auto --maxprocesses 4

lint: setup  ## ruff, import-linter and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/mypy $(PACKAGES)

bench: setup model  ## measure this machine (options: make bench ARGS="overhead --json out.json")
	$(VENV)/bin/lockstep bench $(ARGS)

clean:  ## remove what was generated here, .venv too (the model cache stays)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -f proto/lockstep_proto/v1/*_pb2*.py proto/lockstep_proto/v1/*_pb2*.pyi
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Third-party pins first. Then our own packages from their folders, without dependencies and without an isolated build, so
# that no resolver ever asks an index for them; `pip check` proves that the pins satisfy what the packages declare.
$(STAMP): requirements-dev.txt $(UNITS:=/pyproject.toml)
	@test -n "$(PYTHON)" || { echo "Lockstep needs Python 3.11 or 3.12: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Setting up $(VENV): a minute or two, most of it torch"
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --quiet pip==$(PIP_VERSION)
	$(PY) -m pip install --quiet --quiet -r requirements-dev.txt
	$(PY) -m pip install --quiet --quiet --no-deps --no-build-isolation $(addprefix -e ./,$(UNITS))
	$(PY) -m pip check
	touch $@

# mypy's cache does not notice modules that appear for the first time.
$(STUBS) &: $(PROTOS) proto/hatch_build.py | $(STAMP)
	test -e $(firstword $(STUBS)) || rm -rf .mypy_cache
	$(PY) proto/hatch_build.py
	touch $(STUBS)
