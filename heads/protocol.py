"""What every head offers to training, export and the reference decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from heads.vocab import DraftVocab


class Head(Protocol):
    """Implemented by the classes that `HEADS` names; they are `nn.Module`s. See CONTRIBUTING.md, "Add a head in six steps"."""

    block: Any  # the recipe's head block
    vocab: DraftVocab
    config: Any  # the draft's own, a transformers config

    def new_cache(self) -> Any:
        """What one request's drafting remembers between rounds."""
        ...

    def propose(
        self, hidden: dict[int, Tensor], tokens: Tensor, positions: Tensor, cache: Any, k: int, choose: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Take in n committed entries ({layer: [n, H]}, tokens [n] = x[t+1], positions [n]) and draft [k] target ids."""
        ...

    def served_config(self) -> dict:
        """config.json, with every field that the server would otherwise guess."""
        ...

    def served_tensors(self) -> dict[str, Tensor]:
        """Trained tensors under the names that the server reads."""
        ...

    def load_served(self, tensors: dict[str, Tensor]) -> None:
        """Take over weights by their served names, ours or published. Raises ExportError where one is missing or misshapen."""
        ...

    @staticmethod
    def served_shapes(config: dict) -> dict[str, tuple[int, ...]]:
        """Every tensor that must exist for a config.json, with its shape."""
        ...

    @staticmethod
    def speculative_config() -> dict:
        """What the user passes to vLLM besides `model` and `num_speculative_tokens`."""
        ...

    # ---- of nn.Module ----

    def eval(self) -> Any: ...

    def to(self, *args: Any, **kwargs: Any) -> Any: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def state_dict(self) -> dict[str, Any]: ...


@runtime_checkable
class WholeModel(Protocol):
    """What a draft that is a causal LM of any shape adds: its own config, and files beside the weights."""

    def architecture(self) -> dict[str, Any]:
        """What `headstart.json` must hold to build the same model again."""
        ...

    def save_extra(self, folder: Path) -> None:
        """Write what else the export needs."""
        ...

    def load_extra(self, folder: Path) -> None:
        """Read it back."""
        ...
