"""The reference decoder: draft, verify, roll back, in plain PyTorch over the target's real KV cache.

    round    1. draft     the drafter proposes a chain or tree behind each request's last committed token (the root)
             2. verify    one target forward over all trees; `eval.verify` keeps a path and adds one token of the target's own
             3. roll back the cache keeps the root's and the path's entries (`eval.target_cache`)
             4. refresh   the target's states at the kept positions go to the drafter, whose own cache is extended with true features

Every request draws from dice of its own, so its tokens do not depend on what else is in flight. Counts follow vLLM's per-request
metrics: the prefill's token is no round; a draft counts in full as it was verified, even where EOS or `max_tokens` cut its round
short (`Round.kept` tells); `max_tokens` does not shorten a draft, only the end of the context does.

Shapes: B requests in flight, n nodes, V vocabulary, H hidden size.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.ledger import RoundCost
from eval.metrics import RequestCounts
from eval.target_cache import States, TargetCache
from eval.trees import chain_tree
from eval.verify import Dice, Draft, TorchDice, Verdict, process_logits, verify_block, verify_greedy, verify_tokenwise, verify_typical
from recipes.errors import EngineError

Rule = Literal["tokenwise", "block", "typical"]  # typical is NOT lossless (eval.verify.RULES)


@dataclass(frozen=True)
class Settings:
    """How to decode. At temperature 0 every rule is the greedy one."""

    max_tokens: int  # of the answer
    max_length: int  # of prompt and answer: what the target (or the engine it is compared with) allows
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    rule: Rule = "tokenwise"
    eos_ids: frozenset[int] = frozenset()  # and other stop tokens; the stop token is part of the answer
    should_stop: Callable[[list[int]], bool] | None = None  # called with the answer's tokens after each one; see `stop_strings`
    seed: int = 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """Logits [..., V] → the distribution that is sampled from; the same for the target's and the draft's."""
        return process_logits(logits, self.temperature, self.top_k, self.top_p)


class Round(NamedTuple):
    """One target forward of one request."""

    accepted: int  # drafted tokens accepted, before any trimming
    drafted: int
    depth: int  # of the draft: equal to `drafted` for a chain
    kept: int  # tokens committed; less than accepted + 1 where the answer ended inside the block


@dataclass(eq=False)
class Request:
    """One request: what a drafter sees of it, and its outcome."""

    prompt: list[int]
    dice: Dice
    tokens: list[int] = field(default_factory=list)  # prompt and answer; the last one has not been processed by the target
    hidden: dict[int, Tensor] = field(default_factory=dict)  # {layer: [m, H]} of the m positions processed since the last draft
    state: Any = None  # the drafter's own (a draft KV cache)
    rounds: list[Round] = field(default_factory=list)
    candidates: list[tuple[int, list[int]]] = field(default_factory=list)  # at visited nodes: the target's token, the children's
    finish_reason: Literal["stop", "length"] | None = None

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def counts(self) -> RequestCounts:
        """For `eval.metrics`."""
        accepted, drafted, depth, kept = zip(*self.rounds, strict=True) if self.rounds else ((), (), (), ())
        return RequestCounts(accepted, drafted, depth, kept)


class Drafter(Protocol):
    """Whatever proposes tokens for one request: a head, n-gram lookup, another model, in sequence or all at once.

    A drafter checks at construction that it fits its target. `draft` reads `request.tokens` and `request.hidden`, keeps what it
    wants to remember in `request.state`, and tells truly how the tokens came about (`Draft.sampling`).
    """

    depth: int  # most tokens ahead that a draft reaches
    layers: list[int]  # states it wants in `request.hidden` (LAST_HIDDEN included); [] for none
    sampled: bool  # whether drafts are drawn at random (at temperature > 0)

    def start(self) -> Any:
        """A new request's state."""
        ...

    def draft(self, request: Request, settings: Settings) -> Draft: ...


@dataclass
class Decoded:
    """All requests, in the order of the prompts, and where the time went."""

    requests: list[Request]
    seconds: dict[str, float]  # `prefill`, `draft`, `verify` (target forwards) and `all`
    rounds: int  # target forwards after prefills; each served all requests in flight

    @property
    def round_cost(self) -> RoundCost:
        """Seconds of one round for all requests in flight (`eval.ledger`)."""
        rounds = max(self.rounds, 1)
        other = self.seconds["all"] - self.seconds["prefill"] - self.seconds["draft"] - self.seconds["verify"]
        return RoundCost(self.seconds["draft"] / rounds, self.seconds["verify"] / rounds, other / rounds)


def decode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter,
    settings: Settings,
    *,
    concurrency: int = 1,
    make_dice: Callable[[int], Dice] | None = None,
    on_round: Callable[[TargetCache, list[Request]], None] = lambda cache, active: None,
) -> Decoded:
    """Answer every prompt. Requests join as others finish, at most `concurrency` in flight.

    Args:
        prompts: token ids, at least one each. A prompt that leaves less than `max_tokens` of `max_length` ends there.
        make_dice: the dice of request number i; by default seeded with `settings.seed + i`.
        on_round: called after each round's roll-back with the cache and the requests of that round, finished ones included.

    Raises:
        EngineError, TargetError: prompt empty, too long or with unknown ids; settings out of range or not fit for this
            drafter; a target that cannot be rolled back. All before anything runs.
    """
    check(model, prompts, drafter, settings, concurrency)
    make_dice = make_dice or (lambda i: TorchDice(torch.Generator().manual_seed(settings.seed + i)))
    requests = [Request(list(prompt), make_dice(i), list(prompt), state=drafter.start()) for i, prompt in enumerate(prompts)]
    cache, clock = TargetCache(model, drafter.layers), Clock(model.device)
    waiting, active, rounds = deque(requests), list[Request](), 0
    with clock("all"):
        while waiting or active:
            if waiting and len(active) < concurrency:
                joining = [waiting.popleft() for _ in range(min(concurrency - len(active), len(waiting)))]
                active += joining
                with clock("prefill"):
                    states = cache.prefill([request.prompt for request in joining])
                begin(joining, states, settings)
            else:
                with clock("draft"):
                    drafts = [draft_for(request, drafter, settings) for request in active]
                with clock("verify"):
                    states = cache.forward([draft.tree for draft in drafts])
                finish_round(active, drafts, states, cache, settings)
                rounds += 1
                on_round(cache, active)
            going = [row for row, request in enumerate(active) if request.finish_reason is None]
            cache.select(going)
            active = [active[row] for row in going]
    return Decoded(requests, clock.seconds, rounds)


def begin(requests: list[Request], states: States, settings: Settings) -> None:
    """After the prefill: the first token is the target's own, and the prompt's states are the drafter's."""
    law = target_law(states.logits, settings)
    for row, request in enumerate(requests):
        first = int(law[row, 0]) if settings.temperature == 0 else request.dice.draw(law[row, 0])
        request.hidden = {layer: hidden[row, : len(request.prompt)] for layer, hidden in states.hidden.items()}
        commit(request, [first], settings)


def draft_for(request: Request, drafter: Drafter, settings: Settings) -> Draft:
    """A draft, or none where the context has no room for one."""
    if len(request.tokens) + drafter.depth > settings.max_length:
        return no_draft(request)
    return drafter.draft(request, settings)


def finish_round(active: list[Request], drafts: list[Draft], states: States, cache: TargetCache, settings: Settings) -> None:
    """Verify, commit, roll back, and hand the kept positions' states to the drafters."""
    law = target_law(states.logits, settings)
    verdicts = []
    for row, (request, draft) in enumerate(zip(active, drafts, strict=True)):
        verdict = judge(draft, law[row, : draft.tree.num_nodes], settings, request.dice)
        tokens, children = draft.tree.tokens.tolist(), draft.tree.children
        for node, token in zip((0, *verdict.path), verdict.tokens, strict=True):
            if children[node]:
                request.candidates.append((token, [tokens[child] for child in children[node]]))
        kept = commit(request, verdict.tokens, settings)
        request.rounds.append(Round(verdict.num_accepted, draft.tree.num_drafts, draft.tree.depth, kept))
        nodes = torch.tensor([0, *verdict.path], device=states.logits.device)
        request.hidden = {layer: hidden[row, nodes] for layer, hidden in states.hidden.items()}
        verdicts.append(verdict)
    cache.keep([verdict.path for verdict in verdicts])


def target_law(logits: Tensor, settings: Settings) -> Tensor:
    """Logits [B, n, V] → what the rules read, on the CPU: argmax [B, n] at temperature 0, else probabilities [B, n, V]."""
    return (logits.argmax(-1) if settings.temperature == 0 else settings.probabilities(logits)).cpu()


def judge(draft: Draft, law: Tensor, settings: Settings, dice: Dice) -> Verdict:
    """Apply the rule that the settings ask for; `law` is one request's part of `target_law`."""
    if settings.temperature == 0:
        return verify_greedy(draft, law)
    if draft.tree.num_drafts == 0 or settings.rule == "tokenwise":
        return verify_tokenwise(draft, law, dice)
    return (verify_block if settings.rule == "block" else verify_typical)(draft, law, dice)


def commit(request: Request, tokens: list[int], settings: Settings) -> int:
    """Append tokens up to the end of the answer; returns how many. EOS, then stop strings, then length, as vLLM checks them."""
    for count, token in enumerate(tokens, start=1):
        request.tokens.append(token)
        if token in settings.eos_ids or (settings.should_stop and settings.should_stop(request.answer)):
            request.finish_reason = "stop"
        elif len(request.tokens) - len(request.prompt) >= settings.max_tokens or len(request.tokens) >= settings.max_length:
            request.finish_reason = "length"
        if request.finish_reason:
            return count
    return len(tokens)


def no_draft(request: Request) -> Draft:
    """A round without speculation: the root alone."""
    return Draft(chain_tree(request.tokens[-1], []), "deterministic")


def stop_strings(tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> Callable[[list[int]], bool]:
    """For `Settings.should_stop`: whether the answer's text holds one of the strings, the token that completes it being the last."""
    window = 4 * max(map(len, strings)) + 8  # tokens that surely hold the longest string: a token is at least one byte

    def should_stop(answer: list[int]) -> bool:
        text = tokenizer.decode(answer[-window:], skip_special_tokens=True)
        return any(string in text for string in strings)

    return should_stop


def check(model: PreTrainedModel, prompts: Sequence[Sequence[int]], drafter: Drafter, settings: Settings, concurrency: int) -> None:
    """Everything that can be known to fail, before anything runs."""
    TargetCache(model)  # refuses targets that cannot be rolled back
    vocab = model.config.get_text_config().vocab_size
    limit = model.config.get_text_config().max_position_embeddings
    if settings.max_tokens < 1 or concurrency < 1:
        raise EngineError(f"max_tokens={settings.max_tokens} and concurrency={concurrency} must be 1 or more.")
    if settings.max_length > limit:
        raise EngineError(f"max_length={settings.max_length} is more than the target's {limit} positions; lower eval.max_model_len.")
    settings.probabilities(torch.zeros(2))  # refuses a temperature, top-k or top-p out of range
    if not prompts:
        raise EngineError("no prompt was given; check eval.prompts and eval.max_prompts.")
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise EngineError(f"prompt {i} is empty; a target needs at least one token to predict the next.")
        if len(prompt) >= settings.max_length:
            raise EngineError(
                f"prompt {i} has {len(prompt)} tokens, which leaves no room for an answer in a context of {settings.max_length}; "
                "shorten it or raise eval.max_model_len."
            )
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise EngineError(f"prompt {i} holds token ids {min(prompt)}..{max(prompt)}, outside the target's vocabulary 0..{vocab - 1}.")
    if settings.rule == "block" and settings.temperature > 0 and not drafter.sampled:
        raise EngineError(
            "block verification needs drafts that were sampled; set eval.draft_sample_method=probabilistic, or use the token-wise rule, "
            "which is as good for deterministic drafts."
        )


class Clock:
    """Adds up seconds by name; on a GPU it waits for the device, so that each part gets its own work."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, float] = {"all": 0.0, "prefill": 0.0, "draft": 0.0, "verify": 0.0}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = self._now()
        yield
        self.seconds[name] += self._now() - began

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
