"""The tiny target with heads for it: one that has learnt a few of its answers by heart, and untrained ones, loose and exported."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from heads import head_class
from heads.eagle3 import Eagle3Head
from heads.target import TargetParts, load_target_model, read_target
from heads.vocab import DraftVocab
from recipes.methods import DistributionObjective
from recipes.methods import Eagle3Head as Eagle3Block
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
    layers = recipe.head.feature_layers(target.num_layers)
    states = {layer: torch.randn(12, target.hidden_size) for layer in layers}
    row = SimpleNamespace(input_ids=torch.arange(12), hidden=states, last_hidden=torch.randn(12, target.hidden_size))
    rows = SimpleNamespace(supervised=torch.tensor([5]), read=lambda number, wanted: row)
    figures = {"steps": 0, "validation": {"al": {1: 1.01, 2: 1.02, 3: 1.3}}}
    return export_head(recipe, head, target, rows, figures, recipe.export_dir)


PROMPTS = [[72, 101, 108, 108, 111], [33], list(range(40, 57)), [200, 100, 50] * 9]  # of unequal lengths, one of a single token
LEARNT = 40  # tokens of each greedy answer that `trained_head` has seen


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
def greedy(model: PreTrainedModel) -> Callable[[list[int], int], list[int]]:
    """The target's own greedy answer, from fresh forwards without any cache."""
    known: dict[tuple[int, ...], list[int]] = {}

    def answer(prompt: list[int], length: int) -> list[int]:
        ids = prompt + known.get(tuple(prompt), [])
        while len(ids) < len(prompt) + length:
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        known[tuple(prompt)] = ids[len(prompt) :]
        return ids[len(prompt) : len(prompt) + length]

    return answer


@pytest.fixture(scope="session")
def head(parts: TargetParts) -> Eagle3Head:
    """Untrained, over a reduced draft vocabulary (every second byte)."""
    torch.manual_seed(1)
    return Eagle3Head(Eagle3Block(aux_layers=[1, 2, 3], draft_vocab_size=128), parts, DraftVocab(torch.arange(0, 256, 2), 260)).eval()


@pytest.fixture(scope="session")
def trained_head(parts: TargetParts, model: PreTrainedModel, greedy: Callable) -> Eagle3Head:
    """Overfitted on the greedy answers to PROMPTS, full vocabulary: accepts most drafts there, few elsewhere."""
    from train.eagle3 import Eagle3Objective
    from train.packing import Batch

    torch.manual_seed(1)
    block = Eagle3Block(aux_layers=[1, 2, 3], draft_vocab_size=None, unroll_steps=4)
    head = Eagle3Head(block, parts, DraftVocab(torch.arange(260), 260))
    rows = [torch.tensor(prompt + greedy(prompt, LEARNT)) for prompt in PROMPTS]
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
    objective = Eagle3Objective(head, parts, DistributionObjective(loss="ce"))
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        (objective(batch).loss_sum / batch.loss_mask.sum()).backward()
        optimizer.step()
    return head.eval()
