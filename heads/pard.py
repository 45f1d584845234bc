"""PARD: a draft model that drafts all its tokens in one pass, behind mask tokens (arXiv 2504.18583; METHODS §7).

Timeline at index t, where the target has processed x[0..t] and chosen x[t+1] (MASK: a token of the vocabulary that no text
holds, the same in every slot, so that more slots may be drafted than were trained):

    slot     token eaten   position    sees                         predicts
    0        x[t+1]        t + 1       x[0..t+1]                    x[t+2]
    i >= 1   MASK          t + 1 + i   x[0..t+1], slots 1..i        x[t+2+i]

PARD-2 (arXiv 2605.08632; METHODS §7.2) adds the target's last known states to the input, f_t = scale * W [last_hidden; layers
from high to low]_t: x[t+1] and the slots behind it eat f_t, x[0] none. Trained on rows with and without, one set of weights
drafts both ways; a server drafts without, the reference decoder either way (`with_target_states`).

Shapes: N packed tokens, R_i anchors of slot i, n entries of one request, H the draft's hidden size, k slots drafted.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DynamicCache

from heads import LAST_HIDDEN
from heads.autoregressive import Choose
from heads.draft_model import DraftModelHead, entry_positions
from heads.exported import copy_tensors, read_config
from heads.layers import Linear
from heads.packed import Packed
from heads.peagle import check_mask_token
from heads.target import TargetParts
from heads.vocab import DraftVocab
from recipes.errors import ExportError
from recipes.head_blocks import PardHead as PardBlock

PROJECTION_FILES = ("pard2/target_proj.safetensors", "warp_model.bin")  # ours, beside what a server loads; the published one


class PardHead(DraftModelHead):
    """The draft model, and what it needs besides a causal LM: the mask token's embedding, and PARD-2's projection."""

    block: PardBlock
    reads_target = False  # PARD-2: whether `propose` adds the target's states

    def __init__(self, block: PardBlock, target: TargetParts, vocab: DraftVocab, architecture: dict[str, Any] | None = None):
        check_mask_token(block.mask_token_id, vocab.size)
        # With a frozen embedding the mask token's row still learns, as a parameter of its own that is written into its row.
        self.mask_embedding: nn.Parameter | None = None
        super().__init__(block, target, vocab, architecture)
        if not block.train_embeddings:
            self.mask_embedding = nn.Parameter(self.embedding[block.mask_token_id].clone())
        self.target_layers: list[int] | None = None  # as they are concatenated
        if block.aux_layers is not None:
            self.target_layers = [LAST_HIDDEN, *reversed(block.feature_layers(target.num_layers))]
            self.target_proj = Linear(len(self.target_layers) * target.hidden_size, self.config.hidden_size, bias=False)
            nn.init.normal_(self.target_proj.weight, std=self.config.initializer_range)
        self.num_target_layers = target.num_layers

    @torch.no_grad()
    def write_mask_row(self) -> None:
        """Put the mask token's embedding into its row of a frozen embedding (and of a tied LM head): what is drafted with and exported."""
        if self.mask_embedding is not None:
            self.embedding[self.block.mask_token_id] = self.mask_embedding

    def mask_slots(self, count: int) -> Tensor:
        """[count, H] what the slots eat in place of a token."""
        if self.mask_embedding is not None:
            return self.mask_embedding.expand(count, -1)
        return self.embed(torch.full((count,), self.block.mask_token_id, device=self.embedding.device))

    def target_states(self, hidden: dict[int, Tensor]) -> Tensor:
        """PARD-2: the target's states {layer: [n, H]} of positions t → [n, H] what x[t+1] eats of them."""
        assert self.target_layers is not None
        parts = [hidden[layer].to(self.target_proj.weight.dtype) for layer in self.target_layers]
        return self.target_proj(torch.cat(parts, -1)) * self.block.feature_scale

    def slot_states(self, ids: Tensor, positions: Tensor, document: Tensor, anchors: list[Tensor], added: Tensor | None) -> list[Tensor]:
        """States of every slot of all anchors in packed documents.

        Args:
            ids, positions, document: [N]. anchors: int64 [R_i] for slot i, ascending indices of the real token x[t+1] of each
                anchor, each a subset of the one before.
            added: [N, H] what the target's states add to each real token (and to the slots behind it), or None.

        Returns:
            [R_i, H], one a slot.
        """
        chains = anchors[1:]
        entries = torch.cat([self.embed(ids), self.mask_slots(sum(map(len, chains)))])
        if added is not None:
            entries = entries + torch.cat([added, *(added[rows] for rows in chains)])
        places = torch.cat([positions, *(positions[rows] + slot for slot, rows in enumerate(chains, start=1))])
        real, *slots = self.states(entries, places, packed=Packed(document, chains)).split([len(ids), *map(len, chains)])
        return [real[anchors[0]], *slots]

    @torch.no_grad()
    def propose(self, hidden: dict[int, Tensor], tokens: Tensor, positions: Tensor, cache: DynamicCache, k: int, choose: Choose) -> Tensor:
        """As in DraftModelHead, in one pass: the committed entries, and k - 1 mask slots behind the last of them."""
        places = entry_positions(tokens, positions)
        entries = torch.cat([self.embed(tokens), self.mask_slots(k - 1).to(self.embedding.dtype)])
        if self.reads_target:
            added = self.target_states(hidden)  # [n, H]; x[0] has no state before it
            first = added.new_zeros(len(tokens) - len(added), added.shape[1])
            entries = entries + torch.cat([first, added, added[-1:].expand(k - 1, -1)])
        slots = torch.arange(1, k, device=places.device)
        states = self.states(entries, torch.cat([places, places[-1:] + slots]), cache=cache)
        cache.crop(1 - k)
        return choose(self.logits(states[len(tokens) - 1 :]))

    def with_target_states(self) -> PardHead:
        """PARD-2: the same draft, drafting with the target's states."""
        assert self.target_layers is not None
        twin = copy.copy(self)
        twin.reads_target = True
        return twin

    # ---- export: what vLLM reads (VLLM_FORMATS §4), PARD-2's projection beside it (METHODS §14) -------------------

    def served_config(self) -> dict[str, Any]:
        """The causal LM's config.json, and the id that fills the slots."""
        config = super().served_config() | {"pard_token": self.block.mask_token_id, "spd_type": "pard"}
        if self.target_layers is None:
            return config
        from_the_end = [layer if layer == LAST_HIDDEN else layer - self.num_target_layers - 1 for layer in self.target_layers]
        return config | {
            "spd_type": "pard2",
            "pard2": True,
            "pard2_scale": self.block.feature_scale,
            "pard2_target_dim": self.target_hidden_size,
            "pard2_target_layers": from_the_end,  # of transformers' hidden_states, whose last entry is post-norm
            "pard2_proj_bias": False,
        }

    def served_tensors(self) -> dict[str, Tensor]:
        """As in DraftModelHead, the mask token's row up to date."""
        self.write_mask_row()
        return super().served_tensors()

    @torch.no_grad()
    def load_served(self, tensors: dict[str, Tensor]) -> None:
        """As in DraftModelHead."""
        super().load_served(tensors)
        if self.mask_embedding is not None:
            self.mask_embedding.copy_(self.embedding[self.block.mask_token_id])

    def save_extra(self, folder: Path) -> None:
        """The tokenizer, and PARD-2's projection where no server looks for weights."""
        super().save_extra(folder)
        if self.target_layers is not None:
            file = folder / PROJECTION_FILES[0]
            file.parent.mkdir()
            save_file({"target_proj.weight": self.target_proj.weight.detach().cpu().contiguous()}, file)

    @torch.no_grad()
    def load_extra(self, folder: Path) -> None:
        """Check the tokenizer; take over the projection of a PARD-2 draft (another draft leaves ours as it is).

        Raises:
            TargetError: another tokenizer. ExportError: the projection is missing or of another shape.
        """
        super().load_extra(folder)
        if self.target_layers is None or not read_config(folder).get("pard2"):
            return
        file = next((path for name in PROJECTION_FILES if (path := folder / name).is_file()), None)
        if file is None:
            raise ExportError(f"{folder} is a PARD-2 draft (config.json: pard2) without its projection, {' or '.join(PROJECTION_FILES)}")
        tensors = load_file(file) if file.suffix == ".safetensors" else torch.load(file, map_location="cpu", weights_only=True)
        copy_tensors({"target_proj.weight": self.target_proj.weight}, tensors)

    @staticmethod
    def speculative_config() -> dict:
        """What the user passes to vLLM besides `model` and `num_speculative_tokens`."""
        return {"method": "draft_model", "parallel_drafting": True}
