"""P-EAGLE: EAGLE-3 that drafts all its tokens in one pass (arXiv 2602.01469; METHODS §6).

Timeline at index t, the anchor (x: tokens, g: EAGLE-3's fused feature, m: fc of a learned vector, MASK: a token of the
vocabulary that no text holds):

    slot     feature    token eaten   position   predicts
    0        g_t        x[t+1]        t          x[t+2]
    i >= 1   m          MASK          t + i      x[t+2+i]

Slot i of anchor t sees slot 0 of all anchors <= t and slots 1..i of its own. That is EAGLE-3's rollout with a learned
vector in place of the fed-back state and MASK in place of the drafted token, so `rollout` and the cache are EAGLE-3's;
only `propose` differs: the slots do not wait for one another and run in one pass.

Shapes: n entries of one request, H hidden size, A tapped layers, D draft vocabulary, k slots drafted.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heads.autoregressive import Choose
from heads.cache import DraftCache
from heads.eagle3 import Eagle3Head
from heads.target import TargetParts
from heads.vocab import DraftVocab
from recipes.errors import RecipeError
from recipes.head_blocks import PeagleHead as PeagleBlock


class PeagleHead(Eagle3Head):
    """The draft head: EAGLE-3's, usually with more layers, and `mask_hidden` [1, 1, A * H] (the shape published drafts have)."""

    block: PeagleBlock

    def __init__(self, block: PeagleBlock, target: TargetParts, vocab: DraftVocab):
        check_mask_token(block.mask_token_id, vocab.size)
        super().__init__(block, target, vocab)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.in_features) * self.config.initializer_range)

    def mask_feature(self) -> Tensor:
        """[1, H] feature of every slot but the first: the learned vector through the same norms and fc as real states."""
        parts = self.mask_hidden.view(1, -1).chunk(len(self.aux_layers), -1)
        return self.fuse(dict(zip(self.aux_layers, parts, strict=True)))

    def feedback(self, state: Tensor) -> Tensor:
        """[n, H] what slots 1.. eat in place of a state."""
        return self.mask_feature().expand(len(state), -1)

    def advance(self, feature: Tensor, tokens: Tensor, positions: Tensor, cache: DraftCache, visible: Tensor | None = None) -> Tensor:
        """Raises RecipeError: trees are grown entry by entry, and here no slot knows what the one before it drafted."""
        raise RecipeError("P-EAGLE drafts all its tokens in one pass, so no tree can be grown; set eval.tree: chain")

    @torch.no_grad()
    def propose(self, hidden: dict[int, Tensor], tokens: Tensor, positions: Tensor, cache: DraftCache, k: int, choose: Choose) -> Tensor:
        """As in AutoregressiveHead, in one pass: the n committed entries, and k - 1 mask slots behind the last of them."""
        n = len(tokens)
        slots = torch.arange(1, k, device=positions.device)
        feature = torch.cat([self.fuse(hidden), self.mask_feature().expand(k - 1, -1)])
        eaten = torch.cat([tokens, tokens.new_full((k - 1,), self.block.mask_token_id)])
        states = super().advance(feature, eaten, torch.cat([positions, positions[-1] + slots]), cache)
        cache.crop(cache.length - (k - 1))
        return self.draft_ids[choose(self.logits(states[n - 1 :]))]

    # ---- export: what vLLM reads (VLLM_FORMATS §5) -------------------------------------------------------------

    def served_config(self) -> dict:
        """EAGLE-3's config.json and the id that fills the later slots."""
        return super().served_config() | {"ptd_token_id": self.block.mask_token_id}

    def load_served(self, tensors: dict[str, Tensor]) -> None:
        """As EAGLE-3; a published `mask_hidden` may have any shape of that many numbers."""
        if "mask_hidden" in tensors and tensors["mask_hidden"].numel() == self.mask_hidden.numel():
            tensors = tensors | {"mask_hidden": tensors["mask_hidden"].view_as(self.mask_hidden)}
        super().load_served(tensors)

    @staticmethod
    def served_shapes(config: dict) -> dict[str, tuple[int, ...]]:
        """EAGLE-3's tensors and `mask_hidden`."""
        width = config["num_aux_hidden_states"] * config["target_hidden_size"]
        return Eagle3Head.served_shapes(config) | {"mask_hidden": (1, 1, width)}

    @staticmethod
    def speculative_config() -> dict:
        """What the user passes to vLLM besides `model` and `num_speculative_tokens`."""
        return {"method": "eagle3", "parallel_drafting": True}


def check_mask_token(token: int, vocab_size: int) -> None:
    """Raises RecipeError where the mask token lies outside the target's vocabulary (B34)."""
    if token >= vocab_size:
        raise RecipeError(
            f"head.mask_token_id={token} lies outside the target's vocabulary of {vocab_size}; give an id below that which no text holds, "
            "such as an unused special token."
        )
