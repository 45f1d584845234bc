"""A small random target and packed batches for objective tests."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from heads.layers import RMSNorm
from heads.target import TargetParts
from train.packing import Batch

LAYERS = [1, 3, 5]


@pytest.fixture
def small_target() -> TargetParts:
    """H 32, 4 heads of 8, 2 KV heads, 6 layers, V 50."""
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        max_position_embeddings=64,
    )
    norm = RMSNorm(32, 1e-6).requires_grad_(False)
    return TargetParts(Path("random"), config, torch.randn(50, 32), torch.randn(50, 32), None, norm, "random")


@pytest.fixture
def packed_batch():
    """A function: documents as (prompt length, answer length) → Batch of random tokens below 49 and random states."""

    def make(*documents: tuple[int, int], tokens: Tensor | None = None, width: int = 32) -> Batch:
        lengths = torch.tensor([a + b for a, b in documents])
        n = int(lengths.sum())
        mask = torch.cat([torch.tensor([False] * a + [True] * b) for a, b in documents])
        return Batch(
            input_ids=torch.randint(49, (n,)) if tokens is None else tokens,
            loss_mask=mask,
            document=torch.repeat_interleave(torch.arange(len(documents)), lengths),
            positions=torch.cat([torch.arange(int(length)) for length in lengths]),
            hidden={layer: torch.randn(n, width) for layer in LAYERS},
            last_hidden=torch.randn(n, width),
        )

    return make
