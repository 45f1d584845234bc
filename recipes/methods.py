"""The methods, one line each: which `head:` and `objective:` block a recipe of it has.

Their keys and defaults live in `recipes/head_blocks.py` and `recipes/objective_blocks.py`, and nowhere else.
"""

from __future__ import annotations

from typing import NamedTuple

from recipes.blocks import Block
from recipes.head_blocks import (
    DflashHead,
    DraftModelHead,
    Eagle1Head,
    Eagle3Head,
    HeadBlock,
    MedusaHead,
    MtpHead,
    MtpNativeHead,
    PardHead,
    PeagleHead,
)
from recipes.objective_blocks import (
    DflashObjective,
    DraftModelObjective,
    Eagle1Objective,
    Eagle3Objective,
    Medusa2Objective,
    MedusaObjective,
    MtpObjective,
    PardObjective,
    PeagleObjective,
)


class Method(NamedTuple):
    """The two blocks a method reads from a recipe."""

    head: type[HeadBlock]
    objective: type[Block]


METHODS: dict[str, Method] = {
    "eagle3": Method(Eagle3Head, Eagle3Objective),
    "eagle1": Method(Eagle1Head, Eagle1Objective),
    "medusa": Method(MedusaHead, MedusaObjective),
    "medusa2": Method(MedusaHead, Medusa2Objective),
    "peagle": Method(PeagleHead, PeagleObjective),
    "mtp": Method(MtpHead, MtpObjective),
    "mtp_native": Method(MtpNativeHead, MtpObjective),
    "dflash": Method(DflashHead, DflashObjective),
    "draft_model": Method(DraftModelHead, DraftModelObjective),
    "pard": Method(PardHead, PardObjective),
}
