# make demo: a raw loop on 2 processes and on 1, side by side.   make test: lint, types, all tests.
# Both make .venv first. An existing .venv is used as it is; torch is installed only where it has none.

PYTHON ?= python3
VENV ?= .venv
# Any build of torch >= 2.11 will do. On Linux the plain PyPI one brings CUDA (gigabytes); for the CPU only:
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input install

.PHONY: demo test lint types tests quick clean help
.NOTPARALLEL:

help:
	@echo "make demo    the same loop on 2 processes and on 1, side by side"
	@echo "make test    lint, types and all tests"
	@echo "make lint | types | tests | quick (the tests without the slow ones) | clean (removes $(VENV))"

demo: $(VENV)/.examples
	@$(BIN)/python examples/demo.py

test: lint types tests

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

tests: $(VENV)/.dev
	$(BIN)/python -m pytest

quick: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow"

clean:
	rm -rf $(VENV)

# Stamps: a step runs again only when what it was made from has changed.
$(VENV)/.made:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10))" || \
		{ echo "$(PYTHON) is missing or older than 3.10. Write: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) -m venv failed. On Debian and Ubuntu: \
	apt install python3-venv. Or write: make PYTHON=/path/to/another/python3 ..." >&2; rm -rf $(VENV); exit 1; }
	@touch $@

$(VENV)/.torch: $(VENV)/.made
	@$(BIN)/python -c "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)" || \
		{ echo "installing $(TORCH) (a large download)" && $(PIP) $(TORCH); }
	@touch $@

$(VENV)/.examples: $(VENV)/.torch pyproject.toml
	@echo "installing torch-fabric[examples]"
	@$(PIP) --editable ".[examples]"
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@echo "installing torch-fabric[dev]"
	@$(PIP) --editable ".[dev]"
	@touch $@ $(VENV)/.examples
