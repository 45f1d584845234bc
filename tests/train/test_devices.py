"""An objective and its head compute on whatever device they are moved to, with nothing left behind on the CPU."""

from pathlib import Path

import pytest
import torch

from heads import LAST_HIDDEN, head_class
from heads.embedded import resolve_target
from heads.target import read_target
from heads.vocab import DraftVocab
from recipes.schema import load_recipe
from tests.far import FarTensor, far_device, near
from train.bench import random_batch
from train.objective import objective_class
from train.validate import chain_hits, count_rounds

DEBUG = Path(__file__).parents[2] / "recipes/debug"
CASES = [(path.stem, ()) for path in sorted(DEBUG.glob("*.yaml"))]
CASES += [(name, ("objective.loss=lk",)) for name in ("eagle3", "peagle", "mtp", "pard")]
CASES += [
    ("eagle1", ("objective.top_k_weight=1.0",)),
    ("eagle1", ("objective.passes=3",)),
    ("pard", ("objective.confidence_weights=true",)),
]
CASES += [("dflash", ("objective.weights=dpace", "objective.gamma=7.0")), ("mtp", ("head.shared=false", "eval.engine=reference"))]
CASES += [("eagle3", ("head.fc_norm=true", "head.norm_output=true", "head.train_lm_head=false"))]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory):
    """A function: path of a tiny target in a recipe → its folder, made once."""
    root = tmp_path_factory.mktemp("targets")
    return lambda path: str(resolve_target(path, root=root))


def test_the_second_device_refuses_what_a_gpu_refuses():
    with far_device() as far:
        weight = torch.nn.Parameter(torch.randn(5, 4).to(far))
        x = torch.randn(3, 4)
        loss = (torch.nn.functional.linear(x.to(far), weight)[torch.arange(2)] ** 2).sum()
        loss.backward()
        assert isinstance(weight.grad, FarTensor) and float(loss.detach()) == float((x[:2] @ weight.near.T).square().sum())
        for mixed in (lambda: torch.nn.functional.linear(x, weight), lambda: x.to(far) + x, lambda: x[torch.arange(2, device=far)]):
            with pytest.raises(RuntimeError, match="tensors on two devices"):
                mixed()


@pytest.mark.parametrize(("name", "changes"), CASES, ids=lambda part: part if isinstance(part, str) else " ".join(part))
def test_a_step_and_a_draft_on_another_device(name, changes, targets):
    """Loss, hits and drafts are those of the CPU; every trained parameter gets its gradient where it lies."""
    recipe = load_recipe(DEBUG / f"{name}.yaml", list(changes))
    target = read_target(recipe.target.model_copy(update={"path": targets(recipe.target.path)}))
    size = getattr(recipe.head, "draft_vocab_size", None) or target.vocab_size
    vocab = DraftVocab(torch.arange(size), target.vocab_size)
    head = head_class(recipe.method)(recipe.head, target, vocab)
    objective = objective_class(recipe.method)(head, target, recipe.objective)
    batch = random_batch(48, 0.5, target, vocab, recipe.head.feature_layers(target.num_layers))

    def validated(batch) -> tuple[float, torch.Tensor]:
        out = objective.eval()(batch)
        return float(out.loss_sum), count_rounds(chain_hits(objective, out, batch, recipe.eval.k), batch)

    def drafted(batch) -> torch.Tensor:
        first = 0 if getattr(head, "eats_first_token", False) else 1
        hidden = {layer: h[:12] for layer, h in (batch.hidden | {LAST_HIDDEN: batch.last_hidden}).items()}
        positions = torch.arange(12, device=batch.input_ids.device)
        depth = min(3, head.block.max_depth or 3)
        return head.propose(hidden, batch.input_ids[first:13], positions, head.new_cache(), depth, lambda logits: logits.argmax(-1))

    with torch.no_grad():
        loss, rounds = validated(batch)
        drafts = drafted(batch)
    with far_device() as far:
        objective.to(far)
        batch = batch.to(far)
        with torch.no_grad():
            far_loss, far_rounds = validated(batch)
            assert near(drafted(batch)).tolist() == drafts.tolist()
        assert far_loss == pytest.approx(loss, rel=1e-4) and torch.equal(near(far_rounds), rounds)
        objective.train()(batch).loss_sum.backward()
        for parameter_name, parameter in objective.named_parameters():
            assert not parameter.requires_grad or isinstance(parameter.grad, FarTensor), parameter_name
