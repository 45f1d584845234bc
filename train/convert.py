"""A published draft in our export layout, so that it can be measured and fine-tuned like ours.

    python -m train.export --from FOLDER --recipe RECIPE [--output DIR]

EAGLE-1, EAGLE-3 and P-EAGLE (`fc`, `layers.0` or `midlayer`, d2t/t2d), Medusa legacy and new (`medusa_lm_head.pt`), DFlash: the
names are read by the heads' `load_served` (METHODS §14), and config.json also in speculators' format. A draft that is a whole
model (PARD, an independent draft) must come with its tokenizer, and PARD-2 with its projection (`load_extra`). What no tensor's
shape tells (which layers are tapped, which token is the mask) is compared with the recipe. The folder that comes out is also
what `head.init_from` takes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from data_prep.store import RowFeatures
from heads import head_class
from heads.exported import read_tensors, served_vocab
from heads.protocol import Head, WholeModel
from heads.target import TargetParts, read_target
from recipes.schema import Recipe
from train.export import export_head
from train.published import check_same_computation, published_config, rope_of


def convert(published: Path, recipe: Recipe, output: Path | None = None) -> Path:
    """Write the export of a published draft for the recipe's target.

    A draft keeps the rotary embedding that its config.json describes, for it was trained with that one (METHODS §15.16).

    Raises:
        ExportError: config.json disagrees with the head that the recipe describes, a tensor is missing, unknown or there twice, or
            the draft holds what our head has no place for.
        TargetError: the draft is a whole model without a tokenizer, or with another one than the target's.
    """
    target = read_target(recipe.target)
    tensors, config = read_tensors(published), published_config(published)
    block = recipe.head
    if hasattr(block, "rope"):
        block = block.model_copy(update={"rope": rope_of(config)})
    head: Head = head_class(recipe.method)(block, target, served_vocab(tensors, target.vocab_size))
    check_same_computation(head, config, published)
    head.load_served(tensors)
    if isinstance(head, WholeModel):
        head.load_extra(published)
    figures = {"converted_from": published.name, "published_architectures": config.get("architectures")}
    recipe = recipe.model_copy(update={"head": block})
    return export_head(recipe, head, target, RandomRows(target), figures, output or recipe.export_dir)


class RandomRows:
    """Rows of random tokens and states in place of a feature store: enough to compare an export with the head it was made of."""

    def __init__(self, target: TargetParts, rows: int = 2, length: int = 24):
        self.target, self.length = target, length
        self.supervised = torch.full((rows,), length)

    def read(self, row: int, layers: list[int]) -> RowFeatures:
        """Row number `row`, the same each time."""
        generator = torch.Generator().manual_seed(row)

        def states() -> Tensor:
            return torch.randn(self.length, self.target.hidden_size, generator=generator)

        ids = torch.randint(self.target.vocab_size, (self.length,), generator=generator)
        return RowFeatures(ids, torch.ones(self.length, dtype=torch.bool), {layer: states() for layer in layers}, states())
