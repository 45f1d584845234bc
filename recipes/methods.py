"""What each method may be told: its `head:` and `objective:` blocks.

A method is registered by one line in `METHODS`. Its defaults live here and nowhere else. Layer numbers follow the one
convention of the project (DESIGN §4): layer i is the residual stream after i decoder blocks, 0 is the embedding.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from recipes.errors import RecipeError

Share = Annotated[float, Field(ge=0, lt=1)]


class Block(BaseModel):
    """Base of every recipe block: unknown keys fail, values are checked, instances do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class HeadBlock(Block):
    """Base of every `head:` block: what the head reads from the target and where it may start from."""

    init_from: str | None = None  # an export (ours or a published one) to start from, for fine-tuning

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

    num_layers: PositiveInt = 1
    draft_vocab_size: PositiveInt | None = 32000  # None: the target's whole vocabulary
    unroll_steps: PositiveInt = 7  # training-time-test steps
    aux_layers: Literal["auto"] | list[int] = "auto"
    intermediate_size: PositiveInt | None = None  # None: the target's
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


class DistributionObjective(Block):
    """How draft and target distributions are compared at each depth."""

    loss: Literal["kl", "ce", "lk"] = "kl"  # kl: target distribution; ce: the answer's token; lk: acceptance (arXiv 2602.23881)
    step_decay: float = Field(default=0.8, gt=0, le=1)  # weight of depth i is step_decay ** i
    lk_eta: float = Field(default=3.0, ge=0)  # lk only: KL share is exp(-lk_eta * acceptance)

    @model_validator(mode="after")
    def _eta_needs_lk(self):
        default = type(self).model_fields["lk_eta"].default  # a resolved recipe, read back, holds it for every loss
        if self.lk_eta != default and self.loss != "lk":
            raise RecipeError(
                f"objective.lk_eta={self.lk_eta} has no effect with objective.loss={self.loss!r}; set objective.loss: lk or drop lk_eta."
            )
        return self


class MedusaHead(HeadBlock):
    """Medusa (arXiv 2401.10774; METHODS §1): head i, residual blocks and an LM head, drafts the token 2 + i places on."""

    num_heads: PositiveInt = 5
    num_layers: PositiveInt = 1  # residual blocks a head
    shared_lm_head: bool = False  # one LM head for all draft heads instead of one each
    train_lm_head: bool = True  # false: the shared LM head stays the target's, only the residual blocks learn
    draft_vocab_size: PositiveInt | None = None  # training only: the loss compares these most frequent tokens; drafts are over all

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


class MedusaObjective(Block):
    """Medusa-1: the target is frozen, each head learns the token (or the target's distribution) at its place."""

    loss: Literal["kl", "ce"] = "kl"  # kl: to the target's distribution; ce: on the answer's token, as published
    head_decay: float = Field(default=0.8, gt=0, le=1)  # weight of head i (from 0) is head_decay ** (i + 1)


class Medusa2Objective(MedusaObjective):
    """Medusa-2: heads and target learn together; loss = target's own + heads_weight * schedule * (Medusa-1's)."""

    backbone: Literal["lora", "full"] = "lora"  # what of the target learns: low-rank adapters on its linear layers, or all of it
    lora_rank: PositiveInt = 32
    lora_alpha: PositiveFloat = 16.0
    lora_dropout: Share = 0.05
    target_loss: Literal["distill", "ce"] = "distill"  # distill: KL from the un-adapted target; ce: on the answer's token
    heads_weight: PositiveFloat = 0.2  # λ0
    heads_schedule: Literal["constant", "linear", "sine"] = "constant"  # λ0 over the run: as it is, t, or sin(t π/2); t in 0..1
    head_warmup: Share = 0.0  # share of the run in which only the heads learn
    head_lr_multiplier: PositiveFloat = 4.0  # learning rate of the heads over train.lr

    @model_validator(mode="after")
    def _lora_needs_lora(self):
        fields = type(self).model_fields
        given = [name for name in fields if name.startswith("lora_") and getattr(self, name) != fields[name].default]
        if given and self.backbone != "lora":
            raise RecipeError(
                f"objective.{given[0]}={getattr(self, given[0])} has no effect with objective.backbone={self.backbone!r}; "
                f"set objective.backbone: lora or drop it."
            )
        return self


class Eagle1Head(HeadBlock):
    """EAGLE-1 (arXiv 2401.15077; METHODS §2), also the body of HASS and EAGLE-2: one layer on the post-norm last hidden state."""

    num_layers: PositiveInt = 1
    intermediate_size: PositiveInt | None = None  # None: the target's
    draft_vocab_size: PositiveInt | None = None  # training only: the loss compares these most frequent tokens; drafts are over all
    rope: dict[str, Any] | None = None  # transformers' rope_parameters; None: the target's. A converted draft keeps its own


class Eagle1Objective(Block):
    """EAGLE-1 with `passes: 1`; HASS (arXiv 2408.15766; METHODS §4) with more passes and a top-K loss."""

    feature_weight: float = Field(default=1.0, ge=0)  # smooth-L1 between draft state and the target's next state
    logit_weight: float = Field(default=0.1, ge=0)  # soft cross-entropy with the target's distribution
    noise: float = Field(default=0.1, ge=0)  # inputs get U(-noise, noise) * 512 / row length; labels do not
    passes: PositiveInt = 1  # HASS: harmonised passes, each on the states of the pass before
    top_k: PositiveInt = 10  # HASS: tokens in the top-K loss
    top_k_weight: float = Field(default=0.0, ge=0)  # HASS: its weight

    @model_validator(mode="after")
    def _consistent(self):
        if self.top_k != type(self).model_fields["top_k"].default and self.top_k_weight == 0:
            raise RecipeError(
                f"objective.top_k={self.top_k} has no effect with objective.top_k_weight=0; set objective.top_k_weight or drop top_k."
            )
        if self.feature_weight == self.logit_weight == self.top_k_weight == 0:
            raise RecipeError("objective.feature_weight, objective.logit_weight and objective.top_k_weight are all 0: there is no loss.")
        return self


class PeagleHead(Eagle3Head):
    """P-EAGLE (arXiv 2602.01469; METHODS §6): EAGLE-3 that drafts `unroll_steps` slots in one pass."""

    num_layers: PositiveInt = 4
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


class PeagleObjective(DistributionObjective):
    """Loss of each slot; deeper slots are trained at fewer places (conditional drop, METHODS §6)."""

    step_decay: float = Field(default=1.0, gt=0, le=1)
    keep_ratio: float = Field(default=0.7, gt=0, le=1)  # slot d is trained at a share keep_ratio ** d of the places of slot 0 …
    keep_min: float = Field(default=0.2, ge=0, le=1)  # … and never at less than this share


class MtpHead(HeadBlock):
    """Multi-token prediction from scratch (METHODS §8): one module used again and again (FastMTP), or a chain (DeepSeek-V3)."""

    unroll_steps: PositiveInt = 3  # depths trained
    shared: bool = True  # false: a module of its own for each depth, which only the reference decoder runs
    draft_vocab_size: PositiveInt | None = None  # training only: the loss compares these most frequent tokens; drafts are over all
    layout: Literal["head", "mimo"] = (
        "head"  # head: a folder of its own, reads the post-norm state; mimo: the target rewritten as MiMo, pre-norm
    )

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


class MtpObjective(DistributionObjective):
    """Weight of depth i is step_decay ** i over the sum of all: .51, .31, .18 with FastMTP's 0.6 and three depths; 1 is a mean."""

    step_decay: float = Field(default=0.6, gt=0, le=1)


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

    num_layers: PositiveInt = 5
    block_size: Annotated[int, Field(ge=2)] = 16  # the last committed token and block_size - 1 mask tokens, each of which drafts
    mask_token_id: NonNegativeInt  # a token of the target's vocabulary that no text holds
    aux_layers: PositiveInt | list[int] = 5  # tapped layers, or how many, spread evenly as published
    draft_vocab_size: PositiveInt | None = None  # None: the target's whole vocabulary; the LM head stays the target's rows
    intermediate_size: PositiveInt | None = None  # None: the target's

    @property
    def max_depth(self) -> int:
        return self.block_size - 1

    def feature_layers(self, num_target_layers: int) -> list[int]:
        if isinstance(self.aux_layers, int):
            return dflash_layers(self.aux_layers, num_target_layers)
        return check_layers("head.aux_layers", list(self.aux_layers), num_target_layers)


class DflashObjective(Block):
    """Blocks behind random supervised tokens, redrawn at every visit of a row; the weight of a slot falls with its place."""

    loss: Literal["ce", "kl"] = "ce"  # ce: on the answer's token, as published; kl: to the target's distribution
    anchors: PositiveInt = 512  # blocks a document, at most
    weights: Literal["decay", "dpace"] = "decay"  # decay: exp(-(j - 1) / gamma) for slot j; dpace: by how likely the draft gets that far
    gamma: PositiveFloat = 7.0  # decay only; published: 7 for blocks of 16, 5 for 10, 4 for 8
    alpha: float = Field(default=0.5, ge=0, le=1)  # dpace only: confidence q counts as (1 - alpha) q + alpha

    @model_validator(mode="after")
    def _consistent(self):
        for name, needed in (("gamma", "decay"), ("alpha", "dpace")):
            if getattr(self, name) != type(self).model_fields[name].default and self.weights != needed:
                raise RecipeError(
                    f"objective.{name}={getattr(self, name)} has no effect with objective.weights={self.weights!r}; "
                    f"set objective.weights: {needed} or drop objective.{name}."
                )
        return self


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


class DraftModelObjective(Block):
    """What a draft model learns from the target's own answers; one pass over a row trains every depth at once."""

    loss: Literal["kl", "ce"] = "kl"  # kl: to the target's distribution; ce: on the answer's token
    check_depth: PositiveInt = 8  # validation only: AL~ is estimated for chains of up to so many drafted tokens


class PardHead(DraftModelHead):
    """PARD (arXiv 2504.18583; METHODS §7): a draft model that drafts behind mask tokens in one pass; with `aux_layers`, PARD-2."""

    mask_token_id: NonNegativeInt  # a token of the target's vocabulary that no text holds; it stands in every slot but the first
    unroll_steps: PositiveInt = 8  # slots trained; more may be drafted, for all share one mask token
    aux_layers: list[int] | None = None  # PARD-2: layers of the target that the input reads beside its last hidden state ([]: only that)
    feature_scale: PositiveFloat = 0.02  # PARD-2: factor of the projected target states

    def feature_layers(self, num_target_layers: int) -> list[int]:
        return check_layers("head.aux_layers", list(self.aux_layers or []), num_target_layers)


class PardObjective(PeagleObjective):
    """Loss of each slot, deeper ones at fewer places; the last three keys are PARD-2's (arXiv 2605.08632)."""

    ce_weight: float = Field(default=0.0, ge=0)  # cross-entropy on the answer's token, added to the loss; published for PARD-2: 0.1
    confidence_weights: bool = False  # weigh a slot by how likely the target itself takes the tokens that come before it in the chain
    feature_drop: Share = 0.0  # share of rows whose target states are left out, so that the draft also serves without; published: 0.1, 0.2

    @model_validator(mode="after")
    def _one_cross_entropy(self):
        if self.ce_weight and self.loss == "ce":
            raise RecipeError(f"objective.ce_weight={self.ce_weight} has no effect with objective.loss='ce'; drop it or set loss: kl.")
        return self


class Method(NamedTuple):
    """The two blocks a method reads from a recipe."""

    head: type[HeadBlock]
    objective: type[Block]


METHODS: dict[str, Method] = {
    "eagle3": Method(Eagle3Head, DistributionObjective),
    "eagle1": Method(Eagle1Head, Eagle1Objective),
    "medusa": Method(MedusaHead, MedusaObjective),
    "medusa2": Method(MedusaHead, Medusa2Objective),
    "peagle": Method(PeagleHead, PeagleObjective),
    "mtp": Method(MtpHead, MtpObjective),
    "mtp_native": Method(MtpNativeHead, MtpObjective),
    "dflash": Method(DflashHead, DflashObjective),
    "draft_model": Method(DraftModelHead, DraftModelObjective),
    "pard": Method(PardHead, PardObjective),
}
