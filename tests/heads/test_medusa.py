"""Medusa's heads: a fresh one is the LM head, blocks are distinct, and every layout round-trips."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from heads import LAST_HIDDEN
from heads.exported import check_served, read_tensors
from heads.medusa import MedusaHead
from heads.vocab import DraftVocab
from recipes.errors import ExportError, RecipeError
from recipes.head_blocks import MedusaHead as Block
from recipes.objective_blocks import Medusa2Objective
from recipes.schema import load_recipe

FULL = DraftVocab(torch.arange(50), 50)
GREEDY = lambda logits: logits.argmax(-1)  # noqa: E731
LM_HEADS = [{}, {"shared_lm_head": True}, {"shared_lm_head": True, "train_lm_head": False}]


def make(parts, trained=True, vocab=FULL, **block) -> MedusaHead:
    torch.manual_seed(1)
    head = MedusaHead(Block(num_heads=block.pop("num_heads", 3), **block), parts, vocab)
    if trained:
        with torch.no_grad():
            for p in head.parameters():
                p.add_(torch.randn_like(p) * 0.3)
    return head.eval()


def served(head: MedusaHead) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in head.served_tensors().items()}


@pytest.mark.parametrize("lm_heads", LM_HEADS, ids=str)
@pytest.mark.parametrize("num_layers", [1, 2])
def test_fresh_head_is_the_lm_head(parts, num_layers, lm_heads):
    """B33, METHODS §1.1: weight and bias of a block start at zero, so every head says what the target's LM head says."""
    head, h = make(parts, trained=False, num_layers=num_layers, **lm_heads), torch.randn(5, 32)
    for logits in head.head_logits(h, 3):
        assert torch.equal(logits, h @ parts.lm_head.T)


def test_blocks_are_distinct(parts):
    """E13: two blocks are two sets of parameters, in every head."""
    one, two = make(parts, num_layers=1), make(parts, num_layers=2)
    count = lambda head: sum(p.numel() for p in head.blocks.parameters())  # noqa: E731
    assert count(two) == 2 * count(one) == 2 * 3 * (32 * 32 + 32)
    pointers = {p.data_ptr() for p in two.parameters()}
    assert len(pointers) == 3 * 2 * 2 + 3  # weight and bias of every block, an LM head each
    assert not torch.equal(two.blocks[0].layers[0].weight, two.blocks[0].layers[1].weight)
    assert make(parts, shared_lm_head=True, train_lm_head=False).lm_head.data_ptr() == parts.lm_head.data_ptr()


@pytest.mark.parametrize("lm_heads", LM_HEADS, ids=str)
def test_served_layout_drafts_the_same(parts, lm_heads):
    """B33: from the served tensors alone, by the server's formula, the same top-1 tokens."""
    head = make(parts, num_layers=2, **lm_heads)
    tensors, config, h = served(head), head.served_config(), torch.randn(6, 32)
    check_served(MedusaHead.served_shapes(config), tensors, "export")
    drafts = head.propose({LAST_HIDDEN: h}, torch.zeros(6, dtype=torch.long), torch.arange(6), head.new_cache(), 3, GREEDY)
    expected = []
    for i in range(config["num_heads"]):
        z = h[-1]
        for j in range(config["num_hidden_layers"]):
            z = z + F.silu(tensors[f"blocks.{i}.layers.{j}.weight"] @ z + tensors[f"blocks.{i}.layers.{j}.bias"])
        lm_head = tensors["lm_head.weight" if config["original_lm_head"] else f"lm_heads.{i}.weight"]
        expected.append(int((lm_head @ z).argmax()))
    assert drafts.tolist() == expected
    assert config["medusa_fc_bias"] is True and config["truncated_vocab_size"] == config["vocab_size"] == 50

    other = make(parts, trained=False, num_layers=2, **lm_heads)
    other.load_served(tensors)
    assert all(torch.equal(other.served_tensors()[name], value) for name, value in tensors.items())


def published(head: MedusaHead, prefix="", legacy=False) -> dict[str, torch.Tensor]:
    """The reference's names (METHODS §14)."""
    layers = head.block.num_layers
    names = {f"blocks.{i}.layers.{b}.": f"{i}.{b}.linear." for i in range(head.block.num_heads) for b in range(layers)}
    names |= {f"lm_heads.{i}.": f"{i}.{layers}." for i in range(head.block.num_heads)}
    renamed = {}
    for name, tensor in served(head).items():
        old = next(old for old in names if name.startswith(old))
        renamed[prefix + name.replace(old, names[old])] = tensor
    return {name: tensor for name, tensor in renamed.items() if not (legacy and name.endswith(f".{layers}.weight"))}


def test_published_new_layout(parts, tmp_path):
    """METHODS §14: medusa_lm_head.pt through weights_only; `i.b.linear` and `i.L.weight`."""
    head = make(parts, num_layers=2)
    torch.save(published(head), tmp_path / "medusa_lm_head.pt")
    other = make(parts, trained=False, num_layers=2)
    other.load_served(read_tensors(tmp_path))
    assert all(torch.equal(other.served_tensors()[name], value) for name, value in head.served_tensors().items())


@pytest.mark.parametrize("lm_heads", LM_HEADS, ids=str)
def test_published_legacy_layout(parts, lm_heads):
    """METHODS §15.18: without LM heads in the file, they are the target's."""
    trained, h = make(parts), torch.randn(4, 32)
    other = make(parts, trained=False, **lm_heads)
    before = parts.lm_head.clone()
    other.load_served(published(trained, legacy=True))
    for i, logits in enumerate(other.head_logits(h, 3)):
        torch.testing.assert_close(logits, trained.states(h, i) @ parts.lm_head.T)
    assert torch.equal(parts.lm_head, before)


def test_published_whole_model(parts):
    """METHODS §14: v1.0 files hold the target too, the heads below `medusa_head.`."""
    head = make(parts)
    other = make(parts, trained=False)
    other.load_served(published(head, "medusa_head.") | {"model.embed_tokens.weight": parts.embed_tokens, "lm_head.weight": parts.lm_head})
    assert all(torch.equal(other.served_tensors()[name], value) for name, value in head.served_tensors().items())


def test_blocks_that_the_reference_shared(parts):
    """E13: a reference file with L > 1 holds one block's numbers L times; they are read as they are."""
    head = make(parts, num_layers=2)
    for blocks in head.blocks:
        blocks.layers[1].load_state_dict(copy.deepcopy(blocks.layers[0].state_dict()))
    other = make(parts, trained=False, num_layers=2)
    other.load_served(published(head))
    assert torch.equal(other.blocks[1].layers[0].weight, other.blocks[1].layers[1].weight)
    assert other.blocks[1].layers[0].weight.data_ptr() != other.blocks[1].layers[1].weight.data_ptr()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"0.0.linear.bias": None}, r"missing blocks\.0\.layers\.0\.bias \(32,\)"),
        ({"2.1.weight": None}, r"missing lm_heads\.2\.weight"),
        ({"1.1.weight": torch.zeros(40, 32)}, r"lm_heads\.1\.weight is \(40, 32\), this head needs \(50, 32\)"),
        ({"0.1.linear.weight": torch.zeros(32, 32)}, r"unknown blocks\.0\.layers\.1\.weight"),
        ({"something": torch.zeros(1)}, r"unknown something"),
        ({"blocks.0.layers.0.weight": torch.zeros(32, 32)}, r"blocks\.0\.layers\.0\.weight twice, as 0\.0\.linear\.weight and as blocks"),
        ({"3.0.linear.weight": torch.zeros(32, 32), "3.0.linear.bias": torch.zeros(32)}, r"has 4 Medusa heads, the recipe asks for 3"),
        ({"2.0.linear.weight": None, "2.0.linear.bias": None, "2.1.weight": None}, r"has 2 Medusa heads.*set head\.num_heads=2"),
    ],
)
def test_published_file_that_does_not_fit(parts, change, message):
    """VLLM_FORMATS §3: a missing LM head is not detected by the server; missing, extra and doubled tensors are by name here."""
    head = make(parts)
    tensors = {name: value for name, value in (published(head) | change).items() if value is not None}
    with pytest.raises(ExportError, match=message):
        make(parts, trained=False).load_served(tensors)


def test_own_lm_heads_do_not_fit_a_frozen_shared_one(parts):
    """The target's LM head is never overwritten."""
    frozen, before = make(parts, shared_lm_head=True, train_lm_head=False), parts.lm_head.clone()
    with pytest.raises(ExportError, match="head.train_lm_head=false keeps the target's"):
        frozen.load_served(served(make(parts, shared_lm_head=True)))
    assert torch.equal(parts.lm_head, before)


def test_a_pickle_with_code_is_refused(tmp_path):
    """DESIGN §9: weights_only, and the message says so."""
    torch.save({"0.0.linear.weight": torch.zeros(2), "code": pytest.raises}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ExportError, match="is not a plain file of tensors"):
        read_tensors(tmp_path)


def test_more_tokens_than_heads(parts):
    """Fewer heads than k asks for: an error in the head, and in the recipe before anything runs."""
    head = make(parts)
    with pytest.raises(RecipeError, match="4 drafted tokens were asked of 3 Medusa heads"):
        head.propose({LAST_HIDDEN: torch.randn(1, 32)}, torch.zeros(1), torch.zeros(1), head.new_cache(), 4, GREEDY)
    with pytest.raises(RecipeError, match="eval.k=5 asks for more drafted tokens than this head makes in a round, 4"):
        load_recipe("recipes/debug/medusa.yaml", ["eval.k=[3,5]"])


def test_tree_deeper_than_the_heads():
    """METHODS §15.19, Medusa#63."""
    tree = ["eval.engine=reference", "eval.tree=medusa"]
    with pytest.raises(RecipeError, match="eval.tree_depth=5 asks for more drafted tokens than this head makes in a round, 4"):
        load_recipe("recipes/debug/medusa.yaml", [*tree, "eval.tree_depth=5"])
    assert load_recipe("recipes/debug/medusa.yaml", [*tree, "eval.tree_depth=4"]).eval.tree_depth == 4


@pytest.mark.parametrize("lm_heads", LM_HEADS, ids=str)
def test_a_draft_vocabulary_is_served_as_whole_lm_heads_that_never_draft_other_tokens(parts, lm_heads):
    """VLLM_FORMATS §3: token_map fails in the server. AL~ and AL may not differ by what rows that nobody trained would say."""
    ids = torch.arange(0, 50, 3)
    vocab = DraftVocab(ids, 50)
    head, h = make(parts, vocab=vocab, draft_vocab_size=len(ids), **lm_heads), torch.randn(400, 32)
    assert head.head_logits(h, 3).shape == (3, 400, len(ids))
    tensors = head.served_tensors()
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == head.served_shapes(head.served_config())
    loaded = make(parts, trained=False, draft_vocab_size=len(ids), **lm_heads)  # as eval does: over all tokens, from the export alone
    loaded.load_served(tensors)
    best = loaded.head_logits(h, 3).argmax(-1)
    assert torch.equal(best, ids[head.head_logits(h, 3).argmax(-1)]) and best.unique().numel() > 3
    again = make(parts, trained=False, vocab=vocab, draft_vocab_size=len(ids), **lm_heads)  # as fine-tuning does
    again.load_served(tensors)
    torch.testing.assert_close(again.head_logits(h, 3), head.head_logits(h, 3))
    drafted = head.propose({LAST_HIDDEN: h[:1]}, torch.zeros(1), torch.zeros(1), head.new_cache(), 3, GREEDY)
    assert torch.equal(drafted, best[:, 0])


def test_contradictory_settings():
    with pytest.raises(RecipeError, match="set head.shared_lm_head: true"):
        Block(train_lm_head=False)
    with pytest.raises(RecipeError, match="objective.lora_rank=8 has no effect with objective.backbone='full'"):
        Medusa2Objective(backbone="full", lora_rank=8)
    Medusa2Objective.model_validate(Medusa2Objective(backbone="full").model_dump())  # a resolved recipe holds every value


def test_tied_target_is_not_trained_through_the_head(parts):
    """B23: an LM head that trains is a copy, also where the target's is its embedding."""
    tied, before = replace(parts, lm_head=parts.embed_tokens), parts.embed_tokens.clone()
    head = make(tied)  # its trained weights are changed in place
    assert torch.equal(parts.embed_tokens, before)
    assert all(weight.weight.data_ptr() != tied.lm_head.data_ptr() for weight in head.lm_heads)
