"""The acceptance rules are lossless: their exact law, computed by walking through every random decision, is the target's own.

`enumerate_law` runs the real sampler once for each possible sequence of coins and draws, so what is proved is the code that users run.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.trees import Shape, build_tree, chain_tree, shape_from_paths, top_children
from eval.verify import (
    RULES,
    Dice,
    Draft,
    TorchDice,
    Verdict,
    acceptance,
    block_acceptance,
    expected_acceptance,
    process_logits,
    residual,
    sample_children,
    scatter_to_target_vocab,
    verify_block,
    verify_greedy,
    verify_tokenwise,
    verify_typical,
    without,
)
from recipes.errors import EngineError
from tests.eval.laws import Model, distance, draft_with, enumerate_law, one_round, random_model, target_law, target_rows

EXACT = 1e-12

CHAIN = shape_from_paths([(0,), (0, 0)])
TREE = shape_from_paths([(0,), (1,), (0, 0), (0, 1)])
NODE = shape_from_paths([(0,), (1,)])
WIDE = shape_from_paths([(0,), (1,), (2,), (1, 0)])


# --- Losslessness, exactly -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, shape, sampling, verify, vocab",
    [
        ("sampled chain", CHAIN, "iid", verify_tokenwise, 4),
        ("one-hot chain", CHAIN, "deterministic", verify_tokenwise, 4),
        ("one-hot tree", WIDE, "deterministic", verify_tokenwise, 5),
        ("i.i.d. node", NODE, "iid", verify_tokenwise, 4),
        ("i.i.d. tree", TREE, "iid", verify_tokenwise, 3),
        ("without-replacement node", NODE, "without_replacement", verify_tokenwise, 4),
        ("without-replacement tree", TREE, "without_replacement", verify_tokenwise, 3),
        ("without-replacement wide node", shape_from_paths([(0,), (1,), (2,)]), "without_replacement", verify_tokenwise, 4),
        ("block", shape_from_paths([(0,), (0, 0), (0, 0, 0)]), "iid", verify_block, 3),
    ],
)
def test_the_law_of_the_tokens_is_the_targets(name, shape, sampling, verify, vocab):
    """E01: exact, to 1e-12, at context-dependent random p and q."""
    for seed in range(2):
        p, q = random_model(seed, vocab), random_model(seed + 100, vocab)
        law = enumerate_law(one_round(shape, p, q, sampling, verify))
        assert sum(law.values()) == pytest.approx(1, abs=EXACT)
        gap = distance(law, target_law(p, vocab, shape.depth + 1))
        print(f"{name}, seed {seed}: {gap:.1e}")
        assert gap < EXACT


def test_duplicates_among_iid_siblings_are_tried_again():
    """Skipping the second of two equal siblings would leave out one p ← norm(max(p − q, 0)) and bias the law."""
    q = torch.tensor([0.8, 0.15, 0.05], dtype=torch.float64)
    p = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    law = enumerate_law(one_round(NODE, lambda _: p, lambda _: q, "iid"))
    first = {token: sum(prob for tokens, prob in law.items() if tokens[0] == token) for token in range(3)}
    assert list(first.values()) == pytest.approx(p.tolist(), abs=EXACT)


def test_reduced_vocabulary_and_truncated_target_stay_lossless():
    """q = 0 outside the draft vocabulary; p truncated by top-k: tokens with p = 0 are never accepted."""
    p_row = process_logits(torch.tensor([1.0, 0.2, 2.0, 0.5, -1.0], dtype=torch.float64), top_k=3)
    q_row = scatter_to_target_vocab(torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0, 1, 2]), 5)
    assert q_row.tolist() == [0.5, 0, 0.3, 0, 0.2]
    for shape, sampling in ((CHAIN, "iid"), (NODE, "iid"), (NODE, "without_replacement"), (WIDE, "deterministic")):
        law = enumerate_law(one_round(shape, lambda _: p_row, lambda _: q_row, sampling))
        assert distance(law, target_law(lambda _: p_row, 5, shape.depth + 1)) < EXACT


def test_more_children_than_q_has_tokens():
    """Sampling without replacement gives up when q has run out; the law stays the target's."""
    p = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    q = torch.tensor([0.6, 0.4, 0.0], dtype=torch.float64)
    shape = shape_from_paths([(0,), (1,), (2,)])
    dice = TorchDice(torch.Generator().manual_seed(0))
    assert draft_with(shape, lambda _: q, "without_replacement", dice).tree.num_drafts == 2
    law = enumerate_law(one_round(shape, lambda _: p, lambda _: q, "without_replacement"))
    assert distance(law, target_law(lambda _: p, 3, 2)) < EXACT


# --- The wrong pairing ---------------------------------------------------------------------------------------------------------

P4 = torch.tensor([0.45, 0.25, 0.2, 0.1], dtype=torch.float64)
Q4 = torch.tensor([0.1, 0.5, 0.3, 0.1], dtype=torch.float64)


@pytest.mark.parametrize("claimed", ["iid", "without_replacement"])
def test_deterministic_children_verified_with_the_real_q_are_not_lossless(claimed):
    """METHODS §10.4, negative control: top-2 children passed off as sampled give (.5, .5, 0, 0) instead of p."""
    tree = build_tree([0, *top_children(Q4.log(), 2)], [-1, 0, 0])
    wrong = enumerate_law(lambda dice: tuple(verify_tokenwise(Draft(tree, claimed, Q4[None]), P4.repeat(3, 1), dice).tokens[:1]))
    assert [wrong.get((token,), 0) for token in range(4)] == pytest.approx([0.5, 0.5, 0, 0], abs=EXACT)
    right = enumerate_law(lambda dice: tuple(verify_tokenwise(Draft(tree, "deterministic"), P4.repeat(3, 1), dice).tokens[:1]))
    assert [right.get((token,), 0) for token in range(4)] == pytest.approx(P4.tolist(), abs=EXACT)


def test_sampled_drafts_verified_as_one_hot_are_lossless_but_accept_less():
    """The one-hot rule ignores how the child came about, so the law stays p; but Σ p·q are accepted instead of Σ min(p, q)."""

    def run(dice: Dice) -> tuple:
        tree = chain_tree(0, [dice.draw(Q4)])
        verdict = verify_tokenwise(Draft(tree, "deterministic"), P4.repeat(2, 1), dice)
        return verdict.tokens[0], verdict.num_accepted

    law = enumerate_law(run)
    first = [law.get((token, 0), 0) + law.get((token, 1), 0) for token in range(4)]
    assert first == pytest.approx(P4.tolist(), abs=EXACT)
    accepted = sum(prob for (_, num_accepted), prob in law.items() if num_accepted)
    assert accepted == pytest.approx((P4 * Q4).sum().item(), abs=EXACT)
    assert accepted < expected_acceptance(P4, Q4).item() - 0.3


def test_the_wrong_pairing_is_refused():
    chain = chain_tree(0, [1, 2])
    rows = Q4.repeat(2, 1)
    with pytest.raises(EngineError, match="deterministic draft was given"):
        Draft(chain, "deterministic", rows)
    for sampling in ("iid", "without_replacement"):
        with pytest.raises(EngineError, match="needs the probabilities q"):
            Draft(chain, sampling)
    with pytest.raises(EngineError, match="choose 'deterministic'"):
        Draft(chain, "greedy", rows)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="block verification needs drafts that were sampled"):
        verify_block(Draft(chain, "deterministic"), P4.repeat(3, 1), TorchDice(torch.Generator()))
    with pytest.raises(EngineError, match="needs a chain"):
        verify_block(Draft(build_tree([0, 1, 2], [-1, 0, 0]), "iid", rows), P4.repeat(3, 1), TorchDice(torch.Generator()))
    with pytest.raises(EngineError, match="draws at random"):
        sample_children(Q4.log(), 2, "deterministic", TorchDice(torch.Generator()))


def test_a_token_that_q_cannot_have_drawn_is_refused():
    q = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64)
    dice = TorchDice(torch.Generator())
    for verify in (verify_tokenwise, verify_block):
        with pytest.raises(EngineError, match="q = 0"):
            verify(Draft(chain_tree(0, [2]), "iid", q[None]), P4.repeat(2, 1), dice)
    duplicates = build_tree([0, 1, 1], [-1, 0, 0])
    p = torch.tensor([0.9, 0.0, 0.05, 0.05], dtype=torch.float64)
    with pytest.raises(EngineError, match="q = 0"):
        verify_tokenwise(Draft(duplicates, "without_replacement", Q4[None]), p.repeat(3, 1), dice)


@pytest.mark.parametrize(
    "p_rows, q_rows, vocab, message", [(2, 2, 4, "has 3 nodes"), (3, 1, 4, "have children"), (3, 2, 3, "scatter_to_target_vocab")]
)
def test_probabilities_that_do_not_cover_the_tree_are_refused(p_rows, q_rows, vocab, message):
    with pytest.raises(EngineError, match=message):
        draft = Draft(chain_tree(0, [1, 2]), "iid", torch.full((q_rows, vocab), 1 / vocab))
        verify_tokenwise(draft, P4.repeat(p_rows, 1), TorchDice(torch.Generator()))


# --- Block verification --------------------------------------------------------------------------------------------------------


def expected_accepted(shape: Shape, p: Model, q: Model, verify) -> float:
    def run(dice: Dice) -> tuple:
        draft = draft_with(shape, q, "iid", dice)
        return (verify(draft, target_rows(draft, p), dice).num_accepted,)

    return sum(accepted * prob for (accepted,), prob in enumerate_law(run).items())


def chain_shape(k: int) -> Shape:
    return shape_from_paths([(0,) * depth for depth in range(1, k + 1)])


def test_block_verification_on_the_papers_case():
    """METHODS §10.5: 11/9 accepted drafts against 10/9 token by token."""
    p, q = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64), torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
    assert expected_accepted(chain_shape(2), lambda _: p, lambda _: q, verify_block) == pytest.approx(11 / 9, abs=EXACT)
    assert expected_accepted(chain_shape(2), lambda _: p, lambda _: q, verify_tokenwise) == pytest.approx(10 / 9, abs=EXACT)


def test_block_verification_on_three_symbols():
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    assert expected_accepted(chain_shape(3), lambda _: p, lambda _: q, verify_block) == pytest.approx(1.695, abs=5e-4)
    assert expected_accepted(chain_shape(3), lambda _: p, lambda _: q, verify_tokenwise) == pytest.approx(1.533, abs=5e-4)


def accepted_by_formula(p: Model, q: Model, vocab: int, k: int) -> tuple[float, float]:
    """(block, token-wise) E[accepted] from the acceptance probabilities of each drafted chain, without running the samplers."""
    block = tokenwise = 0.0
    for tokens in itertools.product(range(vocab), repeat=k):
        p_rows = torch.stack([p(tokens[:i]) for i in range(k + 1)])
        q_rows = torch.stack([q(tokens[:i]) for i in range(k)])
        weight = math.prod(q_rows[i, token].item() for i, token in enumerate(tokens))
        _, accept = block_acceptance(p_rows, q_rows, list(tokens))
        block += weight * sum(1 - math.prod(1 - h for h in accept[i:]) for i in range(k))
        each = [acceptance(p_rows[i], token, q_rows[i]) for i, token in enumerate(tokens)]
        tokenwise += weight * sum(math.prod(each[: i + 1]) for i in range(k))
    return block, tokenwise


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), vocab=st.integers(2, 3), k=st.integers(1, 3), sharpness=st.floats(0.1, 4))
def test_block_verification_never_accepts_less_than_tokenwise(seed, vocab, k, sharpness):
    block, tokenwise = accepted_by_formula(random_model(seed, vocab, sharpness), random_model(seed + 1, vocab, sharpness), vocab, k)
    assert block >= tokenwise - EXACT
    if k == 1:
        assert block == pytest.approx(tokenwise, abs=EXACT)


def test_formula_and_sampler_agree_on_the_accepted_length():
    p, q = random_model(7, 3), random_model(8, 3)
    block, tokenwise = accepted_by_formula(p, q, 3, 2)
    assert expected_accepted(chain_shape(2), p, q, verify_block) == pytest.approx(block, abs=EXACT)
    assert expected_accepted(chain_shape(2), p, q, verify_tokenwise) == pytest.approx(tokenwise, abs=EXACT)


def test_block_verification_where_draft_and_target_agree_accepts_everything():
    """Z = 0 and 1 − p = 0: the denominator is 0 and h is 1."""
    assert block_acceptance(P4.repeat(3, 1), P4.repeat(2, 1), [0, 3]) == ([1, 1, 1], [1, 1])
    verdict = verify_block(Draft(chain_tree(0, [0, 3]), "iid", P4.repeat(2, 1)), P4.repeat(3, 1), TorchDice(torch.Generator()))
    assert verdict.path == [1, 2]


# --- Greedy --------------------------------------------------------------------------------------------------------------------


def test_greedy_keeps_the_argmax_path_and_adds_the_bonus():
    #       0 ─┬─ 1(tok 5) ─┬─ 3(tok 7)
    #          └─ 2(tok 6)  └─ 4(tok 8)
    tree = build_tree([9, 5, 6, 7, 8], [-1, 0, 0, 1, 1])
    draft = Draft(tree, "deterministic")
    assert verify_greedy(draft, torch.tensor([5, 8, 0, 0, 3])) == Verdict([1, 4], [5, 8, 3])
    assert verify_greedy(draft, torch.tensor([6, 0, 2, 0, 0])) == Verdict([2], [6, 2])
    assert verify_greedy(draft, torch.tensor([1, 0, 0, 0, 0])) == Verdict([], [1])
    assert verify_greedy(Draft(chain_tree(9, []), "deterministic"), torch.tensor([4])) == Verdict([], [4])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), sampling=st.sampled_from(["deterministic", "iid", "without_replacement"]))
def test_at_temperature_0_every_rule_is_the_greedy_rule(seed, sampling):
    """E01: T = 0 equals plain greedy token for token, whatever the draft."""
    generator = torch.Generator().manual_seed(seed)
    dice = TorchDice(generator)
    draft = draft_with(TREE, random_model(seed, 4), sampling, dice)
    logits = torch.randn(draft.tree.num_nodes, 4, generator=generator)
    one_hot = process_logits(logits, temperature=0, top_k=2, top_p=0.5)
    greedy = verify_greedy(draft, logits.argmax(-1))
    results = [verify_tokenwise(draft, one_hot, dice), verify_typical(draft, one_hot, dice)]
    assert [result.tokens for result in results] == [greedy.tokens] * 2
    chain = draft_with(CHAIN, random_model(seed, 4), "iid", dice)
    assert verify_block(chain, one_hot[:3], dice) == verify_greedy(chain, logits[:3].argmax(-1))


# --- Typical acceptance --------------------------------------------------------------------------------------------------------


def test_typical_acceptance_takes_the_longest_path_above_the_threshold():
    p = torch.tensor([[0.7, 0.2, 0.1], [0.98, 0.01, 0.01], [0.1, 0.1, 0.8], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64)
    tree = build_tree([0, 0, 1, 1], [-1, 0, 0, 1])  # 1: token 0 after the root, 2: token 1, 3: token 1 after node 1
    entropy = -(p[0] * p[0].log()).sum().item()
    dice = TorchDice(torch.Generator().manual_seed(0))
    threshold = min(0.09, 0.3 * math.exp(-entropy))
    assert 0.2 > threshold > 0.01
    # Node 3 has p = .01 after node 1, below every threshold here; nodes 1 and 2 tie in depth and node 1 is likelier.
    assert verify_typical(Draft(tree, "deterministic"), p, dice).path == [1]
    assert verify_typical(Draft(tree, "deterministic"), p, dice, epsilon=0.001).path == [1, 3]
    assert verify_typical(Draft(tree, "deterministic"), p, dice, epsilon=0.9, delta=5.0).path == []


def test_typical_acceptance_is_not_lossless_and_says_so():
    draft = Draft(chain_tree(0, [1]), "deterministic")
    law = enumerate_law(lambda dice: tuple(verify_typical(draft, P4.repeat(2, 1), dice).tokens[:1]))
    assert law == {(1,): pytest.approx(1)}  # p(1) = .25 is typical, so it is always kept
    assert "NOT lossless" in RULES["typical"] and "NOT lossless" in (verify_typical.__doc__ or "")
    assert all("NOT" not in text for rule, text in RULES.items() if rule != "typical")


# --- Distributions -------------------------------------------------------------------------------------------------------------


def test_process_logits_orders_temperature_top_k_top_p():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()
    close = partial(torch.testing.assert_close, rtol=0, atol=EXACT)
    close(process_logits(logits), logits.exp())
    close(process_logits(logits, top_k=2), torch.tensor([0.625, 0.375, 0, 0], dtype=torch.float64))
    close(process_logits(logits, top_p=0.79), torch.tensor([0.625, 0.375, 0, 0], dtype=torch.float64))
    close(process_logits(logits, top_p=0.81), torch.tensor([0.5, 0.3, 0.15, 0], dtype=torch.float64) / 0.95)
    close(process_logits(logits, top_k=2, top_p=0.6), torch.tensor([1.0, 0, 0, 0], dtype=torch.float64))  # .625 after top-k
    squared = logits.exp() ** 2
    close(process_logits(logits, temperature=0.5), squared / squared.sum())
    assert process_logits(logits, temperature=0).tolist() == [1, 0, 0, 0]
    assert process_logits(logits, top_p=1e-9).tolist() == [1, 0, 0, 0]  # never empty
    assert process_logits(logits.half()[None]).dtype == torch.float32
    for temperature, top_k, top_p in ((-1.0, None, 1.0), (1.0, 0, 1.0), (1.0, None, 0.0), (1.0, None, 1.1)):
        with pytest.raises(EngineError, match="temperature >= 0"):
            process_logits(logits, temperature, top_k, top_p)


def test_scatter_refuses_a_map_of_another_target():
    with pytest.raises(EngineError, match="made for another target"):
        scatter_to_target_vocab(torch.tensor([0.5, 0.5]), torch.tensor([0, 9]), 4)
    with pytest.raises(EngineError, match="d2t has 3 entries"):
        scatter_to_target_vocab(torch.tensor([0.5, 0.5]), torch.tensor([0, 1, 1]), 4)


def test_acceptance_pieces():
    """P(accept) = Σ min(p, q) = 1 − TV, and the residual is what the accepted mass leaves of p."""
    accepted = sum(Q4[x].item() * acceptance(P4, x, Q4) for x in range(4))
    assert accepted == pytest.approx(expected_acceptance(P4, Q4).item(), abs=EXACT)
    assert accepted == pytest.approx(1 - (P4 - Q4).abs().sum().item() / 2, abs=EXACT)
    assert residual(P4, Q4).tolist() == [1, 0, 0, 0]
    assert residual(P4, P4).tolist() == pytest.approx(P4.tolist())  # rejecting a certain token is rounding; p stands
    assert without(torch.tensor([0.0, 1.0]), 1) is None


# --- The real dice -------------------------------------------------------------------------------------------------------------


def chi_square_p_value(counts: list[int], law: list[float]) -> float:
    total = sum(counts)
    statistic = sum((n - total * prob) ** 2 / (total * prob) for n, prob in zip(counts, law, strict=True))
    return torch.special.gammaincc(torch.tensor((len(law) - 1) / 2), torch.tensor(statistic / 2)).item()


@pytest.mark.parametrize(
    "shape, sampling, verify",
    [
        (CHAIN, "iid", verify_tokenwise),
        (NODE, "deterministic", verify_tokenwise),
        (NODE, "iid", verify_tokenwise),
        (NODE, "without_replacement", verify_tokenwise),
        (CHAIN, "iid", verify_block),
    ],
)
def test_samplers_draw_from_the_targets_law(shape, sampling, verify, draws=2000):
    """E01 with the generator that users get, in float32: chi-square over the first two tokens, and each first token within 3σ."""
    p, q = random_model(1, 4, sharpness=0.7), random_model(2, 4)

    def single(model: Model) -> Model:
        cached = {prefix: model(prefix).float() for n in range(3) for prefix in itertools.product(range(4), repeat=n)}
        return cached.__getitem__

    run, dice = one_round(shape, single(p), single(q), sampling, verify), TorchDice(torch.Generator().manual_seed(0))
    counts: dict[tuple, int] = defaultdict(int)
    for _ in range(draws):
        counts[run(dice)[:2]] += 1
    law = target_law(p, 4, 2)
    assert chi_square_p_value([counts[key] for key in law], list(law.values())) > 0.001
    for token in range(4):
        prob = p(())[token].item()
        seen = sum(n for key, n in counts.items() if key[0] == token)
        assert abs(seen - draws * prob) < 3 * math.sqrt(draws * prob * (1 - prob))
