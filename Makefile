# make demo   sets everything up and shows token merging at work on the two embedded models
# make test   sets everything up and runs all checks and tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.setup-done

.PHONY: setup demo test check browser format clean

setup: $(SETUP)

$(SETUP): pyproject.toml demo_model/pyproject.toml requirements/constraints.txt requirements/hosts.txt requirements/eval.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint requirements/constraints.txt --editable ".[dev]" --editable ./demo_model
	$(BIN)/pip install --quiet --no-deps --requirement requirements/hosts.txt --requirement requirements/eval.txt
	touch $@

DEMO := --prompt "a penguin on an orange and yellow striped background"
demo: $(SETUP)
	$(BIN)/tomesd demo $(DEMO) --overwrite --model transformer --preset balanced --out demo_output/transformer
	$(BIN)/tomesd demo $(DEMO) --overwrite --model unet --out demo_output/unet

check: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/update_docs.py --check

# For the tests of the page. Without one, and where none can be installed, they are skipped.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends chromium; } \
		|| echo "no chromium: the page is tested without a browser"

# One thread per worker: the models are tiny, and more threads only get in each other's way.
test: check browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

format: $(SETUP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python scripts/update_docs.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis demo_output
