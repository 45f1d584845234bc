"""What a head borrows from its target, read from the target's files without loading the whole model.

A head uses the target's embedding, LM head and final norm. The norm is the model family's own module (Gemma scales by
1 + w, Llama by w): it is taken from `transformers`, never imitated. `TargetParts.logits` applies the family's own
scale and soft-cap, and `check_probe` proves on one stored row that the result is what the target itself computes.

Shapes: N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from heads.embedded import resolve_target, target_fingerprint
from recipes.errors import TargetError
from recipes.schema import Target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EXACT_PROBE = 0.999  # share of the probe's tokens that float32 states must give again
ROUNDED_PROBE = 0.9  # of states from half-precision products: near ties fall either way, a wrong norm gives less than a third

Sink = Callable[[int | None, Tensor], None]  # (layer or None for last_hidden, states [B, T, H])


@dataclass(frozen=True)
class TargetParts:
    """The borrowed parts of one target.

    `embed_tokens` and `lm_head` are [V, H]; with tied embeddings they are the same tensor. `norm` maps the residual
    stream after the last block to `last_hidden`. `config` is the text model's own config.
    """

    path: Path
    config: PretrainedConfig
    embed_tokens: Tensor
    lm_head: Tensor
    lm_head_bias: Tensor | None
    norm: nn.Module
    fingerprint: str
    source: Target | None = None  # the recipe block it was read by; Medusa-2 loads the whole model with it

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        return self.lm_head.shape[0]

    def decoder_block(self, number: int) -> dict[str, Tensor]:
        """Tensors of one decoder block by their names inside it (`self_attn.q_proj.weight`, …), read from the files (float32)."""
        files, mark = TensorFiles(self.path), f"layers.{number}."
        return {key.split(mark, 1)[1]: files.get(key) for key in files.where if mark in key and "vis" not in key.split(mark, 1)[0]}

    def logits(self, last_hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """Logits [N, V] (or [N, len(rows)] of these vocabulary ids) of post-norm states [N, H]."""
        weight, bias = self.lm_head, self.lm_head_bias
        if rows is not None:
            weight, bias = weight[rows], None if bias is None else bias[rows]
        return self.scale_logits(F.linear(last_hidden.to(weight.dtype), weight, bias))

    def scale_logits(self, logits: Tensor) -> Tensor:
        """The family's own scale and soft-cap (Cohere, Granite, Gemma); most families have neither."""
        if (scale := getattr(self.config, "logit_scale", None)) is not None:
            logits = logits * scale
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def logit_scale(self) -> float:
        """The constant c in logits = c * lm_head(last_hidden), for losses through the target's own LM head.

        Raises:
            TargetError: logits are not linear in the state: a soft-cap, or an LM head with a bias.
        """
        cap = getattr(self.config, "final_logit_softcapping", None)
        if cap is not None or self.lm_head_bias is not None:
            what = f"a logit soft-cap of {cap}" if cap is not None else "an LM head with a bias"
            raise TargetError(
                f"{self.path} has {what}, and this method compares states through the target's LM head; train an EAGLE-3 head"
            )
        return float(self.scale_logits(torch.ones((), device="cpu")))  # not on a meta device

    def norm_weight(self) -> Tensor:
        """[H] the final norm as a plain RMSNorm's weight (Gemma's 1 + w included); ones where it is another kind of norm."""
        ones = torch.ones(self.hidden_size)
        return self.norm(ones) if "RMSNorm" in type(self.norm).__name__ else ones

    @property
    def plain_logits(self) -> bool:
        """Whether logits are `last_hidden @ lm_head.T` and nothing else."""
        names = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        return self.lm_head_bias is None and all(getattr(self.config, n, None) in (None, 1.0) for n in names)


@contextmanager
def explained(cfg: Target, what: str) -> Iterator[None]:
    """Inside, what transformers raises on loading `what` of a target becomes a TargetError with the recipe key in it."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as e:
        reason = next((line for line in str(e).splitlines() if line.strip()), type(e).__name__)
        remedy = "set target.trust_remote_code: true after reading its files" if "trust_remote_code" in str(e) else "look at its files"
        raise TargetError(f"target.path={cfg.path}: transformers cannot load its {what}: {reason} ({remedy})") from e


def text_config(cfg: Target) -> PretrainedConfig:
    """The target's config; the language model's own where the target has other parts too."""
    path = resolve_target(cfg.path, cfg.revision)
    with explained(cfg, "config.json"):
        return AutoConfig.from_pretrained(path, trust_remote_code=cfg.trust_remote_code).get_text_config()


def read_target(cfg: Target) -> TargetParts:
    """Read the borrowed parts of a target (float32 on the CPU) from its safetensors files.

    Raises:
        TargetError: no safetensors files, or a needed tensor is missing; names the file and the nearest keys (B22).
    """
    path = resolve_target(cfg.path, cfg.revision)
    config = text_config(cfg)
    with explained(cfg, "model class"), torch.device("meta"):  # a skeleton: names and module classes, no memory
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=cfg.trust_remote_code)
    names = {id(module): name for name, module in skeleton.named_modules()}
    embed_name = names[id(skeleton.get_input_embeddings())] + ".weight"
    head = skeleton.get_output_embeddings()
    head_name = names[id(head)] + ".weight"
    norm = _final_norm(skeleton)
    norm_name = names[id(norm)]

    files = TensorFiles(path)
    embed_tokens = files.get(embed_name)
    if embed_tokens.shape[1] != config.hidden_size:
        raise TargetError(f"{path}: {embed_name} is {tuple(embed_tokens.shape)} but config.json says hidden_size={config.hidden_size}")
    tied = bool(config.tie_word_embeddings)
    lm_head = embed_tokens if tied and files.find(head_name) is None else files.get(head_name, fallback_hint=embed_name)
    bias = files.get(head_name.replace(".weight", ".bias")) if head.bias is not None else None
    norm = norm.to_empty(device="cpu")
    norm.load_state_dict({key: files.get(f"{norm_name}.{key}") for key in norm.state_dict()})
    norm.requires_grad_(False)
    return TargetParts(path, config, embed_tokens, lm_head, bias, norm, target_fingerprint(path), cfg)


def load_target_model(cfg: Target) -> PreTrainedModel:
    """The whole target in `cfg.dtype`, in evaluation mode, without gradients."""
    path = resolve_target(cfg.path, cfg.revision)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=DTYPES[cfg.dtype], attn_implementation=cfg.attn, trust_remote_code=cfg.trust_remote_code
    )
    return model.eval().requires_grad_(False)


def rope_kinds(config: PretrainedConfig) -> list[dict]:
    """Rotary settings of a text model's config; some families have one set per layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(part for part in rope.values() if isinstance(part, dict))]


def needs_equal_lengths(model: PreTrainedModel) -> bool:
    """Whether rotary frequencies depend on the longest row of a batch, so that mixed lengths would change the short rows' states."""
    return any(kind.get("rope_type") in ("dynamic", "longrope") for kind in rope_kinds(model.config.get_text_config()))


@torch.no_grad()
def reset_rope(model: nn.Module) -> None:
    """Back to the frequencies of a model that has seen no row: those of type dynamic stay at the longest one's until a short one comes."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            if kind == "dynamic":  # a single token is such a short row
                one = torch.zeros(1, 1, dtype=torch.long, device=next(module.buffers()).device)
                module(one.float(), one, **({} if layer_type is None else {"layer_type": layer_type}))


def kv_cache_bytes(config: PretrainedConfig, dtype: str) -> int:
    """Bytes of one token in the key-value cache, by a text model's config (GPT-NeoX and others name no KV heads and no head size)."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * DTYPES[dtype].itemsize


def load_tokenizer(cfg: Target) -> PreTrainedTokenizerBase:
    """The target's tokenizer, with its chat template."""
    path = resolve_target(cfg.path, cfg.revision)
    with explained(cfg, "tokenizer"):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=cfg.trust_remote_code)


def check_probe(target: TargetParts, last_hidden: Tensor, argmax: Tensor, where: str, floor: float = EXACT_PROBE) -> float:
    """Prove that borrowed norm, head, scale and soft-cap give the target's own predictions (B18, PEERS §4.4).

    Args:
        last_hidden: [N, H] stored post-norm states of one row.
        argmax: [N] what the target's own full forward predicts at the same positions.
        where: the store, for the message.

    Returns:
        The share of positions that agree.

    Raises:
        TargetError: fewer than `floor` of the positions agree.
    """
    agreement = (target.logits(last_hidden.float()).argmax(-1) == argmax).float().mean().item()
    if agreement < floor:
        raise TargetError(
            f"{where}: lm_head(last_hidden) gives the target's own next token at {agreement:.1%} of the probe row's positions "
            f"(needed: {floor:.1%}). The store holds pre-norm states, or this target's norm, logit scale or soft-cap is not applied "
            f"as {type(target.norm).__name__} does. Rebuild it with `python -m data_prep RECIPE`; if it stays, the family is not supported."
        )
    return agreement


@contextmanager
def tapped(model: PreTrainedModel, layers: list[int], sink: Sink) -> Iterator[None]:
    """While open, every forward pass of `model` hands each tapped layer's states to `sink`.

    Raises:
        TargetError: the model's decoder has no list of blocks `layers`.
    """
    blocks = getattr(model.get_decoder(), "layers", None)
    if not isinstance(blocks, torch.nn.ModuleList):
        raise TargetError(f"{type(model).__name__}: its decoder has no list of blocks named `layers`; this family is not supported")

    def before(layer: int):
        def hook(module, args, kwargs):
            sink(layer, args[0] if args else kwargs["hidden_states"])

        return blocks[layer].register_forward_pre_hook(hook, with_kwargs=True)

    def after_last():
        def hook(module, args, output):
            sink(len(blocks), output if isinstance(output, Tensor) else output[0])

        return blocks[-1].register_forward_hook(hook)

    handles: list[RemovableHandle] = []
    try:
        for layer in layers:
            handles.append(after_last() if layer == len(blocks) else before(layer))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _final_norm(skeleton: PreTrainedModel) -> nn.Module:
    """The last norm module of the decoder: a direct child whose name says so."""
    decoder = skeleton.get_decoder()
    for name in ("norm", "final_layernorm", "ln_f", "final_layer_norm", "embedding_norm"):
        if isinstance(module := getattr(decoder, name, None), nn.Module):
            return module
    children = ", ".join(name for name, _ in decoder.named_children())
    raise TargetError(f"no final norm found in {type(decoder).__name__} (children: {children}); this family is not supported")


class TensorFiles:
    """Lookup of tensors by name over one or many safetensors files, nested names included."""

    def __init__(self, path: Path):
        self.path = path
        index = path / "model.safetensors.index.json"
        if index.is_file():
            self.where: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            self.where = {}
            for file in sorted(path.glob("*.safetensors")):
                with safe_open(file, "pt") as f:
                    self.where.update(dict.fromkeys(f.keys(), file.name))
        if not self.where:
            raise TargetError(f"{path} holds no *.safetensors file; save the target with save_pretrained(safe_serialization=True) first")

    def find(self, name: str) -> str | None:
        """The key under which `name` is stored; vision-language models nest it below `language_model`."""
        inner = name.removeprefix("model.")
        nested = (
            f"model.language_model.{inner}",
            f"language_model.model.{inner}",
            f"language_model.{inner}",
            f"language_model.{name}",
            inner,
        )
        return next((key for key in (name, *nested) if key in self.where), None)

    def get(self, name: str, fallback_hint: str | None = None) -> Tensor:
        """The tensor in float32. Raises TargetError naming the file that is missing or damaged, or the nearest keys where the tensor is."""
        if (key := self.find(name)) is None:
            near = difflib.get_close_matches(name, self.where, n=4, cutoff=0.3)
            hint = (
                f" If it shares the embedding, set tie_word_embeddings: true in config.json ({fallback_hint} is there)."
                if fallback_hint
                else ""
            )
            raise TargetError(f"{self.path}: no tensor {name}; nearest keys: {', '.join(near) or 'none'}.{hint}")
        file = self.path / self.where[key]
        try:
            with safe_open(file, "pt") as f:
                return f.get_tensor(key).float()
        except (OSError, SafetensorError) as e:
            fault = f"cannot be read ({str(e).splitlines()[0]})" if file.is_file() else f"is missing, and {key} should be in it"
            raise TargetError(f"{file} {fault}: the target is not whole. Download or save it again.") from None
