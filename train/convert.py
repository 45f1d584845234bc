"""A published draft in our export layout, so that it can be measured and fine-tuned like ours.

    python -m train.export --from FOLDER --recipe RECIPE [--output DIR]

EAGLE-1, EAGLE-3 and P-EAGLE (`fc`, `layers.0` or `midlayer`, d2t/t2d), Medusa legacy and new (`medusa_lm_head.pt`), DFlash: the
names are read by the heads' `load_served` (METHODS §14), and config.json also in speculators' format. A draft that is a whole
model (PARD, an independent draft) must come with its tokenizer, and PARD-2 with its projection (`load_extra`). What no tensor's
shape tells (which layers are tapped, which token is the mask) is compared with the recipe. The folder that comes out is also
what `head.init_from` takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from data_prep.store import RowFeatures
from heads import head_class
from heads.exported import read_config, read_tensors, served_vocab
from heads.protocol import Head, WholeModel
from heads.target import TargetParts, read_target
from recipes.errors import ExportError
from recipes.schema import Recipe
from train.export import export_head

DIMENSIONS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps", "hidden_act")
LAYERS, MASK = "eagle_aux_hidden_state_layer_ids", "mask_token_id"
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "causal", "layer_types", "logit_scale")
PARD2 = ("pard2_target_layers", "pard2_scale")
MASK_KEYS = (MASK, "pard_token", "ptd_token_id")  # the order in which vLLM looks


def convert(published: Path, recipe: Recipe, output: Path | None = None) -> Path:
    """Write the export of a published draft for the recipe's target.

    A draft keeps the rotary embedding that its config.json describes, for it was trained with that one (METHODS §15.16).

    Raises:
        ExportError: config.json disagrees with the head that the recipe describes, a tensor is missing, unknown or there twice, or
            the draft holds what our head has no place for.
        TargetError: the draft is a whole model without a tokenizer, or with another one than the target's.
    """
    if (own_mask := published / "mask_embedding.pt").is_file():
        raise ExportError(f"{own_mask}: the draft has a mask embedding of its own; this head takes the target's row of head.mask_token_id")
    target = read_target(recipe.target)
    tensors, config = read_tensors(published), flat_config(read_config(published))
    block = recipe.head
    if hasattr(block, "rope"):
        theirs = LlamaConfig(**config)
        block = block.model_copy(update={"rope": theirs.rope_parameters})
    head: Head = head_class(recipe.method)(block, target, served_vocab(tensors, target.vocab_size))
    ours = {"logit_scale": 1.0} | said_of(head.served_config())
    for key, theirs in said_of(config).items():
        if key in ours and theirs != ours[key]:
            raise ExportError(
                f"{published / 'config.json'} says {key}={theirs!r}, the recipe's head for this target has {ours[key]!r}; set head.* to "
                "what was trained"
            )
    head.load_served(tensors)
    if isinstance(head, WholeModel):
        head.load_extra(published)
    figures = {"converted_from": published.name, "published_architectures": config.get("architectures")}
    recipe = recipe.model_copy(update={"head": block})
    return export_head(recipe, head, target, RandomRows(target), figures, output or recipe.export_dir)


def flat_config(config: dict) -> dict:
    """The config.json of speculators' format (VLLM_FORMATS §2, §5, §7), which nests the draft's layers, as the others are written.

    >>> flat_config({"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [1, 3], "transformer_layer_config": {"head_dim": 8}})
    {'head_dim': 8, 'speculators_model_type': 'dflash', 'eagle_aux_hidden_state_layer_ids': [1, 3]}
    """
    if "speculators_model_type" not in config:
        return config
    nested, own = dict(config.get("transformer_layer_config") or {}), {k: v for k, v in config.items() if k != "transformer_layer_config"}
    if "aux_hidden_state_layer_ids" in own:
        own[LAYERS] = own.pop("aux_hidden_state_layer_ids")
    if own["speculators_model_type"] == "eagle3":  # alone among the formats, this one has it on where nothing is said
        own.setdefault("norm_before_residual", True)
    return nested | {key: value for key, value in own.items() if value is not None}


def said_of(config: dict) -> dict[str, Any]:
    """What a config.json says of a draft, ours or a published one, each under one name.

    >>> said_of({"hidden_size": 64, "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 9}})
    {'hidden_size': 64, 'eagle_aux_hidden_state_layer_ids': [1, 3], 'mask_token_id': 9}
    """
    inner = (config.get("eagle_config") or {}) | (config.get("dflash_config") or {})
    both = inner | config
    said = {key: both[key] for key in (*DIMENSIONS, *SWITCHES, *PARD2) if both.get(key) is not None}
    if both.get(LAYERS) is not None:
        said[LAYERS] = both[LAYERS]
    elif "target_layer_ids" in inner:  # layer outputs, counted from 0
        said[LAYERS] = [layer + 1 for layer in inner["target_layer_ids"]]
    masks = [side[key] for side in (inner, config) for key in MASK_KEYS if side.get(key) is not None]
    return said | ({MASK: masks[0]} if masks else {})


class RandomRows:
    """Rows of random tokens and states in place of a feature store: enough to compare an export with the head it was made of."""

    def __init__(self, target: TargetParts, rows: int = 2, length: int = 24):
        self.target, self.length = target, length
        self.supervised = torch.full((rows,), length)

    def read(self, row: int, layers: list[int]) -> RowFeatures:
        """Row number `row`, the same each time."""
        generator = torch.Generator().manual_seed(row)

        def states() -> Tensor:
            return torch.randn(self.length, self.target.hidden_size, generator=generator)

        ids = torch.randint(self.target.vocab_size, (self.length,), generator=generator)
        return RowFeatures(ids, torch.ones(self.length, dtype=torch.bool), {layer: states() for layer in layers}, states())
