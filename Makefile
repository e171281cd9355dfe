# make demo: a raw loop on 2 processes and on 1, side by side.   make test: lint, types, tests.
# All make .venv first. An existing .venv is used as it is; torch is installed only where it has none.

PYTHON ?= python3
VENV ?= .venv
# Any build of torch >= 2.9 will do; another VENV keeps several apart. On Linux the plain PyPI one brings CUDA (gigabytes); for the CPU only:
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input install

# Tests run in so many processes at once; each has up to 4 ranks, which often wait for each other.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: docs dist demo test test-all lint types tests slow-tests test-device test-engines test-ecosystem test-pythons test-torch fuzz clean help
.NOTPARALLEL:

help:
	@echo "make demo    the same loop on 2 processes and on 1, side by side"
	@echo "make test    lint, types and the tests but for the slow ones"
	@echo "make test-all   those, make docs, whole jobs under every launcher (slow), make test-device and make test-engines"
	@echo "make dist    a wheel and an sdist in dist/; the wheel runs an example in a fresh environment"
	@echo "make docs    these pages as a site: site/index.html (needs no torch)"
	@echo "make fuzz    random user programs, ranks against one process: make fuzz MINUTES=10 SEED=0"
	@echo "make lint | types | tests | slow-tests | clean (removes $(VENV))"
	@echo "make test-device   what can differ on an accelerator, on a pretend one (needs a C++ compiler)"
	@echo "make test-ecosystem   Hugging Face, peft, WebDataset, loggers, the report and the pages in a browser, likewise (a part of make test-engines)"
	@echo "make test-pythons PYTHONS=\"3.10 3.13\"   unit tests, launches and the demo on each Python that is installed"
	@echo "make test-torch TORCH_VERSIONS=\"2.9.1 2.15.0\"   tests and the demo on each version of torch"
	@echo "make test-engines ENGINES=\"horovod ray\"   engines of others with their packages, each in an environment of its own"

demo: $(VENV)/.examples
	@$(BIN)/python examples/demo.py

test: lint types tests

test-all: test docs slow-tests test-device test-engines

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

tests: $(VENV)/.dev
	$(PYTEST) -m "not slow or smoke"

slow-tests: $(VENV)/.dev
	$(PYTEST) -m "slow and not smoke"

# In processes of their own: with the folder on the path `import torch` gives the device, to all ranks, too.
# tests/gpu by the script for a machine with a GPU, so that it cannot rot.
test-device: $(VENV)/.dev
	@status=0; PYTHON=$(BIN)/python bash tests/gpu/run.sh --pretend || status=1; \
		PYTHONPATH=$(CURDIR)/tests/pretend/device \
		$(PYTEST) -m device tests/pretend tests/data tests/strategies tests/test_frames.py || status=1; exit $$status

# Engines of others (tests/integrations): what cannot be installed is skipped, and said at the end. All, unless named.
ENGINES ?=

test-engines: $(VENV)/.dev
	$(BIN)/python tests/integrations $(ENGINES)

# What people bring along. make test-engines has them, too.
test-ecosystem: $(VENV)/.dev
	$(BIN)/python tests/integrations docs huggingface loggers peft report webdataset

# Random user programs, on ranks and in plain torch (tests/fuzz). Another SEED is another million of programs.
MINUTES ?= 10
SEED ?= 0

# The same on other interpreters (tests/pythons.py): those installed, unless named. On Linux PyPI's torch brings CUDA.
PYTHONS ?=

test-pythons:
	@TORCH="$(TORCH)" $(PYTHON) tests/pythons.py $(PYTHONS)

# The same package on other versions of torch (tests/torch_versions.py), each in an environment of its own: gigabytes.
TORCH_VERSIONS ?= 2.9.1 2.15.0

test-torch:
	@WORKERS="$(WORKERS)" $(PYTHON) tests/torch_versions.py $(TORCH_VERSIONS)

# The pages of docs/ as a site, in an environment of its own, which needs no torch. A warning is an error.
docs:
	@test -x .venv-docs/bin/mkdocs || { $(PYTHON) -m venv .venv-docs && \
		.venv-docs/bin/python -m pip -qq --disable-pip-version-check --no-input install $(DOCS); }
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict --quiet
	@echo "open site/index.html"

# What a release consists of. The wheel is installed beside a fresh torch, and runs the demo from another folder.
dist:
	@test -d .venv-dist || $(PYTHON) -m venv .venv-dist
	@.venv-dist/bin/python -m pip -qq --disable-pip-version-check --no-input install build
	@rm -rf dist .venv-dist/fresh
	@.venv-dist/bin/python -m build --outdir dist . > .venv-dist/build.log 2>&1 || { cat .venv-dist/build.log; exit 1; }
	@$(PYTHON) -m venv .venv-dist/fresh
	@echo "installing $(TORCH) and $$(ls dist/*.whl) into .venv-dist/fresh (a large download)"
	@.venv-dist/fresh/bin/python -m pip -qq --disable-pip-version-check --no-input install $(TORCH)
	@.venv-dist/fresh/bin/python -m pip -qq --disable-pip-version-check --no-input install "$$(ls dist/*.whl)[examples]"
	@cd .venv-dist && fresh/bin/python -c "import fabric; print(fabric.__file__)" | grep -q /site-packages/
	@cd .venv-dist && fresh/bin/python $(CURDIR)/examples/demo.py
	@ls -l dist

fuzz: $(VENV)/.dev
	$(BIN)/python tests/fuzz --minutes $(MINUTES) --seed $(SEED)

clean:
	rm -rf $(VENV) .venv-dist .venv-docs .venv-engines .venv-pythons .venv-torch dist site

# The extra `docs` without the package itself and its torch.
DOCS := "mkdocs>=1.6" "mkdocs-material>=9.5" "mkdocstrings[python]>=0.27" ruff

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

$(VENV)/.dev: $(VENV)/.torch pyproject.toml tests/quick_imports.py
	@echo "installing torch-fabric[dev]"
	@$(PIP) --editable ".[dev]"
	@$(BIN)/python tests/quick_imports.py
	@touch $@ $(VENV)/.examples
