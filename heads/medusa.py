"""Medusa: heads that each draft one place further ahead from the same state of the target (arXiv 2401.10774; METHODS §1).

Timeline at index t (x: tokens, h: the target's state after its final norm; the target's own head predicts x[t+1]):

    head    eats    predicts     compared with (training)
    0       h_t     x[t+2]       the target's distribution at t + 1, or the token x[t+2]
    i       h_t     x[t+2+i]     the target's distribution at t + 1 + i, or the token x[t+2+i]

A head is residual blocks z ← z + SiLU(W z + b), then an LM head. W and b start at zero, so a fresh head says what the
target's own LM head says. Each head has an LM head of its own (started from the target's rows), or all share one, which
may stay the target's. Nothing is fed back: the heads of a round know nothing of each other's drafts.

With a draft vocabulary of D tokens the LM heads have D rows. vLLM 0.32 loads Medusa's LM heads over all V tokens only, so the
export gives every other token the mean of those rows: a mean of logits is never above the largest one, and no such token is drafted.

Shapes: n entries, H hidden size, V target vocabulary, D draft vocabulary, K heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads import LAST_HIDDEN
from heads.cache import DraftCache
from heads.exported import copy_tensors, rename_tensors, same_values
from heads.layers import Linear
from heads.target import TargetParts
from heads.vocab import DraftVocab
from recipes.errors import ExportError, RecipeError
from recipes.head_blocks import MedusaHead as MedusaBlock


class ResidualBlocks(nn.Module):
    """`count` blocks z + SiLU(W z + b), each with parameters of its own (E13), all zero at first."""

    def __init__(self, size: int, count: int):
        super().__init__()
        self.layers = nn.ModuleList(Linear(size, size) for _ in range(count))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """[n, H] → [n, H]."""
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHead(nn.Module):
    """All draft heads. A shared LM head that stays the target's is borrowed: in no checkpoint, but in the export (vLLM wants it)."""

    lm_head: Tensor  # [D, H], only where it is borrowed

    def __init__(self, block: MedusaBlock, target: TargetParts, vocab: DraftVocab):
        super().__init__()
        H, V = target.hidden_size, target.vocab_size
        self.block, self.vocab, self.config = block, vocab, {"hidden_size": H, "vocab_size": V}
        rows = target.lm_head if vocab.full or target.lm_head.is_meta else target.lm_head[vocab.ids]
        self.blocks = nn.ModuleList(ResidualBlocks(H, block.num_layers) for _ in range(block.num_heads))
        if block.train_lm_head:
            self.lm_heads = nn.ModuleList(
                nn.Linear(H, len(vocab.ids), bias=False) for _ in range(1 if block.shared_lm_head else block.num_heads)
            )
            if not target.lm_head.is_meta:
                for lm_head in self.lm_heads:
                    lm_head.load_state_dict({"weight": rows})
        else:
            self.register_buffer("lm_head", rows, persistent=False)

    # ---- pieces that training and drafting share -------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """Of the trained weights."""
        return next(self.blocks.parameters()).dtype

    def states(self, last_hidden: Tensor, head: int) -> Tensor:
        """Post-norm states [n, H] → what head `head` gives to its LM head [n, H]."""
        return self.blocks[head](last_hidden)

    def lm_head_of(self, head: int) -> Tensor:
        """[D, H] the LM head of head `head`."""
        if not self.block.train_lm_head:
            return self.lm_head
        return self.lm_heads[0 if self.block.shared_lm_head else head].weight  # type: ignore[return-value]

    # ---- serving ----------------------------------------------------------------------------------------------

    def new_cache(self) -> DraftCache:
        """Heads keep nothing between rounds."""
        return DraftCache(0)

    def head_logits(self, last_hidden: Tensor, k: int) -> Tensor:
        """Post-norm states [n, H] of the last processed tokens → logits [k, n, D] of the first k heads (for chains and trees).

        Raises:
            RecipeError: k is larger than the number of heads.
        """
        if k > self.block.num_heads:
            raise RecipeError(
                f"{k} drafted tokens were asked of {self.block.num_heads} Medusa heads; lower eval.k to {self.block.num_heads}"
            )
        z = [self.states(last_hidden, head) for head in range(k)]
        return torch.stack([F.linear(state, self.lm_head_of(head).to(state.dtype)) for head, state in enumerate(z)])

    @torch.no_grad()
    def propose(
        self, hidden: dict[int, Tensor], tokens: Tensor, positions: Tensor, cache: DraftCache, k: int, choose: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Draft k tokens behind the newest one, each head's best on its own.

        Args:
            hidden: {LAST_HIDDEN: [n, H]}; only the last of the n committed positions is read. tokens: [n], x[t+1] for each.
            choose: logits [1, D] → draft id [1], called for heads 0..k-1 in turn.

        Returns:
            [k] target ids.
        """
        last = hidden[LAST_HIDDEN][-1:].to(self.lm_head_of(0).dtype)
        return self.vocab.ids.to(last.device)[torch.cat([choose(logits) for logits in self.head_logits(last, k)])]

    # ---- export: what vLLM reads (VLLM_FORMATS §3) ------------------------------------------------------------

    def served_config(self) -> dict:
        """config.json of vLLM's own layout, with every field that it would otherwise guess."""
        return self.config | {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "num_heads": self.block.num_heads,
            "num_hidden_layers": self.block.num_layers,
            "medusa_fc_bias": True,
            "original_lm_head": self.block.shared_lm_head,
            "truncated_vocab_size": self.config["vocab_size"],
        }

    def served_tensors(self) -> dict[str, Tensor]:
        """Blocks, and LM heads: one each, or the shared one under a name of its own."""
        return self._served_blocks() | {name: self._over_all_tokens(rows) for name, rows in self._served_lm_heads().items()}

    def _served_blocks(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.state_dict().items() if name.startswith("blocks.")}

    def _served_lm_heads(self) -> dict[str, Tensor]:
        """Each LM head [D, H] by the name that the server gives it."""
        if self.block.shared_lm_head:
            return {"lm_head.weight": self.lm_head_of(0)}
        return {f"lm_heads.{head}.weight": self.lm_head_of(head) for head in range(self.block.num_heads)}

    def _over_all_tokens(self, rows: Tensor) -> Tensor:
        """[D, H] → [V, H] for the server: tokens outside the draft vocabulary get the mean row, whose logit is never the largest."""
        if self.vocab.full:
            return rows
        whole = rows.mean(0).expand(self.vocab.size, -1)
        return whole.index_copy(0, self.vocab.ids.to(rows.device), rows)

    @torch.no_grad()
    def load_served(self, tensors: dict[str, Tensor]) -> None:
        """Take over weights: vLLM's layout, or one of the published ones (METHODS §14).

        Published files name head i's block b `i.b.linear`, and its LM head, after L blocks, `i.L.weight`; legacy ones have
        no LM heads and use the target's, which is what a fresh head has. In a whole model's files the names begin with
        `medusa_head.`, and the rest is passed over. Blocks that the reference shared by accident are read as equal ones.

        Raises:
            ExportError: a tensor is missing, unknown, there twice, or of another shape; fewer or more heads than `head.num_heads`.
        """
        prefixed = {name: tensor for name, tensor in tensors.items() if re.match(r"medusa_heads?\.", name)}
        tensors = rename_tensors(prefixed or tensors, served_name)
        found = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
        if found != self.block.num_heads:
            raise ExportError(f"the draft has {found} Medusa heads, the recipe asks for {self.block.num_heads}; set head.num_heads={found}")
        blocks, lm_heads = self._served_blocks(), self._served_lm_heads()
        own = blocks | lm_heads
        if self.block.shared_lm_head:
            tensors = rename_tensors(tensors, lambda name: name.replace("lm_heads.0.", "lm_head."))
        if not self.vocab.full:
            ids, size = self.vocab.ids, self.vocab.size
            tensors = {n: t[ids] if n in lm_heads and len(t) == size else t for n, t in tensors.items()}
        if not any(name.startswith("lm_head") for name in tensors):  # legacy: the target's LM head, which every fresh head has
            own = blocks
        elif not self.block.train_lm_head:
            theirs, borrowed = tensors.pop("lm_head.weight", None), own.pop("lm_head.weight")
            if theirs is not None and self.block.draft_vocab_size is not None and self.vocab.full:
                self.lm_head = theirs.to(borrowed)  # the served one: the target's rows of the draft vocabulary, and their mean elsewhere
            elif theirs is None or not same_values(theirs, borrowed):
                raise ExportError("the draft has LM heads of its own, and head.train_lm_head=false keeps the target's; set it to true")
        copy_tensors(own, tensors)

    @staticmethod
    def served_shapes(config: dict) -> dict[str, tuple[int, ...]]:
        """Every tensor that must exist for a config.json, with its shape: vLLM itself does not notice a missing LM head."""
        H, V, heads = config["hidden_size"], config["vocab_size"], range(config["num_heads"])
        shapes: dict[str, tuple[int, ...]] = {}
        for head in heads:
            for layer in range(config["num_hidden_layers"]):
                shapes |= {f"blocks.{head}.layers.{layer}.weight": (H, H), f"blocks.{head}.layers.{layer}.bias": (H,)}
        if config["original_lm_head"]:
            return shapes | {"lm_head.weight": (V, H)}
        return shapes | {f"lm_heads.{head}.weight": (V, H) for head in heads}

    @staticmethod
    def speculative_config() -> dict:
        """What the user passes to vLLM besides `model` and `num_speculative_tokens`."""
        return {"method": "medusa"}


def served_name(name: str) -> str:
    """A published tensor name → vLLM's; others stay as they are.

    >>> [served_name(n) for n in ("0.1.linear.bias", "medusa_head.2.1.weight", "lm_heads.0.weight")]
    ['blocks.0.layers.1.bias', 'lm_heads.2.weight', 'lm_heads.0.weight']
    """
    name = re.sub(r"^medusa_heads?\.", "", name)
    name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
    return re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)
