"""PARD: who sees whom at which position, slots are real parallel drafting, and what is exported."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from heads import LAST_HIDDEN
from heads.exported import check_served, read_tensors
from heads.layers import RMSNorm
from heads.packed import Packed
from heads.pard import PROJECTION_FILES, PardHead
from heads.target import TargetParts, read_target
from heads.vocab import DraftVocab
from recipes.errors import ExportError, RecipeError
from recipes.head_blocks import PardHead as Block
from recipes.schema import Target, load_recipe
from tests.heads.test_draft_model import written

V, MASK = 260, 259
GREEDY = lambda logits: logits.argmax(-1)  # noqa: E731


@pytest.fixture(scope="module")
def parts(tiny_target: Path) -> TargetParts:
    return read_target(Target(path=str(tiny_target), dtype="float32"))


def make(parts, **block) -> PardHead:
    torch.manual_seed(1)
    head = PardHead(Block(**({"num_layers": 2, "mask_token_id": MASK} | block)), parts, DraftVocab(torch.arange(V), V))
    with torch.no_grad():  # the mask token's row and the projection far from nothing, so that they matter
        head.embedding[MASK].normal_()
        if head.mask_embedding is not None:
            head.mask_embedding.copy_(head.embedding[MASK])
        if head.target_layers is not None:
            head.target_proj.weight.normal_()
    return head.eval()


def test_who_sees_whom():
    """METHODS §7.1: block j, index t sees the real tokens 0..t-j and (block 1, t-j+1) … (block j, t); nothing of another document.

    Two documents of 4 and 2 tokens, chains of up to 3 slots. Values are one-hot and scores equal, so that what comes out of
    attention is the set of visible entries.
    """
    document = torch.tensor([0, 0, 0, 0, 1, 1])
    chains = [torch.tensor([0, 1, 2, 4]), torch.tensor([1, 2]), torch.tensor([1])]
    T = 6 + 7
    zeros, one_hot = torch.zeros(T, 1, T), torch.eye(T)[:, None]
    seen = [row.nonzero()[:, 0].tolist() for row in Packed(document, chains).attend(zeros, zeros, one_hot)[:, 0]]
    real = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [4], [4, 5]]
    first = [[0, 6], [0, 1, 7], [0, 1, 2, 8], [4, 9]]  # slot 1 behind tokens 0, 1, 2, 4: entries 6..9
    second = [[0, 1, 7, 10], [0, 1, 2, 8, 11]]  # slot 2 behind tokens 1 and 2: entries 10, 11
    assert seen == real + first + second + [[0, 1, 7, 10, 12]]


def test_positions(parts, monkeypatch):
    """METHODS §7.1: the mask of block j that predicts x[t+1] has position t; here slot i of anchor t, at t + 1 + i, predicts x[t+2+i]."""
    head, asked = make(parts), {}
    monkeypatch.setattr(PardHead, "states", lambda self, x, positions, **kw: asked.setdefault("positions", positions)[:, None] * 1.0)
    positions, document = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]), torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
    anchors = [torch.tensor([1, 2, 6]), torch.tensor([1, 6]), torch.tensor([6])]  # indices of x[t+1]
    states = head.slot_states(torch.arange(8), positions, document, anchors, None)
    assert asked["positions"].tolist() == [*positions.tolist(), 2, 2, 3]
    assert [s[:, 0].tolist() for s in states] == [[1, 2, 1], [2, 2], [3]]


def test_mask_slots_while_drafting(parts, monkeypatch):
    """B34: a prompt of 6 tokens and K = 4: all tokens from the first on, then 3 masks at 6, 7, 8; only tokens stay in the cache."""
    head, asked, original = make(parts), [], PardHead.states

    def states(self, x, positions, **kw):
        asked.append((x, positions.tolist()))
        return original(self, x, positions, **kw)

    monkeypatch.setattr(PardHead, "states", states)
    ids, cache = torch.tensor([5, 9, 200, 3, 77, 31, 8]), head.new_cache()
    assert len(head.propose({}, ids[:6], torch.arange(5), cache, 4, GREEDY)) == 4
    ((x, positions),) = asked
    assert positions == [0, 1, 2, 3, 4, 5, 6, 7, 8] and cache.get_seq_length() == 6
    assert torch.equal(x, head.embedding[[5, 9, 200, 3, 77, 31, MASK, MASK, MASK]])
    second = head.propose({}, ids[6:], torch.tensor([5]), cache, 4, GREEDY)
    assert torch.equal(second, head.propose({}, ids, torch.arange(6), head.new_cache(), 4, GREEDY))
    assert asked[1][1] == [6, 7, 8, 9] and cache.get_seq_length() == 7


@pytest.mark.parametrize("frozen", [False, True])
def test_slots_are_parallel_drafting(parts, tmp_path, frozen):
    """METHODS §16.8, §7.1: slot j at an anchor is what the exported model makes of the tokens up to it and j masks."""
    head, lengths = make(parts, num_layers=3, train_embeddings=not frozen), [9, 1, 6]
    model = AutoModelForCausalLM.from_pretrained(written(head, tmp_path / "draft"), dtype=torch.float32).eval()
    ids, document = torch.randint(256, (16,)), torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    anchors = [torch.tensor(r) for r in ([0, 2, 3, 4, 6, 9, 10, 12], [2, 3, 4, 6, 9, 10, 12], [2, 4, 10], [4, 10])]
    with torch.no_grad():
        states = head.slot_states(ids, positions, document, anchors, None)
        for slot, rows in enumerate(anchors):
            for place, at in enumerate(rows.tolist()):
                prefix = ids[int((document == document[at]).nonzero()[0]) : at + 1].tolist()
                expected = model(torch.tensor([prefix + [MASK] * slot])).logits[0, -1]
                torch.testing.assert_close(head.logits(states[slot][place]), expected, rtol=1e-4, atol=1e-4)


def test_more_slots_than_trained(parts, tmp_path):
    """One mask token for all slots: k = 12 with unroll_steps = 4, and the first slots do not depend on how many follow."""
    head, ids = make(parts, unroll_steps=4), torch.randint(256, (7,))
    model = AutoModelForCausalLM.from_pretrained(written(head, tmp_path / "draft"), dtype=torch.float32).eval()
    drafted = head.propose({}, ids, torch.arange(6), head.new_cache(), 12, GREEDY)
    with torch.no_grad():
        expected = model(torch.tensor([ids.tolist() + [MASK] * 11])).logits[0, 6:].argmax(-1)
    assert torch.equal(drafted, expected) and head.block.max_depth is None
    assert torch.equal(drafted[:3], head.propose({}, ids, torch.arange(6), head.new_cache(), 3, GREEDY))
    cache = head.new_cache()  # k = 1 has no mask slot, and nothing to drop again
    for known, new, positions in ((5, ids[:5], torch.arange(4)), (7, ids[5:], torch.arange(4, 6))):
        one = head.propose({}, new, positions, cache, 1, GREEDY)
        assert cache.get_seq_length() == known
    assert torch.equal(one, drafted[:1])


def test_target_states_enter_where_they_are_known(parts):
    """METHODS §7.2: x[t+1] and the slots behind it eat the states of t, x[0] none; the states of the newest token are never asked for."""
    head = make(parts, num_layers=1, aux_layers=[1, 3])
    assert head.target_layers == [LAST_HIDDEN, 3, 1]
    ids, n = torch.randint(256, (8,)), 7
    hidden = {layer: torch.randn(n, 64) for layer in (LAST_HIDDEN, 1, 3)}
    plain = head.propose(hidden, ids, torch.arange(n), head.new_cache(), 3, GREEDY)
    assert torch.equal(plain, head.propose({}, ids, torch.arange(n), head.new_cache(), 3, GREEDY))  # without the target by default
    seen = []
    twin = head.with_target_states()
    twin.propose(hidden, ids, torch.arange(n), twin.new_cache(), 3, lambda logits: seen.append(logits) or logits.argmax(-1))
    assert not head.reads_target and twin.reads_target

    by_hand = 0.02 * torch.cat([hidden[LAST_HIDDEN], hidden[3], hidden[1]], -1) @ head.target_proj.weight.T
    added = torch.cat([torch.zeros(1, 64), by_hand])  # of entry s: the states of s - 1
    document = torch.zeros(8, dtype=torch.long)
    last = [torch.tensor([7])] * 3
    with torch.no_grad():
        states = head.slot_states(ids, torch.arange(8), document, last, added)
        torch.testing.assert_close(seen[0], head.logits(torch.cat(states)), rtol=1e-4, atol=1e-4)
        x = torch.cat([head.embed(ids) + added, head.embedding[[MASK, MASK]] + added[-1]])  # the whole, by hand
        expected = head.states(x, torch.arange(10), packed=Packed(torch.zeros(10, dtype=torch.long)))
        torch.testing.assert_close(torch.cat(states), expected[7:], rtol=1e-4, atol=1e-4)

    cache = twin.new_cache()  # in two rounds as in one
    twin.propose({layer: h[:4] for layer, h in hidden.items()}, ids[:5], torch.arange(4), cache, 3, GREEDY)
    later = {layer: h[4:] for layer, h in hidden.items()}
    assert torch.equal(twin.propose(later, ids[5:], torch.arange(4, 7), cache, 3, GREEDY), seen[0].argmax(-1))


@pytest.mark.parametrize("tied", [True, False])
def test_the_mask_row_learns_in_a_frozen_embedding(parts, tied):
    """B34: the row exists and is trained; it is written into the file, no other row changes, and a tied LM head has it too."""
    config = LlamaConfig(**parts.config.to_dict() | {"tie_word_embeddings": tied})
    head = make(replace(parts, config=config), train_embeddings=False)
    before = head.embedding.clone()
    assert head.mask_embedding is not None and head.mask_embedding.requires_grad and not head.embedding.requires_grad
    head.mask_slots(3).sum().backward()
    assert head.mask_embedding.grad is not None and bool((head.mask_embedding.grad == 3).all())
    with torch.no_grad():
        head.mask_embedding.add_(1.0)
    served = head.served_tensors()["model.embed_tokens.weight"]
    torch.testing.assert_close(served[MASK], before[MASK] + 1)
    assert torch.equal(served[:MASK], before[:MASK]) and (head.head_weight is head.embedding) == tied
    other = make(parts, train_embeddings=False)
    tensors = {name: tensor.clone() for name, tensor in make(parts).served_tensors().items()}
    other.load_served(tensors | {"model.embed_tokens.weight": served.clone()})
    assert torch.equal(other.mask_embedding, head.mask_embedding)  # type: ignore[arg-type]


@pytest.mark.parametrize("aux", [None, [1, 3]])
def test_served_layout_round_trip(parts, tmp_path, aux):
    """B34: `pard_token` is there; E07; PARD-2's projection lies beside what a server loads and comes back."""
    head = make(parts, aux_layers=aux)
    config = head.served_config()
    assert config["pard_token"] == MASK and config["spd_type"] == ("pard2" if aux else "pard")
    assert config["architectures"] == ["LlamaForCausalLM"]
    folder = written(head, tmp_path / "draft")
    tensors = read_tensors(folder)
    check_served(PardHead.served_shapes(config), tensors, "export")
    assert not any("target_proj" in name for name in tensors)
    again = PardHead(head.block, parts, DraftVocab(torch.arange(V), V), architecture=head.architecture())
    again.load_served(tensors)
    again.load_extra(folder)
    for name, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert again.served_config() == config
    if aux:
        plain = make(parts)
        plain.load_extra(folder)  # another draft may start from it
        (folder / PROJECTION_FILES[0]).unlink()
        torch.save({"target_proj.weight": torch.ones_like(head.target_proj.weight)}, folder / PROJECTION_FILES[1])
        again.load_extra(folder)  # as published
        assert bool((again.target_proj.weight == 1).all())
        (folder / PROJECTION_FILES[1]).unlink()
        with pytest.raises(ExportError, match="without its projection"):
            again.load_extra(folder)


def test_published_layer_numbers():
    """METHODS §14: of a 32-layer target, layers 9, 17 and 25 and the last hidden state are pard2_target_layers -1, -8, -16, -24."""
    with torch.device("meta"):
        config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=32, num_attention_heads=4, vocab_size=V)
        embedding = torch.empty(V, 64)
        parts = TargetParts(Path(), config, embedding, embedding, None, RMSNorm(64, 1e-6), "meta")
        block = Block(num_layers=2, mask_token_id=MASK, aux_layers=[9, 17, 25])
        head = PardHead(block, parts, DraftVocab(torch.arange(V, device="cpu"), V))
    served = head.served_config()
    assert served["pard2_target_layers"] == [-1, -8, -16, -24] and served["pard2_target_dim"] == 64 and served["pard2_scale"] == 0.02
    assert head.target_proj.weight.shape == (64, 4 * 64)


def test_bad_mask_tokens(parts):
    """B34: unset, and outside the vocabulary; one that occurs in the data: tests/train/test_pard.py."""
    with pytest.raises(RecipeError, match=f"mask_token_id={V} lies outside the target's vocabulary of {V}"):
        make(parts, mask_token_id=V)
    with pytest.raises(RecipeError, match="missing key head.mask_token_id"):
        load_recipe("recipes/debug/eagle3.yaml", ["method=pard", "head={}", "head.num_layers=2"])
