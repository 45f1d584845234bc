"""Train Medusa-2: the heads and the target together.

    accelerate launch train/medusa2.py recipes/smollm2-135m/medusa2.yaml [train.max_steps=200 …]

The objective (arXiv 2401.10774 §2.2.2; METHODS §1.3): L = L_target + λ0 s(t) Σ_i head_decay ** (i + 1) L_i. The heads eat the
states of the target as it is adapted (LoRA, or all weights), so their gradient reaches it; L_target keeps it where it was:
KL from the un-adapted target, whose states are the stored ones, or cross-entropy on the answer's tokens. s is a schedule
over the run. The heads learn faster (`head_lr_multiplier`) and may learn alone at first (`head_warmup`).

Export: the adapted target, adapters merged, beside the heads (`exports/NAME-target`), and how far it moved on held-out rows.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from data_prep.extract import plan_batches
from heads import shift
from heads.medusa import MedusaHead
from heads.target import DTYPES, TargetParts, TensorFiles, load_target_model, needs_equal_lengths, read_target, reset_rope
from recipes.errors import ExportError, RecipeError, TargetError
from recipes.objective_blocks import Medusa2Objective as Medusa2Block
from recipes.schema import Recipe
from train.depths import Compared
from train.export import export_head
from train.folders import partial_of, swap_in
from train.inside_target import write_inside_target
from train.losses import Teacher, head_loss
from train.medusa import heads_loss
from train.objective import Output
from train.packing import Batch, collate, fixed_batches

FORWARD_TOKENS = 1024  # tokens (pads included) in one forward pass of the target; rows of similar length go together
WIDTH = 64  # padded rows are a multiple of so many tokens wide: bfloat16 products on a CPU are compiled for each number of rows that occurs
SAME_LOGITS = 1e-2  # apart, of the same weights in float32


class Medusa2Objective(nn.Module):
    """Loss of the target itself plus the weighted loss of the heads on its adapted states."""

    def __init__(self, head: MedusaHead, target: TargetParts, objective: Medusa2Block):
        super().__init__()
        if target.source is None:
            raise TargetError(
                f"Medusa-2 trains {target.path} itself, and these parts do not say how to load it; make them with read_target"
            )
        self.head, self.objective, self.teacher_parts = head, objective, target
        self.logit_scale = target.logit_scale()
        self.lr_scales = {"head.": objective.head_lr_multiplier}
        self.progress = 0.0  # share of the run that is behind; the loop sets it
        self.served_dtype = DTYPES[target.source.dtype]
        self.model = load_target_model(target.source)
        adapt(self.model, objective)
        self.compared = Compared(head.vocab, target)
        # What does not learn is in no checkpoint: it is read from the target again.
        parameters = self.model.named_parameters(remove_duplicate=False)
        self.frozen = {f"model.{name}" for name, parameter in parameters if not parameter.requires_grad}
        self.register_state_dict_post_hook(_drop_frozen)
        self.register_load_state_dict_post_hook(_expect_no_frozen)

    def forward(self, batch: Batch) -> Output:
        cfg = self.objective
        alone = self.training and self.progress < cfg.head_warmup
        with torch.no_grad() if alone else nullcontext():
            states = self.adapted_states(batch)
        heads = heads_loss(self.head, states, batch, self.compared, cfg)
        weight = cfg.heads_weight * (1.0 if alone else heads_schedule(cfg, self.progress))
        if alone:  # every trained parameter takes part in every step, as several processes need it
            target_loss = sum((p.flatten()[:1] * 0).sum() for p in self.model.parameters() if p.requires_grad)
        else:
            target_loss = self.target_loss(states, batch, {"distill": "kl", "ce": "ce"}[cfg.target_loss])[0].loss_sum
        return Output(target_loss + weight * heads.loss_sum, heads.depth_loss, heads.depth_correct, heads.depth_count, heads.hits)

    def adapted_states(self, batch: Batch) -> Tensor:
        """[N, H] post-norm states of the adapted target; padded on the right, where a causal model never looks.

        Not padded where rotary frequencies follow the width of a batch.
        """
        exact = needs_equal_lengths(self.model)
        lengths = torch.unique_consecutive(batch.document, return_counts=True)[1].tolist()
        rows = batch.input_ids.split(lengths)
        states: list[Tensor | None] = [None] * len(rows)
        for members in plan_batches(lengths, FORWARD_TOKENS, exact):
            ids = pad_sequence([rows[i] for i in members], batch_first=True)
            ids = ids if exact else nn.functional.pad(ids, (0, -ids.shape[1] % WIDTH))
            reset_rope(self.model)
            output = self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
            for i, state in zip(members, output, strict=True):
                states[i] = state[: lengths[i]]
        return torch.cat([state for state in states if state is not None])

    def lm_head(self) -> Tensor:
        """[V, H] the adapted target's LM head."""
        lm_head = self.model.get_output_embeddings()
        assert lm_head is not None
        return lm_head.weight

    def target_loss(self, states: Tensor, batch: Batch, kind: str) -> tuple[Any, int]:
        """Loss of the target's own next-token prediction, summed over supervised labels x[t + 1], and their count.

        Args:
            states: [N, H] adapted states. kind: "kl" from the un-adapted target (on the batch's stored states), or "ce".
        """
        row = shift.next_weight(batch.loss_mask, batch.document).nonzero()[:, 0]
        teacher = Teacher(batch.last_hidden[row], self.compared.all_rows, self.teacher_parts)
        lm_head = self.lm_head()
        place, labels = torch.arange(len(row), device=row.device), shift.next_tokens(batch.input_ids)[row]
        ones = torch.ones(len(row), device=row.device)
        return head_loss(states[row] * self.logit_scale, lm_head, teacher, place, ones, labels, kind), len(row)

    # ---- export -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def movement(self, source: Any, rows: list[int], tokens: int) -> dict[str, float]:
        """How far the target moved on `rows`, a supervised token: KL, cross-entropy before and after, equal top-1 share."""
        was_training, device = self.training, self.compared.all_rows.device
        self.eval()
        kl = before = after = same = count = 0.0
        for picked in fixed_batches(rows, lambda row: int(source.lengths[row]), tokens):
            batch = collate(source.read_rows(picked, []), [], source.manifest.hidden_size).to(device)
            states, original = self.adapted_states(batch), batch.last_hidden.to(self.compared.all_rows.dtype)
            result, labels = self.target_loss(states, batch, "kl")
            kl, count = kl + float(result.loss.sum()), count + labels
            after += float(self.target_loss(states, batch, "ce")[0].loss.sum())
            row = shift.next_weight(batch.loss_mask, batch.document).nonzero()[:, 0]
            for part in row.split(256):
                logits = original[part] @ self.compared.all_rows.T * self.logit_scale
                before += float(nn.functional.cross_entropy(logits, shift.next_tokens(batch.input_ids)[part], reduction="sum"))
                adapted = states[part] @ self.lm_head().T
                same += float((logits.argmax(-1) == adapted.argmax(-1)).sum())
        self.train(was_training)
        n = max(count, 1.0)
        return {"tokens": count, "kl": kl / n, "cross_entropy_before": before / n, "cross_entropy_after": after / n, "same_top1": same / n}

    def export(self, recipe: Recipe, source: Any, figures: dict, folder: Path) -> None:
        """Write the adapted target to `folder`-target and the heads, made for it, to `folder`.

        Raises:
            ExportError: the merged target predicts other tokens than the adapted one.
        """
        rows = source.validation.nonzero()[:, 0].tolist() or list(range(min(64, len(source.lengths))))
        figures = figures | {"target_moved": self.movement(source, rows, recipe.train.micro_batch_tokens)}
        adapted = folder.with_name(f"{folder.name}-target")
        self.write_target(adapted)
        self.check_target(adapted, source)
        cfg = recipe.target.model_copy(update={"path": str(adapted), "revision": None})
        export_head(recipe.model_copy(update={"target": cfg}), self.head, read_target(cfg), source, figures, folder)

    def write_target(self, folder: Path) -> None:
        """The target with its adapters merged, as a folder that transformers and vLLM load."""
        origin = self.teacher_parts.path
        files = TensorFiles(origin)
        changed = {files.find(name): tensor.cpu() for name, tensor in merged(self.model).items()}
        tensors = {name: tensor for name, tensor in changed.items() if name is not None}  # a tied LM head is in no file
        digest = hashlib.sha256()
        for name in sorted(tensors):
            digest.update(name.encode() + tensors[name].float().numpy().tobytes())
        config = json.loads((origin / "config.json").read_text()) | {"headstart_adapted": digest.hexdigest()[:16]}
        partial = partial_of(folder)
        write_inside_target(origin, partial, tensors, config)
        swap_in(partial, folder)

    @torch.no_grad()
    def check_target(self, folder: Path, source: Any) -> None:
        """Raises ExportError where the written target has other logits than the adapted one on the store's first row.

        Both compute in float32, the adapted one with the rounding that its weights got when they were written: that is no fault.
        """
        self.eval()
        ids = source.read(0, []).input_ids[None]
        written = AutoModelForCausalLM.from_pretrained(folder, dtype=self.served_dtype).float().eval()(ids).logits[0]
        with self.rounded_as_written(TensorFiles(folder)):
            reset_rope(self.model)
            apart = (self.model(ids.to(self.model.device)).logits[0].cpu() - written).abs().amax(-1)
        if (agreement := (apart <= SAME_LOGITS).float().mean().item()) < 0.98:  # experts may be chosen otherwise on another device
            raise ExportError(
                f"{folder}: the merged target has the adapted one's logits at {agreement:.1%} of the first row's positions (needed 98%); "
                f"they are up to {apart.max().item():.3g} apart. It is left there to look at"
            )

    @contextmanager
    def rounded_as_written(self, files: TensorFiles) -> Iterator[None]:
        """Inside, the adapted model is in float32, and what rounding to the types of `files` took from a weight is taken from it too."""
        saved = [(p, p.data.device, p.data.cpu()) for p in self.model.parameters()]
        try:
            for name, own, exact in adapted_weights(self.model):
                if (key := files.find(name)) is not None:
                    with safe_open(files.path / files.where[key], "pt") as f:
                        stored = f.get_tensor(key).dtype
                    rounded = exact.to(own.dtype).to(stored).to(self.served_dtype).float()
                    own.data = own.data.float() + (rounded - exact)
            for p in self.model.parameters():
                p.data = p.data.float()
            yield
        finally:
            for p, device, data in saved:
                p.data = data.to(device)


def heads_schedule(cfg: Medusa2Block, done: float) -> float:
    """s(t): the share of `heads_weight` that applies when a share `done` of the run is behind (METHODS §1.3)."""
    t = min(1.0, done / cfg.heads_ramp)
    return {"constant": 1.0, "linear": t, "sine": math.sin(math.pi / 2 * t)}[cfg.heads_schedule]


def adapt(model: nn.Module, cfg: Medusa2Block) -> None:
    """Make of the frozen target what learns: low-rank adapters on its linear layers (not the LM head), or everything.

    Raises:
        RecipeError: LoRA without the package peft.
    """
    if cfg.backbone == "full":
        model.float().requires_grad_(True)  # master weights; train.precision: bf16 computes in half precision
        return
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise RecipeError("objective.backbone: lora needs the package peft: pip install peft, or set objective.backbone: full") from None
    lora = LoraConfig(r=cfg.lora_rank, lora_alpha=cfg.lora_alpha, lora_dropout=cfg.lora_dropout, target_modules="all-linear")  # type: ignore[arg-type]
    inject_adapter_in_model(lora, model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


@torch.no_grad()
def adapted_weights(model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(the target's own parameter name, that parameter, its adapted value in float32): W + B A * alpha / r, or W of all that learn."""
    layers = [(name, module) for name, module in model.named_modules() if hasattr(module, "get_delta_weight")]  # peft's LoRA layers
    for name, module in layers:
        weight = module.get_base_layer().weight  # type: ignore[operator]
        yield f"{name}.weight", weight, weight.float() + module.get_delta_weight("default").float()  # type: ignore[operator]
    if not layers:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter, parameter.detach().float()


def merged(model: nn.Module) -> dict[str, Tensor]:
    """The adapted weights under the target's own parameter names, in the types of its parameters."""
    return {name: exact.to(own.dtype) for name, own, exact in adapted_weights(model)}


def _drop_frozen(module: Any, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    for name in module.frozen:
        state.pop(prefix + name, None)


def _expect_no_frozen(module: Any, incompatible: Any) -> None:
    incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if not any(key.endswith(name) for name in module.frozen)]


if __name__ == "__main__":
    from train.loop import main

    main("medusa2", Medusa2Objective)
