"""Who drafts: heads (chains, static, Medusa's and EAGLE-2's trees), n-gram lookup, an independent model, nobody.

All follow `eval.decode.Drafter`. A new kind of draft (in parallel, from several sources) is one more class with `depth`, `layers`,
`sampled`, `start` and `draft`; nothing else in the decoder knows about it.

Shapes: m positions processed since the last draft, k drafts, V target vocabulary, D draft vocabulary, F frontier nodes, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from eval.decode import Request, Settings, no_draft
from eval.target_cache import check_rollback
from eval.trees import Choose, Shape, chain_tree, check_fits, eagle2_tree, fill_shape, grow_shape, top_children
from eval.verify import Dice, Draft, sample_children, scatter_to_target_vocab
from heads import LAST_HIDDEN
from recipes.errors import EngineError, RecipeError


class NoDrafter:
    """Plain decoding, the baseline: each round yields the target's next token."""

    depth, layers, sampled = 0, list[int](), False

    def start(self) -> None:
        return None

    def draft(self, request: Request, settings: Settings) -> Draft:
        return no_draft(request)


class NgramDrafter:
    """Prompt lookup, as vLLM's `ngram`: what followed an earlier occurrence of the last tokens (METHODS §10.3: deterministic).

    The longest match of `min_n` to `max_n` tokens wins, of several the earliest; what follows it is drafted, at most k tokens.
    """

    layers, sampled = list[int](), False

    def __init__(self, k: int, min_n: int, max_n: int):
        check_fits(k, 1)
        if not 1 <= min_n <= max_n:
            raise RecipeError(f"eval.ngram_min={min_n} and eval.ngram_max={max_n}: need 1 <= ngram_min <= ngram_max.")
        self.depth, self.min_n, self.max_n = k, min_n, max_n

    def start(self) -> None:
        return None

    def draft(self, request: Request, settings: Settings) -> Draft:
        tokens = request.tokens
        return Draft(chain_tree(tokens[-1], lookup(tokens, self.depth, self.min_n, self.max_n)), "deterministic")


def lookup(tokens: Sequence[int], k: int, min_n: int, max_n: int) -> list[int]:
    """What follows the earliest occurrence of the longest suffix of `tokens` that occurs before; [] for a miss.

    >>> lookup([7, 1, 2, 3, 9, 1, 2, 4, 1, 2], k=2, min_n=1, max_n=3)
    [3, 9]
    """
    tokens = list(tokens)
    for n in range(min(max_n, len(tokens) - 1), min_n - 1, -1):
        suffix = tokens[-n:]
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == suffix:
                return tokens[start + n : start + n + k]
    return []


# --- Heads --------------------------------------------------------------------------------------------------------------------


class HeadDrafter:
    """A chain of k tokens through the head's own `propose`: any method.

    Args:
        head: of heads/: `propose`, `new_cache`, `vocab` and `block` are what is asked of it.
        sampled: draw the drafts at the request's temperature, top-k and top-p, instead of taking the most probable (vLLM's
            `draft_sample_method: probabilistic`).

    Raises:
        EngineError: the head was made for a target of another width or vocabulary.
        RecipeError: k = 0, or deeper than the head drafts.
    """

    def __init__(self, head: Any, model: PreTrainedModel, k: int, *, sampled: bool = False):
        config = model.config.get_text_config()
        check_fits(k, 1, head_depth=head.block.max_depth)
        if head.vocab.size != config.vocab_size:
            raise EngineError(
                f"the head drafts for a target of {head.vocab.size} tokens, this one has {config.vocab_size}; "
                "use the target it was trained on."
            )
        self.head, self.vocab, self.depth, self.sampled = head, head.vocab, k, sampled
        self.ids = head.vocab.ids.to(model.device)
        self.layers = [*head.block.feature_layers(config.num_hidden_layers), LAST_HIDDEN]
        self._try(config.hidden_size, model.device, model.dtype)

    def _try(self, width: int, device: torch.device, dtype: torch.dtype) -> None:
        """One draft from states of the target's shape: a head of another width fails here, and not in the middle of a measurement."""
        one = torch.zeros(1, dtype=torch.long, device=device)
        hidden = {layer: torch.zeros(1, width, device=device, dtype=dtype) for layer in self.layers}
        try:
            self.head.propose(hidden, one, one, self.start(), self.depth, lambda logits: logits.argmax(-1))
        except RuntimeError as error:
            raise EngineError(
                f"{type(self.head).__name__} cannot draft from this target's states (width {width}, layers {self.layers}): "
                f"{str(error).splitlines()[0]}; use the target it was trained on."
            ) from None

    def start(self) -> Any:
        return self.head.new_cache()

    def draft(self, request: Request, settings: Settings) -> Draft:
        chooser = Chooser(settings, request.dice, self.sampled)
        tree = chain_tree(request.tokens[-1], self.propose(request, chooser).cpu())
        if not chooser.draws:
            return Draft(tree, "deterministic")
        return Draft(tree, "iid", self.over_target_vocab(torch.cat(chooser.chosen_from)))

    def propose(self, request: Request, choose: Any) -> Tensor:
        """[k] target ids, after the head's cache has been extended with the committed entries (feature of t, token t + 1).

        A draft that is a whole model eats token 0 as well, which stands before the first round's entries (B34).
        """
        tokens, positions = committed(request)
        if getattr(self.head, "eats_first_token", False) and int(positions[0]) == 0:
            tokens = torch.cat([tokens.new_tensor(request.tokens[:1]), tokens])
        return self.head.propose(request.hidden, tokens, positions, request.state, self.depth, choose)

    def over_target_vocab(self, q: Tensor) -> Tensor:
        """q [n, D] → [n, V]."""
        return q if self.vocab.full else scatter_to_target_vocab(q, self.vocab.d2t, self.vocab.size)


def committed(request: Request) -> tuple[Tensor, Tensor]:
    """Tokens x[t+1] and positions t of the entries since the last draft, [m] each; the newest token stands behind the last position."""
    states = next(iter(request.hidden.values()))
    m, end = states.shape[0], len(request.tokens)
    return torch.tensor(request.tokens[end - m :], device=states.device), torch.arange(end - 1 - m, end - 1, device=states.device)


class Chooser:
    """What `propose` calls with draft logits [n, D] to get draft ids [n]. It remembers what it chose from.

    At temperature 0, or for deterministic drafts, the argmax; else a draw from the processed distribution, which is the q that
    verification needs.
    """

    def __init__(self, settings: Settings, dice: Dice, sampled: bool):
        self.settings, self.dice = settings, dice
        self.draws = sampled and settings.temperature > 0
        self.chosen_from: list[Tensor] = []  # [n, D] each, on the CPU: q where ids are drawn, else raw logits

    def __call__(self, logits: Tensor) -> Tensor:
        if not self.draws:
            self.chosen_from.append(logits)
            return logits.argmax(-1)
        q = self.settings.probabilities(logits).cpu()
        self.chosen_from.append(q)
        return torch.tensor([self.dice.draw(row) for row in q], device=logits.device)


class MedusaDrafter(HeadDrafter):
    """A static tree filled with the best guesses of every depth, whatever was guessed before (METHODS §1.5).

    Made for heads that draft all depths at once (Medusa); `shape` usually comes from `eval.trees.medusa_paths`. The rank-r guess of
    depth d stands at every node of that depth and rank, so the tree is a function of the prefix: deterministic.
    """

    def __init__(self, head: Any, model: PreTrainedModel, shape: Shape):
        super().__init__(head, model, shape.depth)
        check_fits(shape.depth, shape.width, vocab_size=len(head.vocab.ids))
        self.shape = shape

    def draft(self, request: Request, settings: Settings) -> Draft:
        chooser = Chooser(settings, request.dice, sampled=False)
        self.propose(request, chooser)
        best = torch.cat(chooser.chosen_from).topk(self.shape.width).indices  # [k, R]
        return Draft(fill_shape(self.shape, request.tokens[-1], self.ids[best].cpu()), "deterministic")


def grows_trees(head: Any) -> bool:
    """Whether a head runs entry by entry from a fed-back state, as deep as it is asked to."""
    return hasattr(head, "advance") and head.block.max_depth is None


class GrownTreeDrafter(HeadDrafter):
    """Trees grown level by level with the head's output at each node: heads that draft token by token (the EAGLE family).

    Such a head offers `fuse`, `advance`, `feedback` and `logits` (heads/autoregressive.py).
    """

    def __init__(self, head: Any, model: PreTrainedModel, depth: int, width: int, *, sampled: bool = False):
        super().__init__(head, model, depth, sampled=sampled)
        if not grows_trees(head):
            raise EngineError(
                f"a tree cannot be grown node by node through {type(head).__name__}: it drafts all depths at once, has a module for each, "
                "or is a model of its own (eagle1, eagle3, mtp with head.shared and mtp_native can); use eval.tree=medusa or chain."
            )
        check_fits(depth, width, vocab_size=len(head.vocab.ids))

    def expander(self, request: Request, settings: Settings) -> Expander:
        return Expander(self, request, settings)


class Expander:
    """The `Expand` of `eval.trees` for one request: one draft forward a call, the nodes' entries kept in the draft cache.

    `close` drops them again: the next round brings true features.
    """

    def __init__(self, drafter: GrownTreeDrafter, request: Request, settings: Settings):
        self.drafter, self.head, self.cache, self.settings = drafter, drafter.head, request.state, settings
        tokens, positions = committed(request)
        feature = self.head.fuse(request.hidden)
        self.states = self.head.advance(feature, tokens, positions, self.cache)[-1:]
        self.committed, self.position = self.cache.length, positions[-1:]
        self.ancestors: Tensor | None = None  # [F, nodes so far]: which of the drafted entries each frontier node sees

    def __call__(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities [F, V] after each frontier node: raw, or processed (to be sampled from) where drafts are drawn."""
        if int(parents[0]) >= 0:  # not the root, whose state is there already
            device = self.states.device
            parents, tokens = parents.to(device), tokens.to(device)
            own = torch.eye(len(parents), dtype=torch.bool, device=device)
            # A child of the root sees, of the drafted entries, only itself.
            self.ancestors = own if self.ancestors is None else torch.cat([self.ancestors[parents], own], 1)
            self.position = self.position + 1
            self.states = self.head.advance(
                self.head.feedback(self.states)[parents],
                tokens,
                self.position.expand(len(parents)),
                self.cache,
                visible=self.ancestors,
            )
        logits = self.head.logits(self.states)
        draws = self.drafter.sampled and self.settings.temperature > 0
        log_probs = self.settings.probabilities(logits).log() if draws else logits.float().log_softmax(-1)
        vocab = self.drafter.vocab
        if vocab.full:
            return log_probs
        full = log_probs.new_full((len(log_probs), vocab.size), -torch.inf)
        return full.index_copy_(-1, self.drafter.ids, log_probs)

    def close(self) -> None:
        self.cache.crop(self.committed)


class Eagle2Drafter(GrownTreeDrafter):
    """EAGLE-2's dynamic tree (METHODS §3). Always deterministic: its scores know no temperature and its nodes are picked, not drawn."""

    def __init__(self, head: Any, model: PreTrainedModel, *, nodes: int = 60, depth: int = 6, top_k: int = 10):
        super().__init__(head, model, depth, top_k)
        if nodes < 2:
            raise RecipeError(f"eval.tree_nodes={nodes} leaves no room for a draft beside the root; set it to 2 or more.")
        self.nodes, self.top_k = nodes, top_k

    @torch.no_grad()
    def draft(self, request: Request, settings: Settings) -> Draft:
        expand = self.expander(request, settings)
        tree = eagle2_tree(expand, request.tokens[-1], total_nodes=self.nodes, top_k=self.top_k, depth=self.depth)
        expand.close()
        return Draft(tree.to("cpu"), "deterministic")


class StaticTreeDrafter(GrownTreeDrafter):
    """A static tree grown through the head (EAGLE-1): each node's children its best tokens, or drawn without replacement."""

    def __init__(self, head: Any, model: PreTrainedModel, shape: Shape, *, sampled: bool = False):
        super().__init__(head, model, shape.depth, shape.width, sampled=sampled)
        self.shape = shape

    @torch.no_grad()
    def draft(self, request: Request, settings: Settings) -> Draft:
        draws = self.sampled and settings.temperature > 0
        choose: Choose = partial(sample_children, sampling="without_replacement", dice=request.dice) if draws else top_children
        expand = self.expander(request, settings)
        tree, q = grow_shape(self.shape, request.tokens[-1], expand, choose)
        expand.close()
        return Draft(tree.to("cpu"), "without_replacement", q.cpu()) if draws else Draft(tree.to("cpu"), "deterministic")


# --- An independent model -----------------------------------------------------------------------------------------------------


class ModelDrafter:
    """A chain by any causal LM with the target's vocabulary, over a KV cache of its own.

    The state is that cache and the tokens it holds. What the target rejected is cropped; what it accepted stays.
    """

    layers = list[int]()

    def __init__(self, draft_model: PreTrainedModel, model: PreTrainedModel, k: int, *, sampled: bool = False):
        check_fits(k, 1)
        check_rollback(draft_model)
        theirs, ours = (m.config.get_text_config().vocab_size for m in (draft_model, model))
        if theirs != ours:
            raise EngineError(
                f"the draft model has {theirs} tokens and the target {ours}; an independent draft needs the target's own tokenizer."
            )
        self.model, self.depth, self.sampled = draft_model, k, sampled

    def start(self) -> tuple[DynamicCache, list[int]]:
        return DynamicCache(), []  # without a config: every layer keeps all entries, so that any can be dropped

    @torch.no_grad()
    def draft(self, request: Request, settings: Settings) -> Draft:
        cache, held = request.state
        agreed = 0  # tokens of the cache that were committed; the last committed one is always processed again for its logits
        for mine, theirs in zip(held, request.tokens[:-1], strict=False):
            if mine != theirs:
                break
            agreed += 1
        if len(held) > agreed:
            cache.crop(agreed - len(held))
        chooser, drafted, feed = Chooser(settings, request.dice, self.sampled), [], request.tokens[agreed:]
        for _ in range(self.depth):
            ids = torch.tensor([feed], device=self.model.device)
            logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0]  # [1, V]
            feed = chooser(logits).tolist()
            drafted += feed
        request.state = cache, request.tokens + drafted[:-1]
        tree = chain_tree(request.tokens[-1], drafted)
        return Draft(tree, "iid", torch.cat(chooser.chosen_from)) if chooser.draws else Draft(tree, "deterministic")
