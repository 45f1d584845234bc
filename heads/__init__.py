"""Draft heads: what each one is, how it drafts, and how it is laid out for the server."""

from __future__ import annotations

from importlib import import_module

from recipes.errors import RecipeError

LAST_HIDDEN = -1  # key of the post-norm last hidden state where a mapping {layer: states} holds it beside tapped layers

HEADS = {
    "eagle3": "heads.eagle3:Eagle3Head",
    "eagle1": "heads.eagle1:Eagle1Head",
    "medusa": "heads.medusa:MedusaHead",
    "medusa2": "heads.medusa:MedusaHead",
    "peagle": "heads.peagle:PeagleHead",
    "mtp": "heads.mtp:MtpHead",
    "mtp_native": "heads.mtp_native:MtpNativeHead",
    "dflash": "heads.dflash:DflashHead",
    "draft_model": "heads.draft_model:DraftModelHead",
    "pard": "heads.pard:PardHead",
}


def head_class(method: str):
    """The head's class, imported when asked for. Raises RecipeError listing the known methods."""
    if method not in HEADS:
        raise RecipeError(f"method: {method!r} is not one of {', '.join(HEADS)}")
    module, name = HEADS[method].split(":")
    return getattr(import_module(module), name)
