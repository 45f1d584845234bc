"""EAGLE-3: one decoder layer that drafts from three tapped layers of the target (arXiv 2503.01840; METHODS §5).

Timeline at index t (x: tokens, h^l: the target's residual stream after l blocks):

    depth    feature at index t       token eaten   position   predicts   fed back
    0        g_t = fc[h^lo;h^mid;h^hi]_t    x[t+1]        t          x[t+2]     s_0 (before the final norm)
    i >= 1   s_{i-1} at the same index      x[t+1+i]      t + i      x[t+2+i]   s_i

Layer input is [norm(embedding) ; norm(feature)], 2H wide; the residual is the raw feature. Logits over the draft
vocabulary are lm_head(norm(s)). At depth i the query at index t sees the depth-0 keys at indices <= t and its own
keys of depths 1..i: what a server's draft cache holds after i drafted tokens. The EAGLE-3.1 switches (PEERS §2.1)
are `norm_before_fc`, `fc_norm`, `norm_output` and `norm_before_residual`.

Shapes: N packed tokens, R rows computed at a depth, H hidden size, D draft vocabulary, A/G query/key-value heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from heads.autoregressive import AutoregressiveHead, DraftLayer
from heads.exported import check_borrowed, copy_tensors, rename_tensors
from heads.layers import Linear, RMSNorm, draft_llama_config
from heads.target import TargetParts
from heads.vocab import DraftVocab
from recipes.errors import ExportError
from recipes.head_blocks import Eagle3Head as Eagle3Block


class Eagle3Layer(DraftLayer):
    """A Llama decoder layer; the first one eats embedding and feature side by side."""

    def __init__(self, config: LlamaConfig, first: bool, norm_before_residual: bool):
        H, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(config, 2 * H if first else H)
        self.first, self.norm_before_residual = first, norm_before_residual
        self.input_layernorm = RMSNorm(H, eps)
        if first:
            self.hidden_norm = RMSNorm(H, eps)

    def enter(self, embedding: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """[n, H] embedding and feature → attention input [n, 2H] (or [n, H] in later layers) and residual [n, H]."""
        if not self.first:
            return self.input_layernorm(x), x
        normed = self.hidden_norm(x)
        residual = normed if self.norm_before_residual else x
        return torch.cat([self.input_layernorm(embedding), normed], -1), residual


class Eagle3Head(AutoregressiveHead):
    """The draft head."""

    block: Eagle3Block

    def __init__(self, block: Eagle3Block, target: TargetParts, vocab: DraftVocab):
        own = {"intermediate_size": block.intermediate_size, "rope_parameters": block.rope}
        config = draft_llama_config(target.config, block.num_layers, **{key: value for key, value in own.items() if value is not None})
        layers: list[DraftLayer] = [Eagle3Layer(config, i == 0, block.norm_before_residual) for i in range(block.num_layers)]
        super().__init__(block, target, vocab, config, layers)
        self.aux_layers = block.feature_layers(target.num_layers)
        H, eps, A = target.hidden_size, self.config.rms_norm_eps, len(self.aux_layers)
        self.input_norm = RMSNorm(A * H, eps) if block.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(H, eps) for _ in range(A)) if block.fc_norm else None
        self.fc = Linear(A * H, H, bias=False)
        self.norm = RMSNorm(H, eps)
        self.lm_head = nn.Linear(H, len(vocab.ids), bias=False)
        self.reset(target)

    @torch.no_grad()
    def reset(self, target: TargetParts) -> None:
        """Initial weights: projections as Llama's, norms at one, the LM head the target's own rows."""
        self.reset_projections()
        if not target.lm_head.is_meta:
            self.lm_head.weight.copy_(target.lm_head[self.vocab.ids])
            if self.block.init_layer == "target":
                self._start_as_last_blocks(target)
        self.lm_head.requires_grad_(self.block.train_lm_head)

    def _start_as_last_blocks(self, target: TargetParts) -> None:
        """Start where the target ends: fc passes the highest tapped layer, the layers are the target's last blocks, the norm its final one.

        Attention of the first layer reads the feature as that block reads its input; what it reads of the embedding stays at its
        random start. Tensors that a block lacks, or that have another shape there, keep their random start.
        """
        H = target.hidden_size
        self.fc.weight.zero_()
        self.fc.weight[:, -H:] = torch.eye(H)
        self.norm.weight.copy_(target.norm_weight())
        for number, layer in enumerate(self.layers):
            block = target.decoder_block(target.num_layers - len(self.layers) + number)
            for name, own in layer.named_parameters():
                theirs = block.get(name.replace("hidden_norm", "input_layernorm"))
                if theirs is None or (number == 0 and name.startswith("input_layernorm")):  # that one norms the embedding here
                    continue
                if theirs.shape == own.shape:
                    own.copy_(theirs)
                elif own.ndim == 2 and theirs.shape == own[:, H:].shape:  # q, k, v: the embedding's half stays
                    own[:, H:] = theirs

    # ---- what is EAGLE-3 about drafting (the rest: heads/autoregressive.py) ------------------------------------

    def fuse(self, hidden: dict[int, Tensor]) -> Tensor:
        """Tapped layers {l: [n, H]} → features [n, H] (METHODS §5.2)."""
        parts = [hidden[layer].to(self.fc.weight.dtype) for layer in self.aux_layers]
        if self.fc_norm is not None:
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        x = torch.cat(parts, -1)
        return self.fc(x if self.input_norm is None else self.input_norm(x))

    def feedback(self, state: Tensor) -> Tensor:
        """What the next depth eats as its feature: the raw state, or the normed one with `norm_output`."""
        return self.norm(state) if self.block.norm_output else state

    def logits(self, state: Tensor) -> Tensor:
        """States [n, H] → draft logits [n, D]."""
        return self.lm_head(self.norm(state))

    # ---- export: what vLLM reads (VLLM_FORMATS §2) ------------------------------------------------------------

    def served_config(self) -> dict:
        """config.json with every field that vLLM would otherwise guess (B31)."""
        return self.config.to_dict() | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(self.vocab.ids),
            "target_hidden_size": self.config.hidden_size,
            "num_aux_hidden_states": len(self.aux_layers),
            "eagle_aux_hidden_state_layer_ids": self.aux_layers,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": self.aux_layers,
                "use_aux_hidden_state": True,
                "norm_before_fc": self.block.norm_before_fc,
            },
            "norm_before_residual": self.block.norm_before_residual,
            "norm_before_fc": self.block.norm_before_fc,
            "fc_norm": self.block.fc_norm,
            "norm_output": self.block.norm_output,
        }

    def served_tensors(self) -> dict[str, Tensor]:
        """Our parameters under the names that vLLM reads; the borrowed embedding is left out (E07)."""
        tensors = dict(self.state_dict())
        for number in range(1, len(self.layers)):  # vLLM declares this norm in later layers too and never runs it
            tensors[f"layers.{number}.hidden_norm.weight"] = torch.ones(self.config.hidden_size)
        if not self.vocab.full:
            tensors |= {"d2t": self.vocab.d2t, "t2d": self.vocab.t2d}
        return tensors

    @torch.no_grad()
    def load_served(self, tensors: dict[str, Tensor]) -> None:
        """Take over weights by their served names, ours or published (`midlayer.` or `layers.0.`, METHODS §14).

        LM head rows are matched by target token; tokens that the other draft vocabulary lacks keep their rows.

        Raises:
            ExportError: a tensor is missing, unknown, there twice, or of another shape, or the embedding is not the target's.
        """
        tensors = rename_tensors(tensors, lambda name: name.replace("midlayer.", "layers.0."))
        own = self.state_dict()
        unused = {f"layers.{number}.hidden_norm.weight" for number in range(1, len(self.layers))}
        beside = {"lm_head.weight", "embed_tokens.weight", "d2t", "t2d"}
        copy_tensors({k: v for k, v in own.items() if k != "lm_head.weight"}, tensors, beside | unused)
        offsets = tensors.get("d2t")
        theirs = torch.arange(self.vocab.size) if offsets is None else offsets.long() + torch.arange(len(offsets))
        check_borrowed("embed_tokens.weight", tensors.get("embed_tokens.weight"), self.embed_tokens)
        lm_head = tensors.get("lm_head.weight")
        if lm_head is not None and lm_head.shape != (len(theirs), self.config.hidden_size):
            raise ExportError(
                f"lm_head.weight of the draft is {tuple(lm_head.shape)}, but "
                + (f"without d2t it covers all {len(theirs)} tokens" if offsets is None else f"its d2t names {len(theirs)} tokens")
                + f", {self.config.hidden_size} numbers each: which row is which token cannot be told. Get the whole draft again."
            )
        if lm_head is not None:
            where = DraftVocab(theirs, self.vocab.size).to_draft(self.vocab.ids)
            own["lm_head.weight"][where >= 0] = lm_head[where[where >= 0]].to(own["lm_head.weight"].dtype)
        elif not self.vocab.full:
            raise ExportError("the draft has no lm_head.weight, so it drafts over the whole vocabulary; leave head.draft_vocab_size empty")

    @staticmethod
    def served_shapes(config: dict) -> dict[str, tuple[int, ...]]:
        """Every tensor that must exist for a config.json, with its shape: vLLM itself does not notice a missing one."""
        H, M, V, D = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "draft_vocab_size"))
        q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
        width = config["num_aux_hidden_states"] * config["target_hidden_size"]
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, width), "norm.weight": (H,), "lm_head.weight": (D, H)}
        for number in range(config["num_hidden_layers"]):
            enter = 2 * H if number == 0 else H
            layer = {f"self_attn.{name}_proj": (size, enter) for name, size in (("q", q), ("k", kv), ("v", kv))}
            layer |= {"self_attn.o_proj": (H, q), "mlp.gate_proj": (M, H), "mlp.up_proj": (M, H), "mlp.down_proj": (H, M)}
            layer |= {norm: (H,) for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
            shapes |= {f"layers.{number}.{name}.weight": shape for name, shape in layer.items()}
        if config["norm_before_fc"]:
            shapes["input_norm.weight"] = (width,)
        if config["fc_norm"]:
            shapes |= {f"fc_norm.{j}.weight": (config["target_hidden_size"],) for j in range(config["num_aux_hidden_states"])}
        if D != V:
            shapes |= {"d2t": (D,), "t2d": (V,)}
        return shapes

    @staticmethod
    def speculative_config() -> dict:
        """What the user passes to vLLM besides `model` and `num_speculative_tokens`."""
        return {"method": "eagle3"}
