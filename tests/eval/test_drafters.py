"""Drafters: what they draft, what they say about it, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from eval.decode import Request, Settings
from eval.drafters import (
    Eagle2Drafter,
    Expander,
    GrownTreeDrafter,
    HeadDrafter,
    MedusaDrafter,
    ModelDrafter,
    NgramDrafter,
    StaticTreeDrafter,
    committed,
    lookup,
)
from eval.target_cache import TargetCache
from eval.trees import shape_from_paths
from eval.verify import TorchDice
from heads.eagle3 import Eagle3Head
from heads.medusa import MedusaHead
from heads.peagle import PeagleHead
from heads.target import TargetParts
from heads.vocab import DraftVocab
from recipes.errors import EngineError, RecipeError
from recipes.head_blocks import Eagle3Head as Eagle3Block
from recipes.head_blocks import MedusaHead as MedusaBlock
from recipes.head_blocks import PeagleHead as PeagleBlock

GREEDY = Settings(max_tokens=10, max_length=512)
SAMPLED = Settings(max_tokens=10, max_length=512, temperature=0.7, top_k=20, top_p=0.9)
SHAPE = shape_from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)])


def request_for(drafter: Any, model: PreTrainedModel, prompt: list[int], newest: int) -> Request:
    """As after a prefill of `prompt` that chose `newest`."""
    states = TargetCache(model, drafter.layers).prefill([prompt])
    hidden = {layer: h[0] for layer, h in states.hidden.items()}
    dice = TorchDice(torch.Generator().manual_seed(0))
    return Request(prompt, dice, [*prompt, newest], hidden, drafter.start())


# --- n-gram -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "k", "sizes", "drafted"),
    [
        ([1], 3, (1, 3), []),  # prompts of 1, 2 and 3 tokens
        ([1, 1], 3, (1, 3), [1]),
        ([1, 2, 1], 3, (1, 3), [2, 1]),
        ([1, 2, 3], 3, (1, 3), []),
        ([5] * 50, 4, (2, 5), [5] * 4),  # overlapping matches; the earliest has room for all k
        ([1, 2, 9, 1, 2, 8, 1, 2], 1, (1, 2), [9]),  # of equally long matches the earliest
        ([2, 7, 1, 2, 8, 3, 1, 2], 1, (1, 3), [8]),  # a longer match beats an earlier one
        ([1, 2, 3, 1, 2, 3, 4, 2, 3], 9, (2, 2), [1, 2, 3, 4, 2, 3]),  # no more than there is
        ([1, 2, 3, 4, 9, 3], 2, (2, 5), []),  # shorter than min_n
        ([1, 2, 3, 4, 5, 1, 2, 3, 4], 1, (1, 2), [5]),  # longer than max_n: its last tokens count
    ],
)
def test_lookup(tokens, k, sizes, drafted):
    assert lookup(tokens, k, *sizes) == drafted


def test_an_ngram_miss_is_a_round_without_a_draft():
    draft = NgramDrafter(3, 2, 4).draft(Request([1, 2, 3], None, [1, 2, 3]), SAMPLED)  # type: ignore[arg-type]
    assert draft.tree.num_drafts == 0 and draft.sampling == "deterministic"


@pytest.mark.vllm
def test_lookup_is_vllms_own():
    """The same draft as vLLM's proposer on 2,000 random texts over few tokens, so that matches overlap in every way."""
    import numpy as np
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as vllms

    generator = np.random.default_rng(0)
    for _ in range(2000):
        tokens = generator.integers(0, generator.integers(1, 5), generator.integers(1, 30)).astype(np.int32)
        min_n = int(generator.integers(1, 4))
        max_n, k = min_n + int(generator.integers(0, 4)), int(generator.integers(1, 6))
        assert lookup(tokens.tolist(), k, min_n, max_n) == vllms(tokens, min_n, max_n, 4096, k).tolist()


# --- Heads --------------------------------------------------------------------------------------------------------------------


def test_committed_entries_pair_each_position_with_the_token_after_it():
    """Positions 3 and 4 were processed last; their successors are tokens 4 and 5, the newest (METHODS §2.4: not token 0 dropped twice)."""
    request = Request([10, 11], None, [10, 11, 12, 13, 14, 15], {0: torch.zeros(2, 8)})  # type: ignore[arg-type]
    tokens, positions = committed(request)
    assert tokens.tolist() == [14, 15] and positions.tolist() == [3, 4]


def test_a_sampled_chain_tells_the_q_it_was_drawn_from(model, head, prompts):
    """q is 0 outside the draft vocabulary, processed like p, and drawn from: top-k leaves 20 tokens at most (METHODS §10.2)."""
    drafter = HeadDrafter(head, model, 3, sampled=True)
    draft = drafter.draft(request_for(drafter, model, prompts[2], 65), SAMPLED)
    assert draft.sampling == "iid" and draft.q is not None and draft.q.shape == (3, 260)
    outside = torch.ones(260, dtype=torch.bool)
    outside[head.vocab.ids] = False
    assert draft.q[:, outside].sum() == 0
    torch.testing.assert_close(draft.q.sum(-1), torch.ones(3))
    assert (draft.q > 0).sum(-1).max() <= 20
    assert (draft.q[range(3), draft.tree.tokens[1:]] > 0).all()


def test_at_temperature_zero_drafts_are_deterministic_whatever_was_asked(model, head, prompts):
    drafter = HeadDrafter(head, model, 3, sampled=True)
    draft = drafter.draft(request_for(drafter, model, prompts[2], 65), GREEDY)
    assert draft.sampling == "deterministic" and draft.q is None


@pytest.mark.parametrize("which", ["head", "trained_head"])
def test_a_tree_sees_at_each_node_what_a_chain_along_its_path_would_see(which, model, prompts, request):
    """Level-by-level growth with a tree mask equals drafting each path alone (METHODS §3: masks, positions, parent states)."""
    drafted_by = request.getfixturevalue(which)
    drafter = GrownTreeDrafter(drafted_by, model, 3, 4)
    asked = request_for(drafter, model, prompts[2], 65)
    expand = Expander(drafter, asked, GREEDY)
    levels = [(torch.tensor([-1]), torch.tensor([65])), (torch.tensor([0, 0, 0]), torch.tensor([2, 4, 6]))]
    levels += [(torch.tensor([2, 0, 0]), torch.tensor([8, 10, 12])), (torch.tensor([1, 2]), torch.tensor([14, 16]))]
    log_probs = [expand(parents, tokens) for parents, tokens in levels]
    expand.close()
    assert asked.state.length == len(prompts[2])
    for path, row, level in (([2], 0, 1), ([6, 8], 0, 2), ([2, 12], 2, 2), ([2, 10, 14], 0, 3), ([2, 12, 16], 1, 3)):
        expected = along(drafter, model, prompts[2], 65, path)
        torch.testing.assert_close(log_probs[level][row], expected, atol=1e-4, rtol=1e-4)


def along(drafter: HeadDrafter, model: PreTrainedModel, prompt: list[int], newest: int, path: list[int]) -> Tensor:
    """Log-probabilities [V] after `path`, by a chain that is made to follow it."""
    asked, seen = request_for(drafter, model, prompt, newest), []
    ids = iter([*drafter.vocab.to_draft(torch.tensor(path, dtype=torch.long)).tolist(), 0])

    def follow(logits: Tensor) -> Tensor:
        seen.append(logits[0].log_softmax(-1))
        return torch.tensor([next(ids)])

    drafter.head.propose(asked.hidden, *committed(asked), asked.state, len(path) + 1, follow)
    full = torch.full((260,), -torch.inf)
    full[drafter.ids] = seen[-1]
    return full


def test_eagle2_keeps_the_most_probable_paths(model, head, prompts):
    """On a small tree, by exhaustion: no path left out is more probable than one kept (METHODS §3)."""
    drafter = Eagle2Drafter(head, model, nodes=7, depth=2, top_k=3)
    tree = drafter.draft(request_for(drafter, model, prompts[2], 65), GREEDY).tree

    def best(path: list[int], count: int) -> list[tuple[float, int]]:
        values, tokens = along(drafter, model, prompts[2], 65, path).topk(count)
        return list(zip(values.tolist(), tokens.tolist(), strict=True))

    scores = {(token,): score for score, token in best([], 3)}
    scores |= {(first, token): scores[first,] + score for (first,) in list(scores) for score, token in best([first], 3)}
    tokens = tree.tokens.tolist()
    kept = {tuple(tokens[i] for i in row.nonzero().flatten().tolist()[1:]) for row in tree.mask[1:]}
    assert kept == set(sorted(scores, key=lambda path: -scores[path])[:6])


def test_a_sampled_static_tree_draws_siblings_without_replacement(model, head, prompts):
    drafter = StaticTreeDrafter(head, model, SHAPE, sampled=True)
    draft = drafter.draft(request_for(drafter, model, prompts[2], 65), SAMPLED)
    assert draft.sampling == "without_replacement" and draft.q is not None
    for node, children in enumerate(draft.tree.children):
        tokens = draft.tree.tokens[children].tolist()
        assert len(set(tokens)) == len(tokens) and all(draft.q[node, token] > 0 for token in tokens)


@pytest.fixture
def medusa(parts: TargetParts) -> MedusaHead:
    torch.manual_seed(2)
    head = MedusaHead(MedusaBlock(num_heads=3), parts, DraftVocab(torch.arange(260), 260)).eval()
    with torch.no_grad():
        for parameter in head.blocks.parameters():
            parameter.normal_(std=0.3)
    return head


def test_medusa_puts_the_rank_r_guess_of_head_d_at_every_node_of_that_depth_and_rank(model, medusa, prompts):
    drafter = MedusaDrafter(medusa, model, SHAPE)
    asked = request_for(drafter, model, prompts[2], 65)
    best = medusa.head_logits(asked.hidden[-1][-1:], 3)[:, 0].topk(2).indices
    draft = drafter.draft(asked, SAMPLED)
    assert draft.sampling == "deterministic"
    expected = [65] + [int(best[depth - 1, rank]) for depth, rank in zip(SHAPE.depths[1:], SHAPE.ranks[1:], strict=True)]
    assert draft.tree.tokens.tolist() == expected


# --- An independent model -----------------------------------------------------------------------------------------------------


def test_the_model_drafts_its_own_greedy_tokens_and_reuses_what_was_accepted(model, greedy, prompts):
    """Over three rounds: all accepted, some accepted, none accepted; each time as from a fresh cache."""
    drafter = ModelDrafter(model, model, 4)
    request = Request(prompts[0], None, list(prompts[0]), {}, drafter.start())  # type: ignore[arg-type]
    processed = []
    draft_model = drafter.model
    drafter.model = lambda **inputs: (processed.append(inputs["input_ids"].shape[1]), draft_model(**inputs))[1]  # type: ignore[assignment]
    drafter.model.device = draft_model.device
    for committed_tokens in ([*greedy(prompts[0], 5)], [*greedy(prompts[0], 5), 7, 8], [*greedy(prompts[0], 5), 7, 8, 9]):
        drafted = drafter.draft(request, GREEDY).tree.tokens[1:].tolist()
        assert drafted == greedy(request.tokens, 4)
        request.tokens = prompts[0] + committed_tokens
    # 5 prompt tokens; then the last draft (never fed back) and the target's own token; then what the target put in place of drafts
    assert processed == [5, 1, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1]


# --- Refused --------------------------------------------------------------------------------------------------------------------


def test_a_head_for_another_width_or_vocabulary_is_refused(model, parts):
    small = AutoModelForCausalLM.from_config(type(model.config)(**{**model.config.to_dict(), "hidden_size": 32, "head_dim": 8}))
    block = Eagle3Block(aux_layers=[1, 2, 3], draft_vocab_size=None)
    head = Eagle3Head(block, parts, DraftVocab(torch.arange(260), 260))
    with pytest.raises(EngineError, match=r"Eagle3Head cannot draft from this target's states \(width 32"):
        HeadDrafter(head, small, 3)
    head.vocab = DraftVocab(torch.arange(260), 300)
    with pytest.raises(EngineError, match="a target of 300 tokens, this one has 260"):
        HeadDrafter(head, model, 3)


def test_a_draft_model_with_other_tokens_is_refused(model):
    other = AutoModelForCausalLM.from_config(type(model.config)(**{**model.config.to_dict(), "vocab_size": 261}))
    with pytest.raises(EngineError, match="261 tokens and the target 260"):
        ModelDrafter(other, model, 3)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda head, medusa, model: HeadDrafter(head, model, 0), "drafts nothing"),
        (lambda head, medusa, model: NgramDrafter(0, 1, 3), "drafts nothing"),
        (lambda head, medusa, model: ModelDrafter(model, model, 0), "drafts nothing"),
        (lambda head, medusa, model: NgramDrafter(3, 4, 3), "ngram_min=4"),
        (lambda head, medusa, model: HeadDrafter(medusa, model, 4), "deeper than the head, which drafts 3"),
        (
            lambda head, medusa, model: MedusaDrafter(medusa, model, shape_from_paths([(0,) * d for d in (1, 2, 3, 4)])),
            "deeper than the head",
        ),
        (lambda head, medusa, model: Eagle2Drafter(head, model, top_k=129), "wider than the head's vocabulary of 128"),
        (lambda head, medusa, model: Eagle2Drafter(head, model, nodes=1), "leaves no room"),
        (lambda head, medusa, model: MedusaDrafter(medusa, model, shape_from_paths([(0,), (0, 1)])), "no better sibling"),
        (lambda head, medusa, model: StaticTreeDrafter(head, model, shape_from_paths([(0,), (1, 0)])), "orphan"),
    ],
)
def test_drafts_that_cannot_be_are_refused(make, says, head, medusa, model):
    with pytest.raises(RecipeError, match=says):
        make(head, medusa, model)


def test_a_parallel_head_grows_no_tree(medusa, model):
    with pytest.raises(EngineError, match="eval.tree=medusa"):
        Eagle2Drafter(medusa, model, depth=3, top_k=2)


def test_a_tree_needs_a_head_that_goes_on_from_its_own_state(model, parts):
    """P-EAGLE's slots run at once: refused before anything is drafted, not in the middle of a measurement."""
    block = PeagleBlock(aux_layers=[1, 2, 3], num_layers=1, unroll_steps=4, draft_vocab_size=None, mask_token_id=254)
    head = PeagleHead(block, parts, DraftVocab(torch.arange(260), 260)).eval()
    with pytest.raises(EngineError, match="cannot be grown node by node through PeagleHead"):
        Eagle2Drafter(head, model, depth=3, top_k=2)


def test_sampling_at_the_edge_of_the_vocabulary(model, head, prompts):
    """top_k=1 leaves one token: a sampled tree has one child a node, and q is 1 there."""
    drafter = StaticTreeDrafter(head, model, SHAPE, sampled=True)
    draft = drafter.draft(request_for(drafter, model, prompts[2], 65), Settings(max_tokens=4, max_length=512, temperature=1.0, top_k=1))
    assert draft.tree.num_drafts == 2 and draft.q is not None  # (0,) and (0, 0); the others found no token left
    assert math.isclose(float(draft.q[0].max()), 1.0, rel_tol=1e-6)
