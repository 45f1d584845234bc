"""Whole runs of EAGLE-1 and Medusa-2 on the debug target: noise, dropout and schedules survive a kill; ranks take the same step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data_prep.__main__ import main as data_prep
from heads.exported import load_exported_head, with_own_target
from heads.target import read_target
from recipes.schema import Recipe, load_recipe
from train import loop
from train.eagle1 import Eagle1Objective
from train.export import export_run
from train.loop import fit
from train.medusa2 import Medusa2Objective

ROOT = Path(__file__).parents[2]
HASS = ["objective.passes=2", "objective.top_k_weight=1.0"]  # with the default noise
MEDUSA2 = [
    "method=medusa2",
    "objective.head_warmup=0.3",
    "objective.heads_schedule=sine",
    "objective.lora_rank=4",
]  # with the default dropout
CASES = {"hass": ("eagle1", "eagle1", Eagle1Objective, HASS), "medusa2": ("medusa", "medusa2", Medusa2Objective, MEDUSA2)}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Features of the debug recipes, made once: last hidden states only."""
    folder = tmp_path_factory.mktemp("features")
    assert data_prep([str(ROOT / "recipes/debug/eagle1.yaml"), f"features.dir={folder}"]) == 0
    return folder


def arguments(case: str, store: Path, out: Path, *changes: str) -> list[str]:
    recipe, _, _, own = CASES[case]
    folders = [f"features.dir={store}", f"train.dir={out}/run", f"export.dir={out}/export"]
    every = ["train.max_steps=6", "train.eval_every=100", "train.save_every=100", "train.log_every=1"]
    return [str(ROOT / f"recipes/debug/{recipe}.yaml"), *folders, *every, *own, *changes]


def recipe_for(*args) -> Recipe:
    path, *overrides = arguments(*args)
    return load_recipe(path, overrides)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(sorted((out / "run").glob("step_*"))[-1] / "model.safetensors")


def losses(out: Path) -> list[float]:
    return [record["loss"] for line in (out / "run/metrics.jsonl").read_text().splitlines() if "loss" in (record := json.loads(line))]


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_is_the_uninterrupted_run(case, store, tmp_path, monkeypatch):
    """DESIGN §6: same losses and weights, although every batch draws noise (EAGLE-1) or dropout (LoRA) and λ0 follows the run."""
    objective = CASES[case][2]
    fit(recipe_for(case, store, tmp_path / "whole"), objective)
    killed, original, calls = recipe_for(case, store, tmp_path / "killed", "train.save_every=2"), loop.take_step, []

    def dying(*args):
        calls.append(1)
        if len(calls) == 6:  # the last checkpoint is that of step 4
            raise RuntimeError("killed")
        return original(*args)

    monkeypatch.setattr(loop, "take_step", dying)
    with pytest.raises(RuntimeError, match="killed"):
        fit(killed, objective)
    monkeypatch.setattr(loop, "take_step", original)
    fit(killed, objective)
    whole, resumed = losses(tmp_path / "whole"), losses(tmp_path / "killed")
    assert resumed == whole[:5] + whole[4:]  # step 5 was taken twice, with the same loss
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_medusa2_from_checkpoint_to_evaluation(store, tmp_path):
    """A checkpoint exports like the run itself; the recipe's own target is replaced by the one that belongs to the heads."""
    recipe = recipe_for("medusa2", store, tmp_path)
    fit(recipe, Medusa2Objective)
    again = export_run(recipe.run_dir, None, tmp_path / "again")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("export-target", "again-target"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    own = with_own_target(recipe)
    assert own.target.path == str(tmp_path / "export-target") and own.target.dtype == recipe.target.dtype
    head, trained = load_exported_head(recipe.export_dir, read_target(own.target))
    assert trained.method == "medusa2" and json.loads((again / "headstart.json").read_text())["training"]["target_moved"]["kl"] > 0
    assert torch.equal(head.blocks[0].layers[0].weight, weights(tmp_path)["head.blocks.0.layers.0.weight"])


@pytest.mark.dist
@pytest.mark.parametrize(
    ("case", "deterministic"), [("hass", ["objective.noise=0"]), ("medusa2", ["objective.lora_dropout=0", "objective.head_warmup=0"])]
)
def test_two_ranks_take_the_same_step(case, deterministic, store, tmp_path):
    """B36, B38: two gloo processes and one give the same parameters after a step."""
    changes = [*deterministic, "train.max_steps=1", "train.warmup=0", "train.lr=1e-4", "train.micro_batch_tokens=512"]
    fit(recipe_for(case, store, tmp_path / "one", *changes), CASES[case][2])
    env = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29617"]
    command = [*launch, str(ROOT / f"train/{CASES[case][1]}.py"), *arguments(case, store, tmp_path / "two", *changes)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    a, b = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
