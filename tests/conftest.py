"""Fixtures for all tests. No test reaches a hub: HF_HUB_OFFLINE is set before anything of Hugging Face is imported."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import random
from pathlib import Path

import pytest
import torch

from heads.embedded import resolve_target, tiny_tokenizer

torch.set_num_threads(1)  # tiny matrices: a second thread only waits; and sums do not depend on the machine's cores


@pytest.fixture(autouse=True)
def seeds():
    """Every test starts from the same random state, whichever ran before it."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the random Llama `tiny:llama` (H=64, L=4, V=260): read it, do not write into it."""
    return resolve_target("tiny:llama", root=tmp_path_factory.mktemp("targets"))


@pytest.fixture(scope="session", name="tiny_tokenizer")
def _tiny_tokenizer():
    """The byte-level tokenizer of `tiny:llama`, with its ChatML template."""
    return tiny_tokenizer()
