"""The loop that all methods share: `fit` from recipe to export.

Objectives return sums; a step divides once by the count of supervised tokens over all micro-batches and ranks, so one
big batch, accumulation and several ranks take the same step (B38). Every rank runs the same micro-batches (B36).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, set_seed
from torch import nn

from heads.exported import resolve_draft
from heads.precision import in_bf16, usable_cores
from heads.target import EXACT_PROBE, ROUNDED_PROBE, TargetParts, check_probe, read_target
from recipes.errors import HeadstartError
from recipes.folders import writable_folder
from recipes.schema import Recipe, load_recipe
from train import checkpoint
from train.export import export_head, load_export_into
from train.optimizer import make_optimizer
from train.packing import Batch, StepSampler, collate, deal
from train.run_log import RunLog, peak_memory_gib, short_time
from train.start import check_lm_head, check_mask_token, make_head, open_source
from train.step import Progress, StopSignal, as_main_process, learning_rate, take_step
from train.validate import validate

MakeObjective = Callable[[Any, TargetParts, Any], nn.Module]  # (head, target, objective block)


def main(method: str, make_objective: MakeObjective, argv: list[str] | None = None) -> None:
    """The command line of every `train/<method>.py`: RECIPE [key=value …]."""
    parser = argparse.ArgumentParser(
        description=f"Train a draft head with {method}.", epilog="Any recipe value can be overridden: train.max_steps=200"
    )
    parser.add_argument("recipe", help="a YAML file in recipes/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe values to override")
    args = parser.parse_args(argv)
    try:
        recipe = load_recipe(args.recipe, args.overrides)
        if recipe.method != method:
            raise HeadstartError(
                f"{args.recipe} is for method {recipe.method!r}; run `accelerate launch train/{recipe.method}.py {args.recipe}`"
            )
        fit(recipe, make_objective, " ".join([args.recipe, *args.overrides]))
    except HeadstartError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


@dataclass
class Run:
    """Everything a training run holds on one rank."""

    recipe: Recipe
    accelerator: Accelerator
    bf16: bool  # products in bfloat16, weights in float32
    target: TargetParts
    source: Any  # FeatureStore or OnlineFeatures
    layers: list[int]
    objective: nn.Module
    optimizer: Any
    sampler: StepSampler
    total_steps: int | None  # None: train.max_minutes alone sets the length
    check_rows: list[int]  # rows that validation counts on
    check_name: str
    log: RunLog
    progress: Progress = field(default_factory=Progress)

    @property
    def module(self) -> Any:
        """The objective itself, without what accelerate put around it."""
        return self.accelerator.unwrap_model(self.objective)

    @property
    def trainable_parameters(self) -> int:
        """How many numbers learn."""
        return sum(p.numel() for p in self.objective.parameters() if p.requires_grad)

    def done(self) -> float:
        """Share of the run that is behind, by steps or by time, whichever is further."""
        shares = [self.progress.step / self.total_steps] if self.total_steps else []
        if limit := self.recipe.train.max_minutes:
            shares.append(self.progress.seconds / 60 / limit)
        return max(shares)

    def check(self) -> dict[str, Any]:
        """Validate, and log it."""
        tokens, served = self.recipe.train.micro_batch_tokens, self.recipe.eval.k
        result = validate(self.objective, self.source, self.check_rows, self.layers, tokens, self.accelerator, served)
        self.log.validation(self.progress, result, self.check_name)
        return result

    def next_step(self) -> tuple[list[int], dict, list[Batch]]:
        """Rows of the next step (all ranks'), the sampler's position after it, and this rank's micro-batches."""
        rows = self.sampler.next_step()
        dealt = deal(rows, lambda row: int(self.source.lengths[row]), self.recipe.train.micro_batch_tokens, self.accelerator.num_processes)
        hidden_size = self.source.manifest.hidden_size
        mine = dealt[self.accelerator.process_index]
        batches = [collate(self.source.read_rows(micro, self.layers), self.layers, hidden_size) for micro in mine]
        return rows, self.sampler.state_dict(), batches


def set_up_deepspeed(accelerator: Accelerator, clip_norm: float, bf16: bool) -> None:
    """Tell DeepSpeed's engine what the recipe says, before `prepare` builds it: it clips by itself, and it has a precision of its own.

    Its bf16 mode would turn the whole module into bfloat16, rotary frequencies included, and train another model than the one that is
    served; instead products are in bfloat16 and weights in float32, as without DeepSpeed.

    Raises:
        HeadstartError: ZeRO-3. It puts a weight together only while the module that owns it runs, and losses here read LM heads as plain
            tensors, in chunks (B37).
    """
    if (plugin := accelerator.deepspeed_plugin) is not None:
        if plugin.zero_stage == 3:
            raise HeadstartError(
                "zero_stage=3: the loss reads the LM head's weight outside its module, where ZeRO-3 leaves it empty; a draft head fits on "
                "one GPU, so take recipes/accelerate/deepspeed_zero2.yaml, which splits moments and gradients"
            )
        plugin.deepspeed_config |= {
            "gradient_clipping": clip_norm,
            "fp16": {"enabled": False},
            "bf16": {"enabled": False},
            "torch_autocast": {"enabled": bf16, "dtype": "bfloat16"},
        }


def fit(recipe: Recipe, make_objective: MakeObjective, recipe_path: str = "RECIPE") -> Path:
    """Train, validate, checkpoint, and export; resumes where a former run of the same recipe stopped.

    Returns:
        The export folder.
    """
    run = prepare(recipe, make_objective)
    stop = StopSignal()
    try:
        if (found := checkpoint.latest(recipe.run_dir)) is not None:
            run.accelerator.load_state(str(found))
            run.log.say(f"resuming from {found}")
        _say_start(run)
        result = _train(run, stop)
        saved = checkpoint.save(run.accelerator, recipe.run_dir, run.progress.step, recipe.train.keep)
        if stop.asked and run.done() < 1:
            run.log.say(f"interrupted at step {run.progress.step}; saved {saved}. Run the same command again to go on.")
            run.accelerator.end_training()
            sys.exit(130)
        run.log.say(
            f"trained {run.progress.step} steps in {short_time(run.progress.seconds)}; checkpoint {saved}; "
            f"peak memory {peak_memory_gib(run.accelerator.device):.2f} GiB"
        )
        if run.accelerator.is_main_process:
            _export(run, result)
            run.log.say(f"exported to {recipe.export_dir}\nnext: python -m eval {recipe_path}")
        run.accelerator.wait_for_everyone()
        run.accelerator.end_training()
    finally:
        run.log.close()
        stop.restore()
    return recipe.export_dir


def make_accelerator(recipe: Recipe, bf16: bool) -> Accelerator:
    """accelerate for this recipe on the processes and devices that `accelerate launch` gave it; `bf16`: products in bfloat16."""
    cfg = recipe.train
    accelerator = Accelerator(
        mixed_precision="bf16" if bf16 else "no",
        log_with=list(cfg.trackers) or None,  # type: ignore[arg-type]
        project_dir=str(recipe.run_dir),
        # Borrowed tables (embeddings, LM heads) are buffers, the same on all ranks: DDP need not send gigabytes of them before every step.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    if (started := int(os.environ.get("WORLD_SIZE", 1))) != accelerator.num_processes:
        raise HeadstartError(
            f"{started} processes were started, but each would train alone (accelerate sees {accelerator.num_processes} of them, on "
            f"{accelerator.device}): on a CPU set ACCELERATE_USE_CPU=true (recipes/accelerate/two_cpu_processes.yaml); where GPUs are, "
            "torch sees none: look at nvidia-smi and CUDA_VISIBLE_DEVICES, or start one process (recipes/accelerate/one_process.yaml)"
        )
    if accelerator.device.type == "cpu":  # accelerate launch asks for one thread where nobody says otherwise
        torch.set_flush_denormal(True)  # a CPU multiplies probabilities below 1e-38 many times more slowly, and they change nothing
        torch.set_num_threads(cfg.threads or max(1, usable_cores() // accelerator.num_processes))
    if cfg.optimizer == "muon" and accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise HeadstartError(
            "train.optimizer='muon' under DeepSpeed: ZeRO cuts matrices into flat pieces, and Muon needs them whole; set "
            "train.optimizer=adamw, or train on several GPUs with recipes/accelerate/multi_gpu.yaml"
        )
    set_up_deepspeed(accelerator, cfg.clip_norm, bf16)
    return accelerator


def prepare(recipe: Recipe, make_objective: MakeObjective) -> Run:
    """Everything of a run before its first step: rows, target, head, objective, optimizer, folders and logs."""
    cfg, run_dir = recipe.train, recipe.run_dir
    bf16 = in_bf16(cfg.precision)  # auto measures the machine: once, so that all who ask hear the same
    accelerator = make_accelerator(recipe, bf16)
    set_seed(cfg.seed)
    checkpoint.check_same_recipe(run_dir, recipe)

    source = open_source(recipe)
    check_mask_token(recipe, source)
    target = read_target(recipe.target)
    check_lm_head(target)
    states = source.read(0, []).last_hidden.cpu()  # online features are on the target's device, its LM head is not
    exact = states.dtype == torch.float32 and recipe.features.precision == "fp32"
    check_probe(target, states, source.probe["argmax"], recipe.features.dir, EXACT_PROBE if exact else ROUNDED_PROBE)
    head = make_head(recipe, target, source)
    checkpoint.check_same_vocab(run_dir, head.vocab.ids)
    if recipe.head.init_from:
        load_export_into(head, resolve_draft(recipe.head.init_from))
    objective = make_objective(head, target, recipe.objective)
    objective, optimizer = accelerator.prepare(objective, make_optimizer(objective, cfg))

    train_rows, held_out = (~source.validation).nonzero()[:, 0], source.validation.nonzero()[:, 0].tolist()
    sampler = StepSampler(source.lengths[train_rows], train_rows, cfg.tokens_per_step, cfg.seed)
    total_steps = cfg.max_steps or (cfg.epochs * sampler.steps_per_epoch() if cfg.epochs else None)
    if accelerator.is_main_process:
        writable_folder(run_dir, "train.dir")
        writable_folder(recipe.export_dir.parent, "export.dir")
        (run_dir / "recipe.yaml").write_text(recipe.dump())
        checkpoint.save_vocab(run_dir, head.vocab.ids)
    accelerator.wait_for_everyone()
    if cfg.trackers:
        accelerator.init_trackers("headstart", config={"recipe": recipe.dump()})
    run = Run(
        recipe=recipe,
        accelerator=accelerator,
        bf16=bf16,
        target=target,
        source=source,
        layers=recipe.head.feature_layers(target.num_layers),
        objective=objective,
        optimizer=optimizer,
        sampler=sampler,
        total_steps=total_steps,
        check_rows=held_out or train_rows[:64].tolist(),
        check_name="held-out" if held_out else "training rows (none is held out)",
        log=RunLog(run_dir / "metrics.jsonl", total_steps, accelerator),
    )
    accelerator.register_for_checkpointing(run.progress, sampler)
    return run


def _export(run: Run, result: dict[str, Any]) -> None:
    """Write the export, with what training measured."""
    recipe, module = run.recipe, run.module
    figures = run.progress.state_dict() | {
        "validation": result,
        "held_out": bool(run.source.validation.any()),
        "peak_gib": peak_memory_gib(run.accelerator.device),
        "trainable_parameters": run.trainable_parameters,
    }
    if hasattr(module, "export"):  # a method that trains the target itself
        module.export(recipe, run.source, figures, recipe.export_dir)
    else:
        export_head(recipe, module.head, run.target, run.source, figures, recipe.export_dir)


def _train(run: Run, stop: StopSignal) -> dict[str, Any]:
    """Steps until the length is reached or a stop is asked for; returns the last validation."""
    cfg, progress, sampler, source = run.recipe.train, run.progress, run.sampler, run.source
    result = run.check() if run.done() == 0 or run.done() >= 1 else {}
    position, module = sampler.state_dict(), run.module
    with ThreadPoolExecutor(1) as pool:
        # One step is read ahead; what a checkpoint holds is the position after the step just taken.
        pending = pool.submit(run.next_step)
        while run.done() < 1 and not stop.on_any_rank(run.accelerator):
            began, began_cpu = time.perf_counter(), time.process_time()
            rows, position, batches = pending.result()
            pending = pool.submit(run.next_step)
            lr = learning_rate(cfg, run.done())
            if hasattr(module, "progress"):  # an objective with a schedule of its own
                module.progress = run.done()
            where = f"step {progress.step}, rank {run.accelerator.process_index}, rows {rows[:8]}"
            sums, grad_norm = take_step(run.objective, run.optimizer, run.accelerator, batches, lr, cfg.clip_norm, where)
            seconds = as_main_process(run.accelerator, time.perf_counter() - began)
            tokens = sum(int(source.lengths[row]) for row in rows)
            progress.step += 1
            progress.seconds += seconds
            progress.cpu_seconds += time.process_time() - began_cpu
            progress.tokens += tokens
            progress.supervised += sum(int(source.supervised[row]) for row in rows)
            run.log.took(sums, tokens, seconds, progress.step)
            finished = run.done() >= 1
            if progress.step % cfg.log_every == 0 or finished:
                run.log.step(progress, lr, grad_norm, run.done())
            if progress.step % cfg.eval_every == 0 or finished:
                pending.result()  # one reader at a time
                result = run.check()
            if progress.step % cfg.save_every == 0 and not finished:
                pending.result()  # the reader must not move the sampler while its position is swapped
                ahead = sampler.state_dict()
                sampler.load_state_dict(position)
                checkpoint.save(run.accelerator, run.recipe.run_dir, progress.step, cfg.keep)
                sampler.load_state_dict(ahead)
        pending.result()
    sampler.load_state_dict(position)
    return result


def _say_start(run: Run) -> None:
    """What is about to be trained on what."""
    recipe, source, cfg = run.recipe, run.source, run.recipe.train
    trained, train_rows = run.trainable_parameters, run.sampler.rows
    tokens, supervised = int(source.lengths[train_rows].sum()), int(source.supervised[train_rows].sum())
    length = f"{run.total_steps} steps" if run.total_steps else f"{cfg.max_minutes:g} minutes"
    memory = trained * 16 / 2**30  # float32 weights, gradients and two moments
    held_out = len(source.lengths) - len(train_rows)
    precision = "bf16 autocast" if run.bf16 else "fp32"
    where = str(run.accelerator.device)
    if where == "cpu":
        where += f", {torch.get_num_threads()} thread(s) a process"
    run.log.say(
        f"{recipe.name}: {recipe.method} head, {trained / 1e6:.2f} M trainable parameters, {memory:.2f} GiB with gradients and moments\n"
        f"data: {len(train_rows)} rows, {tokens} tokens, {supervised} supervised ({supervised / max(tokens, 1):.0%}); "
        f"{held_out} rows held out\n"
        f"steps: {cfg.tokens_per_step} tokens a step over {run.accelerator.num_processes} process(es), micro-batches of "
        f"{cfg.micro_batch_tokens}; {length}; {precision} on {where}"
    )
    if not (vocab := run.module.head.vocab).full:
        coverage = vocab.coverage(source.token_counts)
        run.log.say(f"draft vocabulary: {len(vocab.ids)} of {vocab.size}, covers {coverage:.2%} of the supervised training tokens")
