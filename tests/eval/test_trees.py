"""Trees: what they are made of, that EAGLE-2 and Medusa build the best ones, and that impossible ones are refused early."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eval.trees import (
    build_tree,
    chain_tree,
    check_fits,
    eagle2_pool_size,
    eagle2_tree,
    expected_accepted,
    fill_shape,
    grow_shape,
    medusa_paths,
    node_values,
    rank_accuracies,
    rank_hits,
    shape_from_paths,
    top_children,
)
from recipes.errors import RecipeError


def markov_head(vocab: int, seed: int):
    """A draft head whose distribution depends on the last token only, with a log of its calls."""
    table = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)).mul(2).log_softmax(-1)
    calls: list[tuple[list[int], list[int]]] = []

    def expand(parents: Tensor, tokens: Tensor) -> Tensor:
        calls.append((parents.tolist(), tokens.tolist()))
        return table[tokens]

    return table, expand, calls


# --- The tree itself -----------------------------------------------------------------------------------------------------------


def test_build_tree_worked_example():
    """The picture in the module docstring: the → cat → sat, the → dog."""
    tree = build_tree([10, 11, 12, 13], [-1, 0, 0, 1])
    assert tree.depths.tolist() == [0, 1, 1, 2]
    assert tree.positions(5).tolist() == [5, 6, 6, 7]
    assert tree.children == [[1, 2], [3], [], []]
    assert tree.mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert (tree.num_nodes, tree.num_drafts, tree.depth) == (4, 3, 2)


def test_chain_is_a_causal_tree():
    tree = chain_tree(7, [1, 2, 3])
    assert tree.tokens.tolist() == [7, 1, 2, 3]
    assert torch.equal(tree.mask, torch.ones(4, 4).tril().bool())
    assert tree.depths.tolist() == [0, 1, 2, 3]
    assert chain_tree(7, []).num_drafts == 0  # an n-gram miss
    assert torch.equal(chain_tree(7, torch.tensor([1, 2])).tokens, torch.tensor([7, 1, 2]))


@pytest.mark.parametrize(
    "tokens, parents, message",
    [
        ([], [], "one token and one parent a node"),
        ([1, 2], [-1], "one token and one parent a node"),
        ([1, 2], [0, 0], "must be the root"),
        ([1, 2, 3], [-1, 0, -1], "node 2 is an orphan"),
        ([1, 2, 3], [-1, 2, 0], "node 1 is an orphan"),
    ],
)
def test_broken_trees_are_refused(tokens, parents, message):
    with pytest.raises(RecipeError, match=message):
        build_tree(torch.tensor(tokens, dtype=torch.long), parents)


def test_trees_that_do_not_fit_the_head_are_refused():
    """Bad input of issue 3: k = 0, deeper than the head, wider than the vocabulary."""
    check_fits(3, 10, head_depth=3, vocab_size=10)
    check_fits(50, 1)
    for depth, width, message in [(0, 1, "drafts nothing"), (2, 0, "drafts nothing"), (4, 1, "deeper than the head"), (3, 11, "wider")]:
        with pytest.raises(RecipeError, match=message):
            check_fits(depth, width, head_depth=3, vocab_size=10)


# --- Static trees --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "paths, message",
    [
        ([], "without a single path"),
        ([()], "without a single path"),
        ([(0,), (1, 0)], r"\(1, 0\) is an orphan"),
        ([(0, -1), (0,)], "negative rank"),
        ([(1,)], "no better sibling"),
        ([(0,), (0, 0), (0, 0, 0)], "deeper than the head"),
        ([(0,), (1,), (2,), (3,), (4,)], "wider than"),
    ],
)
def test_broken_paths_are_refused(paths, message):
    with pytest.raises(RecipeError, match=message):
        shape_from_paths(paths, head_depth=2, vocab_size=4)


def test_medusa_tokens_stand_at_their_depth_and_rank():
    shape = shape_from_paths([(0, 1), (0,), (1,), (0, 0)])
    tree = fill_shape(shape, 9, torch.tensor([[10, 11, 12], [20, 21, 22]]))
    assert tree.tokens.tolist() == [9, 10, 11, 20, 21]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1]
    with pytest.raises(RecipeError, match="deeper than the head"):
        fill_shape(shape, 9, torch.tensor([[10, 11, 12]]))
    with pytest.raises(RecipeError, match="wider"):
        fill_shape(shape, 9, torch.tensor([[10], [20]]))


def test_static_tree_grows_from_the_heads_own_output():
    table, expand, calls = markov_head(6, seed=0)
    tree, q = grow_shape(shape_from_paths([(0,), (1,), (1, 0), (1, 0, 0)]), 3, expand)
    first, second = table[3].topk(2).indices.tolist()
    third = int(table[second].argmax())
    assert tree.tokens.tolist() == [3, first, second, third, int(table[third].argmax())]
    assert tree.parents.tolist() == [-1, 0, 0, 2, 3]
    # Only nodes with children are expanded; each names the row of its parent in the call before.
    assert calls == [([-1], [3]), ([0], [second]), ([0], [third])]
    assert q.shape == (4, 6)
    torch.testing.assert_close(q[2], table[second].exp())


def test_top_children_leave_out_impossible_tokens():
    assert top_children(torch.tensor([-1.0, -torch.inf, -0.5, -torch.inf]), 3) == [2, 0]


# --- Medusa --------------------------------------------------------------------------------------------------------------------


def test_calibration_divides_by_the_positions_it_saw():
    """METHODS §1.5: the reference divides by a fixed sample count; head 1 has one label fewer here (the row ends)."""
    top_tokens = torch.tensor([[[5, 6], [7, 8]], [[5, 6], [7, 8]], [[5, 6], [7, 8]]])  # [N=3, K=2, R=2]
    labels = torch.tensor([[5, 8], [6, 8], [9, 7]])
    valid = torch.tensor([[True, True], [True, True], [True, False]])
    hits, counts = rank_hits(top_tokens, labels, valid)
    assert hits.tolist() == [[1, 1], [0, 2]] and counts.tolist() == [3, 2]
    torch.testing.assert_close(rank_accuracies(hits, counts), torch.tensor([[1 / 3, 1 / 3], [0, 1]], dtype=torch.float64))
    halves = [rank_hits(top_tokens[s], labels[s], valid[s]) for s in (slice(0, 1), slice(1, 3))]
    assert torch.equal(halves[0][0] + halves[1][0], hits)  # batches add up
    with pytest.raises(RecipeError, match=r"heads \[1\]"):
        rank_accuracies(hits, torch.tensor([3, 0]))


def all_trees(num_paths: int, heads: int, ranks: int):
    """Every connected set of `num_paths` paths without gaps between siblings."""
    universe = [path for depth in range(1, heads + 1) for path in itertools.product(range(ranks), repeat=depth)]
    for paths in itertools.combinations(universe, num_paths):
        chosen = set(paths)
        if all(len(p) == 1 or p[:-1] in chosen for p in paths):
            yield paths


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), total_nodes=st.integers(2, 6))
def test_medusas_greedy_tree_is_the_best_tree(seed, total_nodes):
    """Against brute force, where a[i, r] falls with the rank."""
    accuracies = torch.rand(3, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).sort(-1, descending=True).values
    paths = medusa_paths(accuracies, total_nodes)
    assert len(paths) == total_nodes - 1
    best = max(expected_accepted(other, accuracies) for other in all_trees(total_nodes - 1, 3, 2))
    assert expected_accepted(paths, accuracies) == pytest.approx(best, abs=1e-12)


def test_medusa_tree_keeps_its_limits_and_its_value():
    accuracies = torch.tensor([[0.6, 0.2, 0.1], [0.5, 0.2, 0.1], [0.4, 0.2, 0.1]], dtype=torch.float64)
    paths = medusa_paths(accuracies, total_nodes=5)
    assert paths == [(0,), (0, 0), (1,), (0, 0, 0)]
    assert node_values(paths, accuracies) == pytest.approx([0.6, 0.3, 0.2, 0.12])
    assert expected_accepted(paths, accuracies) == pytest.approx(1.22)
    values = node_values(medusa_paths(accuracies, 30), accuracies)
    assert values == sorted(values, reverse=True)
    limited = medusa_paths(accuracies, 64, max_depth=2, max_children=2)
    assert sorted(limited) == [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]  # fewer than asked for: the limits allow no more
    shape_from_paths(paths, head_depth=3, vocab_size=3)
    with pytest.raises(RecipeError, match="deeper than the head"):
        medusa_paths(accuracies, max_depth=4)
    with pytest.raises(RecipeError, match="drafts nothing"):
        medusa_paths(accuracies, total_nodes=1)


def test_published_size_of_medusas_tree():
    """63 nodes and the root from 4 heads with 10 ranks."""
    accuracies = torch.tensor([[0.6 * 0.8**i * 0.5**r for r in range(10)] for i in range(4)])
    shape = shape_from_paths(medusa_paths(accuracies), head_depth=4)
    assert len(shape.parents) == 64 and shape.depth <= 4 and shape.width <= 10


# --- EAGLE-2 -------------------------------------------------------------------------------------------------------------------


def test_eagle2_pool_sizes():
    """METHODS §16.6: k + depth·k² with the reference's depth 5 and 7, which are the paper's depth 6 and 8."""
    assert eagle2_pool_size(top_k=10, depth=6) == 510
    assert eagle2_pool_size(top_k=10, depth=8) == 710


@pytest.mark.parametrize("depth, pool", [(6, 510), (8, 710)])
def test_eagle2_default_tree(depth, pool):
    table, expand, calls = markov_head(40, seed=1)
    tree = eagle2_tree(expand, 0, depth=depth)
    assert tree.num_nodes == 60 and tree.depth <= depth
    assert [len(tokens) for _, tokens in calls] == [1] + [10] * (depth - 1)
    assert len(calls[0][1]) * 10 + sum(len(tokens) * 10 for _, tokens in calls[1:]) == pool
    whole = eagle2_tree(expand, 0, depth=depth, total_nodes=pool + 1)  # every candidate: reranking drops nothing
    assert whole.num_nodes == pool + 1 and whole.depth == depth


def path_score(tree, table: Tensor, node: int) -> float:
    path = tree.mask[node].nonzero().flatten().tolist()
    tokens = tree.tokens[path].tolist()
    return sum(table[a, b].item() for a, b in itertools.pairwise(tokens))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), top_k=st.integers(1, 4), depth=st.integers(1, 4), total_nodes=st.integers(2, 20))
def test_eagle2_keeps_the_best_of_its_candidates(seed, top_k, depth, total_nodes):
    """The kept nodes are exactly the best by cumulative log-probability of the whole pool, siblings best first."""
    table, expand, _ = markov_head(8, seed)
    tree = eagle2_tree(expand, 0, total_nodes=total_nodes, top_k=top_k, depth=depth)
    whole = eagle2_tree(expand, 0, total_nodes=10**6, top_k=top_k, depth=depth)
    pool = sorted((path_score(whole, table, node) for node in range(1, whole.num_nodes)), reverse=True)
    kept = sorted((path_score(tree, table, node) for node in range(1, tree.num_nodes)), reverse=True)
    assert len(pool) == eagle2_pool_size(top_k, depth)
    assert kept == pytest.approx(pool[: total_nodes - 1], abs=1e-5)
    for children in tree.children:
        assert len({tree.tokens[c].item() for c in children}) == len(children) <= top_k
        scores = [path_score(tree, table, c) for c in children]
        assert scores == sorted(scores, reverse=True)


def test_eagle2_frontier_rows_point_at_the_call_before():
    """A head gathers hidden states and masks by these rows: following them must give each frontier node's own path."""
    table, expand, calls = markov_head(12, seed=3)
    eagle2_tree(expand, 5, top_k=3, depth=4)
    paths = [[5]]
    for (parents, tokens), (_, earlier) in zip(calls[1:], calls, strict=False):
        assert all(0 <= row < len(earlier) for row in parents)
        paths = [paths[row] + [token] for row, token in zip(parents, tokens, strict=True)]
        for path in paths:
            assert path[-1] in table[path[-2]].topk(3).indices.tolist()
    scores = [sum(table[a, b].item() for a, b in itertools.pairwise(path)) for path in paths]
    assert scores == sorted(scores, reverse=True)


def test_eagle2_stays_connected_where_a_child_is_certain():
    """A child drafted with probability 1 ties with its parent; the parent must be kept first."""

    def certain(parents: Tensor, tokens: Tensor) -> Tensor:
        logits = torch.full((len(tokens), 5), -20.0)
        logits[torch.arange(len(tokens)), (tokens + 1) % 5] = 1e-6  # rounding above 0
        return logits

    for total_nodes in range(2, 8):
        tree = eagle2_tree(certain, 0, total_nodes=total_nodes, top_k=2, depth=6)
        assert tree.tokens[:total_nodes][:7].tolist() == [0, 1, 2, 3, 4, 0, 1][:total_nodes]


def test_eagle2_drops_tokens_outside_a_reduced_vocabulary():
    def reduced(parents: Tensor, tokens: Tensor) -> Tensor:
        return torch.tensor([math.log(0.75), -torch.inf, math.log(0.25), -torch.inf, -torch.inf]).expand(len(tokens), 5)

    tree = eagle2_tree(reduced, 0, total_nodes=60, top_k=3, depth=2)
    assert set(tree.tokens[1:].tolist()) == {0, 2} and tree.num_drafts == 6


def test_eagle2_refuses_what_cannot_be():
    _, expand, _ = markov_head(8, seed=0)
    for kwargs, message in [
        ({"total_nodes": 1}, "tree_nodes=1"),
        ({"depth": 0}, "drafts nothing"),
        ({"top_k": 0}, "drafts nothing"),
        ({"top_k": 9}, "wider than"),
        ({"top_k": 4, "vocab_size": 3}, "wider than"),
        ({"top_k": 4, "head_depth": 5}, "deeper than"),
    ]:
        with pytest.raises(RecipeError, match=message):
            eagle2_tree(expand, 0, **kwargs)
