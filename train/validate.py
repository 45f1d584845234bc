"""Validation: per-depth acceptance on held-out rows, and the estimated acceptance length `AL~`."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from train.objective import simulate_chain
from train.packing import collate, fixed_batches


@torch.no_grad()
def validate(
    objective: nn.Module, source: Any, rows: list[int], layers: list[int], tokens: int, accelerator: Accelerator
) -> dict[str, Any]:
    """Loss, per-depth accuracy and AL~ over `rows`; every rank takes its share of the batches and sums are added up.

    Returns:
        {"loss": per supervised position of depth 0, "accuracy": [K] conditional on nothing (teacher-forced),
        "al": {k: AL~ of a greedy chain of k, bonus token included}, "rounds": {k: rounds behind it},
        "per_position": {k: unconditional acceptance at each drafted position}}
    """
    module = accelerator.unwrap_model(objective)
    was_training = module.training
    module.eval()
    sums, per_k = None, None
    batches = list(fixed_batches(rows, lambda row: int(source.lengths[row]), tokens))
    for index in range(
        accelerator.process_index, -(-len(batches) // accelerator.num_processes) * accelerator.num_processes, accelerator.num_processes
    ):
        picked = batches[index] if index < len(batches) else []
        batch = collate(source.read_rows(picked, layers), layers, source.manifest.hidden_size).to(accelerator.device)
        with accelerator.autocast():
            out = module(batch)
        K = len(out.hits)
        sums = out.sums() if sums is None else sums + out.sums()
        per_k = (
            torch.zeros(K, K + 1, dtype=torch.double, device=accelerator.device) if per_k is None else per_k
        )  # [k-1]: rounds, then accepted at each position
        if picked:
            for k in range(1, K + 1):
                for span in simulate_chain(out.hits, batch.loss_mask, batch.document, k):
                    per_k[k - 1, 0] += len(span)
                    for position in range(k):
                        per_k[k - 1, 1 + position] += sum(accepted > position for accepted in span)
    module.train(was_training)
    if sums is None or per_k is None:
        return {}
    sums, per_k = accelerator.reduce(sums, "sum"), accelerator.reduce(per_k, "sum")
    loss, correct, count = sums.tolist()  # type: ignore[union-attr]
    result: dict[str, Any] = {
        "loss": loss[0] / max(count[0], 1),
        "accuracy": [c / max(n, 1) for c, n in zip(correct, count, strict=True)],
        "al": {},
        "rounds": {},
        "per_position": {},
    }
    for k, (rounds, *accepted) in enumerate(per_k.tolist(), start=1):  # type: ignore[union-attr]
        rates = [a / rounds for a in accepted[:k]] if rounds else []
        result["al"][k] = 1 + sum(rates)
        result["rounds"][k] = int(rounds)
        result["per_position"][k] = rates
    return result
