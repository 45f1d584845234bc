"""`train.precision` and `features.precision`."""

from pathlib import Path

import pytest
import torch

from heads import head_class, precision
from heads.embedded import resolve_target
from heads.target import read_target
from heads.vocab import DraftVocab
from recipes.schema import load_recipe

DEBUG = sorted((Path(__file__).parents[2] / "recipes/debug").glob("*.yaml"))


@pytest.mark.parametrize(("setting", "expected"), [("fp32", False), ("bf16", True)])
def test_named(setting, expected):
    assert precision.in_bf16(setting) is expected


@pytest.mark.parametrize(("bf16", "expected"), [(0.4, True), (0.6, False), (30.0, False)])
def test_auto_takes_what_is_twice_as_fast(monkeypatch, bf16, expected):
    """A CPU that emulates bfloat16 trains in float32."""
    monkeypatch.setattr(precision.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(precision, "_product_seconds", lambda dtype: bf16 if dtype == precision.torch.bfloat16 else 1.0)
    assert precision.in_bf16("auto") is expected


def test_auto_measures_this_machine():
    assert isinstance(precision.in_bf16("auto"), bool)
    assert 0 < precision._product_seconds(precision.torch.float32, budget=0.01) < 5


@pytest.mark.parametrize("file", DEBUG, ids=lambda file: file.stem)
def test_frequencies_stay_exact(file, tmp_path_factory):
    """A head beside a bfloat16 target turns its queries and keys by the angles that it was trained with, thousands of tokens in."""
    recipe = load_recipe(file)
    path = str(resolve_target(recipe.target.path, root=tmp_path_factory.getbasetemp() / "precision"))
    target = read_target(recipe.target.model_copy(update={"path": path}))
    size = getattr(recipe.head, "draft_vocab_size", None) or target.vocab_size
    head = head_class(recipe.method)(recipe.head, target, DraftVocab(torch.arange(size), target.vocab_size))
    before = {name: buffer.clone() for name, buffer in head.named_buffers() if "inv_freq" in name}
    assert precision.cast(head, torch.device("cpu"), torch.bfloat16) is head and (before or recipe.method == "medusa")
    after = dict(head.named_buffers())
    assert all(torch.equal(after[name], exact) for name, exact in before.items())
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
