"""The MTP layer that a target's own files hold: read for fine-tuning, written back under its own names (METHODS §8).

The timeline is that of `heads/mtp.py` with one module used again and again, which is what vLLM does (FastMTP, arXiv
2509.18362, trains for it). The decoder layer is the family's own, from `transformers` (mixture of experts, latent
attention, gates and partial rotary embedding included); only who sees whom is ours, through the attention interface.

What differs between families, as vLLM 0.32 serves them:

    family              names                        projection of   state of the target   handed on            position 0
    MiMo                model.mtp_layers.0.*         [state ; emb]   before final norm     after module's norm  no embedding
    DeepSeek-V3         model.layers.{L}.*           [emb ; state]   after final norm      after module's norm  no embedding
    GLM-4.5             model.layers.{L}.*           [emb ; state]   after final norm      before it            no embedding
    Qwen3-Next, Qwen3.5 mtp.*, mtp.layers.0.*        [emb ; state]   after final norm      after module's norm  as any other

Further MTP layers of a target are left as they are: the server runs the first one alone.

Shapes: N packed tokens, R rows wanted at a depth, n entries of one request, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from heads import LAST_HIDDEN
from heads.autoregressive import AutoregressiveHead
from heads.cache import DraftCache, cached_attention
from heads.exported import copy_tensors
from heads.layers import Linear, document_attention
from heads.target import TargetParts, TensorFiles
from heads.vocab import DraftVocab
from recipes.errors import RecipeError, TargetError
from recipes.head_blocks import MtpNativeHead as MtpNativeBlock

ATTENTION = "headstart_draft"  # our name in transformers' attention interface
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries [n, A, d], keys [n, G, d], values [n, G, e] → [n, A, e]


class Family(NamedTuple):
    """Where a family keeps its MTP layer and how it is run; `{L}` is the target's number of layers."""

    code: str  # of the decoder layer, below transformers.models
    layer: str
    rotary: str
    index: str  # as which layer of the target it is built
    prefix: str  # of the decoder layer's tensors
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    embedding_first: bool = True
    pre_norm_state: bool = False
    hands_on_normed: bool = True
    hides_first: bool = True


def _deepseek_names(code: str, names: str, **differs: Any) -> Family:
    layer = "model.layers.{L}"
    own = [f"{layer}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")]
    return Family(code, f"{names}DecoderLayer", f"{names}RotaryEmbedding", "{L}", layer, own[0], own[1], own[2], own[3], **differs)


def _qwen_names(code: str, names: str, rotary: str) -> Family:
    own = [f"mtp.{name}" for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")]
    return Family(code, f"{names}DecoderLayer", rotary, "0", "mtp.layers.0", own[0], own[1], own[2], own[3], hides_first=False)


_MIMO = "model.mtp_layers.0"
FAMILIES = {
    "mimo": Family(
        "qwen2.modeling_qwen2", "Qwen2DecoderLayer", "Qwen2RotaryEmbedding", "0", _MIMO,
        *(f"{_MIMO}.{name}" for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")),
        embedding_first=False, pre_norm_state=True,
    ),
    "deepseek_v3": _deepseek_names("deepseek_v3.modeling_deepseek_v3", "DeepseekV3"),
    "glm4_moe": _deepseek_names("glm4_moe.modeling_glm4_moe", "Glm4Moe", hands_on_normed=False),
    "qwen3_next": _qwen_names("qwen3_next.modeling_qwen3_next", "Qwen3Next", "Qwen3NextRotaryEmbedding"),
    "qwen3_5_text": _qwen_names("qwen3_5.modeling_qwen3_5", "Qwen3_5", "Qwen3_5TextRotaryEmbedding"),
    "qwen3_5_moe_text": _qwen_names("qwen3_5_moe.modeling_qwen3_5_moe", "Qwen3_5Moe", "Qwen3_5MoeTextRotaryEmbedding"),
}  # fmt: skip


def family_of(target: TargetParts) -> Family:
    """Raises TargetError where the target's family is not among ours."""
    name = "mimo" if "MiMoForCausalLM" in (target.config.architectures or []) else target.config.model_type
    if name not in FAMILIES:
        raise TargetError(
            f"{target.path} is of the family {name!r}, whose MTP layer Headstart does not read (it reads: {', '.join(FAMILIES)}); "
            "train a head from scratch with method: mtp."
        )
    return FAMILIES[name]


class MtpNativeHead(AutoregressiveHead):
    """The target's own first MTP layer. Embedding and LM head are the target's, frozen, and not written back."""

    block: MtpNativeBlock
    lm_head: Tensor  # [V, H]
    final_norm_weight: Tensor  # [H], of the target

    def __init__(self, block: MtpNativeBlock, target: TargetParts, vocab: DraftVocab):
        nn.Module.__init__(self)  # not the base's, which builds Llama layers
        if not vocab.full:
            raise RecipeError(f"an MTP layer drafts over all {vocab.size} tokens; this draft vocabulary has {len(vocab.ids)}")
        self.block, self.vocab, self._target = block, vocab, target
        self.trained_vocab = vocab
        self.family = family = family_of(target)
        self.config: Any = copy.deepcopy(target.config)
        self.config._attn_implementation = ATTENTION
        self.config._experts_implementation = "eager"
        if getattr(self.config, "layer_types", None):
            self.config.layer_types = ["full_attention"] * (target.num_layers + 1)
        code = import_module(f"transformers.models.{family.code}")
        H = target.hidden_size
        norm = type(target.norm)
        eps = self.config.rms_norm_eps
        self.embedding_norm, self.hidden_norm, self.final_norm = (norm(H, eps=eps) for _ in range(3))
        self.projection = Linear(2 * H, H, bias=False)
        self.layers = nn.ModuleList([getattr(code, family.layer)(self.config, int(self._named(family.index)))])
        self.rotary = getattr(code, family.rotary)(self.config)
        self.register_buffer("embed_tokens", target.embed_tokens, persistent=False)
        self.register_buffer("lm_head", target.lm_head, persistent=False)
        self.register_buffer("final_norm_weight", target.norm_weight().detach(), persistent=False)
        self.register_buffer("draft_ids", vocab.ids.to(target.embed_tokens.device), persistent=False)
        self.files = None if target.embed_tokens.is_meta else TensorFiles(target.path)
        if self.files is not None:
            self._read(self.files)

    # ---- the target's files ------------------------------------------------------------------------------------

    def _named(self, text: str) -> str:
        return text.format(L=self._target.num_layers)

    def _views(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of the target's files that is ours, and where it lies in this module."""
        family = self.family
        own = {
            family.embedding_norm: self.embedding_norm.weight,
            family.hidden_norm: self.hidden_norm.weight,
            family.projection: self.projection.weight,
            family.final_norm: self.final_norm.weight,
        }
        for name, tensor in own.items():
            yield self._named(name) + ".weight", tensor
        prefix = self._named(family.prefix)
        for name, tensor in self.layers[0].state_dict().items():
            key = f"{prefix}.{name}"
            experts, _, kind = key.rpartition(".")
            if not experts.endswith(".experts") or (self.files is not None and self.files.find(key) is not None):
                yield key, tensor
                continue
            # transformers stacks experts; published files hold them one by one.
            for number, expert in enumerate(tensor):
                if kind == "gate_up_proj":
                    gate, up = expert.chunk(2)
                    yield f"{experts}.{number}.gate_proj.weight", gate
                    yield f"{experts}.{number}.up_proj.weight", up
                else:
                    yield f"{experts}.{number}.{kind}.weight", expert

    @torch.no_grad()
    def _read(self, files: TensorFiles) -> None:
        """Fill this module from the target's files.

        Raises:
            TargetError: the files lack tensors of the MTP layer, have them in other shapes, or hold FP8 weights.
        """
        views = dict(self._views())
        if missing := [name for name in views if files.find(name) is None]:
            near = difflib.get_close_matches(missing[0], files.where, n=3, cutoff=0.3)
            raise TargetError(
                f"{files.path} lacks {len(missing)} of the {len(views)} tensors of its MTP layer: {', '.join(missing[:4])}…; nearest keys: "
                f"{', '.join(near) or 'none'}. Some copies of a model are saved without that layer; take the original files, or "
                "train a head from scratch with method: mtp."
            )
        for name, view in views.items():
            key = files.find(name)
            if f"{key}_scale_inv" in files.where:
                raise TargetError(f"{files.path}: {key} is stored in FP8 with a scale; fine-tuning needs a copy of the target in bfloat16")
            tensor = files.get(name)
            if tensor.shape != view.shape:
                raise TargetError(f"{files.path}: {key} is {tuple(tensor.shape)}, config.json gives {tuple(view.shape)}")
            view.copy_(tensor)

    # ---- drafting ----------------------------------------------------------------------------------------------

    def fuse(self, hidden: dict[int, Tensor]) -> Tensor:
        """{LAST_HIDDEN: [n, H]} → states [n, H] that depth 0 eats; the hidden norm takes out their length (heads/mtp.py)."""
        state = hidden[LAST_HIDDEN].to(self.dtype)
        return state / self.final_norm_weight.to(state.dtype) if self.family.pre_norm_state else state

    def feedback(self, state: Tensor) -> Tensor:
        """[n, H] what the next depth eats as its state."""
        return self.normed(state) if self.family.hands_on_normed else state

    def normed(self, state: Tensor) -> Tensor:
        """States [n, H] → what the LM head reads."""
        return self.final_norm(state)

    def logits(self, state: Tensor) -> Tensor:
        """States [n, H] → draft logits [n, V]; none of these families has a logit scale or a soft-cap."""
        return F.linear(self.normed(state), self.lm_head.to(state.dtype))

    def _run(self, states: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The module over n entries: states and tokens eaten → states [n, H] before the final norm."""
        embedding = self.embed(tokens)
        if self.family.hides_first:
            embedding = embedding * (positions > 0)[:, None]
        sides = self.embedding_norm(embedding), self.hidden_norm(states)
        x = self.projection(torch.cat(sides if self.family.embedding_first else sides[::-1], -1))[None]
        return self.layers[0](x, position_embeddings=self.rotary(x, positions[None]), attention_mask=None, attend=attend)[0]

    def rollout(self, feature: Tensor, tokens: list[Tensor], positions: Tensor, starts: Tensor, rows: list[Tensor]) -> list[Tensor]:
        """As in AutoregressiveHead; depth 0 runs at every index."""
        everywhere = torch.arange(len(feature), device=feature.device)
        first: tuple[Tensor, Tensor] | None = None
        own: list[tuple[Tensor, Tensor]] = []  # of depths 1.., at the rows of the depth at hand
        states: list[Tensor] = []

        def see_first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            nonlocal first
            first = key, value
            return _document_attention(query, key, value, everywhere, starts)

        def see_own(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            assert first is not None
            own.append((key, value))
            diagonal_k, diagonal_v = (torch.stack(side, 1) for side in zip(*own, strict=True))
            return _document_attention(query, *first, rows[len(states)], starts, diagonal_k, diagonal_v)

        for depth, row in enumerate(rows):
            if depth == 0:
                states.append(self._run(feature, tokens[0], positions, see_first)[row])
                continue
            kept = torch.searchsorted(rows[depth - 1], row)
            if len(row) == 0:  # transformers' layers take no empty input; later depths are empty too
                states.append(states[-1][kept])
                continue
            own = [(key[kept], value[kept]) for key, value in own]
            states.append(self._run(self.feedback(states[-1][kept]), tokens[depth][row], positions[row] + depth, see_own))
        return states

    def advance(self, feature: Tensor, tokens: Tensor, positions: Tensor, cache: DraftCache, visible: Tensor | None = None) -> Tensor:
        """As in AutoregressiveHead."""
        return self._run(feature, tokens, positions, lambda q, k, v: cached_attention(q, *cache.append(0, k, v), visible))

    # ---- export: the target with this layer in it --------------------------------------------------------------

    def served_config(self) -> dict:
        """The target's own config.json."""
        file = self._target.path / "config.json"
        return json.loads(file.read_text()) if file.is_file() else self._target.config.to_dict()

    def served_tensors(self) -> dict[str, Tensor]:
        """The layer's tensors by the names that the target's files have."""
        return {(self.files.find(name) if self.files else None) or name: view for name, view in self._views()}

    @torch.no_grad()
    def load_served(self, tensors: dict[str, Tensor]) -> None:
        """Take over weights by the target's names. Raises ExportError where a tensor is missing or of another shape."""
        own = self.served_tensors()
        copy_tensors(own, {name: tensor for name, tensor in tensors.items() if name in own})

    def served_shapes(self, config: dict) -> dict[str, tuple[int, ...]]:
        """Every tensor of the layer, with its shape."""
        return {name: tuple(tensor.shape) for name, tensor in self.served_tensors().items()}

    @staticmethod
    def speculative_config() -> dict:
        """What the user passes to vLLM besides `num_speculative_tokens`."""
        return {"method": "mtp"}


def _draft_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, attend: Attend, **_: Any):
    """transformers' attention interface, [1, heads, n, d] → [1, n, A, e], with who sees whom left to `attend`."""
    q, k, v = (side[0].transpose(0, 1) for side in (query, key, value))
    return attend(q * (scaling * q.shape[-1] ** 0.5), k, v)[None], None


def _document_attention(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, starts: Tensor, *own: Tensor) -> Tensor:
    """`heads.layers.document_attention` for values narrower than keys (latent attention)."""
    short = key.shape[-1] - value.shape[-1]
    if short:
        value, own = F.pad(value, (0, short)), tuple(F.pad(side, (0, short)) if i == 1 else side for i, side in enumerate(own))
    return document_attention(query, key, value, rows, starts, *own)[..., : query.shape[-1] - short]


AttentionInterface.register(ATTENTION, _draft_attention)
