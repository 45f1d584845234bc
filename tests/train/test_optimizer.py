"""AdamW and Muon behind one interface."""

import copy

import pytest
import torch
from torch import nn

from recipes.schema import Train
from train.optimizer import Together, make_optimizer


class Little(nn.Module):
    lr_scales = {"b.": 3.0}

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 12), nn.Linear(12, 8, bias=False)
        self.norm, self.lm_head = nn.LayerNorm(8), nn.Linear(8, 20)

    def forward(self, x):
        return self.lm_head(self.norm(self.b(torch.tanh(self.a(x))))).square().mean()


def train(model, optimizer, steps):
    for _ in range(steps):
        model(torch.ones(4, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_muon_takes_the_matrices_inside():
    """LM head, biases and norms stay with AdamW; every parameter is in one group, with its own factor of the learning rate."""
    model = Little()
    optimizer = make_optimizer(model, Train(max_steps=1, optimizer="muon", weight_decay=0.1))
    assert isinstance(optimizer, Together)
    adamw, muon = optimizer.parts
    assert isinstance(muon, torch.optim.Muon) and isinstance(adamw, torch.optim.AdamW)
    inside = {id(p) for group in muon.param_groups for p in group["params"]}
    assert inside == {id(model.a.weight), id(model.b.weight)}
    listed = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(listed) == sorted(map(id, model.parameters()))
    scale = {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    assert scale[id(model.b.weight)] == 3.0 and scale[id(model.a.weight)] == 1.0
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay[id(model.a.bias)] == 0 and decay[id(model.a.weight)] == 0.1


def test_learning_rate_reaches_both():
    """What the loop writes into the groups is what both step with."""
    model = Little()
    optimizer = make_optimizer(model, Train(max_steps=1, optimizer="muon"))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_saved_and_loaded_goes_on(name):
    """Moments survive a checkpoint, for Muon's part as well."""
    torch.manual_seed(0)
    cfg = Train(max_steps=1, optimizer=name, lr=1e-2)
    whole = Little()
    resumed = copy.deepcopy(whole)
    optimizer = make_optimizer(whole, cfg)
    train(whole, optimizer, 5)

    first = make_optimizer(resumed, cfg)
    train(resumed, first, 3)
    second = make_optimizer(resumed, cfg)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for group in second.param_groups:
        group["lr"] = cfg.lr  # as the loop does at every step: it must reach the groups that step
    train(resumed, second, 2)
    for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
