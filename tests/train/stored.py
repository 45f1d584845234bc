"""One row of a target's own states, as a feature store gives it."""

from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM

from heads.target import tapped


@torch.no_grad()
def states_of(model, ids: torch.Tensor, layers: list[int]) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Tapped layers {l: [n, H]} and the post-norm last hidden state [n, H] of token ids [n]."""
    hidden: dict[int, torch.Tensor] = {}
    with tapped(model, layers, lambda layer, states: hidden.__setitem__(layer, states[0])):
        last = model.get_decoder()(ids[None]).last_hidden_state[0]
    return hidden, last


@torch.no_grad()
def stored_row(path: Path, vocab: int, layers: tuple[int, ...] = ()) -> SimpleNamespace:
    """A store of one row of random tokens below `vocab`: what the export reads of one."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.randint(vocab, (24,))
    hidden, last = states_of(model, ids, list(layers))
    logits = model.lm_head(last)
    row = SimpleNamespace(input_ids=ids, loss_mask=torch.arange(24) > 8, hidden=hidden, last_hidden=last)
    probe = {"argmax": logits.argmax(-1), "logsumexp": logits.logsumexp(-1)}
    return SimpleNamespace(read=lambda number, layers: row, supervised=torch.tensor([15]), probe=probe)
