"""EAGLE-1 (HASS) and Medusa heads in the reference decoder: what training estimated is what is accepted, trees lose nothing."""

from types import SimpleNamespace

import pytest
import torch

from data_prep.store import RowFeatures
from eval.decode import Settings, decode
from eval.drafters import Eagle2Drafter, HeadDrafter, MedusaDrafter, StaticTreeDrafter
from eval.trees import medusa_paths, rank_accuracies, rank_hits, shape_from_paths
from heads import LAST_HIDDEN, head_class
from heads.vocab import DraftVocab
from recipes.errors import EngineError
from recipes.methods import METHODS
from tests.train.stored import states_of
from train.eagle1 import Eagle1Objective
from train.medusa import MedusaObjective
from train.objective import simulate_chain
from train.packing import collate

ANSWER, K = 24, 3
CASES = {  # objective, head block, objective block, steps to a head that is right now and then
    "eagle1": (Eagle1Objective, {}, {"passes": 1, "noise": 0.0, "logit_weight": 1.0}, 60),
    "hass": (Eagle1Objective, {}, {"passes": 3, "noise": 0.0, "logit_weight": 1.0, "top_k_weight": 0.5}, 60),
    "medusa": (MedusaObjective, {"num_heads": 4, "shared_lm_head": True}, {"loss": "ce"}, 20),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, model, parts, prompts, greedy):
    """A half-trained head, so that some drafts are accepted and some are not, and its batch of the target's greedy answers."""
    objective_class, block, settings, steps = CASES[request.param]
    method = "medusa" if request.param == "medusa" else "eagle1"
    rows = []
    for prompt in prompts:
        ids = torch.tensor(prompt + greedy(prompt, ANSWER))
        _, last = states_of(model, ids, [])
        rows.append(RowFeatures(ids, torch.arange(len(ids)) >= len(prompt), {}, last))
    batch = collate(rows, [], 64)
    torch.manual_seed(0)
    vocab = DraftVocab(torch.arange(260), 260)
    head = head_class(method)(METHODS[method].head(**block), parts, vocab)
    objective = objective_class(head, parts, METHODS[method].objective(**settings)).train()
    optimizer = torch.optim.Adam(objective.parameters(), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        (objective(batch).loss_sum / batch.loss_mask.sum()).backward()
        optimizer.step()
    return SimpleNamespace(name=request.param, head=head.eval(), objective=objective.eval(), batch=batch)


def test_training_estimates_what_is_accepted(case, model, prompts, greedy):
    """DESIGN §8: every round of `AL~` on the target's own greedy answers is a round of the reference decoder, to the token."""
    with torch.no_grad():
        estimated = simulate_chain(case.objective(case.batch).hits, case.batch.loss_mask, case.batch.document, K)
    settings = Settings(max_tokens=ANSWER + K + 1, max_length=512)
    decoded = decode(model, prompts, HeadDrafter(case.head, model, K), settings)
    counted = [[r.accepted for r in request.rounds] for request in decoded.requests]
    assert [rounds[: len(e)] for rounds, e in zip(counted, estimated, strict=True)] == estimated
    accepted = [a for rounds in estimated for a in rounds]
    assert 0 < sum(accepted) < K * len(accepted), "neither nothing nor everything: the comparison means something"
    for request, prompt in zip(decoded.requests, prompts, strict=True):
        assert request.answer == greedy(prompt, ANSWER + K + 1)


def test_trees(case, model, prompts, greedy):
    """EAGLE-2's and EAGLE-1's trees, Medusa's calibrated tree: the target's own answer; a tree that holds the chain accepts as much."""
    settings = Settings(max_tokens=ANSWER, max_length=512)
    if case.name == "medusa":
        labels, last = torch.stack([torch.roll(case.batch.input_ids, -2 - i) for i in range(4)], 1), case.batch.last_hidden
        with torch.no_grad():
            top = case.head.head_logits(last, 4).topk(5).indices.transpose(0, 1)  # [N, K, R]
        inside = torch.stack([torch.roll(case.batch.document, -2 - i) == case.batch.document for i in range(4)], 1)
        paths = medusa_paths(rank_accuracies(*rank_hits(top, labels, inside)), 24)
        assert max(map(len, paths)) <= 4
        trees = [MedusaDrafter(case.head, model, shape_from_paths(paths))]
        with pytest.raises(EngineError, match="drafts all depths at once"):
            Eagle2Drafter(case.head, model, depth=4)
    else:
        trees = [Eagle2Drafter(case.head, model, nodes=24, depth=4, top_k=4)]  # its breadth follows q, flat here: it need not beat a chain
        trees.append(StaticTreeDrafter(case.head, model, shape_from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)])))
    per_round = lambda decoded: sum(r.accepted for q in decoded.requests for r in q.rounds) / sum(len(q.rounds) for q in decoded.requests)  # noqa: E731
    chain = per_round(decode(model, prompts, HeadDrafter(case.head, model, 4), settings))
    for drafter in trees:
        decoded = decode(model, prompts, drafter, settings)
        assert [request.answer for request in decoded.requests] == [greedy(prompt, ANSWER) for prompt in prompts]
        assert per_round(decoded) >= (1.0 if isinstance(drafter, Eagle2Drafter) else chain)


def test_states_wanted(case, model):
    """The decoder is asked for the post-norm last hidden state and for nothing else."""
    assert HeadDrafter(case.head, model, K).layers == [LAST_HIDDEN]
