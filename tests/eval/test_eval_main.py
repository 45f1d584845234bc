"""`python -m eval`: what it refuses before anything runs, and one run from the command line to the report."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eval.__main__ import main, next_command, serve_command
from eval.prepare import check_export, engines_of, fingerprint_of, model_length, read_prompts
from eval.records import read_records
from heads import head_class
from heads.pard import PROJECTION_FILES
from heads.target import read_target
from heads.vocab import DraftVocab
from recipes.errors import ExportError, RecipeError
from recipes.schema import Recipe, load_recipe
from tests.eval.conftest import random_rows
from train.export import export_head

Arguments = Callable[..., list[str]]
REQUIRED = [  # B31: what a server guesses where it is missing
    "eagle_aux_hidden_state_layer_ids",
    "num_aux_hidden_states",
    "target_hidden_size",
    "draft_vocab_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "rope_parameters",
    "head_dim",
    "max_position_embeddings",
]


def recipe_of(arguments: Arguments, *overrides: str) -> Recipe:
    path, *all_overrides = arguments(*overrides)
    return load_recipe(path, all_overrides)


@pytest.fixture
def copied(recipe_arguments: Arguments, exported: Path) -> Recipe:
    """A recipe whose export is a copy to be spoilt."""
    recipe = recipe_of(recipe_arguments)
    shutil.copytree(exported, recipe.export_dir)
    return recipe


def change_config(recipe: Recipe, change: Callable[[dict[str, Any]], Any]) -> None:
    file = recipe.export_dir / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def test_a_new_projection_is_a_new_head(copied: Recipe):
    """PARD-2's projection lies in a folder of its own below the weights; trained anew, its finished cells do not count any more."""
    file = copied.export_dir / PROJECTION_FILES[0]
    file.parent.mkdir()
    prints = [fingerprint_of(copied.export_dir)]
    for value in (0.0, 1.0):
        save_file({"target_proj.weight": torch.full((2, 2), value)}, file)
        prints.append(fingerprint_of(copied.export_dir))
    assert len(set(prints)) == 3 and prints[-1] == fingerprint_of(copied.export_dir)


def test_a_missing_export_names_the_command_that_makes_it(recipe_arguments: Arguments, capsys: pytest.CaptureFixture[str]):
    path, *overrides = recipe_arguments()
    assert main([path, *overrides]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no export at ") and error.count("\n") == 1
    assert f"accelerate launch train/eagle3.py {path}" in error and "python -m train.export" in error


def test_a_good_export_passes(copied: Recipe):
    meta = check_export(copied, read_target(copied.target))
    assert meta["speculative_config"] == {"method": "eagle3"} and meta["trained_max_length"] == copied.data.max_length


@pytest.mark.parametrize("field", REQUIRED)
def test_a_config_without_a_required_field_is_refused(copied: Recipe, field: str):
    """B31: eval compares config.json with what was trained and stops on absence."""
    change_config(copied, lambda config: config.pop(field))
    with pytest.raises(ExportError, match=field):
        check_export(copied, read_target(copied.target))


@pytest.mark.parametrize(
    ("field", "value"), [("norm_output", True), ("eagle_aux_hidden_state_layer_ids", [1, 2, 4]), ("architectures", ["X"])]
)
def test_a_config_that_was_altered_is_refused(copied: Recipe, field: str, value: Any):
    change_config(copied, lambda config: config.update({field: value}))
    with pytest.raises(ExportError, match=rf"{field} is .*trained was"):
        check_export(copied, read_target(copied.target))


def test_an_export_for_another_target_is_refused(copied: Recipe):
    file = copied.export_dir / "headstart.json"
    meta = json.loads(file.read_text())
    file.write_text(json.dumps(meta | {"target": meta["target"] | {"fingerprint": "feedfacefeedface"}}))
    with pytest.raises(ExportError, match="feedfacefeedface"):
        check_export(copied, read_target(copied.target))


def test_an_export_of_another_method_is_refused(copied: Recipe):
    file = copied.export_dir / "headstart.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"method": "medusa"}))
    with pytest.raises(ExportError, match="'medusa'.*'eagle3'"):
        check_export(copied, read_target(copied.target))


def test_fewer_heads_in_the_file_than_k_asks_for(recipe_arguments: Arguments, tiny_target: Path, capsys: pytest.CaptureFixture[str]):
    """VLLM_FORMATS §3: the server would make up the missing LM heads; the recipe alone, with its five heads, cannot tell."""
    overrides = recipe_arguments()[1:]
    few = load_recipe("recipes/debug/medusa.yaml", [*overrides, "head.num_heads=2", "eval.k=[2]"])
    target = read_target(few.target)
    head = head_class("medusa")(few.head, target, DraftVocab(torch.arange(target.vocab_size), target.vocab_size))
    export_head(few, head, target, random_rows([], target.hidden_size), {}, few.export_dir)
    assert check_export(few, target)["method"] == "medusa"
    for engine in ("vllm", "reference"):
        assert main(["recipes/debug/medusa.yaml", *overrides, "head.num_heads=5", "eval.k=[2,3]", f"eval.engine={engine}"]) == 2
        assert re.search(r"drafts 2 tokens in a round, and eval.k=\[2, 3\] asks for 3: lower eval.k to 2", capsys.readouterr().err)


def test_engines_of_a_recipe(recipe_arguments: Arguments, exported: Path):
    """The baseline is always measured; the head's own speculative_config and llm_kwargs come from the export."""
    asked = ["eval.methods=[ngram,head]", "eval.k=[1,4]", "eval.ngram_max=4", "eval.ngram_min=3", f"export.dir={exported}"]
    recipe = recipe_of(recipe_arguments, *asked)
    meta = {"speculative_config": {"method": "mtp"}, "llm_kwargs": {"hf_overrides": {"num_nextn_predict_layers": 1}}}
    engines, impossible = engines_of(recipe, meta)
    assert [(e.method, e.k) for e in engines] == [("baseline", 0), ("eagle3", 1), ("eagle3", 4), ("ngram", 1), ("ngram", 4)]
    assert engines[0].speculative_config is None and not impossible
    assert engines[2].speculative_config == {"method": "mtp", "model": str(exported), "num_speculative_tokens": 4}
    assert engines[2].llm_kwargs == meta["llm_kwargs"] and engines[2].fingerprint
    assert engines[4].speculative_config == {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 3}
    sampled = recipe_of(recipe_arguments, *asked, "eval.draft_sample_method=probabilistic")
    assert (engines_of(sampled, meta)[0][1].speculative_config or {})["draft_sample_method"] == "probabilistic"


def test_suffix_without_its_package_is_one_line(recipe_arguments: Arguments, monkeypatch: pytest.MonkeyPatch):
    """E03: names the package and the recipe key, whether or not this machine has the package."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "arctic_inference" else find(name, *rest))
    engines, impossible = engines_of(recipe_of(recipe_arguments, "eval.methods=[suffix]"), None)
    reason = impossible[engines[1]]
    assert "arctic-inference==0.1.1" in reason and "eval.methods" in reason and "\n" not in reason


def test_prompts_are_rendered_as_in_training(recipe_arguments: Arguments, tiny_tokenizer: Any):
    recipe = recipe_of(recipe_arguments, "eval.prompts=[embedded:eval]", "eval.max_prompts=3")
    prompts = read_prompts(recipe)["embedded:eval"]
    assert len(prompts) == 3
    for ids in prompts:
        text = tiny_tokenizer.decode(ids)
        assert (
            text.startswith("<|im_start|>")
            and text.endswith("<|im_start|>assistant\n")
            and ids.count(tiny_tokenizer.bos_token_id) == text.count("<|im_start|>")
        )


def test_a_prompt_that_does_not_fit_is_refused(recipe_arguments: Arguments):
    recipe = recipe_of(recipe_arguments, "eval.max_tokens=100", "eval.max_model_len=180", "eval.k=[3]")
    assert model_length(recipe, {"a": [[0] * 20]}, 512) == 128  # 20 + 100 + 4 fit into 128
    assert model_length(recipe, {"a": [[0] * 78]}, 512) == 180
    with pytest.raises(RecipeError, match=r"longest prompt of b has 90 tokens.*190.*eval.max_model_len=180"):
        model_length(recipe, {"a": [[0]], "b": [[0] * 90]}, 512)


def test_an_unknown_key_is_one_line(recipe_arguments: Arguments, capsys: pytest.CaptureFixture[str]):
    path, *overrides = recipe_arguments("eval.concurency=[4]")
    assert main([path, *overrides]) == 2
    assert "did you mean concurrency?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layout", "command"),
    [
        (
            "head",
            """vllm serve T --speculative-config '{"method": "m", "num_speculative_tokens": 3, "model": "E"}' --hf-overrides '{"n": 1}'""",
        ),
        ("mimo", """vllm serve E --speculative-config '{"method": "m", "num_speculative_tokens": 3}'"""),
    ],
)
def test_the_serving_command_is_whole(layout: str, command: str):
    """A head inside its target is served alone, one beside it with all that its export asks of the engine."""
    recipe = load_recipe("recipes/debug/mtp.yaml", [f"head.layout={layout}"])
    more = {"hf_overrides": {"n": 1}} if layout == "head" else {}
    assert serve_command(recipe, {"dir": "E", "speculative_config": {"method": "m"}, "llm_kwargs": more}, "T") == command


def test_the_next_command_measures_something_new(recipe_arguments: Arguments):
    recipe = recipe_of(recipe_arguments)
    assert next_command(recipe, "r.yaml", ["eval.prompts=[embedded:eval]", "eval.seed=1"]) == (
        "python -m eval r.yaml eval.seed=1 'eval.prompts=[mt_bench,humaneval]'"
    )


@pytest.mark.vllm
@pytest.mark.slow
def test_interrupted_and_run_again(recipe_arguments: Arguments, exported: Path, capsys: pytest.CaptureFixture[str]):
    """Ctrl-C keeps finished cells and leaves no process; the same command goes on from there to the report."""
    arguments = recipe_arguments(f"export.dir={exported}", "eval.max_prompts=2", "eval.max_tokens=8", "eval.concurrency=[1,2]")
    recipe = load_recipe(arguments[0], arguments[1:])
    cells = recipe.report_dir / "cells.jsonl"
    command = [sys.executable, "-m", "eval", *arguments]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert first.stdout is not None
    for line in first.stdout:
        if line.startswith("starting vLLM with eagle3"):  # the baseline is measured
            break
    os.killpg(first.pid, signal.SIGINT)  # as a terminal does: parent and child
    _, error = first.communicate(timeout=60)
    assert first.returncode == 130 and "finished cells are kept" in error
    with pytest.raises(ProcessLookupError):
        os.killpg(first.pid, 0)
    before = read_records(cells)
    assert len(before) == 2 and all("seconds" in record for record in before.values())

    assert main(arguments) == 0
    after = read_records(cells)
    assert len(after) == 4 and all(after[key] == record for key, record in before.items())
    shown = capsys.readouterr().out
    assert "2 of them already" in shown and "starting vLLM with baseline" not in shown
    for path in ("report.json", "report.md", "report.html"):
        assert (recipe.report_dir / path).is_file()
    report = json.loads((recipe.report_dir / "report.json").read_text())
    assert [(r["method"], r["concurrency"], r["identical_to_baseline"]) for r in report["runs"]] == [
        ("baseline", 1, None),
        ("baseline", 2, None),
        ("eagle3", 1, "2/2"),
        ("eagle3", 2, "2/2"),
    ]
    assert report["versions"]["torch"] and report["recipe"]["method"] == "eagle3" and report["prompts"]["embedded:eval"]["count"] == 2
    assert str(recipe.report_dir / "report.html") in shown and str(exported) in shown and "try next       python -m eval" in shown
