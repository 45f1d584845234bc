"""`train.features: online`: the target runs beside the head and nothing is stored. Same rows, same batches."""

from __future__ import annotations

import threading
from typing import Any

from data_prep.extract import load_extraction_model, online_features
from data_prep.store import FeatureStore, RowFeatures
from heads.precision import in_bf16
from recipes.schema import Recipe


class OnlineFeatures:
    """Rows of a token store, with states computed when they are read. Offers what FeatureStore offers to the loop."""

    def __init__(self, store: FeatureStore, recipe: Recipe):
        self.store, self.batch_tokens = store, recipe.features.batch_tokens
        self.model = load_extraction_model(recipe.target, in_bf16(recipe.features.precision))
        self._one_at_a_time = threading.Lock()  # the loop reads ahead in a thread while validation reads too

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def read_rows(self, rows: list[int], layers: list[int]) -> list[RowFeatures]:
        """Rows through the target, batched: {layer: [n, H]} and the post-norm state."""
        if not rows:
            return []
        tokens, masks = zip(*(self.store.tokens(row) for row in rows), strict=True)
        with self._one_at_a_time:
            return online_features(self.model, list(tokens), list(masks), layers, self.batch_tokens)

    def read(self, row: int, layers: list[int]) -> RowFeatures:
        """One row."""
        return self.read_rows([row], layers)[0]
