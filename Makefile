# `make test` and `make demo` work on a fresh machine: they make a virtual environment in .venv and
# install polyscan and its tools there, once. Where an NVIDIA driver is present, the environment
# sees the packages of $(PYTHON), so that a torch built for CUDA is kept.

PYTHON ?= python3
VENV   ?= .venv
# installed first where no driver is present
TORCH  ?= torch==2.13.0
TRITON ?= triton==3.6.0
# e.g. make test PYTEST_ARGS='-x -k dispatch'
PYTEST_ARGS ?=

BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check install -q
STAMP := $(VENV)/.installed

.PHONY: help demo test lint types clean

help:
	@echo "make demo    run the demonstration"
	@echo "make test    lint, types and the test suite (PYTEST_ARGS=... goes to pytest)"
	@echo "make lint    ruff: rules and formatting"
	@echo "make types   mypy --strict over polyscan/ and backends/"
	@echo "make clean   remove caches and build output; the environment stays in $(VENV)"
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) TORCH=$(TORCH)"

demo: $(STAMP)
	$(BIN)/python -m polyscan demo

test: lint types
	TRITON_INTERPRET=1 $(BIN)/pytest -q --backend triton tests/test_backends.py
	$(BIN)/pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	if nvidia-smi >/dev/null 2>&1; then \
	    echo "NVIDIA driver found: installing into $(VENV) beside the torch that is there"; \
	    test -x $(BIN)/python || $(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
	    echo "No NVIDIA driver: installing into $(VENV) with $(TORCH)"; \
	    test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); \
	    $(PIP) '$(TORCH)' '$(TRITON)' -c constraints.txt; \
	fi; \
	$(PIP) -e '.[dev]' -c constraints.txt; \
	touch $@

clean:
	rm -rf build dist *.egg-info demo-output .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . \( -path ./.git -o -path ./$(VENV) \) -prune -o -type d -name __pycache__ -exec rm -rf {} +
