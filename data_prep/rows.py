"""Conversations → token rows: rendered, masked, split into training and validation, and summed up on one screen."""

from __future__ import annotations

import hashlib
from array import array
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from data_prep.conversations import Tally, held_out, read_conversations
from data_prep.progress import Progress
from data_prep.render import render_rows
from data_prep.store import Rows
from recipes.errors import DataError
from recipes.schema import Data


class RowSummary(NamedTuple):
    """Counts of one data set; `dropped` says why rows are missing."""

    counts: dict[str, int]
    dropped: dict[str, int]
    lengths: dict[str, int]  # tokens a row: min, p10, p50, p90, max

    def text(self) -> str:
        """One screen: kept, dropped by reason, supervised share, lengths."""
        c, n = self.counts, self.lengths
        dropped = ", ".join(f"{reason}={count:,}" for reason, count in sorted(self.dropped.items(), key=lambda item: -item[1])) or "none"
        return "\n".join(
            (
                f"rows kept      {c['rows']:,} ({c['validation_rows']:,} for validation, {c['greedy_rows']:,} greedy, "
                f"{c['duplicate_rows']:,} duplicates)",
                f"rows dropped   {sum(self.dropped.values()):,} ({dropped})",
                f"tokens         {c['tokens']:,}, supervised {c['supervised_tokens']:,} ({c['supervised_tokens'] / c['tokens']:.0%})",
                f"tokens a row   min {n['min']}, 10 % {n['p10']}, median {n['p50']}, 90 % {n['p90']}, max {n['max']}",
            )
        )


def make_rows(sources: list[str], data: Data, tokenizer: PreTrainedTokenizerBase) -> tuple[Rows, RowSummary]:
    """Render every usable conversation of `sources`.

    The hold-out goes by a hash of the prompt (`Conversation.key`): duplicates, and several answers to one prompt, stay on one side.
    With `data.holdout` above 0 and two different prompts, both sides get at least one row.

    Raises:
        DataError: nothing is left; names the reasons.
    """
    tally = Tally()
    input_ids, loss_mask, lengths = array("i"), bytearray(), []
    keys: list[str] = []
    greedy = bytearray()
    with Progress("rows", total=data.max_rows) as progress:
        conversations = read_conversations(sources, tally=tally, max_rows=data.max_rows)
        for conversation, row in render_rows(conversations, tokenizer, data, tally):
            input_ids.extend(row.input_ids)
            loss_mask.extend(row.loss_mask)
            lengths.append(len(row.input_ids))
            keys.append(conversation.key)
            greedy.append(conversation.greedy and row.own)  # text that was tokenised again need not be the target's own argmax
            progress.add(items=1, tokens=len(row.input_ids))
    for note, n in tally.notes.items():
        print(f"note           {n:,} rows: {note}")
    if not keys:
        raise DataError(f"no row is left of {', '.join(sources)}: {tally.summary()}\n{tally.explain()}")
    rows = Rows(
        input_ids=torch.frombuffer(input_ids, dtype=torch.int32),
        loss_mask=torch.frombuffer(loss_mask, dtype=torch.uint8),
        row_offsets=torch.tensor([0, *lengths]).cumsum(0),
        validation=torch.tensor(split(keys, data.holdout, data.seed), dtype=torch.uint8),
        greedy=torch.frombuffer(greedy, dtype=torch.uint8),
    )
    return rows, summarise(rows, tally)


def split(keys: list[str], holdout: float, seed: int) -> list[bool]:
    """Which rows are held out: equal keys on one side, and no side empty where there are two keys to share."""
    chosen = {key: held_out(key, holdout, seed) for key in keys}
    if holdout > 0 and len(chosen) > 1 and len(set(chosen.values())) == 1:  # a handful of rows
        first = min(chosen)
        chosen[first] = not chosen[first]
    return [chosen[key] for key in keys]


def summarise(rows: Rows, tally: Tally) -> RowSummary:
    """Counts and length percentiles."""
    lengths = rows.lengths
    texts = {hashlib.blake2b(rows.input_ids[rows.span(i)].numpy().tobytes(), digest_size=16).digest() for i in range(len(rows))}
    counts = {
        "rows": len(rows),
        "tokens": int(lengths.sum()),
        "supervised_tokens": int(rows.loss_mask.sum()),
        "validation_rows": int(rows.validation.sum()),
        "greedy_rows": int(rows.greedy.sum()),
        "duplicate_rows": len(rows) - len(texts),
    }
    quantiles = {name: int(lengths.double().quantile(q, interpolation="lower")) for name, q in _QUANTILES.items()}
    return RowSummary(counts, dict(tally.skipped), quantiles)


_QUANTILES = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}
