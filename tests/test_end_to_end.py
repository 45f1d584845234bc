"""The commands of the README on the real target, into real vLLM, and the parity rule over what they made.

One short run: a part of the shipped answers, two minutes of training, a few prompts. It shows that the parts fit; how good a
head gets is the recipes' business.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

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
        "train.max_minutes=2",
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


def test_training_estimates_what_vllm_counts(run, monkeypatch, capsys):
    """Train = serve: AL~ of the training objective on an engine's own greedy answers is that engine's acceptance length within 2 %."""
    from train.estimate import main

    monkeypatch.chdir(ROOT)
    assert main([RECIPE, *run.overrides]) == 0
    compared = capsys.readouterr().out
    assert "eagle3 k=3 on embedded:eval, vLLM: AL " in compared and "eagle3 k=3 on embedded:eval, reference decoder: AL " in compared
