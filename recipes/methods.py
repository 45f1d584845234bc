"""What each method may be told: its `head:` and `objective:` blocks.

A method is registered by one line in `METHODS`. Its defaults live here and nowhere else. Layer numbers follow the one
convention of the project (DESIGN §4): layer i is the residual stream after i decoder blocks, 0 is the embedding.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from recipes.errors import RecipeError


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
    def needs_last_hidden(self) -> bool:
        """Whether training reads the target's post-norm last hidden state (teacher logits come from it)."""
        return True


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
    norm_before_residual: bool = False  # residual = normalised feature instead of the raw one
    norm_before_fc: bool = False  # one RMSNorm over the concatenated features
    fc_norm: bool = False  # one RMSNorm per tapped layer, before fc (EAGLE-3.1)
    norm_output: bool = False  # feed back the post-norm state instead of the raw one (EAGLE-3.1)

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
            raise RecipeError(f"objective.lk_eta={self.lk_eta} has no effect with objective.loss={self.loss!r}; set objective.loss: lk or drop lk_eta.")
        return self


class Method(NamedTuple):
    """The two blocks a method reads from a recipe."""

    head: type[HeadBlock]
    objective: type[Block]


METHODS: dict[str, Method] = {
    "eagle3": Method(Eagle3Head, DistributionObjective),
}
