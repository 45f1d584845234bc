"""DFlash: a block of mask tokens denoised in one pass over the target's injected features (arXiv 2602.06036; METHODS §9).

Timeline of the block behind index t: the target has processed x[..t] and chosen x[t+1], the block's anchor (c: fused
features of the target, MASK: a token of the vocabulary that no text holds):

    slot     eaten     position     predicts    same position's token, no shift
    0        x[t+1]    t + 1        nothing
    j >= 1   MASK      t + 1 + j    x[t+1+j]    (depth j - 1 of train/objective.py)

In every layer, keys and values come from c_s = hidden_norm(fc[tapped layers of s]), s <= t in the same document, and from
the block itself, in both directions; queries come from the block alone. c is computed once and no layer changes it. A
block sees no other block and nothing at or behind its anchor but the anchor's own embedding.

Layers are Qwen3's: norms on each head's queries and keys. Embedding and LM head are the target's, frozen; over a reduced
draft vocabulary the LM head is the target's rows of it.

Shapes: N packed tokens, R blocks, B slots a block, n entries of one request, H hidden size, D draft vocabulary,
A/G query/key-value heads, d head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from heads import shift
from heads.autoregressive import Choose, DraftLayer
from heads.cache import DraftCache, cached_attention
from heads.exported import check_borrowed, copy_tensors
from heads.layers import Attention, Linear, RMSNorm, Rotary, document_attention, draft_llama_config, rotate
from heads.peagle import check_mask_token
from heads.target import TargetParts
from heads.vocab import DraftVocab
from recipes.head_blocks import DflashHead as DflashBlock


class DflashAttention(Attention):
    """Grouped-query attention whose queries and keys are normed head by head, before they are rotated."""

    def __init__(self, config: LlamaConfig):
        super().__init__(config, config.hidden_size)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def query(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[R, H] → rotated queries [R, A, d]."""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))), cos, sin)

    def key_value(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[N, H] → rotated keys and values, each [N, G, d]."""
        key, value = (project(x).unflatten(-1, (self.kv_heads, self.head_dim)) for project in (self.k_proj, self.v_proj))
        return rotate(self.k_norm(key), cos, sin), value


class DflashLayer(DraftLayer):
    """A Qwen3 decoder layer."""

    def __init__(self, config: LlamaConfig):
        super().__init__(config, config.hidden_size)
        self.self_attn = DflashAttention(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def enter(self, embedding: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Layer input [n, H] → attention input and residual [n, H]."""
        return self.input_layernorm(x), x


class DflashHead(nn.Module):
    """The draft head. `embed_tokens` and `lm_head` are borrowed from the target and in no checkpoint."""

    embed_tokens: Tensor  # [V, H]
    lm_head: Tensor  # [D, H], the target's rows of the draft vocabulary
    draft_ids: Tensor  # int64 [D], target ids

    def __init__(self, block: DflashBlock, target: TargetParts, vocab: DraftVocab):
        super().__init__()
        check_mask_token(block.mask_token_id, vocab.size)
        self.block, self.vocab = block, vocab
        own = {"intermediate_size": block.intermediate_size, "rope_parameters": block.rope}
        changes = {key: value for key, value in own.items() if value is not None}
        self.config = draft_llama_config(target.config, block.num_layers, **changes)
        self.aux_layers = block.feature_layers(target.num_layers)
        H, eps = target.hidden_size, self.config.rms_norm_eps
        self.fc = Linear(len(self.aux_layers) * H, H, bias=False)
        self.hidden_norm = RMSNorm(H, eps)
        self.layers = nn.ModuleList(DflashLayer(self.config) for _ in range(block.num_layers))
        self.norm = RMSNorm(H, eps)
        self.rotary = Rotary(self.config)
        self.register_buffer("embed_tokens", target.embed_tokens, persistent=False)
        self.register_buffer("lm_head", target.lm_head if vocab.full else target.lm_head[vocab.ids], persistent=False)
        self.register_buffer("draft_ids", vocab.ids.to(target.embed_tokens.device), persistent=False)
        self.reset(target)

    @torch.no_grad()
    def reset(self, target: TargetParts) -> None:
        """Initial weights: projections as Llama's; the final norm the target's own, so that its LM head fits from the start."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
        if not target.lm_head.is_meta:
            self.norm.weight.copy_(target.norm_weight())

    @property
    def stack(self) -> list[DflashLayer]:
        """The layers, typed."""
        return list(self.layers)  # type: ignore[arg-type]

    def fuse(self, hidden: dict[int, Tensor]) -> Tensor:
        """Tapped layers {l: [n, H]} → injected features [n, H]."""
        return self.hidden_norm(self.fc(torch.cat([hidden[layer].to(self.fc.weight.dtype) for layer in self.aux_layers], -1)))

    def block_inputs(self, anchors: Tensor, slots: int) -> Tensor:
        """Anchor tokens [R] → embeddings [R, slots, H] of anchor and masks."""
        ids = torch.cat([anchors[:, None], anchors.new_full((len(anchors), slots - 1), self.block.mask_token_id)], 1)
        return self.embed_tokens[ids].to(self.fc.weight.dtype)

    def logits(self, state: Tensor) -> Tensor:
        """Normed states [n, H] → draft logits [n, D]. A target's logit scale or soft-cap is for the states to learn: vLLM applies none
        here (no `logit_scale` is exported)."""
        return nn.functional.linear(state, self.lm_head.to(state.dtype))

    def denoise(self, feature: Tensor, tokens: Tensor, positions: Tensor, starts: Tensor, rows: Tensor, slots: int) -> Tensor:
        """States of the mask slots of many blocks in packed documents, the blocks apart from one another.

        Args:
            feature: [N, H] from `fuse`. tokens: [N] x[t+1] at index t. positions: [N] inside the document.
            starts: [N] first index of each document. rows: [R] ascending indices t behind which a block stands. slots: B.

        Returns:
            [R, B - 1, H] normed states; slot j, at [:, j - 1], predicts x[t+1+j].
        """
        R = len(rows)
        x = self.block_inputs(tokens[rows], slots).flatten(0, 1)
        cos, sin = self.rotary(x, shift.block_positions(positions[rows], slots).flatten())
        context_cos, context_sin = self.rotary(feature, positions)
        for number, layer in enumerate(self.stack):
            entered, residual = layer.enter(x, x)
            key, value = layer.self_attn.key_value(entered, cos, sin)
            context_k, context_v = layer.self_attn.key_value(feature, context_cos, context_sin)
            asking, asked = (entered, residual, cos, sin), slots
            if number == len(self.layers) - 1:  # past its keys and values, the last layer's anchor is read by nobody
                asking, asked = (side.unflatten(0, (R, slots))[:, 1:].flatten(0, 1) for side in asking), slots - 1
            entered, residual, query_cos, query_sin = asking
            query = layer.self_attn.query(entered, query_cos, query_sin)
            attended = document_attention(
                query.unflatten(0, (R, asked)),
                context_k,
                context_v,
                rows,
                starts,
                key.unflatten(0, (R, slots)),
                value.unflatten(0, (R, slots)),
            )
            x = layer.leave(residual, attended.flatten(0, 1))
        return self.norm(x).unflatten(0, (R, slots - 1))

    def new_cache(self) -> DraftCache:
        """An empty cache of injected keys and values for one request."""
        return DraftCache(len(self.layers))

    @torch.no_grad()
    def propose(self, hidden: dict[int, Tensor], tokens: Tensor, positions: Tensor, cache: DraftCache, k: int, choose: Choose) -> Tensor:
        """Draft k tokens in one pass, behind committed ones.

        Args:
            hidden: {layer: [n, H]} the target's states at the n positions committed since the last round. tokens: [n], x[t+1]
                for each of them; only the last is read, the newest token. positions: [n].
            choose: draft logits [k, D] → draft ids [k].

        Returns:
            [k] target ids.
        """
        feature = self.fuse(hidden)
        context_cos, context_sin = self.rotary(feature, positions)
        x = self.block_inputs(tokens[-1:], k + 1)[0]
        cos, sin = self.rotary(x, shift.block_positions(positions[-1:], k + 1)[0])
        everything = torch.ones(k + 1, k + 1, dtype=torch.bool, device=x.device)
        committed = cache.length + len(positions)
        for number, layer in enumerate(self.stack):
            cache.append(number, *layer.self_attn.key_value(feature, context_cos, context_sin))
            entered, residual = layer.enter(x, x)
            key, value = cache.append(number, *layer.self_attn.key_value(entered, cos, sin))
            x = layer.leave(residual, cached_attention(layer.self_attn.query(entered, cos, sin), key, value, everything))
        cache.crop(committed)
        return self.draft_ids[choose(self.logits(self.norm(x[1:])))]

    # ---- export: what vLLM reads (VLLM_FORMATS §7) -------------------------------------------------------------

    def served_config(self) -> dict:
        """config.json with every field that vLLM would otherwise guess (B31); `target_layer_ids` count layer outputs from 0."""
        return self.config.to_dict() | {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block.block_size,
            "draft_vocab_size": len(self.vocab.ids),
            "target_hidden_size": self.config.hidden_size,
            "eagle_aux_hidden_state_layer_ids": self.aux_layers,
            "layer_types": ["full_attention"] * len(self.layers),
            "use_sliding_window": False,
            "dflash_config": {
                "mask_token_id": self.block.mask_token_id,
                "target_layer_ids": [layer - 1 for layer in self.aux_layers],
                "causal": False,
            },
        }

    def served_tensors(self) -> dict[str, Tensor]:
        """Our parameters by the published names; over a reduced vocabulary the LM head's rows and the maps as well."""
        tensors = dict(self.state_dict())
        if not self.vocab.full:
            tensors |= {"lm_head.weight": self.lm_head, "d2t": self.vocab.d2t, "t2d": self.vocab.t2d}
        return tensors

    @torch.no_grad()
    def load_served(self, tensors: dict[str, Tensor]) -> None:
        """Take over weights by their served names, ours or published.

        Raises:
            ExportError: a tensor is missing or of another shape, or the draft has an embedding or LM head that is not the target's.
        """
        copy_tensors(self.state_dict(), tensors, ignored=("embed_tokens.weight", "lm_head.weight", "d2t", "t2d"))
        for name, own in (("embed_tokens.weight", self.embed_tokens), ("lm_head.weight", self.lm_head)):
            check_borrowed(name, tensors.get(name), own)

    @staticmethod
    def served_shapes(config: dict) -> dict[str, tuple[int, ...]]:
        """Every tensor that must exist for a config.json, with its shape: vLLM itself does not notice a missing one."""
        H, inner, d, V, D = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim", "vocab_size", "draft_vocab_size"))
        q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
        width = len(config["dflash_config"]["target_layer_ids"]) * config["target_hidden_size"]
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, width), "hidden_norm.weight": (H,), "norm.weight": (H,)}
        for number in range(config["num_hidden_layers"]):
            layer = {"self_attn.q_proj": (q, H), "self_attn.k_proj": (kv, H), "self_attn.v_proj": (kv, H), "self_attn.o_proj": (H, q)}
            layer |= {"self_attn.q_norm": (d,), "self_attn.k_norm": (d,), "input_layernorm": (H,), "post_attention_layernorm": (H,)}
            layer |= {"mlp.gate_proj": (inner, H), "mlp.up_proj": (inner, H), "mlp.down_proj": (H, inner)}
            shapes |= {f"layers.{number}.{name}.weight": shape for name, shape in layer.items()}
        if D != V:
            shapes |= {"lm_head.weight": (D, H), "d2t": (D,), "t2d": (V,)}
        return shapes

    @staticmethod
    def speculative_config() -> dict:
        """What the user passes to vLLM besides `model` and `num_speculative_tokens`."""
        return {"method": "dflash"}
