"""The loop that all methods share: `fit` from recipe to export.

Objectives return sums; the loop divides once by the count of supervised tokens over all micro-batches and ranks, so
one big batch, accumulation and several ranks take the same step (B38). Every rank runs the same micro-batches (B36).
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

from data_prep.store import FeatureStore
from heads import head_class
from heads.target import TargetParts, check_probe, load_tokenizer, read_target
from heads.vocab import build_draft_vocab
from recipes.errors import FeatureError, HeadstartError
from recipes.schema import Recipe, Train, load_recipe
from train import checkpoint
from train.export import export_head
from train.packing import Batch, StepSampler, collate, deal
from train.run_log import RunLog, peak_memory_gib, short_time
from train.validate import validate

MakeObjective = Callable[[nn.Module, TargetParts, Any], nn.Module]


def main(method: str, make_objective: MakeObjective, argv: list[str] | None = None) -> None:
    """The command line of every `train/<method>.py`: RECIPE [key=value …]."""
    parser = argparse.ArgumentParser(description=f"Train a draft head with {method}.", epilog="Any recipe value can be overridden: train.max_steps=200")
    parser.add_argument("recipe", help="a YAML file in recipes/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe values to override")
    args = parser.parse_args(argv)
    try:
        recipe = load_recipe(args.recipe, args.overrides)
        if recipe.method != method:
            raise HeadstartError(f"{args.recipe} is for method {recipe.method!r}; run `accelerate launch train/{recipe.method}.py {args.recipe}`")
        fit(recipe, make_objective, args.recipe)
    except HeadstartError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


@dataclass
class Progress:
    """Where a run stands: saved in every checkpoint."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    supervised: int = 0

    def state_dict(self) -> dict:
        return dict(vars(self))

    def load_state_dict(self, state: dict) -> None:
        vars(self).update(state)


def learning_rate(cfg: Train, done: float) -> float:
    """Learning rate when a share `done` of the run (0 to 1) is behind: linear warm-up, then the schedule."""
    if done < cfg.warmup:
        return cfg.lr * done / cfg.warmup
    rest = min(1.0, (done - cfg.warmup) / max(1e-9, 1 - cfg.warmup))
    shape = {"constant": 1.0, "linear": 1 - rest, "cosine": 0.5 * (1 + math.cos(math.pi * rest))}[cfg.schedule]
    return cfg.lr * (cfg.min_lr_share + (1 - cfg.min_lr_share) * shape)


def make_optimizer(objective: nn.Module, cfg: Train) -> torch.optim.Optimizer:
    """AdamW over what trains; weight decay on matrices only."""
    trained = [p for p in objective.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, fused=True)


def open_source(recipe: Recipe) -> Any:
    """Where rows with features come from: the store, or the target running beside the head."""
    store = FeatureStore.open(recipe.features.dir, recipe)
    if int(store.supervised.sum()) == 0:
        raise FeatureError(f"{recipe.features.dir} holds no supervised token; look at a row with `python -m data_prep.show RECIPE`, then rebuild it")
    if recipe.train.features == "stored":
        return store
    from train.online import OnlineFeatures

    return OnlineFeatures(store, recipe)


def build_head(recipe: Recipe, target: TargetParts, store: FeatureStore) -> nn.Module:
    """The recipe's head with its draft vocabulary, started from `head.init_from` where given."""
    size = getattr(recipe.head, "draft_vocab_size", None)
    vocab = build_draft_vocab(store.token_counts, size, load_tokenizer(recipe.target).all_special_ids)
    head = head_class(recipe.method)(recipe.head, target, vocab)
    if recipe.head.init_from:
        from train.export import load_export_into

        load_export_into(head, Path(recipe.head.init_from))
    return head


def fit(recipe: Recipe, make_objective: MakeObjective, recipe_path: str = "RECIPE") -> Path:
    """Train, validate, checkpoint, and export; resumes where a former run of the same recipe stopped.

    Returns:
        The export folder.
    """
    cfg, run_dir = recipe.train, recipe.run_dir
    accelerator = Accelerator(mixed_precision="bf16" if cfg.precision == "bf16" else "no", log_with=list(cfg.trackers) or None, project_dir=str(run_dir))
    set_seed(cfg.seed)
    checkpoint.check_same_recipe(run_dir, recipe)
    run_dir.mkdir(parents=True, exist_ok=True)

    source = open_source(recipe)
    target = read_target(recipe.target)
    check_probe(target, source.read(0, []).last_hidden, source.probe["argmax"], recipe.features.dir)
    head = build_head(recipe, target, source)
    objective = make_objective(head, target, recipe.objective)
    layers = recipe.head.feature_layers(target.num_layers)
    train_rows, val_rows = (~source.validation).nonzero()[:, 0], source.validation.nonzero()[:, 0].tolist()
    sampler = StepSampler(source.lengths[train_rows], train_rows, cfg.tokens_per_step, cfg.seed)
    total_steps = cfg.max_steps or (cfg.epochs * sampler.steps_per_epoch() if cfg.epochs else None)

    optimizer = make_optimizer(objective, cfg)
    objective, optimizer = accelerator.prepare(objective, optimizer)
    progress = Progress()
    accelerator.register_for_checkpointing(progress, sampler)
    if accelerator.is_main_process:
        (run_dir / "recipe.yaml").write_text(recipe.dump())
    if cfg.trackers:
        accelerator.init_trackers("headstart", config={"recipe": recipe.dump()})

    log = RunLog(run_dir / "metrics.jsonl", total_steps, accelerator.is_main_process)
    stop = _StopSignal()
    try:
        if (found := checkpoint.latest(run_dir)) is not None:
            accelerator.load_state(str(found))
            log.say(f"resuming from {found}")
        _say_start(log, recipe, head, source, train_rows, val_rows, total_steps, accelerator)

        def check(rows: list[int]) -> dict[str, Any]:
            result = validate(objective, source, rows, layers, cfg.micro_batch_tokens, accelerator)
            if result:
                log.write({"step": progress.step, "tokens": progress.tokens, "supervised": progress.supervised, "validation": result})
                accelerator.log({f"val/al_k{k}": al for k, al in result["al"].items()} | {"val/loss": result["loss"]}, step=progress.step)
                shown = " ".join(f"k={k} {al:.3f}" for k, al in result["al"].items())
                accuracy = " ".join(f"{a:.3f}" for a in result["accuracy"])
                log.say(f"  held-out at step {progress.step}: loss {result['loss']:.3f} | accuracy by depth {accuracy} | AL~ {shown}")
            return result

        result = _train(recipe, objective, optimizer, accelerator, source, sampler, progress, layers, total_steps, log, stop, check, val_rows)
        if stop.asked:
            checkpoint.save(accelerator, run_dir, progress.step, cfg.keep)
            log.say(f"interrupted at step {progress.step}; saved. Run the same command again to go on.")
            log.close()
            accelerator.end_training()
            sys.exit(130)
        saved = checkpoint.save(accelerator, run_dir, progress.step, cfg.keep)
        log.say(f"trained {progress.step} steps in {short_time(progress.seconds)}; checkpoint {saved}; peak memory {peak_memory_gib(accelerator.device):.2f} GiB")
        if accelerator.is_main_process:
            figures = {"steps": progress.step, "seconds": progress.seconds, "tokens": progress.tokens, "supervised": progress.supervised, "validation": result}
            export_head(recipe, accelerator.unwrap_model(objective).head, target, source, figures, recipe.export_dir)
            log.say(f"exported to {recipe.export_dir}\nnext: python -m eval {recipe_path}")
        accelerator.wait_for_everyone()
        accelerator.end_training()
    finally:
        log.close()
        stop.restore()
    return recipe.export_dir


def _train(recipe, objective, optimizer, accelerator, source, sampler, progress, layers, total_steps, log, stop, check, val_rows) -> dict[str, Any]:
    """Steps until the length is reached or a stop is asked for; returns the last validation."""
    cfg, result = recipe.train, {}

    def done() -> float:
        shares = [progress.step / total_steps] if total_steps else []
        if cfg.max_minutes:
            shares.append(progress.seconds / 60 / cfg.max_minutes)
        return max(shares)

    def load() -> tuple[list[int], dict, list[Batch]]:
        rows = sampler.next_step()
        position = sampler.state_dict()
        mine = deal(rows, lambda row: int(source.lengths[row]), cfg.micro_batch_tokens, accelerator.num_processes)[accelerator.process_index]
        return rows, position, [collate(source.read_rows(micro, layers), layers, source.manifest.hidden_size) for micro in mine]

    if done() == 0 and val_rows:
        result = check(val_rows)
    window, position = _Window(), sampler.state_dict()
    with ThreadPoolExecutor(1) as pool:
        # One step is read ahead; the sampler's position in a checkpoint is that of the step just taken.
        pending = pool.submit(load)
        while done() < 1 and not stop.on_any_rank(accelerator):
            began = time.perf_counter()
            rows, position, batches = pending.result()
            pending = pool.submit(load)
            lr = learning_rate(cfg, done())
            sums, grad_norm = take_step(objective, optimizer, accelerator, batches, lr, cfg.clip_norm, progress.step, rows)
            progress.step += 1
            progress.seconds += time.perf_counter() - began
            tokens = sum(int(source.lengths[row]) for row in rows)
            supervised = sum(int(source.supervised[row]) for row in rows)
            progress.tokens += tokens
            progress.supervised += supervised
            window.add(sums, tokens, time.perf_counter() - began)
            log.advance(progress.step)
            if progress.step % cfg.log_every == 0 or done() >= 1:
                _say_step(log, accelerator, progress, total_steps, window, lr, grad_norm, done())
                window = _Window()
            if done() >= 1 or progress.step % cfg.eval_every == 0:
                if val_rows:
                    result = check(val_rows)
            if progress.step % cfg.save_every == 0 and done() < 1:
                pending.result()
                ahead = sampler.state_dict()
                sampler.load_state_dict(position)
                checkpoint.save(accelerator, recipe.run_dir, progress.step, cfg.keep)
                sampler.load_state_dict(ahead)
        pending.result()
        sampler.load_state_dict(position)
    return result


def take_step(objective, optimizer, accelerator: Accelerator, batches: list[Batch], lr: float, clip: float, step: int, rows: list[int]) -> tuple[torch.Tensor, float]:
    """One optimizer step over this rank's micro-batches.

    Returns:
        [3, K] sums over all ranks (loss, correct, count), and the gradient norm before clipping.

    Raises:
        HeadstartError: loss or gradient is not finite; names step, rank and rows.
    """
    supervised = torch.tensor(sum(batch.supervised for batch in batches), device=accelerator.device)
    total = max(1, int(accelerator.reduce(supervised, "sum")))  # type: ignore[arg-type]
    for group in optimizer.param_groups:
        group["lr"] = lr
    sums = torch.zeros(())
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        accelerator.sync_gradients = last  # DeepSpeed's engine reads it
        with accelerator.autocast(), _no_sync(accelerator, objective, not last):
            out = objective(batch.to(accelerator.device))
        if not torch.isfinite(out.loss_sum):
            raise HeadstartError(
                f"loss is {out.loss_sum.item()} at step {step}, rank {accelerator.process_index}, rows {rows[:8]}…: lower train.lr "
                f"({lr:.2e} now) or train.clip_norm, or look at these rows with `python -m data_prep.show`."
            )
        with _no_sync(accelerator, objective, not last):
            # DDP averages over ranks; the loss is a sum over all of them.
            accelerator.backward(out.loss_sum * (accelerator.num_processes / total))
        sums = sums.to(accelerator.device) + out.sums()
    norm = accelerator.clip_grad_norm_(objective.parameters(), clip)
    norm = float(norm) if norm is not None else float("nan")  # DeepSpeed clips inside its engine
    if math.isinf(norm) or (math.isnan(norm) and accelerator.distributed_type != "DEEPSPEED"):
        raise HeadstartError(f"gradient norm is {norm} at step {step}, rank {accelerator.process_index}, rows {rows[:8]}…: lower train.lr ({lr:.2e} now).")
    optimizer.step()
    optimizer.zero_grad()
    return accelerator.reduce(sums, "sum"), norm  # type: ignore[return-value]


def _no_sync(accelerator: Accelerator, objective: nn.Module, active: bool):
    """Gradients cross ranks once a step, at the last micro-batch."""
    return accelerator.no_sync(objective) if active else nullcontext()


class _Window:
    """What happened since the last printed line."""

    def __init__(self):
        self.sums: torch.Tensor | None = None
        self.tokens, self.seconds = 0, 0.0

    def add(self, sums: torch.Tensor, tokens: int, seconds: float) -> None:
        self.sums = sums if self.sums is None else self.sums + sums
        self.tokens += tokens
        self.seconds += seconds


class _StopSignal:
    """SIGINT and SIGTERM ask for a clean end after the running step."""

    def __init__(self):
        self.asked = False
        self._old = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}

    def _ask(self, *_: Any) -> None:
        self.asked = True

    def on_any_rank(self, accelerator: Accelerator) -> bool:
        """Whether any rank was asked to stop: all of them stop at the same step."""
        if accelerator.num_processes > 1:
            flag = torch.tensor(int(self.asked), device=accelerator.device)
            self.asked = bool(accelerator.reduce(flag, "sum"))  # type: ignore[arg-type]
        return self.asked

    def restore(self) -> None:
        """Give the signals back."""
        for number, handler in self._old.items():
            signal.signal(number, handler)


def _say_start(log: RunLog, recipe: Recipe, head, source, train_rows, val_rows, total_steps, accelerator) -> None:
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    tokens, supervised = int(source.lengths[train_rows].sum()), int(source.supervised[train_rows].sum())
    cfg = recipe.train
    length = f"{total_steps} steps" if total_steps else f"{cfg.max_minutes:g} minutes"
    log.say(
        f"{recipe.name}: {recipe.method} head, {trained / 1e6:.2f} M trainable parameters (Adam: {trained * 16 / 2**30:.2f} GiB with weights and gradients)\n"
        f"data: {len(train_rows)} rows, {tokens} tokens, {supervised} supervised ({supervised / max(tokens, 1):.0%}); {len(val_rows)} rows held out\n"
        f"steps: {cfg.tokens_per_step} tokens a step over {accelerator.num_processes} process(es) in micro-batches of {cfg.micro_batch_tokens}; {length}; "
        f"{cfg.precision} on {accelerator.device}"
    )
    if (vocab := getattr(head, "vocab", None)) is not None and not vocab.full:
        log.say(f"draft vocabulary: {len(vocab.ids)} of {vocab.size}, covers {vocab.coverage(source.token_counts):.2%} of the supervised training tokens")


def _say_step(log, accelerator, progress, total_steps, window, lr, grad_norm, done) -> None:
    loss, correct, count = window.sums.tolist()
    accuracy = [c / max(n, 1) for c, n in zip(correct, count, strict=True)]
    speed = window.tokens / max(window.seconds, 1e-9)
    eta = progress.seconds * (1 - done) / max(done, 1e-9)
    memory = peak_memory_gib(accelerator.device)
    record = {
        "step": progress.step, "loss": loss[0] / max(count[0], 1), "accuracy": accuracy, "lr": lr, "grad_norm": grad_norm,
        "tokens_per_second": speed, "peak_gib": memory, "tokens": progress.tokens, "supervised": progress.supervised,
    }  # fmt: skip
    log.write(record)
    accelerator.log({"train/loss": record["loss"], "train/lr": lr, "train/grad_norm": grad_norm, "train/tokens_per_second": speed}, step=progress.step)
    log.say(
        f"step {progress.step}/{total_steps or '?'} | loss {record['loss']:.3f} | acc {' '.join(f'{a:.2f}' for a in accuracy)} | lr {lr:.2e} | "
        f"grad {grad_norm:.2f} | {speed:,.0f} tok/s | mem {memory:.1f} GiB | eta {short_time(eta)}"
    )
