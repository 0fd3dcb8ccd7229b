# Everything a newcomer needs: `make demo` shows it, `make test` proves it. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: help setup demo docs dist test test-all accelerator fuzz mutants check format bench clean

help:
	@echo "make setup        create .venv with all that the demo, the tests and the benchmarks need"
	@echo "make demo         train a small LLaMA on two ranks, kill one, go on, export, generate (about three minutes)"
	@echo "make docs         build the site of the pages into site/, links checked"
	@echo "make dist         build a wheel and a source distribution into dist/"
	@echo "make test         run the tests, each behaviour once (WORKERS=N at a time; two cores serve four)"
	@echo "make test-all     run all combinations, long curves, a user's first hour, the simulated accelerator in all orders"
	@echo "make accelerator  run those on the simulated accelerator in all orders of its streams"
	@echo "make fuzz         hostile frames and files, FUZZ=10000 of each kind"
	@echo "make mutants      take out each wait on a device, and change what decides in 300 places: a test must notice"
	@echo "make check        formatting, lint and types"
	@echo "make format       rewrite the code in the project's format"
	@echo "make bench        every benchmark in its quick form"

setup: $(STAMP)

# Torch comes first and alone: with its version settled, no other package's range can pull another build of it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Phalanx needs Python 3.11 or newer; name one with: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "Python's venv module is missing; install it (Debian, Ubuntu: apt-get install python3-venv)"; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@# The tests compare our files with those of Megatron's own package; of what it asks for they need nothing.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps "$$(grep '^megatron-core==' constraints.txt)"
	@touch $(STAMP)

demo: setup
	$(BIN)/python -m phalanx demo

# Needs no more than the pages and docstrings; the packages of the extra `docs` come here alone, tests do without.
docs: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt mkdocs-material 'mkdocstrings[python]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html; for its search: python3 -m http.server -d site"

# What an earlier build has left would be taken into the wheel.
dist: setup
	rm -rf build
	$(BIN)/python -c 'from setuptools import build_meta as b; b.build_sdist("dist"); b.build_wheel("dist")'

# Files stay whole, so that what one of them sets up is set up once; tests/conftest.py puts those that take long first.
WORKERS ?= 4
test: setup
	@$(BIN)/python -m tests.accelerator.build
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=40

# All combinations and curves at their full length as well, and the simulated accelerator in all orders.
test-all: export PHALANX_TEST_ALL = 1
test-all: export PHALANX_TEST_ACCELERATOR = all
test-all: test

# Everything on the simulated accelerator: all orders, all seeds. One file holds most of it: its tests are shared out.
accelerator: setup
	@$(BIN)/python -m tests.accelerator.build
	PHALANX_TEST_ALL=1 PHALANX_TEST_ACCELERATOR=all $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/accelerator

# Hostile frames and files by the thousand; what was changed in the one that fails is shown, smallest first.
FUZZ ?= 10000
fuzz: setup
	PHALANX_TEST_FUZZ=$(FUZZ) $(BIN)/python -m pytest -n $(WORKERS) tests/cluster/test_hostile_frames.py tests/unit/test_hostile_files.py

# The package with one line other than it is, again and again: the tests that know the line must fail.
mutants: export PHALANX_TEST_ALL = 1
mutants: setup
	@$(BIN)/python -m tests.accelerator.build
	$(BIN)/python -m tests.accelerator.mutants
	$(BIN)/python -m tests.mutants

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	@for file in $$(grep -l __main__ benchmarks/*.py | grep -v pictures.py); do echo "== $$file"; $(BIN)/python $$file --quick || exit 1; done

clean:
	rm -rf $(VENV) runs out build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
