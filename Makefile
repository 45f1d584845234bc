# make quickstart   set up, then train and measure an EAGLE-3 head for the embedded target
# make test         set up, then run the tests
# make lint         set up, then ruff and pyright
# make row METHOD=medusa   one row of the table in docs/comparison.md: eight minutes of training on one core, vLLM, the reference decoder, AL~

RECIPE ?= recipes/smollm2-135m/quickstart.yaml
export PYTHON
BIN = .venv/bin

# Every method gets the same answers and the same budget. PARD starts from the draft model's row and Medusa-2 from Medusa's, so those go first.
# MORE holds further overrides.
ROW = recipes/smollm2-135m/$(METHOD).yaml train.dir=runs/row-$(METHOD) export.dir=exports/row-$(METHOD) eval.dir=reports/row-$(METHOD) \
  train.threads=1 train.max_minutes=8 train.eval_every=200 train.save_every=100000 \
  eval.methods=[baseline,head] eval.max_prompts=16 eval.max_tokens=96 eval.concurrency=[16] \
  $(if $(filter pard pard2,$(METHOD)),head.init_from=exports/row-draft_model) \
  $(if $(filter medusa2,$(METHOD)),head.init_from=exports/row-medusa) \
  $(if $(filter eagle3,$(METHOD)),data.prompts=[embedded:answers-smollm2-135m] data.holdout=0.03 features.dir=features/smollm2-135m) $(MORE)

.PHONY: setup quickstart row test lint format

setup:
	@bash .ci/setup.sh

quickstart: setup
	$(BIN)/python -m data_prep $(RECIPE)
	$(BIN)/accelerate launch --config_file recipes/accelerate/one_process.yaml train/eagle3.py $(RECIPE)
	$(BIN)/python -m eval $(RECIPE)

row: setup
	$(BIN)/python -m data_prep $(ROW)
	$(BIN)/accelerate launch --config_file recipes/accelerate/one_process.yaml train/$(shell sed -n 's/^method: //p' $(firstword $(ROW))).py $(ROW)
	$(BIN)/python -m eval $(ROW)
	$(BIN)/python -m eval.parity $(ROW) eval.methods=[head] eval.prompts=[embedded:eval] eval.k=[3]
	$(BIN)/python -m train.estimate $(ROW)

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
