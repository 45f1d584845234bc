"""Validation: per-depth acceptance on held-out rows, and the estimated acceptance length `AL~`."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from train.objective import Output, simulate_chain
from train.packing import Batch, collate, fixed_batches


@torch.no_grad()
def validate(
    objective: nn.Module, source: Any, rows: list[int], layers: list[int], tokens: int, accelerator: Accelerator
) -> dict[str, Any]:
    """Loss, per-depth accuracy and AL~ over `rows`; every rank takes its share of the batches and sums are added up.

    Rows whose answers are the target's greedy ones estimate greedy serving; the others estimate sampling at the
    temperature they were written with. The two are counted apart.

    Returns:
        {"loss": per supervised position of depth 0, "accuracy": [K] teacher-forced, unconditional,
        "al": {k: AL~ of a greedy chain of k, bonus token included}, "rounds": {k: rounds behind it},
        "per_position": {k: unconditional acceptance at each drafted position}}, these three over greedy answers, or over
        all where none is greedy; "al_sampled": {k: AL~} over sampled answers, where there are both.
    """
    module = accelerator.unwrap_model(objective)
    was_training = module.training
    module.eval()
    sums: Tensor | None = None
    counted: dict[bool, Tensor] = {}
    for kind in (True, False):
        group = [row for row in rows if bool(source.greedy[row]) == kind]
        batches = list(fixed_batches(group, lambda row: int(source.lengths[row]), tokens))
        ranks, rank = accelerator.num_processes, accelerator.process_index
        for index in range(rank, -(-len(batches) // ranks) * ranks, ranks):
            picked = batches[index] if index < len(batches) else []
            batch = collate(source.read_rows(picked, layers), layers, source.manifest.hidden_size).to(accelerator.device)
            out = module(batch)  # without autocast: rounded logits tie, and a tie would count as accepted
            sums = out.sums() if sums is None else sums + out.sums()
            counted[kind] = counted.get(kind, 0) + count_rounds(out, batch)
    module.train(was_training)
    assert sums is not None, "called with at least one row"
    loss, correct, count = accelerator.reduce(sums, "sum").tolist()  # type: ignore[union-attr]
    chains = {kind: chain_figures(accelerator.reduce(counts, "sum")) for kind, counts in sorted(counted.items(), reverse=True)}  # type: ignore[arg-type]
    first, *others = chains.values()
    return {
        "loss": loss[0] / max(count[0], 1),
        "accuracy": [c / max(n, 1) for c, n in zip(correct, count, strict=True)],
        **first,
        **({"al_sampled": others[0]["al"]} if others else {}),
    }


def count_rounds(out: Output, batch: Batch) -> Tensor:
    """[K, 1 + K]: for chains of k = 1..K, the rounds, then how many of them accepted the draft at each position."""
    K = len(out.hits)
    counts = torch.zeros(K, 1 + K, dtype=torch.double, device=out.hits.device)
    for k in range(1, K + 1):
        rounds = [accepted for span in simulate_chain(out.hits, batch.loss_mask, batch.document, k) for accepted in span]
        counts[k - 1, 0] = len(rounds)
        for position in range(k):
            counts[k - 1, 1 + position] = sum(accepted > position for accepted in rounds)
    return counts


def chain_figures(counts: Tensor) -> dict[str, dict[int, Any]]:
    """`count_rounds` as AL~, rounds, and unconditional acceptance per position, for every k (AL~ = 1 + sum of the rates)."""
    figures: dict[str, dict[int, Any]] = {"al": {}, "rounds": {}, "per_position": {}}
    for k, (rounds, *accepted) in enumerate(counts.tolist(), start=1):
        rates = [a / rounds for a in accepted[:k]] if rounds else []
        figures["al"][k], figures["rounds"][k], figures["per_position"][k] = 1 + sum(rates), int(rounds), rates
    return figures
