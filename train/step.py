"""One optimizer step: learning rate, sums over micro-batches and ranks, clipping, and the check for finite numbers."""

from __future__ import annotations

import math
import signal
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn

from recipes.errors import HeadstartError
from recipes.schema import Train
from train.packing import Batch


@dataclass
class Progress:
    """Where a run stands: saved in every checkpoint."""

    step: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of this process, all threads
    tokens: int = 0
    supervised: int = 0

    def state_dict(self) -> dict:
        """For accelerate's checkpoint."""
        return dict(vars(self))

    def load_state_dict(self, state: dict) -> None:
        """From accelerate's checkpoint."""
        vars(self).update(state)


def learning_rate(cfg: Train, done: float) -> float:
    """Learning rate when a share `done` of the run (0 to 1) is behind: linear warm-up, then the schedule."""
    if done < cfg.warmup:
        return cfg.lr * done / cfg.warmup
    rest = min(1.0, (done - cfg.warmup) / max(1e-9, 1 - cfg.warmup))
    shape = {"constant": 1.0, "linear": 1 - rest, "cosine": 0.5 * (1 + math.cos(math.pi * rest))}[cfg.schedule]
    return cfg.lr * (cfg.min_lr_share + (1 - cfg.min_lr_share) * shape)


def take_step(
    objective: nn.Module, optimizer: Any, accelerator: Accelerator, batches: list[Batch], lr: float, clip: float, where: str
) -> tuple[Tensor, float]:
    """One optimizer step over this rank's micro-batches.

    The summed loss is divided once, by the count of supervised tokens of all micro-batches and ranks (B38).

    Args:
        where: step and rows, for the message of an error.

    Returns:
        [3, K] sums over all ranks (loss, correct, count), and the gradient norm before clipping.

    Raises:
        HeadstartError: loss or gradient is not finite.
    """
    supervised = torch.tensor(sum(batch.supervised for batch in batches), device=accelerator.device)
    total = max(1, int(accelerator.reduce(supervised, "sum")))  # type: ignore[arg-type]
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    sums: Tensor | None = None
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        accelerator.sync_gradients = last  # DeepSpeed's engine reads it
        with nullcontext() if last else accelerator.no_sync(objective):  # gradients cross ranks once a step
            with accelerator.autocast():
                out = objective(batch.to(accelerator.device))
            if not torch.isfinite(out.loss_sum):
                raise HeadstartError(f"loss is {out.loss_sum.item()} at {where}: {_remedy(lr)}")
            # DDP averages over ranks; the loss is a sum over all of them.
            accelerator.backward(out.loss_sum * (accelerator.num_processes / total))
        sums = out.sums() if sums is None else sums + out.sums()
    norm = accelerator.clip_grad_norm_(objective.parameters(), clip)
    if norm is None:  # DeepSpeed's engine clips by itself and need not tell
        norm = float("nan")
    elif not math.isfinite(float(norm)):
        raise HeadstartError(f"gradient norm is {float(norm)} at {where}: {_remedy(lr)}")
    optimizer.step()
    optimizer.zero_grad()
    assert sums is not None, "a step has at least one micro-batch on every rank"
    return accelerator.reduce(sums, "sum"), float(norm)  # type: ignore[return-value]


def _remedy(lr: float) -> str:
    return (
        f"lower train.lr ({lr:.2e} now) or train.clip_norm, with a run folder of its own (train.dir=runs/NAME), or look at these rows "
        "with `python -m data_prep.show RECIPE ROW`."
    )


def as_main_process(accelerator: Accelerator, value: float) -> float:
    """`value` as the main process has it: clocks differ, and all ranks must take the same learning rate and stop at the same step."""
    if accelerator.num_processes == 1:
        return value
    return float(broadcast(torch.tensor(value, device=accelerator.device)))  # type: ignore[arg-type]


class StopSignal:
    """SIGINT and SIGTERM ask for a clean end after the running step."""

    def __init__(self):
        self.asked = False
        self._old = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}

    def _ask(self, *_: Any) -> None:
        self.asked = True

    def on_any_rank(self, accelerator: Accelerator) -> bool:
        """Whether any rank was asked to stop: all of them stop at the same step."""
        if accelerator.num_processes > 1:
            flag = torch.tensor(int(self.asked), device=accelerator.device)
            self.asked = bool(accelerator.reduce(flag, "sum"))  # type: ignore[arg-type]
        return self.asked

    def restore(self) -> None:
        """Give the signals back."""
        for number, handler in self._old.items():
            signal.signal(number, handler)
