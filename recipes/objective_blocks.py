"""What each method's training may be told: its `objective:` block."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from recipes.blocks import Block, Share
from recipes.errors import RecipeError


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


class Eagle3Objective(DistributionObjective):
    """Training-time test; the first depth may learn alone for a while, which costs less than half a step of three depths."""

    depth_warmup: Share = 0.0  # share of the training in which only the first depth learns


class MedusaObjective(Block):
    """Medusa-1: the target is frozen, each head learns the token (or the target's distribution) at its place."""

    loss: Literal["kl", "ce"] = "kl"  # kl: to the target's distribution; ce: on the answer's token, as published
    head_decay: float = Field(default=0.8, gt=0, le=1)  # weight of head i (from 0) is head_decay ** (i + 1)


class Medusa2Objective(MedusaObjective):
    """Medusa-2: heads and target learn together; loss = target's own + heads_weight * schedule * (Medusa-1's)."""

    backbone: Literal["lora", "full"] = "lora"  # what of the target learns: low-rank adapters on its linear layers, or all of it
    lora_rank: PositiveInt = 32  # of the adapters
    lora_alpha: PositiveFloat = 16.0  # adapters are scaled by lora_alpha / lora_rank
    lora_dropout: Share = 0.05  # of the adapters' inputs, in training
    target_loss: Literal["distill", "ce"] = "distill"  # distill: KL from the un-adapted target; ce: on the answer's token
    heads_weight: PositiveFloat = 0.2  # λ0: weight of the heads' loss beside the target's own
    heads_schedule: Literal["constant", "linear", "sine"] = "constant"  # λ0 over the run: as it is, times t, or times sin(t π/2)
    heads_ramp: float = Field(default=1.0, gt=0, le=1)  # linear, sine: share of the run in which t goes from 0 to 1; it stays there
    head_warmup: Share = 0.0  # share of the run in which only the heads learn
    head_lr_multiplier: PositiveFloat = 4.0  # learning rate of the heads over train.lr

    @model_validator(mode="after")
    def _ramp_needs_a_schedule(self):
        if self.heads_ramp != 1 and self.heads_schedule == "constant":
            raise RecipeError(
                f"objective.heads_ramp={self.heads_ramp} has no effect with objective.heads_schedule='constant'; "
                "set objective.heads_schedule: linear or sine, or drop heads_ramp."
            )
        return self

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


class PeagleObjective(DistributionObjective):
    """Loss of each slot; deeper slots are trained at fewer places (conditional drop, METHODS §6)."""

    step_decay: float = Field(default=1.0, gt=0, le=1)
    keep_ratio: float = Field(default=0.7, gt=0, le=1)  # slot d is trained at a share keep_ratio ** d of the places of slot 0 …
    keep_min: float = Field(default=0.2, ge=0, le=1)  # … and never at less than this share


class MtpObjective(DistributionObjective):
    """Weight of depth i is step_decay ** i over the sum of all: .51, .31, .18 with FastMTP's 0.6 and three depths; 1 is a mean."""

    step_decay: float = Field(default=0.6, gt=0, le=1)


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


class DraftModelObjective(Block):
    """What a draft model learns from the target's own answers; one pass over a row trains every depth at once."""

    loss: Literal["kl", "ce"] = "kl"  # kl: to the target's distribution; ce: on the answer's token
    check_depth: PositiveInt = 8  # validation only: AL~ is estimated for chains of up to so many drafted tokens


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
