"""The target's cache where rotary frequencies follow the longest row of a batch."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eval.target_cache import TargetCache
from eval.trees import build_tree
from recipes.errors import TargetError

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
LONG = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 16}


def made(kind: str) -> LlamaForCausalLM:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0} | (LONG if kind == "longrope" else {})
    length = 16 if kind == "dynamic" else 128
    return LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=length, initializer_range=0.3, rope_parameters=rope)).eval()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_prompts_of_mixed_lengths_keep_their_own_states(kind):
    """B16: a short prompt beside one past the original length, and one that comes after it, get what each gets alone."""
    model, prompts = made(kind), [list(range(5)), list(range(40)), list(range(3, 28))]
    fresh = copy.deepcopy(model)
    cache = TargetCache(model, [1])
    states = cache.prefill(prompts)
    assert cache.lengths == [5, 40, 25] and cache.slots == 40 and states.hidden[1].shape == (3, 40, 32)
    for row, prompt in enumerate(prompts):
        alone = TargetCache(copy.deepcopy(fresh), [1])
        expected = alone.prefill([prompt])
        torch.testing.assert_close(states.logits[row], expected.logits[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states.hidden[1][row, : len(prompt)], expected.hidden[1][0], rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(cache.cache.layers, alone.cache.layers, strict=True):
            torch.testing.assert_close(mine.keys[row, :, : len(prompt)], theirs.keys[0], rtol=1e-4, atol=1e-5)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_round_in_which_one_request_would_change_another_is_refused(kind):
    """Up to the original length requests share rounds; past it, each needs its own."""
    model, tree = made(kind), build_tree([1, 2, 3], [-1, 0, 1])
    cache = TargetCache(model)
    cache.prefill([list(range(5)), list(range(13))])
    cache.forward([tree, tree])  # the longer one is 16 tokens long now
    cache.keep([[1], [1]])
    with pytest.raises(TargetError, match=r"a request of 18 tokens is past the 16 .* set eval\.concurrency=1"):
        cache.forward([tree, tree])
    cache.select([1])
    cache.forward([tree])
