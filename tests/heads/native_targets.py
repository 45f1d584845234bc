"""Tiny random targets with an MTP layer, one a family: the main model from transformers, the MTP names written out by hand.

Documented fixture: transformers builds none of these MTP layers, so their tensors' names and shapes follow what vLLM 0.32
reads (models/mimo_mtp.py, deepseek_mtp.py, glm4_moe_mtp.py, qwen3_next_mtp.py, qwen3_5_mtp.py) and METHODS §8.1.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

H, LAYERS, V, EXPERTS, MOE = 64, 2, 50, 4, 32
D = 32  # head size; vLLM's CPU attention takes no smaller one
LATENT, ROPE = 48, 32  # of DeepSeek's attention, whose heads are of D + ROPE; vLLM's CPU attention takes 64 and no size between
COMMON = dict(
    vocab_size=V, hidden_size=H, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=2, max_position_embeddings=64,
    tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LINEAR = dict(linear_conv_kernel_dim=2, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2)
MIXTURE = dict(
    n_routed_experts=EXPERTS, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=MOE, first_k_dense_replace=1, topk_group=1
)  # fmt: skip
# As published DeepSeek-V3 configs have them. transformers takes the first two for granted and knows neither key; vLLM without them has
# no place for the experts' bias (a KeyError while loading) and scores by softmax. YaRN too: plain rotary embedding of such heads is
# wrong on a CPU, where vLLM 0.32's kernel takes a query [N, heads, d] for one of a single head.
SCORING = dict(topk_method="noaux_tc", scoring_func="sigmoid")
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0)
CONFIGS = {
    "mimo": lambda: Qwen2Config(**COMMON, num_key_value_heads=1, architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1),
    "deepseek_v3": lambda: DeepseekV3Config(
        **COMMON, **MIXTURE, num_key_value_heads=2, q_lora_rank=48, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, qk_nope_head_dim=D,
        v_head_dim=24, n_group=2, num_nextn_predict_layers=1, rope_parameters=YARN, **SCORING,
    ),
    "glm4_moe": lambda: Glm4MoeConfig(
        **COMMON, **MIXTURE, num_key_value_heads=1, head_dim=D, n_group=1, use_qk_norm=True, num_nextn_predict_layers=1,
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **COMMON, **LINEAR, num_key_value_heads=1, head_dim=D, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=MOE,
        shared_expert_intermediate_size=MOE, layer_types=["linear_attention", "full_attention"], num_nextn_predict_layers=1,
    ),
    "qwen3_5_text": lambda: Qwen3_5TextConfig(
        **COMMON, **LINEAR, num_key_value_heads=1, head_dim=D, layer_types=["linear_attention", "full_attention"], mtp_num_hidden_layers=1
    ),
    "qwen3_5_moe_text": lambda: Qwen3_5MoeTextConfig(
        **{k: v for k, v in COMMON.items() if k != "intermediate_size"}, **LINEAR, num_key_value_heads=1, head_dim=D, num_experts=EXPERTS,
        num_experts_per_tok=2, moe_intermediate_size=MOE, shared_expert_intermediate_size=MOE,
        layer_types=["linear_attention", "full_attention"], mtp_num_hidden_layers=1,
    ),
}  # fmt: skip


def _experts(shared: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (EXPERTS, H)}
    for where in [f"mlp.experts.{i}" for i in range(EXPERTS)] + [shared]:
        shapes |= {f"{where}.gate_proj.weight": (MOE, H), f"{where}.up_proj.weight": (MOE, H), f"{where}.down_proj.weight": (H, MOE)}
    return shapes


def _dense() -> dict[str, tuple[int, ...]]:
    return {"mlp.gate_proj.weight": (48, H), "mlp.up_proj.weight": (48, H), "mlp.down_proj.weight": (H, 48)}


def _heads(q_width: int, bias: bool = False, norms: bool = False) -> dict[str, tuple[int, ...]]:
    """Two heads of D and one KV head."""
    shapes: dict[str, tuple[int, ...]] = {"self_attn.q_proj.weight": (q_width, H), "self_attn.o_proj.weight": (H, 2 * D)}
    shapes |= {"self_attn.k_proj.weight": (D, H), "self_attn.v_proj.weight": (D, H)}
    if bias:
        shapes |= {"self_attn.q_proj.bias": (q_width,), "self_attn.k_proj.bias": (D,), "self_attn.v_proj.bias": (D,)}
    if norms:
        shapes |= {"self_attn.q_norm.weight": (D,), "self_attn.k_norm.weight": (D,)}
    return shapes


NORMS: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (H,), "post_attention_layernorm.weight": (H,)}
DEEPSEEK_OWN: dict[str, tuple[int, ...]] = {
    "enorm.weight": (H,), "hnorm.weight": (H,), "eh_proj.weight": (H, 2 * H), "shared_head.norm.weight": (H,),
}  # fmt: skip
QWEN_OWN: dict[str, tuple[int, ...]] = {
    "mtp.pre_fc_norm_embedding.weight": (H,), "mtp.pre_fc_norm_hidden.weight": (H,), "mtp.fc.weight": (H, 2 * H), "mtp.norm.weight": (H,),
}  # fmt: skip


def mtp_shapes(family: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a family's MTP tensors as published files hold them."""
    if family == "mimo":
        own = {name: (H,) for name in ("token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight")}
        layer = own | {"input_proj.weight": (H, 2 * H)} | NORMS | _heads(2 * D, bias=True) | _dense()
        return {f"model.mtp_layers.0.{name}": shape for name, shape in layer.items()}
    if family == "deepseek_v3":
        latent: dict[str, tuple[int, ...]] = {
            "self_attn.q_a_proj.weight": (48, H), "self_attn.q_a_layernorm.weight": (48,),
            "self_attn.q_b_proj.weight": (2 * (D + ROPE), 48), "self_attn.kv_a_proj_with_mqa.weight": (LATENT + ROPE, H),
            "self_attn.kv_a_layernorm.weight": (LATENT,),
            "self_attn.kv_b_proj.weight": (2 * (D + 24), LATENT), "self_attn.o_proj.weight": (H, 2 * 24),
        }  # fmt: skip
        layer = DEEPSEEK_OWN | NORMS | latent | _experts("mlp.shared_experts") | {"mlp.gate.e_score_correction_bias": (EXPERTS,)}
        return {f"model.layers.{LAYERS}.{name}": shape for name, shape in layer.items()}
    if family == "glm4_moe":
        layer = DEEPSEEK_OWN | NORMS | _heads(2 * D, norms=True) | _experts("mlp.shared_experts")
        layer |= {"mlp.gate.e_score_correction_bias": (EXPERTS,)}
        return {f"model.layers.{LAYERS}.{name}": shape for name, shape in layer.items()}
    gated = NORMS | _heads(4 * D, norms=True)
    if family in ("qwen3_next", "qwen3_5_moe_text"):
        gated |= _experts("mlp.shared_expert") | {"mlp.shared_expert_gate.weight": (1, H)}
        if family == "qwen3_5_moe_text":  # experts stacked as transformers has them: the other layout that is read
            gated = {name: shape for name, shape in gated.items() if ".experts." not in name}
            gated |= {"mlp.experts.gate_up_proj": (EXPERTS, 2 * MOE, H), "mlp.experts.down_proj": (EXPERTS, H, MOE)}
    else:
        gated |= _dense()
    return QWEN_OWN | {f"mtp.layers.0.{name}": shape for name, shape in gated.items()}


def make_target(family: str, folder: Path, dtype: torch.dtype = torch.float32, sharded: bool = False) -> Path:
    """Save a tiny random target with its MTP layer, and the copies of embedding and head that some families keep in it."""
    config = CONFIGS[family]()
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, mean=1.0 if "norm" in name and "qwen3" not in family else 0.0, std=0.2)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file) | {name: (0.3 * torch.randn(shape)).to(dtype) for name, shape in mtp_shapes(family).items()}
    tensors |= {name: torch.randn(EXPERTS) for name in tensors if name.endswith("e_score_correction_bias")}  # float32 in any target
    if family in ("deepseek_v3", "glm4_moe"):
        tensors[f"model.layers.{LAYERS}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        tensors[f"model.layers.{LAYERS}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    text = json.loads((folder / "config.json").read_text())
    if family == "mimo":
        text["architectures"] = ["MiMoForCausalLM"]
    (folder / "config.json").write_text(json.dumps(text, indent=2))
    if sharded:
        _save_shards(tensors, folder, mtp_shapes(family))
    else:
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def _save_shards(tensors: dict[str, Tensor], folder: Path, mtp: dict[str, tuple[int, ...]]) -> None:
    """Three files: two without a tensor of the MTP layer, one that holds them and others."""
    (folder / "model.safetensors").unlink()
    rest = sorted(tensors.keys() - mtp.keys())
    parts = [rest[: len(rest) // 3], rest[len(rest) // 3 : 2 * len(rest) // 3], rest[2 * len(rest) // 3 :] + list(mtp)]
    where = {}
    for number, names in enumerate(parts, 1):
        file = f"model-{number:05d}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
