"""In which precision a machine computes: float32, or products in bfloat16 under autocast."""

from __future__ import annotations

import os
import time
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

M = TypeVar("M")


def in_bf16(setting: Literal["fp32", "bf16", "auto"]) -> bool:
    """Whether `train.precision` or `features.precision` means bfloat16 here.

    "auto" means it where this machine multiplies bfloat16 at least twice as fast as float32. A CUDA device answers by itself. A
    CPU is timed, for its name does not tell: with matrix units (AMX) it is several times as fast, without any it may be
    emulated and many times as slow.
    """
    if setting != "auto":
        return setting == "bf16"
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return _product_seconds(torch.bfloat16) < 0.5 * _product_seconds(torch.float32)


def cast(module: M, device: torch.device, dtype: torch.dtype) -> M:
    """`module.to(device, dtype)` with rotary frequencies left in float32, as training and vLLM have them.

    In bfloat16 they are .2 % off: radians of error at position 1,000.
    """
    assert isinstance(module, nn.Module)
    exact = [(part, name, buffer) for part in module.modules() for name, buffer in part.named_buffers(recurse=False) if "inv_freq" in name]
    module.to(device=device, dtype=dtype)
    for part, name, buffer in exact:
        setattr(part, name, buffer.to(device))
    return module


def usable_cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _product_seconds(dtype: torch.dtype, budget: float = 0.1) -> float:
    """The best time of a 256 x 512 x 512 product within about `budget` seconds."""
    x, w = torch.randn(256, 512).to(dtype), torch.randn(512, 512).to(dtype)
    F.linear(x, w)
    best, began = float("inf"), time.perf_counter()
    while time.perf_counter() - began < budget:
        t = time.perf_counter()
        F.linear(x, w)
        best = min(best, time.perf_counter() - t)
    return best
