"""Mend what vLLM 0.32.0 gets wrong on a CPU: the rejection sampler at temperature > 0, and DFlash drafts of several layers.

The CPU stand-in for the sampler's expand kernel writes into an int64 copy of its output and never copies back: with
speculative decoding the per-token temperature is uninitialised memory (vllm-project/vllm#55005; VLLM_FORMATS §10).
Greedy requests are not touched by it. The CPU norm kernel takes the first row of a weight that has a row for each layer,
so that all layers of a DFlash draft norm their injected keys with the first layer's weights: drafts are worse, and nothing
says so (the same fault on XPU: vllm-project/vllm#56431). `register()` is a `vllm.general_plugins` entry point, so that every vLLM process
of this environment has the mend before it starts; it can also be called in-process before an engine is built.

Faults are looked for by running the kernels, not by version: a vLLM that is right is left alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MENDED = (
    "vLLM {version}: the CPU expand kernel of the rejection sampler leaves temperatures uninitialised "
    "(vllm-project/vllm#55005); replaced by eval/vllm_plugin.py"
)

MENDED_NORM = (
    "vLLM {version}: the CPU norm kernel gives every layer of a DFlash draft the first layer's weights (as once on XPU, "
    "vllm-project/vllm#56431); replaced by eval/vllm_plugin.py"
)
Norm = Callable[[Tensor, Tensor, Tensor | None, float], None]  # (out, input, weight, epsilon): writes into out


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


def row_by_row(kernel: Norm) -> Norm:
    """A norm kernel that gives each entry of the first dimension its own row of a weight [rows, size].

    >>> def first_row(out, x, weight, epsilon): out.copy_(x * weight.view(-1)[: x.shape[-1]])
    >>> out = torch.empty(2, 1)
    >>> row_by_row(first_row)(out, torch.ones(2, 1), torch.tensor([[3.0], [5.0]]), 0.0)
    >>> out.tolist()
    [[3.0], [5.0]]
    """

    def rms_norm(out: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
        if weight is None or weight.ndim == 1:
            return kernel(out, input, weight, epsilon)
        for rows in zip(out, input, weight, strict=True):
            kernel(*rows, epsilon)

    return rms_norm


def norms_rows(kernel: Norm) -> bool:
    """Whether a norm kernel gives each entry of the first dimension its own row of the weight."""
    out = torch.empty(2, 1, 8)
    kernel(out, torch.ones(2, 1, 8), torch.tensor([[1.0], [3.0]]).expand(2, 8).contiguous(), 1e-6)
    return bool((out[1] > 2).all())


def register() -> str | None:
    """Replace faulty kernels where this vLLM has them; return a note for the report, or None where nothing is amiss.

    Safe to call more than once. Must run before the first engine of a process is built, since vLLM copies the function
    when it starts a worker; `sampler_is_right` tells afterwards whether it took.
    """
    import vllm
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if not current_platform.is_cpu():
        return None
    current_platform.import_kernels()
    from vllm import _custom_ops
    from vllm.utils import cpu_triton_utils as kernels

    mended = []
    if not HAS_TRITON and (kernels._expand_kernel_impl is expand or not is_right(kernels._expand_kernel_impl)):
        kernels._expand_kernel_impl = expand
        mended.append(MENDED)
    if not norms_rows(torch.ops._C.rms_norm):
        _custom_ops.rms_norm = row_by_row(torch.ops._C.rms_norm)
        mended.append(MENDED_NORM)
    return "; ".join(text.format(version=vllm.__version__) for text in mended) or None


def sampler_is_right() -> bool:
    """Whether the sampler of this process, as it would be called, expands temperatures correctly (build an engine first)."""
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    got = expand_batch_to_tokens(torch.tensor([0.7, 0.0, 1.3]), torch.tensor([2, 3, 4], dtype=torch.int32), 4, replace_from=0, replace_to=1)
    return torch.equal(got, torch.tensor([0.7, 0.7, 1.0, 1.3]))
