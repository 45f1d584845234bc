"""Suffix decoding: what followed the last tokens before, in this request or in earlier answers (arXiv 2411.04975; METHODS §10.6).

Two tries count runs of tokens: one of the request itself, prompt and answer, and one of all answers since the last
`forget`. For every length m of a match of the last tokens, the most frequent continuation is followed for at most
m * factor tokens while its probability, the product of count(child) / count(parent), stays above a floor; the draft with the
largest sum of probabilities wins, the longer match of two equal ones, the request's own trie before the other. Settings and
choices are those of vLLM's `suffix` and of the package behind it; among children of equal count the earliest wins here,
and there the order of a hash table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from eval.decode import Request, Settings
from eval.trees import chain_tree, check_fits
from eval.verify import Draft

DEPTH = 24  # tokens of the longest run that is counted: of the match and of what followed it together
FACTOR = 1.0  # drafted tokens at most, for each matched one
FLOOR = 0.1  # probability below which a path is not followed further


class Node:
    """A run of tokens: how often it occurred, and what came after it."""

    __slots__ = ("children", "count")

    def __init__(self):
        self.count = 0
        self.children: dict[int, Node] = {}


class Guess(NamedTuple):
    """A continuation, and the sum of its tokens' path probabilities."""

    tokens: list[int]
    score: float


class SuffixTree:
    """Counts of all runs of at most `depth` tokens in some sequences.

    >>> tree, ends = SuffixTree(3), []
    >>> tree.extend(ends, [7, 8, 7, 8, 9])
    >>> tree.count([7]), tree.count([7, 8]), tree.count([8, 9]), tree.count([9, 7])
    (2, 2, 1, 0)
    """

    def __init__(self, depth: int = DEPTH):
        self.depth, self.root = depth, Node()

    def extend(self, ends: list[Node], tokens: Iterable[int]) -> None:
        """Add tokens to one sequence. `ends` are its last runs, of 1, 2, … tokens: empty for a new sequence, updated in place."""
        for token in tokens:
            ends[:] = [node.children.setdefault(token, Node()) for node in (self.root, *ends[: self.depth - 1])]
            for node in (self.root, *ends):
                node.count += 1

    def find(self, tokens: Iterable[int]) -> Node | None:
        """The node of a run; None where it did not occur."""
        node = self.root
        for token in tokens:
            if (child := node.children.get(token)) is None:
                return None
            node = child
        return node

    def count(self, tokens: Iterable[int]) -> int:
        """How often a run occurred."""
        node = self.find(tokens)
        return node.count if node else 0

    def guess(self, context: Sequence[int], k: int) -> Guess:
        """The best continuation of a context, at most k tokens; only matches shorter than the context are tried."""
        context, best = context[-self.depth :], Guess([], 0.0)
        for matched in range(1, len(context)):
            if (node := self.find(context[-matched:])) is None:
                break  # no longer one matches either
            guess = follow(node, min(k, int(matched * FACTOR)))
            if guess.score >= best.score:
                best = guess
        return best


def follow(node: Node, k: int) -> Guess:
    """The most frequent continuation of a run, token by token, until it gets too improbable."""
    tokens, score, probability = [], 0.0, 1.0
    while len(tokens) < k and node.children:
        token, child = max(node.children.items(), key=lambda item: item[1].count)
        probability *= child.count / node.count
        if probability < FLOOR:
            break
        tokens.append(token)
        score += probability
        node = child
    return Guess(tokens, score)


@dataclass
class Memory:
    """One request's part: its own trie, where its tokens end in both tries, and how many of them are in."""

    own: SuffixTree = field(default_factory=SuffixTree)
    own_ends: list[Node] = field(default_factory=list)
    past_ends: list[Node] = field(default_factory=list)
    taken: int = 0


class SuffixDrafter:
    """Deterministic chains of at most k tokens. What it remembers of answers grows until `forget`."""

    layers, sampled = list[int](), False

    def __init__(self, k: int):
        check_fits(k, 1)
        self.depth = k
        self.forget()

    def forget(self) -> None:
        """Drop all answers, so that a measurement owes nothing to an earlier one."""
        self.past, self.active = SuffixTree(), list[Request]()

    def start(self) -> Memory:
        return Memory()

    def draft(self, request: Request, settings: Settings) -> Draft:
        if request.state.taken == 0:
            self.active.append(request)
        for other in self.active:
            if other is request or other.finish_reason:  # the last tokens of a finished answer are remembered too
                self._take(other)
        self.active = [other for other in self.active if not other.finish_reason]
        own, past = (tree.guess(request.tokens, self.depth) for tree in (request.state.own, self.past))
        best = own if own.score >= past.score else past
        return Draft(chain_tree(request.tokens[-1], best.tokens), "deterministic")

    def _take(self, request: Request) -> None:
        """Count the tokens that came since the last time."""
        memory, answer_begins = request.state, len(request.prompt)
        new = request.tokens[memory.taken :]
        memory.own.extend(memory.own_ends, new)
        self.past.extend(memory.past_ends, request.tokens[max(memory.taken, answer_begins) :])
        memory.taken += len(new)
