"""What training starts from: rows with features, and a head with its draft vocabulary; what cannot be trained on is refused."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from data_prep.store import FeatureStore
from heads import head_class
from heads.protocol import Head
from heads.target import TargetParts, load_tokenizer
from heads.vocab import DraftVocab, build_draft_vocab
from recipes.errors import DataError, FeatureError, TargetError
from recipes.schema import Recipe


def open_source(recipe: Recipe) -> Any:
    """Where rows with features come from: the store, or the target running beside the head."""
    store = FeatureStore.open(recipe.features.dir, recipe)
    if int(store.supervised.sum()) == 0:
        raise FeatureError(
            f"{recipe.features.dir} holds no supervised token; look at a row with `python -m data_prep.show RECIPE`, then rebuild it"
        )
    if recipe.train.features == "stored":
        return store
    from train.online import OnlineFeatures

    return OnlineFeatures(store, recipe)


def check_lm_head(target: TargetParts) -> None:
    """Raises TargetError where the LM head adds a bias (Phi-2, GPT-J): the objectives form the teacher's logits without one."""
    if target.lm_head_bias is not None:
        largest = target.lm_head_bias.abs().max().item()
        raise TargetError(
            f"{target.path}: the LM head has a bias (largest value {largest:.3g}), and the distributions that heads are compared with "
            "would lack it; take a target without one: no head can be trained for this one yet"
        )


def check_mask_token(recipe: Recipe, store: FeatureStore) -> None:
    """Raises DataError where a text of the store holds the draft's mask token: it would mean two things (B34)."""
    token = getattr(recipe.head, "mask_token_id", None)
    if token is not None and (count := int((store.rows.input_ids == token).sum())):
        raise DataError(
            f"head.mask_token_id={token} occurs {count} times in the rows of {recipe.features.dir}, so the draft could not tell a mask "
            "from that token; give the id of a special token that no text holds (the target's tokenizer.json lists them as added_tokens)."
        )


def make_head(recipe: Recipe, target: TargetParts, source: Any, ids: Tensor | None = None) -> Head:
    """The recipe's head, fresh, with the draft vocabulary `ids` [D] of a run, or that of the rows' supervised tokens."""
    if ids is not None:
        vocab = DraftVocab(ids, target.vocab_size)
    else:
        size = getattr(recipe.head, "draft_vocab_size", None)
        vocab = build_draft_vocab(source.token_counts, size, load_tokenizer(recipe.target).all_special_ids)
    return head_class(recipe.method)(recipe.head, target, vocab)
