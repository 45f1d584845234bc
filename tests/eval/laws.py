"""The exact law of what a sampler returns, by walking through every random decision, and small language models to try it on."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from eval.trees import Shape, grow_shape, top_children
from eval.verify import Dice, Draft, sample_children, verify_tokenwise

Model = Callable[[tuple[int, ...]], Tensor]  # prefix -> distribution [V]


class ScriptedDice:
    """Dice that follow a script of choices, then take the first possible one, noting what else was possible."""

    def __init__(self, script: list[int]):
        self.script, self.choices, self.options, self.weight = script, [], [], 1.0

    def _choose(self, probabilities: list[float]) -> int:
        possible = [i for i, probability in enumerate(probabilities) if probability > 0]
        step = len(self.choices)
        choice = self.script[step] if step < len(self.script) else possible[0]
        self.choices.append(choice)
        self.options.append(possible)
        self.weight *= probabilities[choice]
        return choice

    def coin(self, probability: float) -> bool:
        return self._choose([1 - probability, probability]) == 1

    def draw(self, distribution: Tensor) -> int:
        return self._choose(distribution.tolist())


def enumerate_law(run: Callable[[Dice], tuple]) -> dict[tuple, float]:
    """The exact law of what `run` returns."""
    law: dict[tuple, float] = defaultdict(float)
    scripts: list[list[int]] = [[]]
    while scripts:
        dice = ScriptedDice(scripts.pop())
        law[run(dice)] += dice.weight
        for step in range(len(dice.script), len(dice.options)):
            scripts += [dice.choices[:step] + [other] for other in dice.options[step][1:]]
    return dict(law)


def random_model(seed: int, vocab: int, sharpness: float = 1.5) -> Model:
    """A language model on `vocab` tokens: an independent random distribution after every prefix."""
    generator = torch.Generator().manual_seed(seed)
    table: dict[tuple[int, ...], Tensor] = {}

    def distribution(prefix: tuple[int, ...]) -> Tensor:
        if prefix not in table:
            table[prefix] = (torch.randn(vocab, generator=generator, dtype=torch.float64) * sharpness).softmax(-1)
        return table[prefix]

    return distribution


def draft_with(shape: Shape, q: Model, sampling, dice: Dice) -> Draft:
    """Grow a tree of this shape with the draft model q; prefixes here leave the root out."""
    prefixes: list[tuple[int, ...]] = []

    def expand(parents: Tensor, tokens: Tensor) -> Tensor:
        nonlocal prefixes
        prefixes = [() if row < 0 else (*prefixes[row], token) for row, token in zip(parents.tolist(), tokens.tolist(), strict=True)]
        return torch.stack([q(prefix) for prefix in prefixes]).log()

    choose = top_children if sampling == "deterministic" else partial(sample_children, sampling=sampling, dice=dice)
    tree, rows = grow_shape(shape, 0, expand, choose)
    return Draft(tree, sampling, None if sampling == "deterministic" else rows)


def target_rows(draft: Draft, p: Model) -> Tensor:
    tokens = draft.tree.tokens.tolist()
    return torch.stack([p(tuple(tokens[i] for i in row.nonzero().flatten().tolist()[1:])) for row in draft.tree.mask])


def one_round(shape: Shape, p: Model, q: Model, sampling, verify=verify_tokenwise) -> Callable[[Dice], tuple]:
    """Draft, verify, and go on with plain sampling to a fixed length, so that rounds of different lengths can be compared."""

    def run(dice: Dice) -> tuple:
        draft = draft_with(shape, q, sampling, dice)
        tokens = verify(draft, target_rows(draft, p), dice).tokens
        while len(tokens) < shape.depth + 1:
            tokens.append(dice.draw(p(tuple(tokens))))
        return tuple(tokens)

    return run


def target_law(p: Model, vocab: int, length: int) -> dict[tuple, float]:
    return {
        sequence: math.prod(p(sequence[:i])[token].item() for i, token in enumerate(sequence))
        for sequence in itertools.product(range(vocab), repeat=length)
    }


def distance(law: dict[tuple, float], other: dict[tuple, float]) -> float:
    return max(abs(law.get(key, 0) - other.get(key, 0)) for key in law.keys() | other.keys())
