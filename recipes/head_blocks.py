"""What each method's head may be told: its `head:` block.

Layer numbers follow the one convention of the project (DESIGN §4): layer i is the residual stream after i decoder blocks, 0 is the
embedding.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from recipes.blocks import Block
from recipes.errors import RecipeError


class HeadBlock(Block):
    """Base of every `head:` block: what the head reads from the target and where it may start from."""

    init_from: str | None = None  # a draft to start from: an export of ours or a published one, a folder or a HF id, of the same shape

    def feature_layers(self, num_target_layers: int) -> list[int]:
        """Layers of the target whose residual stream the head reads, ascending (empty: none)."""
        return []

    @property
    def max_depth(self) -> int | None:
        """How many tokens ahead the head can draft; None where it drafts token by token and has no limit."""
        return None

    @property
    def needs_last_hidden(self) -> bool:
        """Whether training reads the target's post-norm last hidden state (teacher logits come from it)."""
        return True

    @property
    def inside_target(self) -> bool:
        """Whether the export is the whole target with the head inside, so that the server loads nothing else."""
        return False

    @property
    def not_served(self) -> str | None:
        """Why vLLM does not run this head as it was trained; None where it does."""
        return None


def default_aux_layers(num_target_layers: int) -> list[int]:
    """The low, middle and high layer that EAGLE-3 taps, `(2, L//2, L-3)` (METHODS §5.1, vLLM's default).

    >>> default_aux_layers(32)
    [2, 16, 29]

    Raises:
        RecipeError: the target is too shallow for three distinct layers (B17).
    """
    layers = [2, num_target_layers // 2, num_target_layers - 3]
    if len(set(layers)) < 3 or min(layers) < 0 or layers != sorted(layers):
        raise RecipeError(
            f"head.aux_layers: auto needs three distinct layers (2, L//2, L-3), but a target with L={num_target_layers} "
            f"layers gives {layers}. Give them explicitly, for instance head.aux_layers: [0, 1, {num_target_layers}]."
        )
    return layers


def check_layers(key: str, layers: list[int], num_target_layers: int) -> list[int]:
    """Return `layers` sorted, or raise RecipeError where one is repeated or outside 0..L."""
    bad = [i for i in layers if not 0 <= i <= num_target_layers]
    if bad or len(set(layers)) != len(layers):
        raise RecipeError(
            f"{key}: {layers} must be distinct layers within 0..{num_target_layers} (0 = embeddings, "
            f"{num_target_layers} = after the last block)" + (f"; out of range: {bad}" if bad else "")
        )
    return sorted(layers)


class Eagle3Head(HeadBlock):
    """EAGLE-3 (arXiv 2503.01840) and the EAGLE-3.1 switches (PEERS §2.1)."""

    num_layers: PositiveInt = 1  # decoder layers; the first reads the target, the others the one before
    # the most frequent answer tokens, all that can be drafted; None: the target's whole vocabulary
    draft_vocab_size: PositiveInt | None = 32000
    unroll_steps: PositiveInt = 7  # depths trained by training-time test; at least the k that you serve, each makes a step dearer
    # the target's layers that are read, in 0..L; auto: 2, L//2, L-3. All must be in the store
    aux_layers: Literal["auto"] | list[int] = "auto"
    intermediate_size: PositiveInt | None = None  # width of the MLP; None: the target's
    train_lm_head: bool = True  # false: the LM head stays at the target's rows
    init_layer: Literal["random", "target"] = "random"  # target: start as the target's last block reading its highest tapped layer
    norm_before_residual: bool = False  # residual = normalised feature instead of the raw one
    norm_before_fc: bool = False  # one RMSNorm over the concatenated features
    fc_norm: bool = False  # one RMSNorm per tapped layer, before fc (EAGLE-3.1)
    norm_output: bool = False  # feed back the post-norm state instead of the raw one (EAGLE-3.1)
    rope: dict[str, Any] | None = None  # transformers' rope_parameters; None: the target's. A converted draft keeps its own

    def feature_layers(self, num_target_layers: int) -> list[int]:
        if self.aux_layers == "auto":
            return default_aux_layers(num_target_layers)
        return check_layers("head.aux_layers", list(self.aux_layers), num_target_layers)


class MedusaHead(HeadBlock):
    """Medusa (arXiv 2401.10774; METHODS §1): head i, residual blocks and an LM head, drafts the token 2 + i places on."""

    num_heads: PositiveInt = 5  # tokens drafted in a round, at most: one head each
    num_layers: PositiveInt = 1  # residual blocks a head
    shared_lm_head: bool = False  # one LM head for all draft heads instead of one each
    train_lm_head: bool = True  # false: the shared LM head stays the target's, only the residual blocks learn
    draft_vocab_size: PositiveInt | None = None  # None: the target's whole vocabulary; the served LM heads have rows for all tokens

    @property
    def max_depth(self) -> int:
        return self.num_heads

    @model_validator(mode="after")
    def _frozen_is_shared(self):
        if not self.train_lm_head and not self.shared_lm_head:
            raise RecipeError(
                "head.train_lm_head=false with head.shared_lm_head=false would store the target's LM head "
                f"{self.num_heads} times; set head.shared_lm_head: true."
            )
        return self


class Eagle1Head(HeadBlock):
    """EAGLE-1 (arXiv 2401.15077; METHODS §2), also the body of HASS and EAGLE-2: one layer on the post-norm last hidden state."""

    num_layers: PositiveInt = 1  # decoder layers
    intermediate_size: PositiveInt | None = None  # width of the MLP; None: the target's
    draft_vocab_size: PositiveInt | None = None  # training only: the loss compares these most frequent tokens; drafts are over all
    rope: dict[str, Any] | None = None  # transformers' rope_parameters; None: the target's. A converted draft keeps its own


class PeagleHead(Eagle3Head):
    """P-EAGLE (arXiv 2602.01469; METHODS §6): EAGLE-3 that drafts `unroll_steps` slots in one pass."""

    num_layers: PositiveInt = 4  # decoder layers; all slots go through them in one pass
    unroll_steps: PositiveInt = 8  # slots: the first reads the target, the others a learned state and the mask token
    mask_token_id: NonNegativeInt  # a token of the target's vocabulary that no text holds; its embedding fills the later slots

    @property
    def max_depth(self) -> int:
        return self.unroll_steps

    @model_validator(mode="after")
    def _nothing_fed_back(self):
        if self.norm_output:
            raise RecipeError("head.norm_output=true has no effect on P-EAGLE, which feeds no state back; drop it.")
        return self


class MtpHead(HeadBlock):
    """Multi-token prediction from scratch (METHODS §8): one module used again and again (FastMTP), or a chain (DeepSeek-V3)."""

    unroll_steps: PositiveInt = 3  # depths trained
    shared: bool = True  # false: a module of its own for each depth, which only the reference decoder runs
    draft_vocab_size: PositiveInt | None = None  # training only: the loss compares these most frequent tokens; drafts are over all
    # head: a folder of its own, reads the post-norm state; mimo: the target rewritten as MiMo, pre-norm
    layout: Literal["head", "mimo"] = "head"

    @model_validator(mode="after")
    def _chain_compares_all(self):
        # States that also serve the next module may rise along tokens that are never compared, and one of these then wins every draft.
        if not self.shared and self.unroll_steps > 1 and self.draft_vocab_size is not None:
            raise RecipeError(
                f"head.draft_vocab_size={self.draft_vocab_size} with head.shared=false: in a chain of modules a token that the loss never "
                "compares can win every draft of the first module (measured: AL 1.00); drop draft_vocab_size, or set head.shared: true."
            )
        return self

    @property
    def max_depth(self) -> int | None:
        return None if self.shared else self.unroll_steps

    @property
    def inside_target(self) -> bool:
        return self.layout == "mimo"

    @property
    def not_served(self) -> str | None:
        if self.shared or self.unroll_steps == 1:
            return None
        return (
            f"vLLM runs only the first MTP module, again and again, and this is a chain of {self.unroll_steps} (head.shared=false); "
            "set eval.engine: reference, or train with head.shared: true."
        )


class MtpNativeHead(HeadBlock):
    """Fine-tuning of the MTP layer that the target's own files hold (MiMo, DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5 names)."""

    unroll_steps: PositiveInt = 3  # depths trained; the layer is used again and again

    @property
    def inside_target(self) -> bool:
        return True


def dflash_layers(count: int, num_target_layers: int) -> list[int]:
    """DFlash's default taps, `count` layers spread evenly (METHODS §9.1; the published ids count layer outputs from 0, one less).

    >>> [layer - 1 for layer in dflash_layers(5, 36)]
    [1, 9, 17, 25, 33]

    Raises:
        RecipeError: the target is too shallow for that many distinct layers.
    """
    L = num_target_layers
    layers = [L // 2 + 1] if count == 1 else [round(1 + i * (L - 4) / (count - 1)) + 1 for i in range(count)]
    if len(set(layers)) < count or not all(0 < layer <= L for layer in layers):
        raise RecipeError(
            f"head.aux_layers={count} gives {layers} on a target of {L} layers; give distinct layers within 0..{L} explicitly."
        )
    return layers


class DflashHead(HeadBlock):
    """DFlash (arXiv 2602.06036; METHODS §9): a block of mask tokens denoised in one pass over the target's injected features."""

    num_layers: PositiveInt = 5  # decoder layers; each has the target's features injected as keys and values
    block_size: Annotated[int, Field(ge=2)] = 16  # the last committed token and block_size - 1 mask tokens, each of which drafts
    mask_token_id: NonNegativeInt  # a token of the target's vocabulary that no text holds
    aux_layers: PositiveInt | list[int] = 5  # tapped layers, or how many, spread evenly as published
    draft_vocab_size: PositiveInt | None = None  # None: the target's whole vocabulary; the LM head stays the target's rows
    intermediate_size: PositiveInt | None = None  # width of the MLP; None: the target's
    rope: dict[str, Any] | None = None  # transformers' rope_parameters; None: the target's. A converted draft keeps its own

    @property
    def max_depth(self) -> int:
        return self.block_size - 1

    def feature_layers(self, num_target_layers: int) -> list[int]:
        if isinstance(self.aux_layers, int):
            return dflash_layers(self.aux_layers, num_target_layers)
        return check_layers("head.aux_layers", list(self.aux_layers), num_target_layers)


class DraftModelHead(HeadBlock):
    """Independent draft (arXiv 2211.17192): a small causal LM with the target's tokenizer, cut from the target or `init_from` a model.

    With `init_from` (a folder or a Hugging Face id) architecture and weights are that model's.
    """

    num_layers: PositiveInt | None = None  # cut from the target: how many of its layers are kept
    keep_layers: Literal["first", "spread"] | list[NonNegativeInt] = "first"  # which: the first ones, evenly spread ones, or these (from 0)
    train_embeddings: bool = True  # false: embedding and LM head stay as they are (of PARD's, the mask token's row still learns)
    draft_vocab_size: PositiveInt | None = None  # training only: the loss compares these most frequent tokens; the model keeps all

    @model_validator(mode="after")
    def _one_origin(self):
        if (self.num_layers is None) == (self.init_from is None):
            raise RecipeError(
                f"head.num_layers={self.num_layers} and head.init_from={self.init_from}: give one of them, the first for a draft cut from "
                "the target, the second for one that exists."
            )
        if self.keep_layers != type(self).model_fields["keep_layers"].default and self.init_from is not None:
            raise RecipeError(f"head.keep_layers={self.keep_layers} has no effect with head.init_from={self.init_from}; drop it.")
        return self

    def kept_layers(self, num_target_layers: int) -> list[int]:
        """The target's decoder layers (from 0) that the draft is made of.

        >>> DraftModelHead(num_layers=4, keep_layers="spread").kept_layers(30)
        [0, 10, 19, 29]

        Raises:
            RecipeError: more layers than the target has, or a list that does not fit.
        """
        n, keep = self.num_layers or 0, self.keep_layers
        if keep == "first":
            layers = list(range(n))
        elif keep == "spread":
            layers = [round(i * (num_target_layers - 1) / max(n - 1, 1)) for i in range(n)]
        else:
            layers = sorted(keep)
        if len(layers) != n or len(set(layers)) != n or layers[-1] >= num_target_layers:
            raise RecipeError(
                f"head.keep_layers={keep} with head.num_layers={n} gives layers {layers} of a target that has 0..{num_target_layers - 1}; "
                f"give {n} distinct ones of those."
            )
        return layers


class PardHead(DraftModelHead):
    """PARD (arXiv 2504.18583; METHODS §7): a draft model that drafts behind mask tokens in one pass; with `aux_layers`, PARD-2."""

    mask_token_id: NonNegativeInt  # a token of the target's vocabulary that no text holds; it stands in every slot but the first
    unroll_steps: PositiveInt = 8  # slots trained; more may be drafted, for all share one mask token
    aux_layers: list[int] | None = None  # PARD-2: layers of the target that the input reads beside its last hidden state ([]: only that)
    feature_scale: PositiveFloat = 0.02  # PARD-2: factor of the projected target states

    def feature_layers(self, num_target_layers: int) -> list[int]:
        return check_layers("head.aux_layers", list(self.aux_layers or []), num_target_layers)
