"""A second device on a machine that has one: what a GPU would refuse, refused here, and what it would compute.

Inside `far_device()`, a tensor moved to `FAR` says that it lies on another device (torch's `meta`, which no code of ours uses for values)
while its values are on the CPU. Operations compute with them; one that mixes both devices raises, as CUDA does. Tensors created with
`device=x.device` are far where x is. Code that asks `device.type == "cpu"` takes the other branch.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

FAR = torch.device("meta")
aten = torch.ops.aten
ACROSS = {aten._to_copy.default, aten.copy_.default}  # these may read one device and write the other
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}  # CUDA takes CPU indices


class FarTensor(torch.Tensor):
    """Values `near` on the CPU, and a device of its own."""

    near: torch.Tensor

    @staticmethod
    def __new__(cls, near: torch.Tensor):
        layout = {"strides": near.stride(), "storage_offset": near.storage_offset(), "dtype": near.dtype, "device": FAR}
        made = torch.Tensor._make_wrapper_subclass(cls, near.size(), **layout)  # type: ignore[attr-defined]
        made.near = near
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})

    def tolist(self) -> list:
        return self.near.tolist()

    def new_tensor(self, data: Any) -> torch.Tensor:
        return torch.tensor(data, dtype=self.dtype, device=FAR)


class _Mode(TorchDispatchMode):
    """Creations with `device=FAR` and everything with a far argument goes through `compute`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        far = any(isinstance(x, FarTensor) for x in tree_flatten((args, kwargs))[0])
        return compute(func, args, kwargs) if far or (device is not None and torch.device(device) == FAR) else func(*args, **kwargs)


def near(x: Any) -> Any:
    """The values of a far tensor; anything else as it is."""
    if isinstance(x, torch.Tensor) and not isinstance(x, FarTensor) and x.is_meta:  # an empty one that torch made by itself
        return torch.empty_like(x, device="cpu")
    return x.near if isinstance(x, FarTensor) else x


def compute(func, args, kwargs) -> Any:
    """Run an operation on the values, and put its results where the device would have them.

    Raises:
        RuntimeError: a far tensor meets one of the CPU that is no scalar and no index.
    """
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    far = any(isinstance(x, FarTensor) for x in tensors)
    if func is aten.copy_.default:
        near(args[0]).copy_(near(args[1]))
        return args[0]
    if far and func not in ACROSS:
        for number, x in enumerate(tensors):
            strange = not isinstance(x, FarTensor) and x.dim() > 0 and x.numel() > 0
            if strange and not (func in INDEXING and isinstance(tensors[0], FarTensor)):
                raise RuntimeError(f"{func}: tensors on two devices; argument {number}, {tuple(x.shape)}, is on the CPU")
    if (device := kwargs.get("device")) is not None:
        far, kwargs = torch.device(device) == FAR, kwargs | {"device": torch.device("cpu")}
    given = {id(x.near): x for x in tensors if isinstance(x, FarTensor)}  # what is written in place stays the caller's own tensor
    result = func(*tree_map(near, args), **tree_map(near, kwargs))
    if not far:
        return result
    return tree_map(lambda x: (given[id(x)] if id(x) in given else FarTensor(x)) if isinstance(x, torch.Tensor) else x, result)


@contextlib.contextmanager
def far_device() -> Iterator[torch.device]:
    """Inside, `FAR` is a device; yields it."""
    tensor, autocast = torch.tensor, torch.autocast
    enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype

    def is_far(device: Any) -> bool:
        return device is not None and torch.device(device) == FAR

    def made(data: Any, *, dtype: Any = None, device: Any = None) -> torch.Tensor:
        return tensor(data, dtype=dtype).to(FAR) if is_far(device) else tensor(data, dtype=dtype, device=device)

    def as_made(data: Any, *, dtype: Any = None, device: Any = None) -> torch.Tensor:
        known = isinstance(data, torch.Tensor)
        return data.to(device or data.device, dtype or data.dtype) if known else made(data, dtype=dtype, device=device)

    def no_autocast(device_type: str, *args: Any, **more: Any) -> Any:
        return contextlib.nullcontext() if is_far(device_type) else autocast(device_type, *args, **more)

    with (
        mock.patch("torch.tensor", made),
        mock.patch("torch.as_tensor", as_made),
        mock.patch("torch.autocast", no_autocast),
        mock.patch("torch.is_autocast_enabled", lambda device="cuda": not is_far(device) and enabled(device)),
        mock.patch("torch.get_autocast_dtype", lambda device: torch.bfloat16 if is_far(device) else dtype_of(device)),
        _Mode(),
    ):
        yield FAR
