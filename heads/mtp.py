"""MTP: decoder blocks that go on from the target's last hidden state (DeepSeek-V3, arXiv 2412.19437 §2.2; METHODS §8).

With `shared: true` one module is used again and again (FastMTP, arXiv 2509.18362), which is what vLLM does with any MTP
head. With `shared: false` each depth has a module of its own (DeepSeek-V3's chain); the reference decoder runs that.

Timeline at index t (x: tokens, h: the target's state after its final norm):

    depth    module     state at index t   token eaten   position   predicts   handed on
    0        0          h_t                x[t+1]        t          x[t+2]     s_0, after the module's final norm
    i >= 1   0, or i    s_{i-1}            x[t+1+i]      t + i      x[t+2+i]   s_i

A module mixes projection[norm(state) ; norm(embedding)] (state first, as MiMo does), runs a Qwen2 decoder layer (q, k
and v have biases) and a final norm; logits are the target's own, lm_head(s). At position 0 the embedding counts as zero.
Attention, shared module: at depth i the query of index t sees the depth-0 keys at indices <= t and its own keys of
depths 1..i, which is what a server's cache holds (published FastMTP trains every step on its own step's keys, which no
server does). Chain: module i sees its own keys at all indices <= t.

`layout: mimo` is for targets rewritten as MiMo models, where the server hands over the state before the final norm.
norm(state) takes out its length, so that state is read from the stored one: h / weight of the target's final norm.

Shapes: N packed tokens, R rows wanted at a depth, n entries of one request, H hidden size, V vocabulary.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from heads import LAST_HIDDEN
from heads.autoregressive import AutoregressiveHead, Choose, DraftLayer
from heads.cache import DraftCache, cached_attention
from heads.exported import copy_tensors
from heads.layers import Linear, RMSNorm, document_attention, draft_llama_config, rope_parameters
from heads.target import TargetParts
from heads.vocab import DraftVocab, whole_vocab
from recipes.errors import RecipeError
from recipes.head_blocks import MtpHead as MtpBlock

REWRITABLE = ("llama", "qwen2")  # families whose layers are MiMo's once biases are there


class MtpModule(DraftLayer):
    """Mixing of state and embedding, a Qwen2 decoder layer, a final norm."""

    def __init__(self, config: LlamaConfig):
        H, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(config, H)
        self.hidden_layernorm = RMSNorm(H, eps)
        self.token_layernorm = RMSNorm(H, eps)
        self.input_proj = Linear(2 * H, H, bias=False)
        self.input_layernorm = RMSNorm(H, eps)
        self.final_layernorm = RMSNorm(H, eps)

    def enter(self, embedding: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """[n, H] embedding and state → attention input and residual [n, H]."""
        mixed = self.input_proj(torch.cat([self.hidden_layernorm(x), self.token_layernorm(embedding)], -1))
        return self.input_layernorm(mixed), mixed

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Residual [n, H] and attention output [n, A, d] → normed state [n, H]."""
        return self.final_layernorm(super().leave(residual, attended))


class ChainCache:
    """What a chain of modules keeps of one request.

    Entry i of module m eats x[i+1+m]. It is final once that token is committed; until then the module's input at
    index i waits in `pending`, and the entry is computed anew with drafted tokens.
    """

    def __init__(self, modules: int, empty: Tensor):
        self.kv = [DraftCache(1) for _ in range(modules)]
        self.pending = [empty] * modules  # [0 or 1, H] a module


class MtpHead(AutoregressiveHead):
    """The draft head. Embedding and LM head are borrowed from the target, frozen, and in no checkpoint or export."""

    block: MtpBlock
    lm_head: Tensor  # [V, H]
    final_norm_weight: Tensor  # [H], of the target

    def __init__(self, block: MtpBlock, target: TargetParts, vocab: DraftVocab):
        config = draft_llama_config(target.config, 1 if block.shared else block.unroll_steps, attention_bias=True)
        assert config.head_dim is not None, "draft_llama_config sets it"
        if config.head_dim * config.num_attention_heads != config.hidden_size:
            raise RecipeError(
                f"{target.path}: head_dim={config.head_dim} with {config.num_attention_heads} heads and hidden_size={config.hidden_size}, "
                "but vLLM's MTP layer (MiMo's) has heads of hidden_size / heads; use method eagle3, peagle or dflash for this target."
            )
        super().__init__(block, target, whole_vocab(vocab), config, [MtpModule(config) for _ in range(config.num_hidden_layers)])
        self.trained_vocab = vocab  # what training compares; drafts are over all tokens
        self.register_buffer("lm_head", target.lm_head, persistent=False)
        self.register_buffer("final_norm_weight", target.norm_weight().detach(), persistent=False)
        self._target = target
        if block.layout == "mimo":
            self._check_rewritable()
        self.reset_projections()
        self._reset_norms()

    @torch.no_grad()
    def _reset_norms(self) -> None:
        """No biases, and the target's own final norm, so that its LM head's directions mean tokens from the start."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif name.endswith("final_layernorm.weight") and not self.lm_head.is_meta:
                parameter.copy_(self.final_norm_weight)

    def _check_rewritable(self) -> None:
        family = self._target.config.model_type
        if family not in REWRITABLE or not self._target.plain_logits:
            raise RecipeError(
                f"head.layout=mimo rewrites targets of the families {', '.join(REWRITABLE)} with plain logits, "
                f"{self._target.path} is {family!r}; set head.layout: head, or use eagle3, peagle or dflash."
            )
        if getattr(self._target.config, "use_sliding_window", False):
            raise RecipeError(
                f"head.layout=mimo writes a target that attends to all tokens, {self._target.path} has use_sliding_window=True; set "
                "head.layout: head."
            )
        if not self.final_norm_weight.is_meta and bool((self.final_norm_weight == 0).any()):
            raise RecipeError(
                f"head.layout=mimo reads the state before the final norm from the stored one, but the final norm of "
                f"{self._target.path} has zero weights, which lose it; set head.layout: head."
            )

    # ---- drafting ----------------------------------------------------------------------------------------------

    def fuse(self, hidden: dict[int, Tensor]) -> Tensor:
        """{LAST_HIDDEN: [n, H]} → states [n, H] that depth 0 eats."""
        state = hidden[LAST_HIDDEN].to(self.dtype)
        return state / self.final_norm_weight.to(state.dtype) if self.block.layout == "mimo" else state

    def embed(self, ids: Tensor) -> Tensor:
        """Target ids [n] → embeddings [n, H]; zero where the id is -1."""
        return super().embed(ids.clamp(min=0)) * (ids >= 0)[:, None]

    def normed(self, state: Tensor) -> Tensor:
        """States [n, H] → what the LM head reads: a module's output has been normed."""
        return state

    def logits(self, state: Tensor) -> Tensor:
        """States [n, H] → draft logits [n, V]. A target's logit scale or soft-cap is for the states to learn: vLLM applies none here."""
        return nn.functional.linear(state, self.lm_head.to(state.dtype))

    def rollout(self, feature: Tensor, tokens: list[Tensor], positions: Tensor, starts: Tensor, rows: list[Tensor]) -> list[Tensor]:
        """As in AutoregressiveHead; in a chain, rows need not be subsets of one another."""
        tokens = [_hide_first(eaten, positions + depth) for depth, eaten in enumerate(tokens)]
        if self.block.shared:
            return super().rollout(feature, tokens, positions, starts, rows)
        states: list[Tensor] = []
        everywhere, x = torch.arange(len(feature), device=feature.device), feature
        for depth, module in enumerate(self.stack[: len(rows)]):
            # The next module's keys need this one's states at all indices; the last one's are needed where a loss reads them.
            ask = rows[depth] if depth == len(rows) - 1 else everywhere
            cos, sin = self.rotary(x, positions + depth)
            entered, residual = module.enter(self.embed(tokens[depth]), x)
            key, value = module.self_attn.key_value(entered, cos, sin)
            query = module.self_attn.query(entered[ask], cos[ask], sin[ask])
            x = module.leave(residual[ask], document_attention(query, key, value, ask, starts))
            states.append(x if ask is rows[depth] else x[rows[depth]])
        return states

    def advance(self, feature: Tensor, tokens: Tensor, positions: Tensor, cache: DraftCache, visible: Tensor | None = None) -> Tensor:
        """As in AutoregressiveHead, for a shared module.

        Raises:
            RecipeError: a chain of modules: which module runs depends on how far ahead an entry is.
        """
        if not self.block.shared:
            raise RecipeError("a chain of MTP modules (head.shared=false) drafts chains only; set eval.tree: chain")
        return super().advance(feature, _hide_first(tokens, positions), positions, cache, visible)

    def new_cache(self) -> Any:
        """An empty draft cache for one request: a DraftCache, or a ChainCache."""
        if self.block.shared:
            return super().new_cache()
        return ChainCache(len(self.layers), self.embed_tokens.new_zeros(0, self.config.hidden_size, dtype=self.dtype))

    @torch.no_grad()
    def propose(self, hidden: dict[int, Tensor], tokens: Tensor, positions: Tensor, cache: Any, k: int, choose: Choose) -> Tensor:
        """As in AutoregressiveHead. In a chain, the entries of module m trail m indices behind, for want of committed tokens."""
        if self.block.shared:
            return super().propose(hidden, tokens, positions, cache, k, choose)
        # Final entries: module m eats the same tokens as module 0 does, at m indices less.
        outputs = self._run(0, self.fuse(hidden), tokens, positions, cache)
        state = outputs[-1:]
        for number in range(1, len(self.layers)):
            waiting = torch.cat([cache.pending[number], outputs])
            cache.pending[number] = waiting[-1:]
            outputs = self._run(number, waiting[:-1], tokens, positions, cache)
        # Draft: module d runs anew on the indices whose tokens are drafted ones.
        drafted = self.draft_ids[choose(self.logits(state))]
        outputs = state[:0]
        for number in range(1, k):
            inputs = torch.cat([cache.pending[number], outputs])
            held = cache.kv[number].length
            ahead = positions[-1] + 1 + torch.arange(number, device=positions.device)
            outputs = self._run(number, inputs, drafted, ahead, cache)
            cache.kv[number].crop(held)
            drafted = torch.cat([drafted, self.draft_ids[choose(self.logits(outputs[-1:]))]])
        return drafted

    def _run(self, number: int, states: Tensor, tokens: Tensor, positions: Tensor, cache: ChainCache) -> Tensor:
        """Add entries of one module to its cache: states [n, H] with the last n of tokens and positions → states [n, H]."""
        n = len(states)
        if n == 0:
            return states
        tokens, positions, module = tokens[len(tokens) - n :], positions[len(positions) - n :], self.stack[number]
        cos, sin = self.rotary(states, positions)
        entered, residual = module.enter(self.embed(_hide_first(tokens, positions)), states)
        key, value = cache.kv[number].append(0, *module.self_attn.key_value(entered, cos, sin))
        return module.leave(residual, cached_attention(module.self_attn.query(entered, cos, sin), key, value, None))

    # ---- export: what vLLM reads (VLLM_FORMATS §6) -------------------------------------------------------------

    def served_config(self) -> dict:
        """config.json: MiMo's architecture under model_type qwen2, which needs no remote code.

        In a folder of its own the head has no ordinary layers; vLLM takes the module's dimensions from the target's config.
        """
        mtp = {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "qwen2",
            "num_nextn_predict_layers": len(self.layers),
            "attention_bias": True,
            "use_sliding_window": False,
        }
        if self.block.layout == "head":
            return self.config.to_dict() | mtp | {"num_hidden_layers": 0}
        file = self._target.path / "config.json"
        config = json.loads(file.read_text()) if file.is_file() else self._target.config.to_dict()
        return config | mtp | {"rope_parameters": rope_parameters(self._target.config)}

    def served_tensors(self) -> dict[str, Tensor]:
        """Our parameters by MiMo's names, and in layout mimo zero biases for the target's layers, which have none."""
        return self._by_served_name() | {name: torch.zeros(shape) for name, shape in self._missing_biases().items()}

    def _missing_biases(self) -> dict[str, tuple[int, ...]]:
        """Biases that a MiMo target has and this one lacks."""
        config = self._target.config
        if self.block.layout == "head" or config.model_type == "qwen2" or getattr(config, "attention_bias", False):
            return {}
        attention = self.stack[0].self_attn
        sizes = {name: len(getattr(attention, name).bias) for name in ("q_proj", "k_proj", "v_proj")}
        return {f"model.layers.{i}.self_attn.{name}.bias": (size,) for i in range(config.num_hidden_layers) for name, size in sizes.items()}

    @torch.no_grad()
    def load_served(self, tensors: dict[str, Tensor]) -> None:
        """Take over weights by MiMo's names, ours or published. Raises ExportError where they do not fit."""
        copy_tensors(self._by_served_name(), {name: tensor for name, tensor in tensors.items() if ".mtp_layers." in name})

    def _by_served_name(self) -> dict[str, Tensor]:
        return {f"model.mtp_layers.{name.removeprefix('layers.')}": tensor for name, tensor in self.state_dict().items()}

    def served_shapes(self, config: dict) -> dict[str, tuple[int, ...]]:
        """Every tensor of the head that must exist for a config.json, with its shape: vLLM itself does not notice a missing one."""
        H, inner = config["hidden_size"], config["intermediate_size"]
        q, kv = (config[key] * (H // config["num_attention_heads"]) for key in ("num_attention_heads", "num_key_value_heads"))
        module: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj.weight": (size, H) for name, size in (("q", q), ("k", kv), ("v", kv))}
        module |= {f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", q), ("k", kv), ("v", kv))}
        module |= {"self_attn.o_proj.weight": (H, q), "input_proj.weight": (H, 2 * H)}
        module |= {"mlp.gate_proj.weight": (inner, H), "mlp.up_proj.weight": (inner, H), "mlp.down_proj.weight": (H, inner)}
        norms = ("hidden_layernorm", "token_layernorm", "input_layernorm", "post_attention_layernorm", "final_layernorm")
        module |= {f"{norm}.weight": (H,) for norm in norms}
        count = config["num_nextn_predict_layers"]
        return {f"model.mtp_layers.{m}.{name}": shape for m in range(count) for name, shape in module.items()} | self._missing_biases()

    @staticmethod
    def speculative_config() -> dict:
        """What the user passes to vLLM besides `model` and `num_speculative_tokens`."""
        return {"method": "mtp"}

    def llm_kwargs(self) -> dict:
        """What the engine itself needs: vLLM looks for the number of MTP layers in the *target's* config."""
        return {"hf_overrides": {"num_nextn_predict_layers": len(self.layers)}} if self.block.layout == "head" else {}


def _hide_first(tokens: Tensor, positions: Tensor) -> Tensor:
    """Tokens with -1 (no embedding) where the position is 0, as all MTP servers have it.

    >>> _hide_first(torch.tensor([7, 8, 9]), torch.tensor([0, 1, 2])).tolist()
    [-1, 8, 9]
    """
    return torch.where(positions == 0, -1, tokens)
