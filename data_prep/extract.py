"""Run the target over rows and keep its states: `hidden.<i>` of the tapped layers and `last_hidden`; no LM head, no cache.

Layer i is the residual stream after i decoder blocks: the input of block i, or the output of the last block for i = L.

Rows of similar length are batched and padded on the right. A causal model never looks right, so no row sees a pad and no
attention mask is passed: PyTorch's fused attention stays on its fast path (a mask makes it 1.7 to 1.9 times slower on a CPU,
DATA.md). Pads are computed and thrown away, never stored.

Shapes: B rows in a batch, T padded length, N tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data_prep.manifest import FileEntry, ShardEntry
from data_prep.progress import Progress
from data_prep.stop import Stop, Stopped
from data_prep.store import RowFeatures, Rows, crc32, tensor_name, write_tensors
from heads.target import DTYPES, Sink, load_target_model, needs_equal_lengths, reset_rope, tapped
from recipes.errors import FeatureError, TargetError
from recipes.schema import Target

MAX_PADDING = 1 / 8  # share of a padded row
PROBE_LOGITS = 256  # positions whose full-vocabulary logits are held at once


def extraction_dtype(cfg: Target) -> torch.dtype:
    """What the target computes in here: `target.dtype` on a GPU, float32 on a CPU."""
    return DTYPES[cfg.dtype] if torch.cuda.is_available() else torch.float32


def load_extraction_model(cfg: Target, bf16_products: bool = False) -> PreTrainedModel:
    """The target, on the GPU where there is one, in `extraction_dtype`.

    With `bf16_products` its decoder runs under bfloat16 autocast on a CPU: weights, residual stream and states stay in float32.
    """
    model = load_target_model(cfg)
    torch.nn.Module.to(model, "cuda" if torch.cuda.is_available() else torch.float32)
    if bf16_products and not torch.cuda.is_available():
        decoder = model.get_decoder()
        decoder.forward = torch.autocast("cpu", torch.bfloat16)(decoder.forward)
    return model


def plan_shards(lengths: list[int], shard_tokens: int) -> list[tuple[int, int]]:
    """Cut rows, in order, into runs (first row, number of rows) of at most `shard_tokens` tokens (a longer row stands alone).

    >>> plan_shards([4, 4, 4, 20, 1], shard_tokens=9)
    [(0, 2), (2, 1), (3, 1), (4, 1)]
    """
    plan, first, tokens = [], 0, 0
    for row, length in enumerate(lengths):
        if row > first and tokens + length > shard_tokens:
            plan.append((first, row - first))
            first, tokens = row, 0
        tokens += length
    return [*plan, (first, len(lengths) - first)]


def plan_batches(lengths: list[int], batch_tokens: int, equal_lengths: bool = False) -> list[list[int]]:
    """Group rows of similar length, longest first, so that B × T stays within `batch_tokens` (a longer row stands alone).

    No row is padded by more than `MAX_PADDING` of its batch's length: a small shard would else be a quarter pads.

    >>> plan_batches([30, 90, 40, 82, 88], batch_tokens=200)
    [[1, 4], [3], [2], [0]]
    """
    batches: list[list[int]] = []
    width = 0
    for row in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        fits = batches and width * (len(batches[-1]) + 1) <= batch_tokens
        if fits and lengths[row] >= width * (1 if equal_lengths else 1 - MAX_PADDING):
            batches[-1].append(row)
        else:
            batches.append([row])
            width = lengths[row]
    return batches


@torch.no_grad()
def forward_batch(model: PreTrainedModel, rows: list[Tensor], sink: Sink) -> None:
    """One forward pass of the decoder over `rows` ([n] int64 each, longest first); `last_hidden` goes to `sink` under None."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    reset_rope(model)
    output = model.get_decoder()(input_ids=ids.to(model.device, non_blocking=True), use_cache=False)
    sink(None, output.last_hidden_state)


def extract_rows(
    model: PreTrainedModel,
    rows: list[Tensor],
    buffers: dict[int | None, Tensor],
    batch_tokens: int,
    first_row: int = 0,
    on_batch: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Fill `buffers` with the states of `rows`, one row after the other in the given order.

    Args:
        rows: token ids [n] each.
        buffers: layer (None: last_hidden) → [N, H]; N is the rows' total length. States are rounded to the buffer's dtype.
        batch_tokens: upper bound of B × T.
        first_row: number of `rows[0]`, for messages.
        on_batch: called after each forward pass with its tokens (pads not counted).

    Raises:
        FeatureError: a state is not finite (a float16 target that overflows, for instance).
        TargetError: the decoder's states are not [B, T, H].
    """
    lengths = [len(row) for row in rows]
    starts = list(accumulate(lengths, initial=0))
    members: list[int] = []

    def sink(layer: int | None, states: Tensor) -> None:
        buffer = buffers[layer]
        expected = (len(members), lengths[members[0]], buffer.shape[1])
        if tuple(states.shape) != expected:
            raise TargetError(f"{type(model).__name__}: layer {layer} gives states {tuple(states.shape)}, expected [B, T, H] {expected}")
        states = states.to(buffer.dtype)
        for i, row in enumerate(members):
            buffer[starts[row] : starts[row + 1]].copy_(states[i, : lengths[row]], non_blocking=True)

    with tapped(model, [layer for layer in buffers if layer is not None], sink):
        for batch in plan_batches(lengths, batch_tokens, needs_equal_lengths(model)):
            members[:] = batch
            forward_batch(model, [rows[i] for i in batch], sink)
            on_batch(sum(lengths[i] for i in batch))
    if model.device.type == "cuda":  # the copies above do not block; the current device of a read-ahead thread is 0 on every rank
        torch.cuda.synchronize(model.device)
    finite = buffers[None].isfinite().all(dim=1)
    if not finite.all():
        token = int((~finite).nonzero()[0])
        row = next(i for i in range(len(rows)) if token < starts[i + 1])
        raise FeatureError(
            f"the target's last hidden state is not finite at token {token - starts[row]} of row {first_row + row} in {model.dtype}; "
            f"set target.dtype to bfloat16 or float32."
        )


def state_buffers(
    num_tokens: int, model: PreTrainedModel, layers: list[int], codec: torch.dtype, device: torch.device | str
) -> dict[int | None, Tensor]:
    """Room for the states of `num_tokens` tokens: layers in `codec`, last_hidden (None) as the model computes it.

    CPU memory is pinned where there is a GPU, so that its copies do not wait.
    """
    size = model.config.get_text_config().hidden_size
    pin = torch.cuda.is_available() and torch.device(device).type == "cpu"
    dtypes = {None: model.dtype} | dict.fromkeys(layers, codec)
    return {layer: torch.empty(num_tokens, size, dtype=dtype, device=device, pin_memory=pin) for layer, dtype in dtypes.items()}


def extract_shards(
    model: PreTrainedModel,
    rows: Rows,
    shards: list[ShardEntry],
    layers: list[int],
    codec: torch.dtype,
    batch_tokens: int,
    folder: Path,
    on_written: Callable[[], None],
    stop: Stop,
) -> None:
    """Compute and write each shard; the next one is computed while the last one is written.

    Each entry's `written` is filled in once its file is finished, and `on_written` is called then.

    Raises:
        Stopped: a signal came; the shard at hand was finished.
        FeatureError: disk full (the shards before it are finished), or a state that is not finite.
    """
    pending: list[tuple[ShardEntry, Future[FileEntry]]] = []

    def settle() -> None:
        while pending:
            shard, future = pending.pop()
            shard.written = future.result()
            on_written()

    num_tokens = sum(shard.num_tokens for shard in shards)
    with Progress("features", num_tokens, unit="tokens") as progress, ThreadPoolExecutor(1) as writer, stop.deferred("this shard"):
        try:
            for shard in shards:
                spans = [rows.span(row) for row in range(shard.first_row, shard.first_row + shard.num_rows)]
                buffers = state_buffers(shard.num_tokens, model, layers, codec, "cpu")
                extract_rows(model, [rows.input_ids[span].long() for span in spans], buffers, batch_tokens, shard.first_row, progress.add)
                settle()
                pending.append((shard, writer.submit(write_shard, folder / shard.file, rows, spans, buffers)))
                if stop.signum is not None:
                    settle()
                    raise Stopped
        finally:
            settle()


def write_shard(path: Path, rows: Rows, spans: list[slice], buffers: dict[int | None, Tensor]) -> FileEntry:
    """Write the rows of `spans` and their states in the layout that store.py describes."""
    whole = slice(spans[0].start, spans[-1].stop)
    input_ids, loss_mask = rows.input_ids[whole], rows.loss_mask[whole]
    assert all(len(buffer) == len(input_ids) == len(loss_mask) for buffer in buffers.values()), "as many states as tokens (B16)"
    offsets = [0, *(span.stop - spans[0].start for span in spans)]
    checksums = [[crc32(buffer[a:b]) for buffer in buffers.values()] for a, b in zip(offsets, offsets[1:], strict=False)]
    states = {tensor_name(layer): buffer for layer, buffer in buffers.items()}
    index = {"row_offsets": torch.tensor(offsets), "row_crc32": torch.tensor(checksums)}
    return write_tensors(path, {"input_ids": input_ids, "loss_mask": loss_mask, **index, **states})


def online_features(
    model: PreTrainedModel, rows: list[Tensor], masks: list[Tensor], layers: list[int], batch_tokens: int
) -> list[RowFeatures]:
    """What `FeatureStore.read` gives for stored rows, computed on the spot, on the model's device in its dtype (train.features: online).

    Args:
        rows: token ids [n] int64 each.
        masks: loss masks [n] bool each.
    """
    buffers = state_buffers(sum(map(len, rows)), model, layers, model.dtype, model.device)
    extract_rows(model, rows, buffers, batch_tokens)
    bounds = list(accumulate(map(len, rows), initial=0))
    return [
        RowFeatures(row, mask, {i: buffers[i][a:b] for i in layers}, buffers[None][a:b])
        for row, mask, a, b in zip(rows, masks, bounds, bounds[1:], strict=False)
    ]


@torch.no_grad()
def probe_row(model: PreTrainedModel, row: Tensor) -> dict[str, Tensor]:
    """The target's own predictions at every position of one row, through its whole forward pass (LM head, scale, soft-cap).

    Returns:
        `argmax` int64 [n], `max_logit` float32 [n], `logsumexp` float32 [n].
    """
    parts: dict[str, list[Tensor]] = {"argmax": [], "max_logit": [], "logsumexp": []}
    for end in range(PROBE_LOGITS, len(row) + PROBE_LOGITS, PROBE_LOGITS):
        prefix = row[:end].to(model.device)
        keep = len(prefix) - (end - PROBE_LOGITS)
        logits = model(input_ids=prefix[None], use_cache=False, logits_to_keep=keep).logits[0, -keep:].float()
        best = logits.max(dim=-1)
        for name, value in (("argmax", best.indices), ("max_logit", best.values), ("logsumexp", logits.logsumexp(-1))):
            parts[name].append(value.cpu())
    return {name: torch.cat(values) for name, values in parts.items()}
