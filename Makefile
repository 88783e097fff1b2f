# Targets for users and for CI. Everything is installed into virtual environments in the checkout.

PYTHON ?= python3
VENV := .venv
ORACLE_VENV := .venv-oracle
READY := $(VENV)/.ready
ORACLE_READY := $(ORACLE_VENV)/.ready
INSTALL := -m pip install --quiet --disable-pip-version-check

.PHONY: prefill test oracle lint clean

# Prefills the project's own sources over 8 virtual devices and checks the numbers.
prefill: $(READY)
	$(VENV)/bin/python -m slope_jax.launch.demo

test: $(READY)
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal

# Compares with transformers on torch, which has an environment of its own.
oracle: $(ORACLE_READY)
	$(ORACLE_VENV)/bin/python -m pytest tests/oracle/live.py

lint: $(READY)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) $(ORACLE_VENV)

$(READY): requirements.txt requirements-dev.txt requirements-bench.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; name one with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(INSTALL) -r requirements.txt -r requirements-dev.txt -r requirements-bench.txt
	$(VENV)/bin/python $(INSTALL) --no-deps --editable .
	touch $@

$(ORACLE_READY): requirements.txt requirements-dev.txt requirements-oracle.txt pyproject.toml
	$(PYTHON) -m venv $(ORACLE_VENV)
	$(ORACLE_VENV)/bin/python $(INSTALL) -r requirements.txt -r requirements-dev.txt -r requirements-oracle.txt
	$(ORACLE_VENV)/bin/python $(INSTALL) --no-deps --editable .
	touch $@
