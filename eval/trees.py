"""Draft trees: chains, static trees, Medusa's calibrated tree, EAGLE-2's dynamic tree.

One convention for all: node 0 is the **root**, the last committed token (the target has not processed it yet), so a round
verifies `n` tokens in one target forward, of which `n - 1` are drafts. Every count of nodes below includes the root:
EAGLE-2's 60 are 59 drafts, Medusa's published 63 nodes are `total_nodes=64` here. A depth counts edges from the root:
a chain of k drafts has depth k.

    root "the" ─┬─ "cat" ── "sat"         tokens   the cat dog sat
                └─ "dog"                  parents   -1   0   0   1
                                          depths     0   1   1   2      position of a node = tokens before the root + depth

Shapes: n nodes, V target vocabulary, K Medusa heads, R ranks calibrated per head, F nodes in one frontier.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from recipes.errors import RecipeError

# expand(parents [F], tokens [F]) -> log-probabilities [F, V] of the token after each frontier node, over the *target* vocabulary
# (-inf outside a reduced draft vocabulary). parents[f] is the row of the node's parent in the previous call's frontier, so that a
# head gathers its hidden states, masks and draft KV with it. The first call is the root alone with parent -1, the last position of
# the committed prefix. One call is one draft forward pass.
Expand = Callable[[Tensor, Tensor], Tensor]
# choose(log_probs [V], count) -> token ids of the children of one node, best or first drawn first; fewer where q has run out.
Choose = Callable[[Tensor, int], list[int]]


@dataclass(frozen=True, eq=False)
class Tree:
    """Drafted tokens as a tree, parents before children. Build it with `build_tree`, which checks it and fills the rest.

    Siblings keep the order in which they were drafted: verification without replacement depends on that order.
    """

    tokens: Tensor  # [n] long; tokens[0] is the last committed token
    parents: Tensor  # [n] long; parents[0] = -1
    depths: Tensor  # [n] long; depths[0] = 0
    mask: Tensor  # [n, n] bool; mask[i, j]: node i attends to node j (itself and its ancestors); the prefix is visible to all

    @property
    def num_nodes(self) -> int:
        return self.tokens.numel()

    @property
    def num_drafts(self) -> int:
        return self.num_nodes - 1

    @cached_property
    def children(self) -> list[list[int]]:
        """Node indices of each node's children, in draft order."""
        lists: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                lists[parent].append(node)
        return lists

    @property
    def depth(self) -> int:
        return int(self.depths.max())

    def to(self, device: torch.device | str) -> Tree:
        return Tree(self.tokens.to(device), self.parents.to(device), self.depths.to(device), self.mask.to(device))

    def positions(self, num_before_root: int) -> Tensor:
        """RoPE positions [n], given how many tokens stand before the root (the length of the KV cache)."""
        return self.depths + num_before_root


def build_tree(tokens: Tensor | Sequence[int], parents: Sequence[int], device: torch.device | str | None = None) -> Tree:
    """Check `parents` (node 0 is the root, -1; every other parent stands before its child) and derive depths and mask."""
    token_ids = torch.as_tensor(tokens, dtype=torch.long, device=device)
    n = len(parents)
    if n == 0 or token_ids.shape != (n,):
        raise RecipeError(f"a tree of {tuple(token_ids.shape)} tokens and {n} parents; give one token and one parent a node, root first.")
    if parents[0] != -1:
        raise RecipeError(f"tree node 0 must be the root with parent -1, but its parent is {parents[0]}.")
    depths = [0] * n
    mask = torch.eye(n, dtype=torch.bool)
    for node in range(1, n):
        parent = parents[node]
        if not 0 <= parent < node:
            raise RecipeError(f"tree node {node} is an orphan: its parent {parent} is none of the nodes 0..{node - 1} before it.")
        depths[node] = depths[parent] + 1
        mask[node] |= mask[parent]
    device = token_ids.device
    return Tree(token_ids, torch.tensor(list(parents), device=device), torch.tensor(depths, device=device), mask.to(device))


def chain_tree(root_token: int, drafts: Tensor | Sequence[int], device: torch.device | str | None = None) -> Tree:
    """A chain: each drafted token hangs from the one before. No drafts at all is a round without speculation (an n-gram miss)."""
    draft_ids = torch.as_tensor(drafts, dtype=torch.long, device=device)
    return build_tree(prepend(root_token, draft_ids), range(-1, draft_ids.numel()))


def prepend(root_token: int, drafts: Tensor) -> Tensor:
    """[root, *drafts] as token ids [n]."""
    return torch.cat([torch.tensor([root_token], device=drafts.device), drafts.long()])


def check_fits(depth: int, width: int, *, head_depth: int | None = None, vocab_size: int | None = None) -> None:
    """Raise RecipeError for a tree (or a chain: width 1) that this head cannot draft, before anything runs.

    Args:
        head_depth: how many tokens ahead the head can draft; None for a recurrent head, which has no limit.
        vocab_size: tokens the head can name (its draft vocabulary where that is reduced).
    """
    if depth < 1 or width < 1:
        raise RecipeError(
            f"a draft of depth {depth} and {width} children a node drafts nothing; set eval.k and eval.tree_top_k to 1 or more."
        )
    if head_depth is not None and depth > head_depth:
        raise RecipeError(
            f"a tree of depth {depth} is deeper than the head, which drafts {head_depth} tokens ahead; "
            f"lower eval.tree_depth or eval.k to {head_depth}, or train a deeper head."
        )
    if vocab_size is not None and width > vocab_size:
        raise RecipeError(
            f"a tree with {width} children a node is wider than the head's vocabulary of {vocab_size} tokens; lower eval.tree_top_k."
        )


# --- Static trees -------------------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """A static tree without its tokens, level by level: node i hangs from parents[i] as its ranks[i]-th child (from 0)."""

    parents: list[int]
    ranks: list[int]
    depths: list[int]

    @property
    def depth(self) -> int:
        return self.depths[-1]

    @property
    def width(self) -> int:
        """Most children that any node must be able to have."""
        return max(self.ranks) + 1


def shape_from_paths(paths: Sequence[Sequence[int]], *, head_depth: int | None = None, vocab_size: int | None = None) -> Shape:
    """A static tree from index paths (METHODS §1.5; EAGLE-1): (0, 2, 1) is best child → third child → second child.

    Each path is one node and each prefix of it must be given too; the root, (), is implied.

    >>> shape_from_paths([(0,), (1,), (0, 0)])
    Shape(parents=[-1, 0, 0, 1], ranks=[0, 0, 1, 0], depths=[0, 1, 1, 2])
    """
    nodes = sorted({tuple(path) for path in paths if len(path)}, key=lambda path: (len(path), path))
    if not nodes:
        raise RecipeError("a static tree without a single path drafts nothing; give at least [(0,)].")
    index = {(): 0} | {path: i for i, path in enumerate(nodes, start=1)}
    for path in nodes:
        if min(path) < 0:
            raise RecipeError(f"tree path {path} has a negative rank; ranks count from 0, the best child.")
        if path[:-1] not in index:
            raise RecipeError(f"tree path {path} is an orphan: its parent {path[:-1]} is not among the paths; add it.")
        if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in index:
            # A worse child in place of a better one is never wanted, and among children sampled without replacement it would be wrong.
            raise RecipeError(f"tree path {path} has no better sibling {(*path[:-1], path[-1] - 1)}; add it or lower the rank.")
    shape = Shape([-1] + [index[p[:-1]] for p in nodes], [0] + [p[-1] for p in nodes], [0] + [len(p) for p in nodes])
    check_fits(shape.depth, shape.width, head_depth=head_depth, vocab_size=vocab_size)
    return shape


def fill_shape(shape: Shape, root_token: int, top_tokens: Tensor) -> Tree:
    """Medusa's tree of tokens: head d's rank-r guess stands at every node of depth d+1 and rank r.

    Args:
        top_tokens: [K, R] token ids, best first; head 0 drafts the token right after the root.
    """
    if shape.depth > top_tokens.shape[0] or shape.width > top_tokens.shape[1]:
        check_fits(shape.depth, shape.width, head_depth=top_tokens.shape[0], vocab_size=top_tokens.shape[1])
    depths = torch.tensor(shape.depths[1:], device=top_tokens.device) - 1
    drafts = top_tokens[depths, torch.tensor(shape.ranks[1:], device=top_tokens.device)]
    return build_tree(prepend(root_token, drafts), shape.parents)


def top_children(log_probs: Tensor, count: int) -> list[int]:
    """The `count` most probable tokens of log_probs [V]: a deterministic choice, so the one-hot rule verifies it."""
    values, tokens = log_probs.topk(min(count, log_probs.numel()))
    return tokens[values > -torch.inf].tolist()


def grow_shape(shape: Shape, root_token: int, expand: Expand, choose: Choose = top_children) -> tuple[Tree, Tensor]:
    """Fill a static tree level by level, each node's children chosen from the head's output at that node (EAGLE-1, SpecInfer).

    Args:
        choose: `top_children`, or `verify.sample_children` bound to its sampling and dice: then what `expand` returns must be the
            distribution to be sampled from, temperature, top-k and top-p applied.

    Returns:
        The tree (smaller than `shape` where q has fewer tokens than a node has children) and q [m, V]: row i is the head's
        distribution after node i, filled for each node with children; m is the last such node + 1.
    """
    # How many children a node gets is fixed by the shape before any is drawn, as losslessness demands.
    wanted: dict[int, list[int]] = {}  # node of the shape -> its children, by rank
    for node in range(1, len(shape.parents)):
        wanted.setdefault(shape.parents[node], []).append(node)

    tokens, parents = [root_token], [-1]
    frontier = [(0, 0, -1)]  # (index in the tree, index in the shape, row of its parent in the previous call)
    rows: dict[int, Tensor] = {}
    while frontier:
        log_probs = expand(torch.tensor([row for *_, row in frontier]), torch.tensor([tokens[node] for node, *_ in frontier]))
        next_frontier = []
        for row, (node, place, _) in enumerate(frontier):
            rows[node] = log_probs[row].exp()
            chosen = choose(log_probs[row], len(wanted[place]))
            for child, token in zip(wanted[place], chosen, strict=False):  # fewer are chosen where q has run out
                tokens.append(token)
                parents.append(node)
                if child in wanted:
                    next_frontier.append((len(tokens) - 1, child, row))
        frontier = next_frontier
    q = torch.zeros(max(rows) + 1, rows[0].numel(), dtype=rows[0].dtype, device=rows[0].device)
    for node, row in rows.items():
        q[node] = row
    return build_tree(tokens, parents, device=q.device), q


# --- Medusa's tree from calibration -------------------------------------------------------------------------------------------


def rank_hits(top_tokens: Tensor, labels: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """How often each head's rank-r guess was the true token, as counts, so that batches add up (METHODS §1.5).

    Args:
        top_tokens: [N, K, R] the R best guesses of each head at each of N positions, best first.
        labels: [N, K] the true token that head i should have guessed there.
        valid: [N, K] bool, False where a label does not exist (the end of a row) or is not supervised.

    Returns:
        hits [K, R] and counts [K]: positions that counted for each head. METHODS warns of dividing by a fixed sample count.
    """
    valid = torch.ones_like(labels, dtype=torch.bool) if valid is None else valid.bool()
    hits = (top_tokens == labels[..., None]) & valid[..., None]  # [N, K, R]
    return hits.sum(0), valid.sum(0)


def rank_accuracies(hits: Tensor, counts: Tensor) -> Tensor:
    """a[i, r] [K, R]: share of positions at which head i's rank-r guess was right, by the count that was really seen."""
    if (counts == 0).any():
        empty = (counts == 0).nonzero().flatten().tolist()
        raise RecipeError(f"no calibration position for Medusa heads {empty}; calibrate on more or longer rows.")
    return hits.double() / counts.double()[:, None]


def node_values(paths: Sequence[Sequence[int]], accuracies: Tensor) -> list[float]:
    """Probability that each node is accepted, Π_d a[d, path_d]: heads are taken as independent given the prefix (Medusa's model)."""
    table = accuracies.tolist()
    values = []
    for path in paths:
        value = 1.0
        for depth, rank in enumerate(path):
            value *= table[depth][rank]
        values.append(value)
    return values


def expected_accepted(paths: Sequence[Sequence[int]], accuracies: Tensor) -> float:
    """E[accepted drafts a round] = Σ node values (the root's own token comes on top)."""
    return sum(node_values(paths, accuracies))


def medusa_paths(
    accuracies: Tensor, total_nodes: int = 64, *, max_depth: int | None = None, max_children: int = 10
) -> list[tuple[int, ...]]:
    """Medusa's greedy tree (METHODS §1.5): start with (0,), then keep adding the best next sibling or first child.

    Optimal for the sum of node values where a[i, ·] does not increase with the rank, as calibrated ranks do up to noise.

    Args:
        accuracies: a [K, R] of `rank_accuracies`.
        total_nodes: nodes with the root; 64 gives the published 63 drafts. Fewer come back where the limits allow no more.
        max_depth: at most K, the default.

    Returns:
        Index paths, in the order in which they were added (best first).
    """
    num_heads, num_ranks = accuracies.shape
    max_depth = num_heads if max_depth is None else max_depth
    check_fits(max_depth, min(max_children, total_nodes - 1), head_depth=num_heads)
    table = accuracies.tolist()
    max_children = min(max_children, num_ranks)
    # Each node enters the heap once: as the next sibling of the one before it, or as the first child of its parent.
    heap: list[tuple[float, tuple[int, ...], float]] = [(-table[0][0], (0,), 1.0)]  # (-value, path, value of the parent)
    paths: list[tuple[int, ...]] = []
    while heap and len(paths) < total_nodes - 1:
        negative, path, parent_value = heapq.heappop(heap)
        paths.append(path)
        depth, rank = len(path), path[-1]
        if rank + 1 < max_children:
            heapq.heappush(heap, (-parent_value * table[depth - 1][rank + 1], (*path[:-1], rank + 1), parent_value))
        if depth < max_depth:
            heapq.heappush(heap, (negative * table[depth][0], (*path, 0), -negative))
    return paths


# --- EAGLE-2's dynamic tree ---------------------------------------------------------------------------------------------------


def eagle2_pool_size(top_k: int, depth: int) -> int:
    """Candidates from which the tree is picked: k + (depth - 1)·k². 510 for depth 6 and 710 for depth 8 with k = 10.

    `depth` is the paper's (and eval.tree_depth); the reference code's `depth` argument is one less (METHODS §3).
    """
    return top_k + (depth - 1) * top_k**2


def eagle2_tree(
    expand: Expand,
    root_token: int,
    *,
    total_nodes: int = 60,
    top_k: int = 10,
    depth: int = 6,
    head_depth: int | None = None,
    vocab_size: int | None = None,
) -> Tree:
    """EAGLE-2's dynamic draft tree (arXiv 2406.16858 §4; METHODS §3): expand by joint probability, then rerank.

    1. Expand the root into its top-k children. 2. `depth - 1` times: expand the k nodes of the frontier in one pass, k children each;
    the k of the k² with the best cumulative log-probability are the next frontier. 3. Rerank: of all candidates, the best
    `total_nodes - 1` by cumulative log-probability are verified.

    Scores are the head's raw log-softmax, never at a temperature: the tree is a deterministic function of the prefix, so it is verified
    with the one-hot rule at any temperature (METHODS §10.3). Pruning children that had been *sampled* would not be lossless.
    """
    check_fits(depth, top_k, head_depth=head_depth, vocab_size=vocab_size)
    if total_nodes < 2:
        raise RecipeError(f"eval.tree_nodes={total_nodes} leaves no room for a draft beside the root; set it to 2 or more.")

    # The pool of candidates, one entry an expansion. Candidates are numbered through from 1, and 0 is the root.
    scores: list[Tensor] = []
    tokens: list[Tensor] = []
    parents: list[Tensor] = []
    # The frontier [F]: rows of the parents in the previous call, tokens, cumulative scores, candidate numbers.
    rows, frontier_tokens, frontier_scores, frontier_ids = torch.tensor([-1]), torch.tensor([root_token]), torch.zeros(1), torch.tensor([0])
    first_id = 1
    for _ in range(depth):
        log_probs = expand(rows, frontier_tokens)  # [F, V]
        if log_probs.shape[-1] < top_k:
            check_fits(depth, top_k, vocab_size=log_probs.shape[-1])
        child_scores, child_tokens = log_probs.topk(top_k)  # [F, k]
        # log_softmax never exceeds 0; the clamp keeps a callback's rounding from ranking a child above its parent.
        child_scores = (frontier_scores.to(child_scores)[:, None] + child_scores.clamp(max=0)).flatten()
        scores.append(child_scores)
        tokens.append(child_tokens.flatten())
        parents.append(frontier_ids.to(child_tokens.device).repeat_interleave(top_k))
        best = child_scores.topk(top_k).indices
        rows, frontier_tokens, frontier_scores, frontier_ids = best // top_k, tokens[-1][best], child_scores[best], first_id + best
        first_id += child_scores.numel()

    pool = torch.cat(scores)
    # A stable sort: on a tie (a child drafted with probability 1) the earlier candidate, the parent, wins: the selection stays connected.
    best = pool.sort(descending=True, stable=True).indices[: total_nodes - 1]
    kept = best[pool[best] > -torch.inf].sort().values  # -inf: tokens outside a reduced vocabulary; sorted: parents before children
    node_of = {0: 0} | {old + 1: new for new, old in enumerate(kept.tolist(), start=1)}
    kept_parents = [node_of[parent] for parent in torch.cat(parents)[kept].tolist()]
    return build_tree(prepend(root_token, torch.cat(tokens)[kept]), [-1, *kept_parents])
