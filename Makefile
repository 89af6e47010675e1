# make test   sets everything up and runs all checks and tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.setup-done

.PHONY: setup test check format clean

setup: $(SETUP)

$(SETUP): pyproject.toml requirements/constraints.txt requirements/hosts.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint requirements/constraints.txt --editable ".[dev]"
	$(BIN)/pip install --quiet --no-deps --requirement requirements/hosts.txt
	touch $@

check: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/update_readme.py --check

test: check
	$(BIN)/python -m pytest

format: $(SETUP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python scripts/update_readme.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
