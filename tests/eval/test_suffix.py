"""Suffix decoding: counts on a hand-made history, which continuation is followed how far, and what is remembered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eval.decode import Request, Settings, decode
from eval.drafters import HeadDrafter, ModelDrafter
from eval.suffix import Memory, SuffixDrafter, SuffixTree, follow

GREEDY = Settings(max_tokens=10, max_length=512)


def tree_of(*sequences: list[int], depth: int = 24) -> SuffixTree:
    tree = SuffixTree(depth)
    for sequence in sequences:
        tree.extend([], sequence)
    return tree


def request_of(prompt: list[int], answer: list[int] = []) -> Request:  # noqa: B006
    return Request(prompt, None, [*prompt, *answer], state=Memory())  # type: ignore[arg-type]


def drafted(drafter: SuffixDrafter, request: Request) -> list[int]:
    draft = drafter.draft(request, GREEDY)
    assert draft.sampling == "deterministic" and int(draft.tree.tokens[0]) == request.tokens[-1]
    return draft.tree.tokens[1:].tolist()


def test_counts_of_a_hand_made_history():
    """METHODS §10.6: two answers, 1 2 3 1 2 4 and 2 3 1; every run of up to three tokens."""
    tree = tree_of([1, 2, 3, 1, 2, 4], [2, 3, 1], depth=3)
    once = [[2, 4], [3, 1, 2], [1, 2, 3], [1, 2, 4], [4]]
    counts = {(1,): 3, (2,): 3, (3,): 2, (1, 2): 2, (2, 3): 2, (3, 1): 2, (2, 3, 1): 2} | {tuple(run): 1 for run in once}
    assert {run: tree.count(run) for run in counts} == counts
    assert tree.root.count == 9  # tokens in all
    assert tree.count([1, 2, 3, 1]) == tree.count([4, 2]) == tree.count([5]) == 0  # too long; across answers; never seen


def test_counts_do_not_depend_on_how_tokens_arrive():
    whole, bit_by_bit, ends = tree_of([5, 6, 5, 6, 7, 5]), SuffixTree(), []
    for part in ([5], [6, 5], [], [6, 7, 5]):
        bit_by_bit.extend(ends, part)
    for run in ([5], [6], [5, 6], [6, 5, 6], [5, 6, 7, 5]):
        assert whole.count(run) == bit_by_bit.count(run) > 0
    assert len(ends) == 6


def test_the_most_frequent_continuation_until_it_gets_improbable():
    """After 1: 2 twice, 3 once → 2/3; after 1 2: 9 ten of ten … ; the floor stops where the product falls below 0.1."""
    tree = tree_of([1, 2, 8], [1, 2, 9], [1, 2, 9], [1, 3])
    node = tree.find([1])
    assert node is not None
    guess = follow(node, 5)
    assert guess.tokens == [2, 9] and guess.score == pytest.approx(3 / 4 + 3 / 4 * 2 / 3)
    assert follow(node, 1).tokens == [2]
    wide = tree_of(*[[1, token] for token in range(2, 13)])  # eleven equally likely: 1/11 is below the floor
    assert follow(wide.find([1]), 3) == ([], 0.0)  # type: ignore[arg-type]


def test_a_longer_match_may_draft_more_and_wins_ties():
    """At most one drafted token for each matched one; the larger sum of probabilities wins, of equal sums the longer match."""
    tree = tree_of([1, 2, 3, 4, 5, 6])
    assert tree.guess([9, 3], 4).tokens == [4]
    assert tree.guess([9, 2, 3], 4).tokens == [4, 5]
    assert tree.guess([9, 1, 2, 3], 2).tokens == [4, 5]
    tied = tree_of([7, 3, 5], [3, 6], [3, 6])  # after 3: 6 with 2/3; after 7 3: 5 for sure
    assert tied.guess([0, 7, 3], 1).tokens == [5]
    equal = tree_of([3, 6], [7, 3, 6])  # both lengths give 6 with certainty
    assert equal.guess([0, 7, 3], 1) == ([6], 1.0)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [([1], []), ([1, 1], [1]), ([1, 2], []), ([1, 2, 1], [2]), ([1, 2, 3], []), ([5] * 50, [5] * 4)],
    ids=["1 token", "2, equal", "2", "3, repeating", "3", "50 times the same"],
)
def test_short_and_uniform_prompts(prompt, expected):
    assert drafted(SuffixDrafter(4), request_of(prompt)) == expected


def test_the_requests_own_text_wins_ties_and_other_answers_are_remembered():
    drafter = SuffixDrafter(2)
    first = request_of([9, 9], [1, 2, 3])
    drafted(drafter, first)
    first.tokens += [4, 5]
    first.finish_reason = "length"  # its last tokens come in with the next request's draft
    second = request_of([8, 7], [2, 3])
    assert drafted(drafter, second) == [4, 5]
    assert drafter.past.count([4, 5]) == 1 and drafter.past.count([9]) == 0  # answers, not prompts
    assert drafter.active == [second]
    own = request_of([2, 3, 6, 8, 2, 3])
    assert drafted(drafter, own)[:1] == [6]  # after "2 3": 6 once here, 4 once there; equal scores
    drafter.forget()
    assert drafted(drafter, request_of([8, 7], [2, 3])) == []


def test_decoding_is_lossless_and_uses_what_repeats(model, prompts, greedy):
    drafter = SuffixDrafter(4)
    again = [*prompts, *prompts]
    requests = decode(model, again, drafter, Settings(max_tokens=24, max_length=512)).requests
    assert [r.answer for r in requests] == [greedy(prompt, 24) for prompt in again]
    accepted = [sum(round.accepted for round in request.rounds) for request in requests]
    assert sum(accepted[len(prompts) :]) > sum(accepted[: len(prompts)])  # the second time every answer is known


@pytest.mark.vllm
def test_guesses_are_those_of_vllms_package():
    """The package behind vLLM's `suffix` on random texts over few tokens, skipping those where equal counts leave a choice."""
    package = pytest.importorskip("arctic_inference.suffix_decoding")
    generator, compared = torch.Generator().manual_seed(0), 0

    def draw(low: int, high: int, *size: int) -> Any:
        return torch.randint(low, high, size or (1,), generator=generator).tolist()

    for _ in range(300):
        theirs, ours = package.SuffixDecodingCache(max_tree_depth=24, max_cached_requests=100), SuffixDrafter(6)
        kinds = draw(2, 5)[0]
        for number in range(3):
            prompt, answer = draw(0, kinds, *draw(1, 30)), draw(0, kinds, *draw(1, 20))
            theirs.start_request(number, prompt)
            request = request_of(prompt)
            for token in answer:
                request.tokens.append(token)
                theirs.add_active_response(number, [token])
                mine = drafted(ours, request)
                its = theirs.speculate(number, request.tokens[-24:], max_spec_tokens=6, max_spec_factor=1.0, min_token_prob=0.1)
                if ambiguous(request.state.own, ours.past, request.tokens):
                    continue
                assert mine == list(its.token_ids)
                compared += 1
            theirs.stop_request(number)
            request.finish_reason = "length"
    assert compared > 500


def ambiguous(own: SuffixTree, past: SuffixTree, tokens: list[int]) -> bool:
    """Whether a path that could be followed meets two children of equal, largest count."""
    for tree in (own, past):
        for matched in range(1, min(len(tokens), 24)):
            node = tree.find(tokens[-matched:])
            while node is not None and node.children:
                counts = sorted((child.count for child in node.children.values()), reverse=True)
                if counts[:1] == counts[1:2]:
                    return True
                node = max(node.children.values(), key=lambda child: child.count)
    return False


def test_whole_models_draft_through_their_own_propose(parts, model, prompts):
    """A draft model's rounds in the reference decoder, its first token included, are those of transformers' own model (B34)."""
    from heads.draft_model import DraftModelHead
    from heads.vocab import DraftVocab
    from recipes.head_blocks import DraftModelHead as Block

    head = DraftModelHead(Block(num_layers=2, keep_layers="spread"), parts, DraftVocab(torch.arange(260), 260)).eval()
    plain = type(model)(head.config.__class__(**head.architecture())).eval()
    plain.load_state_dict({name: tensor.clone() for name, tensor in head.served_tensors().items()})
    plain.config._attn_implementation = "sdpa"
    settings = Settings(max_tokens=16, max_length=512)
    ours = decode(model, prompts, HeadDrafter(head, model, 3), settings).requests
    theirs = decode(model, prompts, ModelDrafter(plain, model, 3), settings).requests
    assert [r.rounds for r in ours] == [r.rounds for r in theirs] and [r.answer for r in ours] == [r.answer for r in theirs]
