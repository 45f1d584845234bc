"""A small random target for head tests, as `read_target` would give it."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from heads.layers import RMSNorm
from heads.target import TargetParts


@pytest.fixture
def parts() -> TargetParts:
    """H 32, 4 heads of 8, 2 KV heads, 6 layers, V 50."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        max_position_embeddings=64,
    )
    embedding = torch.randn(50, 32)
    return TargetParts(Path("random"), config, embedding, torch.randn(50, 32), None, RMSNorm(32, 1e-6).requires_grad_(False), "random")
