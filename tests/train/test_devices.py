"""What a step reads moves with the objective: a target's own tensors stay behind on the CPU when `.to(device)` takes it to a GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from heads import head_class
from heads.embedded import resolve_target
from heads.target import read_target
from heads.vocab import DraftVocab
from recipes.schema import load_recipe
from train.bench import random_batch
from train.objective import objective_class

DEBUG = Path(__file__).parents[2] / "recipes/debug"
CASES = [(path.stem, ()) for path in sorted(DEBUG.glob("*.yaml"))]
CASES += [(name, ("objective.loss=lk",)) for name in ("eagle3", "peagle", "mtp", "pard")]
CASES += [("eagle1", ("objective.top_k_weight=1.0",)), ("pard", ("objective.confidence_weights=true",))]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory):
    """A function: path of a tiny target in a recipe → its folder, made once."""
    root = tmp_path_factory.mktemp("targets")
    return lambda path: str(resolve_target(path, root=root))


@pytest.mark.parametrize(("name", "changes"), CASES, ids=lambda part: part if isinstance(part, str) else " ".join(part))
def test_a_step_reads_no_tensor_of_the_target(name, changes, targets):
    """With the target's tables replaced by NaN once the objective is built, losses stay numbers."""
    recipe = load_recipe(DEBUG / f"{name}.yaml", list(changes))
    recipe = recipe.model_copy(update={"target": recipe.target.model_copy(update={"path": targets(recipe.target.path)})})
    parts = read_target(recipe.target)
    target = replace(parts)
    size = getattr(recipe.head, "draft_vocab_size", None) or target.vocab_size
    vocab = DraftVocab(torch.arange(size), target.vocab_size)
    head = head_class(recipe.method)(recipe.head, target, vocab)
    objective = objective_class(recipe.method)(head, target, recipe.objective)
    for table in ("embed_tokens", "lm_head"):
        object.__setattr__(target, table, torch.full_like(getattr(target, table), float("nan")))
    batch = random_batch(48, 0.5, target, vocab, recipe.head.feature_layers(target.num_layers))
    for training in (True, False):
        out = objective.train(training)(batch)
        assert torch.isfinite(out.loss_sum) and torch.isfinite(out.depth_loss).all()
    out.loss_sum.backward()
