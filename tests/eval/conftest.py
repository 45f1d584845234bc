"""An export of the tiny target with random weights, as training would write it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from heads import head_class
from heads.target import read_target
from heads.vocab import DraftVocab
from recipes.schema import Recipe, load_recipe
from train.export import export_head

MakeRecipe = Callable[..., Recipe]


@pytest.fixture(scope="session")
def recipe_arguments(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """A function that gives `python -m eval`'s arguments: the debug recipe, every folder of it in a new temporary place."""

    def arguments(*overrides: str) -> list[str]:
        root = tmp_path_factory.mktemp("eval")
        folders = [f"{key}.dir={root / key}" for key in ("train", "export", "eval", "features")]
        return ["recipes/debug/eagle3.yaml", f"target.path={tiny_target}", *folders, *overrides]

    return arguments


@pytest.fixture(scope="session")
def exported(recipe_arguments: Callable[..., list[str]]) -> Path:
    """A random EAGLE-3 head of the tiny target in export form; it accepts next to nothing. Read it, do not write into it."""
    path, *overrides = recipe_arguments()
    recipe = load_recipe(path, overrides)
    target = read_target(recipe.target)
    vocab = DraftVocab(torch.arange(128), target.vocab_size)
    torch.manual_seed(0)
    head = head_class(recipe.method)(recipe.head, target, vocab)
    layers = recipe.head.feature_layers(target.num_layers)
    states = {layer: torch.randn(12, target.hidden_size) for layer in layers}
    row = SimpleNamespace(input_ids=torch.arange(12), hidden=states, last_hidden=torch.randn(12, target.hidden_size))
    rows = SimpleNamespace(supervised=torch.tensor([5]), read=lambda number, wanted: row)
    figures = {"steps": 0, "validation": {"al": {1: 1.01, 2: 1.02, 3: 1.3}}}
    return export_head(recipe, head, target, rows, figures, recipe.export_dir)
