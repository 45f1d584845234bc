"""What the config.json of a draft says, in whichever format it is written, and whether a head of ours computes the same.

`python -m train.export --from` and `head.init_from` both ask: no tensor's shape tells which layers are tapped, which token is the
mask, or how positions are rotated (METHODS §15.14, §15.16).
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from heads.exported import read_config
from heads.layers import rope_parameters
from heads.protocol import Head
from recipes.errors import ExportError

DIMENSIONS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps", "hidden_act")
LAYERS, MASK = "eagle_aux_hidden_state_layer_ids", "mask_token_id"
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "causal", "layer_types", "logit_scale")
PARD2 = ("pard2_target_layers", "pard2_scale")
MASK_KEYS = (MASK, "pard_token", "ptd_token_id")  # the order in which vLLM looks
ROPE = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor", "max_position_embeddings")


def published_config(folder: Path) -> dict:
    """config.json of a draft, flat. Raises ExportError where there is none, or beside it a mask embedding that no head of ours has."""
    if (own_mask := folder / "mask_embedding.pt").is_file():
        raise ExportError(f"{own_mask}: the draft has a mask embedding of its own; this head takes the target's row of head.mask_token_id")
    return flat_config(read_config(folder))


def check_same_computation(head: Head, config: dict, folder: Path) -> None:
    """Raises ExportError where the draft's flat `config` says that equal weights compute something else than they do in `head`."""
    served = json.loads(json.dumps(head.served_config(), default=str))
    ours, theirs = {"logit_scale": 1.0} | said_of(served), said_of(config)
    if "rope_parameters" in served:
        ours["rope_parameters"], theirs["rope_parameters"] = rope_of(served), rope_of(config)
    for key, value in theirs.items():
        if key in ours and value != ours[key]:
            raise ExportError(
                f"{folder / 'config.json'} says {key}={value!r}, the recipe's head for this target has {ours[key]!r}: the draft's weights "
                f"would draft something else. Set {'head.rope' if key == 'rope_parameters' else 'head.*'} to what was trained"
            )


def rope_of(config: dict) -> dict[str, Any]:
    """Rotary settings of a flat config.json, old spelling or new; those of Llama where it says nothing.

    >>> rope_of({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    {'factor': 2.0, 'rope_theta': 500000.0, 'rope_type': 'linear'}
    """
    said = {key: copy.deepcopy(config[key]) for key in ROPE if config.get(key) is not None}  # LlamaConfig completes them in place
    return {key: value for key, value in rope_parameters(LlamaConfig(**said)).items() if key != "type"}


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
    said = {key: both[key] for key in (*DIMENSIONS, *SWITCHES, *PARD2) if both.get(key) not in (None, [])}
    if both.get(LAYERS) is not None:
        said[LAYERS] = both[LAYERS]
    elif "target_layer_ids" in inner:  # layer outputs, counted from 0
        said[LAYERS] = [layer + 1 for layer in inner["target_layer_ids"]]
    masks = [side[key] for side in (inner, config) for key in MASK_KEYS if side.get(key) is not None]
    return said | ({MASK: masks[0]} if masks else {})
