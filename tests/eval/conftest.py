"""The tiny target with heads for it: one that has learnt a few of its answers by heart, and untrained ones, loose and exported."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from heads import head_class
from heads.eagle3 import Eagle3Head
from heads.target import TargetParts, load_target_model, read_target
from heads.vocab import DraftVocab, build_draft_vocab
from recipes.head_blocks import Eagle3Head as Eagle3Block
from recipes.schema import Recipe, Target, load_recipe
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
    figures = {"steps": 0, "validation": {"al": {1: 1.01, 2: 1.02, 3: 1.3}}}
    return export_head(recipe, head, target, random_rows(recipe.head.feature_layers(4), target.hidden_size), figures, recipe.export_dir)


def random_rows(layers: list[int], hidden_size: int) -> Any:
    """A feature store of one row, for the export's self-test."""
    states = {layer: torch.randn(12, hidden_size) for layer in layers}
    row = SimpleNamespace(input_ids=torch.arange(12), hidden=states, last_hidden=torch.randn(12, hidden_size))
    return SimpleNamespace(supervised=torch.tensor([5]), read=lambda number, wanted: row)


PROMPTS = [[72, 101, 108, 108, 111], [33], list(range(40, 57)), [200, 100, 50] * 9]  # of unequal lengths, one of a single token
LEARNT = 32  # tokens of each greedy answer that `trained_head` has seen


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    return PROMPTS


@pytest.fixture(scope="session")
def target(tiny_target: Path) -> Target:
    return Target(path=str(tiny_target), dtype="float32")


@pytest.fixture(scope="session")
def model(target: Target) -> PreTrainedModel:
    return load_target_model(target)


@pytest.fixture(scope="session")
def parts(target: Target) -> TargetParts:
    return read_target(target)


@pytest.fixture(scope="session")
def greedy_of() -> Callable[[PreTrainedModel], Callable[[list[int], int], list[int]]]:
    """model → (prompt, length) → the model's own greedy answer, from fresh forwards without any cache."""

    def make(model: PreTrainedModel) -> Callable[[list[int], int], list[int]]:
        known: dict[tuple[int, ...], list[int]] = {}

        def answer(prompt: list[int], length: int) -> list[int]:
            ids = prompt + known.get(tuple(prompt), [])
            while len(ids) < len(prompt) + length:
                with torch.no_grad():
                    ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            known[tuple(prompt)] = ids[len(prompt) :]
            return ids[len(prompt) : len(prompt) + length]

        return answer

    return make


@pytest.fixture(scope="session")
def greedy(greedy_of: Callable, model: PreTrainedModel) -> Callable[[list[int], int], list[int]]:
    """The tiny target's own greedy answer."""
    return greedy_of(model)


@pytest.fixture(scope="session")
def head(parts: TargetParts) -> Eagle3Head:
    """Untrained, over a reduced draft vocabulary (every second byte)."""
    torch.manual_seed(1)
    return Eagle3Head(Eagle3Block(aux_layers=[1, 2, 3], draft_vocab_size=128), parts, DraftVocab(torch.arange(0, 256, 2), 260)).eval()


@pytest.fixture(scope="session")
def trained_recipe(recipe_arguments: Callable[..., list[str]]) -> Recipe:
    path, *overrides = recipe_arguments("head.draft_vocab_size=200", "head.unroll_steps=4", "objective.loss=ce")
    return load_recipe(path, overrides)


@pytest.fixture(scope="session")
def trained_head(trained_recipe: Recipe, parts: TargetParts, model: PreTrainedModel, greedy: Callable) -> Eagle3Head:
    """Overfitted on the greedy answers to PROMPTS: there it has all drafts accepted, elsewhere few."""
    from train.eagle3 import Eagle3Objective
    from train.packing import Batch

    rows = [torch.tensor(prompt + greedy(prompt, LEARNT)) for prompt in PROMPTS]
    counts = torch.bincount(torch.cat(rows), minlength=260)
    vocab = build_draft_vocab(counts, 200, [])
    torch.manual_seed(1)
    head = Eagle3Head(trained_recipe.head, parts, vocab)  # type: ignore[arg-type]
    with torch.no_grad():
        outputs = [model(row[None], output_hidden_states=True).hidden_states for row in rows]
    batch = Batch(
        input_ids=torch.cat(rows),
        loss_mask=torch.cat([torch.arange(len(row)) >= len(prompt) for row, prompt in zip(rows, PROMPTS, strict=True)]),
        document=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(row) for row in rows])),
        positions=torch.cat([torch.arange(len(row)) for row in rows]),
        hidden={layer: torch.cat([hidden[layer][0] for hidden in outputs]) for layer in (1, 2, 3)},
        last_hidden=torch.cat([hidden[-1][0] for hidden in outputs]),
    )
    objective = Eagle3Objective(head, parts, trained_recipe.objective)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        output = objective(batch)
        if output.loss_sum < 0.1 * batch.supervised and bool((output.depth_correct == output.depth_count).all()):
            break
        (output.loss_sum / batch.supervised).backward()
        optimizer.step()
    return head.eval()


@pytest.fixture(scope="session")
def trained_export(trained_recipe: Recipe, trained_head: Eagle3Head, parts: TargetParts) -> Path:
    """`trained_head` in export form. Read it, do not write into it."""
    return export_head(trained_recipe, trained_head, parts, random_rows([1, 2, 3], 64), {"steps": 40}, trained_recipe.export_dir)
