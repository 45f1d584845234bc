"""EAGLE-1: one decoder layer that continues the target's last hidden state (arXiv 2401.15077; METHODS §2).

The body of HASS (arXiv 2408.15766, METHODS §4: trained otherwise, `train/eagle1.py`) and of EAGLE-2 (arXiv 2406.16858,
METHODS §3: drafted as a dynamic tree, `eval.tree: eagle2`).

Timeline at index t (x: tokens, h: the target's state after its final norm):

    depth    feature at index t    token eaten   position   imitates     predicts   fed back
    0        h_t                   x[t+1]        t          h_{t+1}      x[t+2]     f_0
    i >= 1   f_{i-1}               x[t+1+i]      t + i      h_{t+1+i}    x[t+2+i]   f_i

Layer input and residual are fc[embedding ; feature] (embedding first, no bias) at every depth; the first layer has no
input norm, and nothing is normed after the last one: f imitates a state that has been normed. Logits are the target's
own, lm_head(f). The reference's HASS writes depth i of index t as pass i + 1 at position t + i; it is the same rollout:
keys of true features at positions <= t, and behind them one key of each earlier pass.

Shapes: n entries, H hidden size, V target vocabulary, A/G query/key-value heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from heads import LAST_HIDDEN
from heads.autoregressive import AutoregressiveHead, DraftLayer
from heads.exported import check_borrowed, copy_tensors
from heads.layers import Linear, RMSNorm, draft_llama_config
from heads.target import TargetParts
from heads.vocab import DraftVocab, whole_vocab
from recipes.errors import ExportError
from recipes.head_blocks import Eagle1Head as Eagle1Block


class Eagle1Layer(DraftLayer):
    """A Llama decoder layer; the first one has no input norm."""

    def __init__(self, config: LlamaConfig, first: bool):
        super().__init__(config, config.hidden_size)
        self.input_layernorm = nn.Identity() if first else RMSNorm(config.hidden_size, config.rms_norm_eps)

    def enter(self, embedding: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Layer input [n, H] → attention input and residual [n, H]."""
        return self.input_layernorm(x), x


class Eagle1Head(AutoregressiveHead):
    """The draft head. Embedding and LM head are borrowed from the target, frozen, and in no checkpoint or export.

    Its states imitate the target's, so their logits take the target's own scale (Cohere, Granite), in training, here and in vLLM.
    """

    lm_head: Tensor  # [V, H]

    def __init__(self, block: Eagle1Block, target: TargetParts, vocab: DraftVocab):
        """Raises TargetError where no constant scale makes logits of such states: a soft-cap, or an LM head with a bias."""
        own = {"intermediate_size": block.intermediate_size, "rope_parameters": block.rope}
        config = draft_llama_config(target.config, block.num_layers, **{key: value for key, value in own.items() if value is not None})
        layers: list[DraftLayer] = [Eagle1Layer(config, i == 0) for i in range(block.num_layers)]
        super().__init__(block, target, whole_vocab(vocab), config, layers)
        self.trained_vocab = vocab  # what training compares; drafts are over all tokens
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.register_buffer("lm_head", target.lm_head, persistent=False)
        self.logit_scale = target.logit_scale()
        self.reset_projections()

    # ---- what is EAGLE-1 about drafting (the rest: heads/autoregressive.py) ------------------------------------

    def fuse(self, hidden: dict[int, Tensor]) -> Tensor:
        """{LAST_HIDDEN: [n, H]} → features [n, H]: the post-norm state as it is."""
        return hidden[LAST_HIDDEN].to(self.dtype)

    def combine(self, embedding: Tensor, feature: Tensor) -> Tensor:
        """Embedding and feature (or fed-back state), [n, H] each → fc of both, embedding first [n, H]."""
        return self.fc(torch.cat([embedding, feature], -1))

    def feedback(self, state: Tensor) -> Tensor:
        """The state itself; no gradient flows back through it, each HASS pass learns from given features (METHODS §4)."""
        return state.detach()

    def logits(self, state: Tensor) -> Tensor:
        """States [n, H] → draft logits [n, V]."""
        return nn.functional.linear(state, self.lm_head.to(state.dtype)) * self.logit_scale

    # ---- export: what vLLM reads (VLLM_FORMATS §1) ------------------------------------------------------------

    def served_config(self) -> dict:
        """config.json; vLLM turns the architecture into EagleLlamaForCausalLM, and takes a missing `logit_scale` for 1."""
        scale = {"logit_scale": self.logit_scale} if self.logit_scale != 1 else {}
        return self.config.to_dict() | {"architectures": ["LlamaForCausalLM"]} | scale

    def served_tensors(self) -> dict[str, Tensor]:
        """Our parameters: their names are the served ones."""
        return dict(self.state_dict())

    @torch.no_grad()
    def load_served(self, tensors: dict[str, Tensor]) -> None:
        """Take over weights by their served names, ours or published (METHODS §14).

        A published file may hold the target's embedding and LM head as well; they are compared and left out.

        Raises:
            ExportError: a tensor is missing, unknown, of another shape, or one that vLLM would drop or replace.
        """
        tensors = dict(tensors)
        for name, own in (("embed_tokens.weight", self.embed_tokens), ("lm_head.weight", self.lm_head)):
            check_borrowed(name, tensors.pop(name, None), own)
        bias = tensors.pop("fc.bias", None)
        if bias is not None and bool(bias.any()):
            raise ExportError(
                f"fc.bias of the draft is not zero (largest value {bias.abs().max():.3g}), and vLLM has no such bias: it would drop it "
                "silently. Use a draft trained without it (its config.json says bias: false), or train one here."
            )
        copy_tensors(self.state_dict(), tensors)

    @staticmethod
    def served_shapes(config: dict) -> dict[str, tuple[int, ...]]:
        """Every tensor that must exist for a config.json, with its shape: vLLM itself does not notice a missing one."""
        H, inner = config["hidden_size"], config["intermediate_size"]
        q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 2 * H)}
        for number in range(config["num_hidden_layers"]):
            layer = {"self_attn.q_proj": (q, H), "self_attn.k_proj": (kv, H), "self_attn.v_proj": (kv, H), "self_attn.o_proj": (H, q)}
            layer |= {"mlp.gate_proj": (inner, H), "mlp.up_proj": (inner, H), "mlp.down_proj": (H, inner), "post_attention_layernorm": (H,)}
            if number > 0:
                layer["input_layernorm"] = (H,)
            shapes |= {f"layers.{number}.{name}.weight": shape for name, shape in layer.items()}
        return shapes

    @staticmethod
    def speculative_config() -> dict:
        """What the user passes to vLLM besides `model` and `num_speculative_tokens`."""
        return {"method": "eagle"}
