"""The optimizer: AdamW, or Muon for the matrices inside and AdamW for the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recipes.schema import Train


class Together(torch.optim.Optimizer):
    """Several optimizers over different parameters that step, save and load as one."""

    def __init__(self, parts: list[torch.optim.Optimizer]):
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of each."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Theirs, in order."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From `state_dict`; loading replaces their groups."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def make_optimizer(objective: nn.Module, cfg: Train) -> torch.optim.Optimizer:
    """`train.optimizer` over what trains; weight decay on matrices only.

    Muon (arXiv 2502.16982, torch's own) takes a step of equal size in every direction of a matrix, scaled to AdamW's usual
    update, so that `train.lr` serves both. It is for matrices between hidden states: LM heads, embeddings, biases and norms go
    to AdamW.

    An objective may have `lr_scales` {prefix of parameter names: factor of train.lr}; other parameters have factor 1.
    """
    scales = getattr(objective, "lr_scales", {})
    groups: dict[tuple[bool, float, bool], list[Tensor]] = {}
    for name, parameter in objective.named_parameters():
        if parameter.requires_grad:
            scale = next((scale for prefix, scale in scales.items() if name.startswith(prefix)), 1.0)
            is_matrix = parameter.ndim >= 2
            inside = parameter.ndim == 2 and not any(word in name for word in ("lm_head", "embed"))
            groups.setdefault((cfg.optimizer == "muon" and inside, scale, is_matrix), []).append(parameter)

    def listed(muon: bool) -> list[dict[str, Any]]:
        return [
            {"params": parameters, "weight_decay": cfg.weight_decay if is_matrix else 0.0, "lr_scale": scale}
            for (by_muon, scale, is_matrix), parameters in groups.items()
            if by_muon == muon
        ]

    parts: list[torch.optim.Optimizer] = []
    if listed(muon=False):
        parts.append(torch.optim.AdamW(listed(muon=False), lr=cfg.lr, betas=cfg.betas, fused=True))
    if listed(muon=True):
        parts.append(torch.optim.Muon(listed(muon=True), lr=cfg.lr, adjust_lr_fn="match_rms_adamw"))
    return parts[0] if len(parts) == 1 else Together(parts)
