"""Small helpers that the prompt generators share."""

import random
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


def items(text: str, sep: str = ";") -> list[str]:
    """Splits a hand-written list. Entries between ";" may go over a line's end; with "|" (texts that hold ";") a new line splits too."""
    parts = text.replace("\n", "|").split("|") if sep == "|" else text.split(sep)
    return [" ".join(part.split()) for part in parts if part.strip()]


def paragraphs(text: str, keep_spaces: bool = False) -> list[str]:
    """Splits at blank lines. Line breaks inside a paragraph are only layout; `keep_spaces` spares the indents of code."""
    parts = [part.strip() for part in text.split("\n\n") if part.strip()]
    return [part.replace("\n", " ") if keep_spaces else " ".join(part.split()) for part in parts]


class Deck(Generic[T]):
    """Deals every item once before any item twice: even coverage, where random.choice would repeat some and miss others."""

    def __init__(self, rng: random.Random, source: Sequence[T]) -> None:
        self._rng = rng
        self._source = list(source)
        self._left: list[T] = []

    def deal(self) -> T:
        if not self._left:
            self._left = list(self._source)
            self._rng.shuffle(self._left)
        return self._left.pop()

    def hand(self, n: int) -> list[T]:
        """n different items, as long as the deck has n."""
        out: list[T] = []
        while len(out) < n:
            item = self.deal()
            if item not in out:
                out.append(item)
        return out


def a(noun: str) -> str:
    """The noun phrase with its indefinite article."""
    return ("an " if noun[0].lower() in "aeiou" else "a ") + noun
