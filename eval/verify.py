"""Which drafted tokens are kept: the acceptance rules of speculative decoding as pure functions of probabilities.

    rule              for drafts that are                        lossless   function
    greedy            any (temperature 0)                        yes        verify_greedy
    token-wise        deterministic, or sampled; chain or tree   yes        verify_tokenwise
    block             sampled; chain                             yes        verify_block
    typical           any                                        NO         verify_typical

"Lossless": the tokens have exactly the target's own law. That holds only if a draft says truly how it came about (`Draft.sampling`).
A *deterministic* draft is a function of the prefix alone (argmax chain, top-k tree, n-gram): its q is 1 on the token, and with the head's
real probabilities the law would be wrong without any visible sign (METHODS §10.4). A *sampled* draft was drawn from q, and exactly that q
is needed, after temperature, top-k and top-p; the one-hot rule would keep the law, but accept Σ p·q instead of Σ min(p, q).
So a draft whose q and declaration disagree is refused.

Every rule asks a `Dice` for its random decisions, so that a test can enumerate all of them and compute the exact law.

Shapes: n nodes of the tree with the root (n = k + 1 for a chain of k drafts), V target vocabulary, D draft vocabulary.
p [n, V]: row i is the target's distribution after node i. q [m, V]: row i is the distribution from which the children of node i were
drawn; rows of nodes without children may be missing at the end or hold anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from eval.trees import Tree
from recipes.errors import EngineError

Sampling = Literal["deterministic", "iid", "without_replacement"]

# For reports and --help: wherever a user picks a rule, this is what is shown.
RULES = {
    "greedy": "temperature 0: keeps drafts equal to the target's argmax (lossless)",
    "tokenwise": "speculative sampling, token by token; one-hot rule for deterministic drafts (lossless)",
    "block": "block verification of sampled chains; accepts at least as much as token-wise (lossless)",
    "typical": "Medusa's typical acceptance; NOT lossless: it changes the target's distribution",
}


# --- Distributions ------------------------------------------------------------------------------------------------------------


def process_logits(logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """Logits [..., V] → probabilities [..., V], in the order temperature, top-k, top-p (as vLLM and transformers do).

    The same function serves p and q: a q processed otherwise than it was sampled breaks losslessness (METHODS §10.2, E01).
    Temperature 0 is a one-hot argmax (top-k and top-p cannot change it). Ties at the k-th logit are all kept. Half precision is
    computed in float32.
    """
    if temperature < 0 or not 0 < top_p <= 1 or (top_k is not None and top_k < 1):
        raise EngineError(
            f"temperature={temperature}, top_k={top_k}, top_p={top_p}; need temperature >= 0, top_k >= 1 or None, 0 < top_p <= 1."
        )
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k, dim=-1).values[..., -1:], -torch.inf)
    probs = logits.softmax(-1)
    if top_p < 1:
        values, order = probs.sort(dim=-1, descending=True, stable=True)
        values[values.cumsum(-1) - values >= top_p] = 0  # a token is kept while the mass before it is short of top_p
        probs = torch.zeros_like(probs).scatter_(-1, order, values)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def scatter_to_target_vocab(q: Tensor, d2t: Tensor, vocab_size: int) -> Tensor:
    """q over a reduced draft vocabulary [..., D] → over the target's [..., V], 0 outside. target_id = draft_id + d2t[draft_id].

    >>> scatter_to_target_vocab(torch.tensor([0.25, 0.75]), torch.tensor([1, 2]), 4)
    tensor([0.0000, 0.2500, 0.0000, 0.7500])
    """
    if d2t.shape != q.shape[-1:]:
        raise EngineError(f"d2t has {d2t.numel()} entries but q covers {q.shape[-1]} tokens; both must have the draft vocabulary's size.")
    target_ids = torch.arange(d2t.numel(), device=d2t.device) + d2t
    low, high = int(target_ids.min()), int(target_ids.max())
    if low < 0 or high >= vocab_size:
        raise EngineError(
            f"d2t maps draft tokens to target ids {low}..{high}, outside the target vocabulary 0..{vocab_size - 1}; "
            "the head was made for another target."
        )
    out = torch.zeros(*q.shape[:-1], vocab_size, dtype=q.dtype, device=q.device)
    return out.index_copy_(-1, target_ids.to(q.device), q)


def expected_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Leviathan's α for one token: P(accept) = Σ min(p, q) = 1 − TV(p, q); p and q [..., V] (arXiv 2211.17192; METHODS §10.2)."""
    return torch.minimum(p, q).sum(-1)


# --- Randomness ---------------------------------------------------------------------------------------------------------------


class Dice(Protocol):
    """The two random decisions of this file. `TorchDice` rolls them; the tests walk through every outcome instead."""

    def coin(self, probability: float) -> bool:
        """True with this probability."""
        ...

    def draw(self, distribution: Tensor) -> int:
        """A token with this distribution [V]."""
        ...


class TorchDice:
    """Dice on a torch.Generator (the distributions are moved to its device)."""

    def __init__(self, generator: torch.Generator):
        self.generator = generator

    def coin(self, probability: float) -> bool:
        return torch.rand((), generator=self.generator, device=self.generator.device, dtype=torch.float64).item() < probability

    def draw(self, distribution: Tensor) -> int:
        return int(torch.multinomial(distribution.to(self.generator.device), 1, generator=self.generator))


# --- Drafts -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Draft:
    """A drafted tree (or chain) and the truth about how its tokens were chosen.

    sampling:
        "deterministic": a function of the prefix (argmax, top-k, n-gram). No q: the one-hot rule holds.
        "iid": the children of a node were drawn from q[node] independently, duplicates kept (SpecInfer). A sampled chain is this.
        "without_replacement": drawn one after another, each from q[node] with the earlier ones taken out (EAGLE-1).

    How many children a node gets must not depend on which tokens were drawn; pruning a sampled tree afterwards is not lossless.
    """

    tree: Tree
    sampling: Sampling
    q: Tensor | None = None  # [m, V], m > the last node with children

    def __post_init__(self):
        if self.sampling not in ("deterministic", "iid", "without_replacement"):
            raise EngineError(f"Draft.sampling={self.sampling!r}: choose 'deterministic', 'iid' or 'without_replacement'.")
        if self.sampling == "deterministic" and self.q is not None:
            raise EngineError(
                "a deterministic draft was given draft probabilities q; verifying it with them is not lossless (METHODS §10.3). "
                "Leave q out, or declare how the tokens were sampled."
            )
        if self.sampling != "deterministic" and self.q is None:
            raise EngineError(
                f"a draft sampled {self.sampling!r} needs the probabilities q it was drawn from, after temperature, top-k and top-p; "
                "without them it could only be verified as deterministic, and would accept less."
            )
        parents_end = int(self.tree.parents.max()) + 1  # 0 for a root alone
        if self.q is not None and (self.q.dim() != 2 or self.q.shape[0] < parents_end):
            raise EngineError(f"q has shape {tuple(self.q.shape)} but nodes 0..{parents_end - 1} have children; give each a row [V].")

    @property
    def sampled(self) -> bool:
        return self.sampling != "deterministic"


@dataclass(frozen=True)
class Verdict:
    """The outcome of one round."""

    path: list[int]  # nodes accepted, from depth 1 down (the root is not among them): the rows of the KV cache to keep
    tokens: list[int]  # tokens committed: those of the path, then the bonus token from the target

    @property
    def num_accepted(self) -> int:
        return len(self.path)


def sample_children(log_probs: Tensor, count: int, sampling: Sampling, dice: Dice) -> list[int]:
    """Draw the children of one node from log_probs [V], in the order in which verification must try them.

    Without replacement fewer than `count` come back where q has fewer tokens. Bound with functools.partial this is a `trees.Choose`.
    """
    if sampling == "deterministic":
        raise EngineError("sample_children draws at random; for deterministic children use trees.top_children.")
    q: Tensor | None = log_probs.exp()
    children: list[int] = []
    while len(children) < count and q is not None:
        children.append(dice.draw(q))
        q = without(q, children[-1]) if sampling == "without_replacement" else q
    return children


# --- The pieces of the token-wise rule -----------------------------------------------------------------------------------------


def acceptance(p: Tensor, token: int, q: Tensor) -> float:
    """Probability that a `token` drawn from q is accepted: min(1, p/q); p and q [V]."""
    if q[token] <= 0:
        raise EngineError(
            f"drafted token {token} has q = 0, so it cannot have been drawn from this q. Check that q is in the target's vocabulary "
            "(scatter_to_target_vocab), was processed with the temperature, top-k and top-p it was sampled with, and the order of siblings."
        )
    return min(1.0, (p[token] / q[token]).item())


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What p [V] becomes once a token drawn from q has been rejected: norm(max(p − q, 0)). p may be scaled (block verification)."""
    left = torch.clamp(p - q, min=0)
    # Nothing is left only where p = q, and then every token is accepted: a rejection is rounding, and p stands.
    return left / left.sum() if left.any() else p / p.sum()


def without(q: Tensor, token: int) -> Tensor | None:
    """q [V] with `token` taken out and renormalised; None where nothing is left."""
    left = q.index_fill(0, torch.tensor(token, device=q.device), 0.0)
    total = left.sum()
    return left / total if total > 0 else None


# --- The rules ----------------------------------------------------------------------------------------------------------------


def follow(tree: Tree, next_token: Callable[[int], int]) -> Verdict:
    """Walk down from the root as long as a child equals the target's own next token; that token is the bonus where none does.

    Args:
        next_token: the target's token after a node; asked once for each node visited.
    """
    tokens, node, path = tree.tokens.tolist(), 0, []
    while True:
        wanted = next_token(node)
        node = next((child for child in tree.children[node] if tokens[child] == wanted), None)
        if node is None:
            return Verdict(path, [tokens[i] for i in path] + [wanted])
        path.append(node)


def verify_greedy(draft: Draft, target_argmax: Tensor) -> Verdict:
    """Keep drafts while they equal the target's argmax; then its argmax is the bonus token (METHODS §10.1). Lossless at temperature 0.

    Right for any draft, sampled or not.

    Args:
        target_argmax: [n] long, the target's most probable token after each node.
    """
    return follow(draft.tree, target_argmax.tolist().__getitem__)


def verify_tokenwise(draft: Draft, p: Tensor, dice: Dice) -> Verdict:
    """Speculative sampling, for chains and trees, sampled and deterministic drafts. Lossless.

    Sampled: at a node, its children are tried in draft order. A child x is accepted with probability min(1, p(x)/q(x)); on rejection
    p ← norm(max(p − q, 0)) and the next is tried. The first one accepted is entered, with its own fresh p. Where none is, the bonus
    token is drawn from what is left of p. The sources differ only in what becomes of q:

    * chain: Leviathan (arXiv 2211.17192, algorithm 1), Chen (2302.01318); METHODS §10.2;
    * "iid" siblings: q unchanged from sibling to sibling, duplicates tried again; SpecInfer (2305.09781, algorithm 2); METHODS §10.4;
    * "without_replacement": after x, q ← norm(q with x taken out); EAGLE-1 (2401.15077); METHODS §10.4.

    Deterministic (METHODS §10.3): q is 1 on the token, so x is accepted with p(x), else taken out of p. That is the same as to draw the
    target's token y ~ p and accept the child equal to y, which is how it is done here: one draw a node, however many children.

    Args:
        p: [n, V], the target's processed probabilities after each node.
    """
    check_probabilities(draft, p)
    if draft.q is None:
        return follow(draft.tree, lambda node: dice.draw(p[node]))
    tokens, path, node = draft.tree.tokens.tolist(), [], 0
    while True:
        children = draft.tree.children[node]
        p_left = p[node]
        q_left = draft.q[node] if children else None  # leaves need no row of q
        for child in children:
            if q_left is None:
                raise EngineError(f"node {node} has {len(children)} children drawn without replacement from fewer tokens.")
            if dice.coin(acceptance(p_left, tokens[child], q_left)):
                path.append(child)
                break
            p_left = residual(p_left, q_left)
            if draft.sampling == "without_replacement":
                q_left = without(q_left, tokens[child])
        else:
            return Verdict(path, [tokens[i] for i in path] + [dice.draw(p_left)])
        node = path[-1]


def block_acceptance(p: Tensor, q: Tensor, tokens: list[int]) -> tuple[list[float], list[float]]:
    """The probabilities of block verification for one sampled chain of γ tokens; p [γ+1, V], q [γ, V] (or longer).

    Returns:
        prefix: p_0..p_γ, p_0 = 1 and p_i = min(1, p_{i−1} · p(x_i)/q(x_i)): the probability the whole prefix may claim.
        accept: h_1..h_γ, h_i = Z_i / (Z_i + 1 − p_i) with Z_i = Σ_x max(p_i·p(x|x^i) − q(x|x^i), 0), and h_γ = p_γ.
    """
    gamma = len(tokens)
    prefix, accept = [1.0], []
    for i, token in enumerate(tokens, start=1):
        if q[i - 1, token] <= 0:
            acceptance(p[i - 1], token, q[i - 1])  # raises, saying why
        prefix.append(min(1.0, prefix[-1] * (p[i - 1, token] / q[i - 1, token]).item()))
        if i == gamma:
            accept.append(prefix[i])
        else:
            excess = torch.clamp(prefix[i] * p[i] - q[i], min=0).sum().item()
            denominator = excess + 1 - prefix[i]
            accept.append(excess / denominator if denominator > 0 else 1.0)
    return prefix, accept


def verify_block(draft: Draft, p: Tensor, dice: Dice) -> Verdict:
    """Block verification of a sampled chain (Sun et al., ICLR 2025, arXiv 2403.10444, algorithm 2; METHODS §10.5). Lossless.

    With the h_i of `block_acceptance`, an independent coin for each i: τ is the *largest* i whose coin falls, not the last before the
    first failure. The bonus token comes from p after x^γ if τ = γ, else from norm(max(p_τ·p(·|x^τ) − q(·|x^τ), 0)).
    Never accepts less than token-wise in expectation. With one-hot q it would be the token-wise rule, so that pairing is refused.
    """
    check_probabilities(draft, p)
    if draft.q is None:
        raise EngineError("block verification needs drafts that were sampled, with their q; for deterministic drafts use verify_tokenwise.")
    gamma, tokens = draft.tree.num_drafts, draft.tree.tokens.tolist()[1:]
    if draft.tree.depth != gamma:
        raise EngineError(
            f"block verification needs a chain, but this tree has {gamma} drafts and depth {draft.tree.depth}; use verify_tokenwise."
        )
    prefix, accept = block_acceptance(p, draft.q, tokens)
    # From the longest prefix down: the first success is the largest, and the coins not thrown are independent of it.
    tau = next((i for i in range(gamma, 0, -1) if dice.coin(accept[i - 1])), 0)
    last = p[tau] if tau == gamma else residual(prefix[tau] * p[tau], draft.q[tau])
    return Verdict(list(range(1, tau + 1)), tokens[:tau] + [dice.draw(last)])


def verify_typical(draft: Draft, p: Tensor, dice: Dice, epsilon: float = 0.09, delta: float = 0.3) -> Verdict:
    """Medusa's typical acceptance (arXiv 2401.10774 §2.3.1; METHODS §1.5). **NOT lossless**: the output is not the target's law.

    A token x after a node is acceptable iff p(x) > min(ε, δ·exp(−H(p))), H the entropy of p there. The longest acceptable path wins,
    ties by total log-likelihood; the bonus token is drawn from p after it. At temperature 0 (p one-hot) this is the greedy rule.
    The lossless way to verify a Medusa tree is `verify_tokenwise` with a deterministic draft.

    Args:
        p: [n, V], the target's processed probabilities after each node.
        epsilon, delta: the defaults are those of Medusa's generate; the paper recommends δ = √ε.
    """
    check_probabilities(draft, p)
    tree = draft.tree
    entropy = torch.special.entr(p).sum(-1)  # [n]
    threshold = torch.clamp(delta * torch.exp(-entropy), max=epsilon).tolist()
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    prob = p[tree.parents[1:], tree.tokens[1:]]  # [n-1]: of each drafted token, after its parent
    log_likelihood = {0: 0.0}  # acceptable nodes only; parents come before children
    for node, (x, log_x) in enumerate(zip(prob.tolist(), prob.log().tolist(), strict=True), start=1):
        if parents[node] in log_likelihood and x > threshold[parents[node]]:
            log_likelihood[node] = log_likelihood[parents[node]] + log_x
    depths = tree.depths.tolist()
    best = max(log_likelihood, key=lambda node: (depths[node], log_likelihood[node]))
    path = tree.mask[best].nonzero().flatten().tolist()[1:]  # ancestors and itself, without the root
    return Verdict(path, [tokens[i] for i in path] + [dice.draw(p[best])])


def check_probabilities(draft: Draft, p: Tensor) -> None:
    """Raise EngineError where p (or q) does not cover this tree or the two have different vocabularies."""
    if p.dim() != 2 or p.shape[0] != draft.tree.num_nodes:
        raise EngineError(
            f"target probabilities have shape {tuple(p.shape)}, but the tree has {draft.tree.num_nodes} nodes; give each a row [V]."
        )
    if draft.q is not None and draft.q.shape[1] != p.shape[1]:
        raise EngineError(
            f"q covers {draft.q.shape[1]} tokens and p {p.shape[1]}; bring q to the target's vocabulary with scatter_to_target_vocab "
            "(q = 0 outside the draft's)."
        )
