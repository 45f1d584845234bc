"""The reference decoder is lossless, rolls its cache back exactly, and ends answers where they end."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MistralConfig, PreTrainedModel

from eval.decode import Request, Settings, decode, stop_strings
from eval.drafters import Eagle2Drafter, HeadDrafter, MedusaDrafter, ModelDrafter, NgramDrafter, NoDrafter, StaticTreeDrafter
from eval.target_cache import TargetCache
from eval.trees import build_tree, shape_from_paths
from eval.verify import Draft
from heads.eagle3 import Eagle3Head
from heads.target import load_target_model
from recipes.errors import EngineError, TargetError

LENGTH = 42  # longer than what trained_head has seen: first everything is accepted, later little
SHAPE = shape_from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)])
GREEDY = Settings(max_tokens=LENGTH, max_length=512)


class OracleTrees:
    """Trees in which the target's own greedy tokens stand somewhere among random ones, to a random depth."""

    layers, sampled, depth = list[int](), False, 4

    def __init__(self, greedy: Callable[[list[int], int], list[int]], vocab: int):
        self.greedy, self.vocab, self.random = greedy, vocab, random.Random(0)

    def start(self) -> None:
        return None

    def draft(self, request: Request, settings: Settings) -> Draft:
        done = len(request.answer)
        right = self.greedy(request.prompt, done + self.depth)[done:][: self.random.randint(0, self.depth)]
        tokens, parents, behind = [request.tokens[-1]], [-1], 0
        for token in right:
            first = len(tokens)
            wrong = [t for t in self.random.sample(range(self.vocab), 3) if t != token][:2]
            siblings = self.random.sample([token, *wrong], 3)
            tokens += siblings
            parents += [behind] * 3
            behind = first + siblings.index(token)
        return Draft(build_tree(tokens, parents), "deterministic")


def drafters(model: PreTrainedModel, head: Eagle3Head, greedy: Callable) -> dict[str, Any]:
    return {
        "none": NoDrafter(),
        "ngram": NgramDrafter(4, 1, 3),
        "chain": HeadDrafter(head, model, 4),
        "probabilistic": HeadDrafter(head, model, 4, sampled=True),  # at temperature 0 it drafts greedily
        "medusa": MedusaDrafter(head, model, SHAPE),
        "static": StaticTreeDrafter(head, model, SHAPE),
        "eagle2": Eagle2Drafter(head, model, nodes=20, depth=4, top_k=4),
        "model": ModelDrafter(model, model, 4),
        "oracle": OracleTrees(greedy, 260),
    }


DRAFTERS = ["none", "ngram", "chain", "probabilistic", "medusa", "static", "eagle2", "model", "oracle"]


# --- Temperature 0 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_output_is_the_targets_own(name, model, trained_head, greedy, prompts):
    """Token for token, whatever drafts and however good, alone and beside requests of other lengths that join and leave (E01)."""
    drafter = drafters(model, trained_head, greedy)[name]
    for concurrency, chosen in ((1, prompts[2:]), (3, prompts)):
        decoded = decode(model, chosen, drafter, GREEDY, concurrency=concurrency)
        assert [request.answer for request in decoded.requests] == [greedy(prompt, LENGTH) for prompt in chosen]
        assert all(request.finish_reason == "length" for request in decoded.requests)


@pytest.mark.parametrize("name", ["chain", "static", "eagle2"])
def test_an_overfitted_head_has_every_draft_accepted(name, model, trained_head, greedy, prompts):
    """Features, positions and the draft cache's refresh are those of training: otherwise the head would miss somewhere."""
    drafter = drafters(model, trained_head, greedy)[name]
    settings = Settings(max_tokens=26, max_length=512)
    for request in decode(model, prompts, drafter, settings, concurrency=4).requests:
        assert {r.accepted for r in request.rounds} == {4}


def test_an_untrained_head_is_harmless(model, head, greedy, prompts):
    decoded = decode(model, prompts, Eagle2Drafter(head, model, nodes=12, depth=3, top_k=3), GREEDY, concurrency=4)
    assert [request.answer for request in decoded.requests] == [greedy(prompt, LENGTH) for prompt in prompts]


@pytest.mark.parametrize(
    ("family", "more"),
    [(MistralConfig, {}), (Gemma3TextConfig, {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]})],
    ids=["mistral", "gemma3"],
)
def test_sliding_windows_survive_trees_and_roll_back(family, more, greedy_of):
    """Windows count positions of the text, not slots of the cache; one mask for Mistral, one a layer type for Gemma."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
    config = family(sliding_window=6, head_dim=8, max_position_embeddings=128, initializer_range=0.3, **sizes, **ids, **more)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()

    greedy = greedy_of(model)
    prompts = [[3, 4, 5], list(range(10, 30)), [7]]
    settings = Settings(max_tokens=20, max_length=128)
    expected = [greedy(prompt, 20) for prompt in prompts]
    for drafter in (NoDrafter(), OracleTrees(greedy, 50), ModelDrafter(model, model, 3)):
        decoded = decode(model, prompts, drafter, settings, concurrency=3)
        assert [request.answer for request in decoded.requests] == expected


# --- The cache ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chain", "static", "eagle2", "model", "oracle"])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_after_every_round_the_cache_is_that_of_a_fresh_prefill(name, concurrency, target, trained_head, greedy, prompts):
    model = load_target_model(target).double()  # so that a wrong slot stands out from rounding
    rounds = 0

    def compare(cache: TargetCache, active: list[Request]) -> None:
        nonlocal rounds
        rounds += 1
        assert cache.slots == max(cache.lengths)
        for row, request in enumerate(active):
            if request.finish_reason:  # its tokens were trimmed, its cache not
                continue
            assert cache.lengths[row] == len(request.tokens) - 1
            fresh = TargetCache(model)
            fresh.prefill([request.tokens[:-1]])
            for mine, theirs in zip(cache.cache.layers, fresh.cache.layers, strict=True):
                torch.testing.assert_close(mine.keys[row, :, : cache.lengths[row]], theirs.keys[0], atol=1e-9, rtol=0)
                torch.testing.assert_close(mine.values[row, :, : cache.lengths[row]], theirs.values[0], atol=1e-9, rtol=0)

    settings = Settings(max_tokens=50, max_length=512)
    decode(model, prompts, drafters(model, trained_head, greedy)[name], settings, concurrency=concurrency, on_round=compare)
    assert rounds > 10


@pytest.mark.parametrize("name", ["chain", "static", "eagle2"])
def test_the_draft_cache_holds_true_features_only(name, model, trained_head, greedy, prompts):
    """After any round: as if the head had read the target's features of all committed tokens at once (METHODS §2.4, vllm#14649)."""

    def compare(cache: TargetCache, active: list[Request]) -> None:
        for request in active:
            fresh = TargetCache(model, drafter.layers)
            states = fresh.prefill([request.tokens[:-1]])
            known = request.state.length  # the states of the last round's tokens are only read at the next draft
            replay = trained_head.new_cache()
            hidden = {layer: h[0, :known] for layer, h in states.hidden.items()}
            tokens = torch.tensor(request.tokens[1 : known + 1])
            trained_head.propose(hidden, tokens, torch.arange(known), replay, 1, lambda logits: logits.argmax(-1))
            torch.testing.assert_close(request.state.keys[0], replay.keys[0], atol=1e-4, rtol=0)
            torch.testing.assert_close(request.state.values[0], replay.values[0], atol=1e-4, rtol=0)

    drafter = drafters(model, trained_head, greedy)[name]
    decode(model, prompts[:2], drafter, Settings(max_tokens=50, max_length=512), concurrency=2, on_round=compare)


# --- Where an answer ends -------------------------------------------------------------------------------------------------------


def test_eos_inside_a_block_ends_the_answer_and_the_draft_still_counts_in_full(model, trained_head, greedy, prompts):
    """B40: vLLM counts the whole draft as it was verified, and returns tokens up to EOS."""
    answer = greedy(prompts[0], 20)
    end = next(i for i in range(7, 10) if answer[i] not in answer[:i])  # inside the second block, 6..10
    settings = Settings(max_tokens=20, max_length=512, eos_ids=frozenset({answer[end]}))
    (request,) = decode(model, prompts[:1], HeadDrafter(trained_head, model, 4), settings).requests
    assert request.answer == answer[: end + 1] and request.finish_reason == "stop"
    last = request.rounds[-1]
    assert last.accepted == last.drafted == 4 and last.kept < last.accepted + 1
    assert request.counts.num_new_tokens == end + 1


def test_eos_as_the_very_first_token(model, greedy, prompts):
    settings = Settings(max_tokens=20, max_length=512, eos_ids=frozenset(greedy(prompts[1], 1)))
    decoded = decode(model, [prompts[1], prompts[0]], NgramDrafter(3, 1, 3), settings)
    assert decoded.requests[0].answer == greedy(prompts[1], 1) and decoded.requests[0].rounds == []


@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_max_tokens_is_never_overrun(max_tokens, model, trained_head, greedy, prompts):
    decoded = decode(model, prompts, HeadDrafter(trained_head, model, 4), Settings(max_tokens=max_tokens, max_length=512), concurrency=2)
    for request, prompt in zip(decoded.requests, prompts, strict=True):
        assert request.answer == greedy(prompt, max_tokens) and request.finish_reason == "length"
        assert all(r.drafted == 4 for r in request.rounds)  # a draft is not shortened for max_tokens, as in vLLM


def test_the_end_of_the_context_ends_drafts_first_and_then_the_answer(model, trained_head, greedy, prompts):
    settings = Settings(max_tokens=100, max_length=len(prompts[0]) + 18)
    (request,) = decode(model, prompts[:1], HeadDrafter(trained_head, model, 4), settings).requests
    assert request.answer == greedy(prompts[0], 18) and request.finish_reason == "length"
    assert [r.drafted for r in request.rounds] == [4, 4, 4, 0, 0]


def test_stop_strings_end_the_answer_with_the_token_that_completes_them(model, trained_head, prompts, tiny_tokenizer, greedy):
    answer = next(a for a in (greedy(p, 40) for p in prompts) if any(32 < x < 127 and 32 < y < 127 for x, y in itertools.pairwise(a)))
    at = next(i for i in range(39) if 32 < answer[i] < 127 and 32 < answer[i + 1] < 127)
    text = tiny_tokenizer.decode(answer[at : at + 2])
    settings = Settings(max_tokens=40, max_length=512, should_stop=stop_strings(tiny_tokenizer, ["never there", text]))
    prompt = next(p for p in prompts if greedy(p, 40) == answer)
    (request,) = decode(model, [prompt], HeadDrafter(trained_head, model, 4), settings).requests
    assert text in tiny_tokenizer.decode(request.answer) and text not in tiny_tokenizer.decode(request.answer[:-1])
    assert request.finish_reason == "stop"


# --- Time and bad input ---------------------------------------------------------------------------------------------------------


def test_time_is_split_into_parts_that_add_up(model, trained_head, prompts):
    decoded = decode(model, prompts, HeadDrafter(trained_head, model, 4), GREEDY, concurrency=2)
    cost = decoded.round_cost
    assert min(cost.draft, cost.verify, cost.overhead) > 0
    assert cost.total * decoded.rounds + decoded.seconds["prefill"] == pytest.approx(decoded.seconds["all"])


@pytest.mark.parametrize(
    ("prompts", "changes", "says"),
    [
        ([], {}, "no prompt"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1] * 512], {}, "prompt 0 has 512 tokens"),
        ([[1, 260]], {}, "outside the target's vocabulary 0..259"),
        ([[1]], {"max_tokens": 0}, "max_tokens=0"),
        ([[1]], {"max_length": 513}, "512 positions"),
        ([[1]], {"temperature": -1.0}, "temperature=-1"),
        ([[1]], {"top_p": 0.0}, "top_p=0"),
        ([[1]], {"rule": "block", "temperature": 1.0}, "draft_sample_method=probabilistic"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(prompts, changes, says, model, head, monkeypatch):
    monkeypatch.setattr(TargetCache, "prefill", lambda *_: pytest.fail("the target ran"))
    with pytest.raises(EngineError, match=says):
        decode(model, prompts, HeadDrafter(head, model, 2), replace(GREEDY, **changes))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [("layer_types", ["linear_attention"] * 4, "cannot be rolled back"), ("_attn_implementation", "flex_attention", "no tree mask")],
)
def test_a_target_that_cannot_be_rolled_back_is_refused(field, value, says, model, monkeypatch):
    monkeypatch.setattr(model.config, field, value, raising=False)
    with pytest.raises(TargetError, match=says):
        decode(model, [[1]], NoDrafter(), GREEDY)
