"""Mend vLLM's rejection sampler on a CPU, where temperature > 0 is wrong in 0.32.0.

The CPU stand-in for the sampler's expand kernel writes into an int64 copy of its output and never copies back: with
speculative decoding the per-token temperature is uninitialised memory (vllm-project/vllm#55005; VLLM_FORMATS §10).
Greedy requests are not touched by it. `register()` is a `vllm.general_plugins` entry point, so that every vLLM process
of this environment has the mend before it starts; it can also be called in-process before an engine is built.

The fault is looked for by running the kernel, not by version: a vLLM that is right is left alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MENDED = (
    "vLLM {version}: the CPU expand kernel of the rejection sampler leaves temperatures uninitialised "
    "(vllm-project/vllm#55005); replaced by eval/vllm_plugin.py"
)


def expand(
    output: Tensor, input_val: Tensor, cu_num_tokens: Tensor, replace_from: float, replace_to: float, MAX_NUM_TOKENS: int | None = None
) -> None:
    """Repeat each request's value over its tokens, in place.

    `output` [N tokens] and `input_val` [B requests] share a dtype; `cu_num_tokens` [B] is the running total of tokens, its
    last entry N. A value equal to `replace_from` is written as `replace_to`. Names and order are the kernel's own, by
    which vLLM calls it (`MAX_NUM_TOKENS` is a launch constant without use here).

    >>> out = torch.empty(3)
    >>> expand(out, torch.tensor([0.7, 0.0]), torch.tensor([1, 3]), 0, 1)
    >>> [round(x, 1) for x in out.tolist()]
    [0.7, 1.0, 1.0]
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    output.copy_(values.repeat_interleave(counts))


def is_right(kernel: Callable[..., None]) -> bool:
    """Whether an expand kernel fills a float32 output, as temperatures need it."""
    out = torch.full((4,), -1.0)
    kernel(out, torch.tensor([0.7, 0.0, 1.3]), torch.tensor([2, 3, 4], dtype=torch.int32), 0, 1)
    return torch.equal(out, torch.tensor([0.7, 0.7, 1.0, 1.3]))


def register() -> str | None:
    """Replace the faulty kernel where this vLLM has it; return a note for the report, or None where nothing is amiss.

    Safe to call more than once. Must run before the first engine of a process is built, since vLLM copies the function
    when it starts a worker; `sampler_is_right` tells afterwards whether it took.
    """
    import vllm
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if not current_platform.is_cpu() or HAS_TRITON:
        return None
    current_platform.import_kernels()
    from vllm.utils import cpu_triton_utils as kernels

    if kernels._expand_kernel_impl is not expand:
        if is_right(kernels._expand_kernel_impl):
            return None
        kernels._expand_kernel_impl = expand
    return MENDED.format(version=vllm.__version__)


def sampler_is_right() -> bool:
    """Whether the sampler of this process, as it would be called, expands temperatures correctly (build an engine first)."""
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    got = expand_batch_to_tokens(torch.tensor([0.7, 0.0, 1.3]), torch.tensor([2, 3, 4], dtype=torch.int32), 4, replace_from=0, replace_to=1)
    return torch.equal(got, torch.tensor([0.7, 0.7, 1.0, 1.3]))
