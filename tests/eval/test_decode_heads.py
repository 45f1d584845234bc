"""Every method's head drafts in the reference decoder through its own `propose`, trained or not."""

from pathlib import Path

import pytest
import torch

from eval.decode import Settings, decode
from eval.drafters import Eagle2Drafter, HeadDrafter, NoDrafter
from heads import HEADS, head_class
from heads.embedded import resolve_target
from heads.target import load_target_model, read_target
from heads.vocab import DraftVocab
from recipes.errors import TargetError
from recipes.head_blocks import MtpNativeHead as MtpNativeBlock
from recipes.schema import Target, load_recipe
from tests.heads.native_targets import make_target

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


@pytest.mark.parametrize("family", ["mimo", "deepseek_v3", "glm4_moe"])
def test_a_targets_own_mtp_layer_is_lossless(family, tmp_path, greedy_of):
    """Chain and EAGLE-2's tree through a layer of the target's files, on targets with mixtures of experts and latent attention too."""
    target = Target(path=str(make_target(family, tmp_path)), dtype="float32")
    model, parts = load_target_model(target), read_target(target)
    greedy = greedy_of(model)
    head = head_class("mtp_native")(MtpNativeBlock(), parts, DraftVocab(torch.arange(50), 50)).eval()
    prompts, settings = [[3, 4, 5, 6], [7], list(range(10, 30))], Settings(max_tokens=12, max_length=64)
    for drafter in (HeadDrafter(head, model, 2), Eagle2Drafter(head, model, nodes=10, depth=3, top_k=3)):
        decoded = decode(model, prompts, drafter, settings, concurrency=3)
        assert [request.answer for request in decoded.requests] == [greedy(prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_recurrent_layers_are_refused_by_name(family, tmp_path):
    """Their state is no list of entries from which the rejected ones could be dropped."""
    model = load_target_model(Target(path=str(make_target(family, tmp_path)), dtype="float32"))
    with pytest.raises(TargetError, match=r"linear_attention.*eval.engine=vllm"):
        decode(model, [[1]], NoDrafter(), Settings(max_tokens=2, max_length=64))


def test_no_method_is_left_out():
    covered = {load_recipe(path).method for path in RECIPES} | {"mtp_native"}
    assert covered | {"medusa2"} == set(HEADS)  # Medusa's heads; its target is another, its head is not
