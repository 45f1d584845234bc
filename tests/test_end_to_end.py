"""The commands of the README on the real target, into real vLLM, and the parity rule over what they made.

One short run: a part of the shipped answers, a minute of training, a few prompts. It shows that the parts fit; how good a
head gets is the recipes' business.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[1]
RECIPE = "recipes/smollm2-135m/quickstart.yaml"

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """data_prep, train and eval as a user types them; returns folders, overrides and the report."""
    out = tmp_path_factory.mktemp("short")
    folders = SimpleNamespace(features=out / "features", run=out / "run", export=out / "export", report=out / "report")
    overrides = [
        f"features.dir={folders.features}",
        f"train.dir={folders.run}",
        f"export.dir={folders.export}",
        f"eval.dir={folders.report}",
    ]
    overrides += ["data.max_rows=90", "head.draft_vocab_size=8192", "train.tokens_per_step=1024", "train.micro_batch_tokens=1024"]
    overrides += [
        "train.max_minutes=1.5",
        "train.eval_every=1000",
        "eval.methods=[baseline,head]",
        "eval.max_prompts=10",
        "eval.max_tokens=40",
    ]
    # Head and n-gram are the recipe's; n-gram has its own tests, and every engine costs half a minute here.
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    outputs = []
    for command in (["-m", "data_prep"], ["train/eagle3.py"], ["-m", "eval"]):
        done = subprocess.run(
            [sys.executable, *command, RECIPE, *overrides], cwd=ROOT, env=env, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        outputs.append(done.stdout)
    report = json.loads((folders.report / "report.json").read_text())
    return SimpleNamespace(folders=folders, overrides=overrides, outputs=outputs, report=report, env=env)


def of(report: dict, method: str) -> dict:
    return next(r for r in report["runs"] if r["method"] == method)


def test_each_command_names_the_next(run):
    prepared, trained, evaluated = run.outputs
    assert f"accelerate launch train/eagle3.py {RECIPE}" in prepared
    assert f"next: python -m eval {RECIPE}" in trained
    assert str(run.folders.report / "report.html") in evaluated and "try next" in evaluated and str(run.folders.export) in evaluated


def test_the_head_accepts_and_loses_nothing(run):
    head, baseline = of(run.report, "eagle3"), of(run.report, "baseline")
    assert head["acceptance_length"] > 1.15 and baseline["acceptance_length"] == 1.0
    assert head["acceptance_length"] == pytest.approx(1 + sum(head["per_position"]))
    same = [r["first_difference"] is None for r in head["requests"]]
    assert sum(same) == len(same), "greedy output with the head is the output without it, token for token (float32)"


def test_rerun_has_nothing_to_do(run):
    done = subprocess.run(
        [sys.executable, "-m", "data_prep", RECIPE, *run.overrides], cwd=ROOT, env=run.env, capture_output=True, text=True
    )
    assert done.returncode == 0 and "nothing to do" in done.stdout


def test_reference_decoder_and_vllm_accept_the_same(run, monkeypatch):
    """DESIGN §8, the parity rule: at least 95 % of requests equal in every round, acceptance length within 2 %."""
    from eval.parity import compare_engines

    monkeypatch.chdir(ROOT)
    assert compare_engines(RECIPE, [*run.overrides, "eval.methods=[head]"]) == 0


def test_training_estimates_what_vllm_counts(run):
    """Train = serve: AL~ of the training objective on vLLM's own greedy answers is vLLM's acceptance length within 2 %."""
    from data_prep.extract import load_extraction_model, online_features
    from eval.prepare import read_prompts
    from heads.exported import load_exported_head
    from heads.target import read_target
    from recipes.schema import load_recipe
    from train.eagle3 import Eagle3Objective
    from train.objective import simulate_chain
    from train.packing import collate

    recipe = load_recipe(ROOT / RECIPE, run.overrides)
    target = read_target(recipe.target)
    head, trained = load_exported_head(run.folders.export, target)
    (prompts,) = read_prompts(recipe).values()
    cells = [json.loads(line) for line in (run.folders.report / "cells.jsonl").read_text().splitlines()]
    requests = next(cell["requests"] for cell in cells if cell["method"] == "eagle3")
    rows, masks = [], []
    for prompt, request in zip(prompts, requests, strict=True):
        answer = request["output_ids"]
        rows.append(torch.tensor([*prompt, *answer]))
        masks.append(torch.tensor([False] * len(prompt) + [True] * len(answer)))
    layers = recipe.head.feature_layers(target.num_layers)
    features = online_features(load_extraction_model(recipe.target), rows, masks, layers, 2048)
    batch = collate(features, layers, target.hidden_size)
    with torch.no_grad():
        out = Eagle3Objective(head, target, trained.objective)(batch)
    rounds = [accepted for span in simulate_chain(out.hits, batch.loss_mask, batch.document, 3) for accepted in span]
    estimate = 1 + sum(rounds) / len(rounds)
    # vLLM counts the rounds at an answer's end too; leave out those that reach past it, as the estimate does.
    counted = []
    for request in requests:
        position = 1
        for accepted in request["accepted"]:
            if position + 3 <= len(request["output_ids"]) - 1:
                counted.append(accepted)
            position += accepted + 1
    assert estimate == pytest.approx(1 + sum(counted) / len(counted), rel=0.02)
