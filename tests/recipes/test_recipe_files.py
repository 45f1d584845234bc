"""Every YAML in recipes/ parses, names existing commands, and builds its head on the meta device."""

import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from heads import HEADS, head_class
from heads.layers import RMSNorm
from heads.target import TargetParts
from heads.vocab import DraftVocab
from recipes.methods import METHODS
from recipes.schema import load_recipe

ROOT = Path(__file__).parents[2]
FILES = sorted(p for p in (ROOT / "recipes").rglob("*.yaml") if p.parent.name != "accelerate")

SMOL = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, vocab_size=49152)
TINY = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, vocab_size=260)
LLAMA = dict(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256
)
QWEN = dict(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
)
MIMO = dict(
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=151680,
    architectures=["MiMoForCausalLM"],
)
CONFIGS = {  # dimensions as the targets' own config.json gives them
    "embedded:smollm2-135m": LlamaConfig(**SMOL),
    "tiny:llama": LlamaConfig(**TINY),
    "tiny:llama-2-heads": LlamaConfig(**TINY),
    "meta-llama/Llama-3.1-8B-Instruct": LlamaConfig(**LLAMA),
    "Qwen/Qwen3-8B": Qwen3Config(**QWEN),
    "XiaomiMiMo/MiMo-7B-RL": Qwen2Config(**MIMO),
}

DRAFTS = {  # models that drafts start from, as their own config.json gives them
    "meta-llama/Llama-3.2-1B-Instruct": LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128256,
        tie_word_embeddings=True,
    ),
    "Qwen/Qwen3-0.6B": Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "exports/smollm2-135m-draft_model": LlamaConfig(**SMOL | {"num_hidden_layers": 7}),
}


def test_recipes_are_found():
    assert len(FILES) >= 5


def test_methods_and_heads_agree():
    assert METHODS.keys() == HEADS.keys()


@pytest.mark.parametrize("file", FILES, ids=lambda p: str(p.relative_to(ROOT / "recipes")))
def test_recipe(file, monkeypatch):
    monkeypatch.setattr("heads.draft_model.base_config", DRAFTS.__getitem__)
    recipe = load_recipe(file)
    header = "".join(line for line in file.read_text().splitlines(keepends=True) if line.startswith("#"))
    for script in re.findall(r"train/\w+\.py", header):
        assert (ROOT / script).is_file(), f"{file} names {script}"
    for named in re.findall(r"recipes/\S+\.yaml", header):
        assert (ROOT / named).is_file(), f"{file} names {named}"
    assert f"train/{recipe.method}.py" in header and "python -m data_prep" in header and "python -m eval" in header

    config = CONFIGS[recipe.target.path]
    with torch.device("meta"):
        embedding = torch.empty(config.vocab_size, config.hidden_size)
        target = TargetParts(Path(), config, embedding, embedding, None, RMSNorm(config.hidden_size, 1e-6), "meta")
        size = getattr(recipe.head, "draft_vocab_size", None) or config.vocab_size
        head = head_class(recipe.method)(recipe.head, target, DraftVocab(torch.arange(size, device="cpu"), config.vocab_size))
        served = {name: tuple(tensor.shape) for name, tensor in head.served_tensors().items()}
    assert served == head.served_shapes(head.served_config())
    assert sum(p.numel() for p in head.parameters() if p.requires_grad) > 0
