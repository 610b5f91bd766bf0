# The whole vocabulary:
#   make run     set everything up, then run the decode job on real input
#   make test    set everything up, then pass the tests: without a driver, then on its test double
#   make check   lint, types, floors, and every kernel compiled for every architecture
#   make bench   benchmarks, on the CUDA device where there is one and on the CPU otherwise
#   make gpu     the evidence of a machine with an NVIDIA GPU; needs no network

PYTHON ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready
OFFLINE := .offline-packages
# The environment of `make run` where there is one, else the machine's own Python.
GPU_PYTHON = $(if $(wildcard $(READY)),$(BIN)/python,$(PYTHON))

.PHONY: run test check bench gpu clean
.DEFAULT_GOAL := run

run: $(READY)
	$(BIN)/python -m nxrt run examples/glm_decode.toml

test: $(READY)
	$(BIN)/python -m pytest
	$(BIN)/python -m pytest --fake-driver

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tools.check_floors
	$(BIN)/python -m tools.compile_kernels

bench: $(READY)
	$(BIN)/python -m benchmarks

# A GPU machine may have a Python of its own and no network. What that lacks is taken from wheels/,
# a folder filled elsewhere with `pip download`; nothing is installed into the machine's Python.
gpu:
	@if ls wheels/*.whl >/dev/null 2>&1; then \
		$(PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target $(OFFLINE) wheels/*.whl; fi
	PYTHONPATH=$(OFFLINE) $(GPU_PYTHON) -m tools.gpu_report

clean:
	rm -rf $(VENV) $(OFFLINE) gpu-logs .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The lock file decides what is installed; the stamp is written last, so a torn set-up is redone.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nxrt needs Python 3.11 or newer; try make PYTHON=python3.12")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@
