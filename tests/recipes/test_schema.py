"""Recipes are strict: unknown, contradictory and ill-typed keys fail with both values and the remedy."""

from pathlib import Path

import pytest
import yaml

from recipes.errors import RecipeError
from recipes.schema import load_recipe, parse_recipe

ROOT = Path(__file__).parents[2]
DEBUG = ROOT / "recipes/debug/eagle3.yaml"


def raw() -> dict:
    return yaml.safe_load(DEBUG.read_text()) | {"name": "x"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.max_step=3", r"unknown key train\.max_step; did you mean max_steps\?"),
        ("head.unrol_steps=3", r"unknown key head\.unrol_steps; did you mean unroll_steps\?"),
        ("trian.lr=1", r"unknown key trian; did you mean train\?"),
        ("objective.los=ce", r"unknown key objective\.los; did you mean loss\?"),
        ("train.lr=-1", r"train\.lr = -1"),
        ("head.unroll_steps=0", r"head\.unroll_steps = 0"),
        ("eval.k=[]", r"eval\.k = \[\]: .* at least 1"),
        ("eval.prompts=[]", r"eval\.prompts = \[\]: .* at least 1"),
        ("eval.concurrency=[]", r"eval\.concurrency = \[\]: .* at least 1"),
        ("train.lr=fast", r"train\.lr = 'fast'"),
        ("method=eagle9", r"'eagle9' is not one of eagle3"),
        ("train.epochs=2", r"train\.epochs=2 and train\.max_steps=40"),
        ("train.micro_batch_tokens=9999", r"micro_batch_tokens=9999 is larger than train\.tokens_per_step=1024"),
        ("eval.tree=eagle2", r"eval\.tree='eagle2' with eval\.engine='vllm'"),
        ("eval.ngram_min=9", r"ngram_min=9 is larger than eval\.ngram_max=5"),
        ("objective.lk_eta=2", r"lk_eta=2\.0 has no effect with objective\.loss='kl'"),
        ("train.lr", r"not of the form key\.sub=value"),
        ("method.x=1", r"method is a value in the recipe, not a block"),
        ("train.lr=[", r"not a YAML value"),
    ],
)
def test_bad_values(override, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(DEBUG, [override])


def test_numbers_in_scientific_notation():
    """YAML 1.1 reads 1e-3 as text; the command line must not."""
    assert load_recipe(DEBUG, ["train.lr=1e-3"]).train.lr == 1e-3


def test_length_is_needed():
    recipe = raw()
    del recipe["train"]["max_steps"]
    with pytest.raises(RecipeError, match="one of train.max_steps, train.epochs or train.max_minutes"):
        parse_recipe(recipe)


def test_missing_file_names_the_nearest(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(RecipeError, match=r"did you mean recipes/debug/eagle3\.yaml"):
        load_recipe("recipes/debug/eagel3.yaml")


def test_not_yaml(tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [")
    with pytest.raises(RecipeError, match="is not valid YAML"):
        load_recipe(bad)
    bad.write_text("- 1")
    with pytest.raises(RecipeError, match="must hold a mapping"):
        load_recipe(bad)


def test_resolved_recipe_reads_back():
    recipe = load_recipe(DEBUG)
    assert parse_recipe(yaml.safe_load(recipe.dump())) == recipe
