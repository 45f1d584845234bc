"""How much of the target's own speed extraction keeps.

    python -m data_prep.bench recipes/smollm2-135m/quickstart.yaml

Bare: forward passes of the decoder alone, no LM head, over full rectangles of the very shapes that extraction uses, every
token counted. Extraction: the same rows through everything `python -m data_prep` does with them: padding (pads are not
counted), hooks, codec, checksums, the shard written and fsynced. The two alternate, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from data_prep.extract import extract_rows, load_extraction_model, plan_batches, state_buffers, write_shard
from data_prep.manifest import ROWS, mend_command
from data_prep.status import wanted_layers
from data_prep.store import CODECS, Rows
from heads.precision import in_bf16
from heads.target import needs_equal_lengths
from recipes.errors import FeatureError, HeadstartError
from recipes.schema import Recipe, load_recipe


@dataclass
class Clock:
    """Tokens and seconds of one kind of work: wall time, and CPU time of all threads."""

    tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def time(self, work: Callable[[], int]) -> None:
        """Run `work`, which returns its tokens."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        self.tokens += work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.wall_s += time.perf_counter() - wall
        self.cpu_s += time.process_time() - cpu

    def text(self, label: str) -> str:
        rates = f"{self.tokens / self.wall_s:10,.1f} tokens/s {self.tokens / self.cpu_s:10,.1f} tokens/CPU-s"
        return f"{label:<12}{rates}   ({self.tokens:,} tokens in {self.wall_s:.1f} s)"


def bench(recipe: Recipe, window_tokens: int, rounds: int) -> tuple[Clock, Clock]:
    """Time bare forward passes and extraction over `rounds` windows of the store's rows; returns both clocks.

    Raises:
        FeatureError: the store has no rows yet.
    """
    folder = Path(recipe.features.dir)
    if not (folder / ROWS).is_file():
        raise FeatureError(f"{folder / ROWS} is missing: the bench runs over real rows. Make them first: `{mend_command()}`")
    rows = Rows.load(folder / ROWS)
    model = load_extraction_model(recipe.target, in_bf16(recipe.features.precision))
    layers = wanted_layers(recipe, model.config.get_text_config().num_hidden_layers)
    codec, batch_tokens = CODECS[recipe.features.codec], recipe.features.batch_tokens
    scratch = Path(tempfile.mkdtemp(prefix=".bench-", dir=folder))  # the same disk as the shards

    def bare(window: range) -> int:
        lengths = [int(rows.lengths[row]) for row in window]
        shapes = [(len(b), lengths[b[0]]) for b in plan_batches(lengths, batch_tokens, needs_equal_lengths(model))]
        for shape in shapes:
            with torch.no_grad():
                model.get_decoder()(
                    input_ids=torch.randint(model.config.get_text_config().vocab_size, shape, device=model.device), use_cache=False
                )
        return sum(b * t for b, t in shapes)

    def extraction(window: range) -> int:
        spans = [rows.span(row) for row in window]
        tokens = spans[-1].stop - spans[0].start
        buffers = state_buffers(tokens, model, layers, codec, "cpu")
        extract_rows(model, [rows.input_ids[span].long() for span in spans], buffers, batch_tokens)
        write_shard(scratch / "shard.safetensors", rows, spans, buffers)
        return tokens

    windows = _windows(rows, window_tokens, rounds)
    clocks = Clock(), Clock()
    try:
        bare(range(windows[0].start, windows[0].start + 1))  # warm up
        for i, window in enumerate(windows):
            for which in (0, 1) if i % 2 == 0 else (1, 0):
                clocks[which].time(lambda which=which, window=window: (bare, extraction)[which](window))
    finally:
        shutil.rmtree(scratch)
    return clocks


def _windows(rows: Rows, window_tokens: int, rounds: int) -> list[range]:
    """`rounds` runs of rows with about `window_tokens` tokens each, from the start again where the rows are few."""
    windows, start = [], 0
    offsets = rows.row_offsets.tolist()
    while len(windows) < rounds:
        stop = start + 1
        while stop < len(rows) and offsets[stop] - offsets[start] < window_tokens:
            stop += 1
        windows.append(range(start, stop))
        start = 0 if stop == len(rows) else stop
    return windows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="a YAML file whose store has rows")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a value of the recipe")
    parser.add_argument("--window-tokens", type=int, default=8192, help="tokens of each round (default 8192)")
    parser.add_argument("--rounds", type=int, default=4, help="each times both kinds of work once (default 4)")
    args = parser.parse_intermixed_args(argv)
    try:
        bare, extraction = bench(load_recipe(args.recipe, args.overrides), args.window_tokens, args.rounds)
    except HeadstartError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    print(f"{device}\n{bare.text('bare')}\n{extraction.text('extraction')}")
    wall, cpu = (getattr(bare, k) / bare.tokens * extraction.tokens / getattr(extraction, k) for k in ("wall_s", "cpu_s"))
    print(f"extraction keeps {wall:.0%} of the bare forward pass (CPU time: {cpu:.0%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
