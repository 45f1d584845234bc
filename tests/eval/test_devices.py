"""The reference decoder beside a target on another device: chains, trees, sampling and verification answer as on the CPU."""

import copy

import pytest

from eval.decode import Settings, decode
from eval.drafters import Eagle2Drafter, HeadDrafter, NgramDrafter, StaticTreeDrafter
from eval.trees import shape_from_paths
from heads.target import load_target_model
from tests.far import far_device

GREEDY = Settings(max_tokens=10, max_length=512)
SAMPLED = Settings(max_tokens=10, max_length=512, temperature=1.0, top_k=50)


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafts", ["chain", "sampled chain", "eagle2", "static", "ngram"])
def test_answers_do_not_depend_on_the_device(drafts, settings, target, head, prompts):
    def answers(head, model) -> list[list[int]]:
        drafter = {
            "chain": lambda: HeadDrafter(head, model, 3),
            "sampled chain": lambda: HeadDrafter(head, model, 3, sampled=True),
            "eagle2": lambda: Eagle2Drafter(head, model, nodes=10, depth=3, top_k=3),
            "static": lambda: StaticTreeDrafter(head, model, shape_from_paths([[0], [1], [0, 0]])),
            "ngram": lambda: NgramDrafter(3, 1, 3),
        }[drafts]()
        return [request.answer for request in decode(model, prompts, drafter, settings, concurrency=3).requests]

    model = load_target_model(target)
    here = answers(head, model)
    with far_device() as far:
        assert answers(copy.deepcopy(head).to(far), model.to(far)) == here
