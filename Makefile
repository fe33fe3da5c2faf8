# pyluce: everything from a clean clone. Needs make, a C++ compiler, and Python 3.10 to 3.13 with its venv module.
#
#   make demo          build all and let the small model answer a question
#   make test          build all and run the tests
#   make lint          ruff, and mypy --strict
#   make amd-check     compile our GPU kernels for AMD and compare registers, LDS and spills with docs/amd-resources.txt (UPDATE=1 writes it)
#   make amd-run       execute the code objects on an interpreter, through ggml-hip's own dispatch (ALL=1: what takes long too)
#   make hip           build with ggml-hip: with the ROCm in /opt/rocm or ROCM=DIR, else with a compiler it fetches (about 90 processor minutes)
#   make bench         the CPU speed comparison with upstream's llama-bench
#   make bench-gpu     checks and speed on a GPU beside upstream's libllama: JSON and a plot (DEVICE=cuda:0; cuda or hip libraries first)
#   make bench-server  load on luce run and on upstream's llama-server, side by side (builds the latter: minutes)
#   make test-browser the status page in headless Chromium (Debian: apt-get install chromium)
#   make test-oracle   the tests against transformers (own environment with torch, a large download)
#   make clean         remove what was built
#   make distclean     the environments and the fetched source too
#
# PYTHON=python3.12 chooses the interpreter, JOBS=4 the number of compilers at once.

PYTHON ?= python3
JOBS ?= $(shell nproc)
DEVICE ?= cuda:0
ROCM ?= $(firstword $(wildcard /opt/rocm) build/rocm)
PROMPT ?= What is the capital of France?

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
READY := $(VENV)/.luce-ready
LINT_READY := $(VENV)/.luce-lint
ORACLE := .venv-oracle
ORACLE_READY := $(ORACLE)/.luce-ready
SETUP_FILES := pyproject.toml setup.py MANIFEST.in

.DEFAULT_GOAL := help

.PHONY: help demo test lint amd-check amd-run hip bench bench-gpu bench-server test-browser test-oracle build setup clean distclean

help:
	@sed -n 's/^#   make/  make/p' Makefile

demo: build
	$(VENV)/bin/luce run --prompt "$(PROMPT)"

test: build
	$(PY) -m pytest

lint: $(LINT_READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy --strict pyluce cli build.py buildtools

# the table is of one compiler: build/rocm, unless a folder is named
amd-check: setup
	$(PY) -m buildtools.amd_check --jobs $(JOBS) $(if $(filter file default,$(origin ROCM)),,--rocm $(ROCM)) \
	    $(if $(UPDATE),--update) $(if $(OPTIONAL),--optional)

amd-run: build
	$(PY) -m tests.rdna.amd_run --jobs $(JOBS) $(if $(filter file default,$(origin ROCM)),,--rocm $(ROCM)) \
	    $(if $(ALL),--all) $(if $(OPTIONAL),--optional)

hip: setup
	$(if $(filter build/rocm,$(ROCM)),$(PY) -m buildtools.rocm --full build/rocm)
	$(PY) build.py --jobs $(JOBS) --backend hip --rocm $(ROCM)

bench: setup
	$(PY) build.py --jobs $(JOBS) --bench
	$(PY) -m bench.cpu_vs_upstream

bench-gpu: setup
	$(PIP) install matplotlib
	$(PY) -m bench.device_suite --device $(DEVICE) --json build/bench/device.json --plot build/bench/device.png

bench-server: setup
	$(PY) build.py --jobs $(JOBS) --bench
	$(PY) -m bench.server_vs_upstream

test-browser: setup
	LUCE_TEST_BROWSER=1 $(PY) -m pytest tests/browser

test-oracle: build $(ORACLE_READY)
	LUCE_ORACLE_PYTHON=$(abspath $(ORACLE))/bin/python $(PY) -m pytest tests/oracles

build: setup
	$(PY) build.py --jobs $(JOBS)

setup: $(READY)

$(READY): $(SETUP_FILES)
	@$(PYTHON) -c 'import sys; v = sys.version_info; ok = (3, 10) <= v[:2] <= (3, 13); \
	sys.exit(0 if ok else "expected Python 3.10 to 3.13, found %d.%d: make PYTHON=python3.12" % v[:2])'
	@echo "setup: $(VENV) with $$($(PYTHON) --version)"
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	@$(PIP) install "setuptools>=77"
	@$(PIP) install --no-build-isolation --editable ".[build,test]"
	@touch $@

$(LINT_READY): $(READY)
	@echo "setup: ruff and mypy"
	@$(PIP) install --no-build-isolation --editable ".[lint]"
	@touch $@

$(ORACLE_READY): tests/oracles/requirements.txt
	@echo "setup: $(ORACLE) with torch and transformers"
	@test -x $(ORACLE)/bin/pip || $(PYTHON) -m venv $(ORACLE)
	@$(ORACLE)/bin/python -m pip --disable-pip-version-check --quiet install -r tests/oracles/requirements.txt
	@touch $@

clean:
	rm -rf build dist *.egg-info vendor/src

distclean: clean
	rm -rf $(VENV) $(ORACLE) vendor/cache
