"""Validation: per-depth acceptance on held-out rows, and the estimated acceptance length `AL~`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from train.objective import Output, simulate_chain
from train.packing import Batch, collate, fixed_batches


@torch.no_grad()
def validate(
    objective: nn.Module,
    source: Any,
    rows: list[int],
    layers: list[int],
    tokens: int,
    accelerator: Accelerator,
    served: Collection[int] = (),
) -> dict[str, Any]:
    """Loss, per-depth accuracy and AL~ over `rows`; every rank takes its share of the batches and sums are added up.

    Rows whose answers are the target's greedy ones estimate greedy serving; the others estimate sampling at the
    temperature they were written with. The two are counted apart.

    Args:
        served: chain lengths that are to be served (`eval.k`), for objectives whose chains must be counted one by one (`chain_hits`).

    Returns:
        {"loss": per supervised position of depth 0, "accuracy": [K] teacher-forced, unconditional,
        "al": {k: AL~ of a greedy chain of k, bonus token included; all k, or the `chain_hits` ones}, "rounds": {k: rounds behind it},
        "per_position": {k: unconditional acceptance at each drafted position}}, these three over greedy answers, or over
        all where none is greedy; "al_sampled": {k: AL~} over sampled answers, where there are both.
    """
    # Without accelerate's autocast around `forward` (steps have their own): rounded logits tie, and a tie would count as accepted.
    module = accelerator.unwrap_model(objective, keep_fp32_wrapper=False)
    was_training = module.training
    module.eval()
    sums: Tensor | None = None
    counted: dict[bool, Tensor] = {}
    lengths: list[int] = []
    for kind in (True, False):
        group = [row for row in rows if bool(source.greedy[row]) == kind]
        batches = list(fixed_batches(group, lambda row: int(source.lengths[row]), tokens))
        ranks, rank = accelerator.num_processes, accelerator.process_index
        for index in range(rank, -(-len(batches) // ranks) * ranks, ranks):
            picked = batches[index] if index < len(batches) else []
            batch = collate(source.read_rows(picked, layers), layers, source.manifest.hidden_size).to(accelerator.device)
            out = module(batch)
            sums = out.sums() if sums is None else sums + out.sums()
            hits = chain_hits(module, out, batch, served)
            lengths = list(hits)
            counted[kind] = counted.get(kind, 0) + count_rounds(hits, batch)
    module.train(was_training)
    assert sums is not None, "called with at least one row"
    loss, correct, count = accelerator.reduce(sums, "sum").tolist()  # type: ignore[union-attr]
    chains = {
        kind: chain_figures(lengths, accelerator.reduce(counts, "sum"))  # type: ignore[arg-type]
        for kind, counts in sorted(counted.items(), reverse=True)
    }
    first, *others = [figures for figures in chains.values() if figures["al"]] or [chain_figures([], torch.zeros(0, 1))]
    return {
        "loss": loss[0] / max(count[0], 1),
        "accuracy": [c / max(n, 1) for c, n in zip(correct, count, strict=True)],
        **first,
        **({"al_sampled": others[0]["al"]} if others else {}),
    }


def chain_hits(module: nn.Module, out: Output, batch: Batch, served: Collection[int]) -> dict[int, Tensor]:
    """{k: bool [k, N]}: the hits of chains of k, for the longest and for all shorter ones that can be had.

    A draft mostly depends on those before it alone, so one pass has the hits of every k. An objective whose drafts see one
    another in both directions has `served_hits`, and drafts anew for each of the `served` lengths.
    """
    longest = len(out.hits)
    if not hasattr(module, "served_hits"):
        return {k: out.hits[:k] for k in range(1, longest + 1)}
    shorter = sorted({k for k in served if k < longest})
    return {k: module.served_hits(batch, k) for k in shorter} | {longest: out.hits}  # type: ignore[operator]


def count_rounds(hits: dict[int, Tensor], batch: Batch) -> Tensor:
    """[lengths, 1 + K]: for each chain length k, the rounds, then how many of them accepted the draft at each position."""
    counts = torch.zeros(len(hits), 1 + max(hits), dtype=torch.double, device=batch.input_ids.device)
    for line, (k, own) in zip(counts, hits.items(), strict=True):
        rounds = [accepted for span in simulate_chain(own, batch.loss_mask, batch.document, k) for accepted in span]
        line[0] = len(rounds)
        for position in range(k):
            line[1 + position] = sum(accepted > position for accepted in rounds)
    return counts


def chain_figures(lengths: list[int], counts: Tensor) -> dict[str, dict[int, Any]]:
    """`count_rounds` as AL~, rounds, and unconditional acceptance per position, for every k with a round (AL~ = 1 + sum of the rates)."""
    figures: dict[str, dict[int, Any]] = {"al": {}, "rounds": {}, "per_position": {}}
    for k, (rounds, *accepted) in zip(lengths, counts.tolist(), strict=True):
        if not rounds:  # answers shorter than a round: nothing was estimated
            continue
        rates = [a / rounds for a in accepted[:k]]
        figures["al"][k], figures["rounds"][k], figures["per_position"][k] = 1 + sum(rates), int(rounds), rates
    return figures
