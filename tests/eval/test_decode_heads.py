"""Every method's head drafts in the reference decoder through its own `propose`, trained or not."""

from pathlib import Path

import pytest
import torch

from eval.decode import Settings, decode
from eval.drafters import HeadDrafter
from heads import HEADS, head_class
from heads.embedded import resolve_target
from heads.target import load_target_model, read_target
from heads.vocab import DraftVocab
from recipes.schema import load_recipe

RECIPES = sorted(Path("recipes/debug").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_head_of_every_method_is_lossless(path, tmp_path, greedy_of, prompts):
    """Greedy answers are the target's own; sampled ones, with the head's own q, do not depend on the batch."""
    recipe = load_recipe(path)
    target = recipe.target.model_copy(update={"path": str(resolve_target(recipe.target.path, root=tmp_path))})
    parts, model = read_target(target), load_target_model(target)
    greedy = greedy_of(model)
    size = getattr(recipe.head, "draft_vocab_size", None) or 260
    torch.manual_seed(4)
    head = head_class(recipe.method)(recipe.head, parts, DraftVocab(torch.arange(260 - size, 260), 260)).eval()
    k = max(recipe.eval.k)
    decoded = decode(model, prompts, HeadDrafter(head, model, k), Settings(max_tokens=16, max_length=512), concurrency=3)
    assert [request.answer for request in decoded.requests] == [greedy(prompt, 16) for prompt in prompts]
    assert all(r.drafted == k for request in decoded.requests for r in request.rounds)

    sampled = HeadDrafter(head, model, k, sampled=True)
    settings = Settings(max_tokens=8, max_length=512, temperature=1.0, top_k=50)
    alone, together = ([r.answer for r in decode(model, prompts, sampled, settings, concurrency=c).requests] for c in (1, 4))
    assert alone == together


def test_no_method_is_left_out():
    covered = {load_recipe(path).method for path in RECIPES}
    inside_others = {"medusa2", "mtp_native"}  # Medusa's heads on an adapted target; a layer of the target's own files
    assert covered | inside_others == set(HEADS)
