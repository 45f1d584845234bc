"""How fast a training step is, in tokens per CPU-second and against this machine's own matmul rate.

    python -m train.bench recipes/smollm2-135m/eagle3.yaml [key=value …] [--seq 512] [--threads 1] [--supervised 1.0 0.5]

Needs no data and no features: tokens and states are random; head, objective, optimizer and precision are the recipe's. A step is forward,
backward, clipping and optimizer on one batch on the CPU; the best of `--steps` counts. One line for each share of supervised tokens,
and the same as JSON. The setting of PEERS §4.1 is `recipes/smollm2-135m/quickstart.yaml` with
`head.num_layers=1 head.fc_norm=false head.norm_output=false train.precision=fp32 train.optimizer=adamw`.
A warm-up (the first depth alone, the heads alone) is over: the full step is what is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from heads import head_class
from heads.precision import in_bf16
from heads.target import TargetParts, read_target
from heads.vocab import DraftVocab
from recipes.errors import HeadstartError
from recipes.schema import Recipe, load_recipe
from train.objective import objective_class
from train.optimizer import make_optimizer
from train.packing import Batch
from train.run_log import peak_memory_gib


def matmul_rate(dtype: torch.dtype, seconds: float = 1.0) -> float:
    """FLOP/s of 512 x 576 x 1536 products in `dtype`, the best of repeated runs: what this machine gives to well-shaped work."""
    x, w = torch.randn(512, 576).to(dtype), torch.randn(1536, 576).to(dtype)
    best, began = 0.0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        t = time.perf_counter()
        for _ in range(8):
            F.linear(x, w)
        best = max(best, 8 * 2 * 512 * 576 * 1536 / (time.perf_counter() - t))
    return best


def random_batch(seq: int, supervised: float, target: TargetParts, vocab: DraftVocab, layers: list[int]) -> Batch:
    """`seq` tokens of the draft vocabulary: one document fully supervised, or four of which the last share is."""
    document_length = seq if supervised >= 1 else seq // 4
    index = torch.arange(seq)
    positions = index % document_length
    H = target.hidden_size
    return Batch(
        input_ids=vocab.ids[torch.randint(len(vocab.ids), (seq,))],
        loss_mask=positions >= round(document_length * (1 - supervised)),
        document=index // document_length,
        positions=positions,
        hidden={layer: torch.randn(seq, H) for layer in layers},
        last_hidden=torch.randn(seq, H),
    )


def bench(recipe: Recipe, make_objective: Any, seq: int, supervised: float, steps: int) -> dict[str, float]:
    """Time whole training steps (forward, backward, clip, AdamW) on one batch.

    Returns:
        tokens per CPU-second and per second (best step), CPU-seconds of the best step, matrix-product FLOPs of a step,
        and the share of the machine's matmul rate that they reach.
    """
    torch.manual_seed(0)
    target = read_target(recipe.target)
    size = getattr(recipe.head, "draft_vocab_size", None) or target.vocab_size
    vocab = DraftVocab(torch.randperm(target.vocab_size)[:size].sort().values, target.vocab_size)
    head = head_class(recipe.method)(recipe.head, target, vocab)
    objective = make_objective(head, target, recipe.objective)
    if hasattr(objective, "progress"):  # past any warm-up: EAGLE-3's first depth alone, Medusa-2's heads alone
        objective.progress = 1.0
    optimizer = make_optimizer(objective, recipe.train)
    batch = random_batch(seq, supervised, target, vocab, recipe.head.feature_layers(target.num_layers))

    bf16 = in_bf16(recipe.train.precision)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            out = objective(batch)
        (out.loss_sum / batch.supervised).backward()
        torch.nn.utils.clip_grad_norm_(objective.parameters(), recipe.train.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    with FlopCounterMode(display=False) as counter:
        step()
    best_cpu = best_wall = float("inf")
    for _ in range(steps):
        cpu, wall = time.process_time(), time.perf_counter()
        step()
        best_cpu, best_wall = min(best_cpu, time.process_time() - cpu), min(best_wall, time.perf_counter() - wall)
    flops = counter.get_total_flops()
    return {
        "tokens_per_cpu_second": seq / best_cpu,
        "tokens_per_second": seq / best_wall,
        "cpu_seconds": best_cpu,
        "gflop": flops / 1e9,
        "share_of_matmul_rate": flops / best_wall / matmul_rate(torch.bfloat16 if bf16 else torch.float32),
    }


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m train.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("recipe", help="a YAML file in recipes/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe values to override, for instance head.unroll_steps=3")
    parser.add_argument("--seq", type=int, default=512, help="tokens in the batch (default 512)")
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's threads (default 1)")
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed after one to warm up (default 10)")
    parser.add_argument(
        "--supervised",
        type=float,
        nargs="+",
        default=[1.0, 0.5],
        metavar="SHARE",
        help="shares of supervised tokens (default 1.0 0.5); below 1, four documents are packed and the end of each is supervised",
    )
    args = parser.parse_intermixed_args(argv)
    torch.set_num_threads(args.threads)
    try:
        recipe = load_recipe(args.recipe, args.overrides)
        for share in args.supervised:
            result = bench(recipe, objective_class(recipe.method), args.seq, share, args.steps)
            print(
                f"{recipe.method} {args.seq} tokens, {share:.0%} supervised, {args.threads} thread(s): "
                f"{result['tokens_per_cpu_second']:.0f} tokens/CPU-s, {result['tokens_per_second']:.0f} tokens/s, "
                f"{result['cpu_seconds']:.3f} CPU-s and {result['gflop']:.0f} GFLOP a step, "
                f"{result['share_of_matmul_rate']:.0%} of the measured matmul rate, peak {peak_memory_gib(torch.device('cpu')):.2f} GiB"
            )
            print(json.dumps({"supervised": share, "threads": args.threads, "seq": args.seq} | result))
    except HeadstartError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
