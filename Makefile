# make quickstart   set up, then train and measure an EAGLE-3 head for the embedded target
# make test         set up, then run the tests
# make lint         set up, then ruff and pyright

RECIPE ?= recipes/smollm2-135m/quickstart.yaml
export PYTHON
BIN = .venv/bin

.PHONY: setup quickstart test lint format

setup:
	@bash .ci/setup.sh

quickstart: setup
	$(BIN)/python -m data_prep $(RECIPE)
	$(BIN)/accelerate launch --config_file recipes/accelerate/one_process.yaml train/eagle3.py $(RECIPE)
	$(BIN)/python -m eval $(RECIPE)

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
