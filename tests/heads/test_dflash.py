"""DFlash: a block in training is real drafting from the prefix, nothing leaks into it, and the served layout is complete."""

import pytest
import torch

from heads import shift
from heads.dflash import DflashHead
from heads.exported import check_served, served_vocab
from heads.layers import document_starts
from heads.vocab import DraftVocab
from recipes.errors import ExportError, RecipeError
from recipes.head_blocks import DflashHead as Block
from recipes.head_blocks import dflash_layers
from recipes.schema import load_recipe

MASK = 49


def make(parts, vocab_size=50, layers=2, block_size=5, **changes) -> DflashHead:
    torch.manual_seed(1)
    vocab = DraftVocab(torch.randperm(50)[:vocab_size].sort().values, 50)
    block = Block(
        num_layers=layers, block_size=block_size, mask_token_id=MASK, aux_layers=[1, 3, 5], draft_vocab_size=vocab_size, **changes
    )
    head = DflashHead(block, parts, vocab)
    with torch.no_grad():
        for p in head.parameters():
            p.normal_(std=0.3)
    return head.eval()


def packed(head, lengths=(9, 2, 6)):
    """Random ids, states and the layout of documents of these lengths."""
    ids = torch.randint(49, (sum(lengths),))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    return ids, document, positions, {layer: torch.randn(len(ids), 32) for layer in head.aux_layers}


def blocks(head, ids, document, positions, hidden, rows, slots) -> torch.Tensor:
    with torch.no_grad():
        return head.denoise(head.fuse(hidden), shift.draft_inputs(ids, 0), positions, document_starts(document), rows, slots)


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("slots", [2, 5, 8])
def test_blocks_are_real_drafting(parts, layers, slots):
    """METHODS §16.8: slot j of the block behind t is what `propose` gives from the prefix <= t, blocks overlapping or not."""
    head = make(parts, layers=layers, block_size=slots)
    ids, document, positions, hidden = packed(head)
    rows = torch.tensor([0, 1, 2, 5, 7, 9, 11, 14, 15])
    states = blocks(head, ids, document, positions, hidden, rows, slots)
    for place, t in enumerate(rows.tolist()):
        prefix = slice(int((document == document[t]).nonzero()[0]), t + 1)
        seen = []
        drafted = head.propose(
            {k: h[prefix] for k, h in hidden.items()}, shift.draft_inputs(ids, 0)[prefix], positions[prefix], head.new_cache(), slots - 1,
            lambda logits, seen=seen: seen.append(logits) or logits.argmax(-1),
        )  # fmt: skip
        torch.testing.assert_close(head.logits(states[place]), seen[0], rtol=1e-4, atol=1e-4)
        assert len(drafted) == slots - 1


def test_nothing_at_or_behind_the_anchor_leaks_in(parts):
    """METHODS §15.22: tokens after the anchor, states at and after it, and other documents change no draft of its block."""
    head, slots = make(parts), 5
    ids, document, positions, hidden = packed(head)
    rows = torch.tensor([3, 4, 12])
    before = blocks(head, ids, document, positions, hidden, rows, slots)
    for t, place in ((3, 0), (12, 2)):
        later = torch.arange(len(ids)) > t
        others = document != document[t]
        changed = torch.where((later & (torch.arange(len(ids)) != t + 1)) | others, (ids + 7) % 49, ids)
        states = {layer: torch.where((later | others)[:, None], torch.randn_like(h), h) for layer, h in hidden.items()}
        after = blocks(head, changed, document, positions, states, rows, slots)
        torch.testing.assert_close(after[place], before[place])
    # The anchor's own token and the states before it are inputs.
    assert not torch.allclose(blocks(head, ids.index_fill(0, torch.tensor([4]), 0), document, positions, hidden, rows, slots)[0], before[0])
    states = {layer: h.index_fill(0, torch.tensor([0]), 0.0) for layer, h in hidden.items()}
    assert not torch.allclose(blocks(head, ids, document, positions, states, rows, slots)[0], before[0])


def test_every_slot_sees_the_whole_block(parts):
    """Both directions: a longer block changes the first draft too, so k at serving time is part of the input."""
    head = make(parts, layers=1)
    ids, document, positions, hidden = packed(head)
    rows = torch.tensor([4])
    assert not torch.allclose(
        blocks(head, ids, document, positions, hidden, rows, 3)[0, 0], blocks(head, ids, document, positions, hidden, rows, 5)[0, 0]
    )


def test_context_is_not_relayered(parts):
    """METHODS §9.1: one injected feature for all layers, projected by each layer's own k and v, without its input norm."""
    head = make(parts, layers=2)
    cache = head.new_cache()
    hidden = {layer: torch.randn(3, 32) for layer in head.aux_layers}
    head.propose(hidden, torch.tensor([1, 2, 3]), torch.arange(3), cache, 2, lambda logits: logits.argmax(-1))
    assert cache.length == 3
    c = torch.nn.functional.rms_norm(head.fc(torch.cat([hidden[i] for i in head.aux_layers], -1)), (32,), head.hidden_norm.weight, 1e-6)
    for number, layer in enumerate(head.stack):
        torch.testing.assert_close(cache.values[number].flatten(1), layer.self_attn.v_proj(c))


def test_propose_over_two_rounds(parts):
    """Only committed entries stay: a second round gives what a fresh start gives."""
    head, greedy = make(parts), lambda logits: logits.argmax(-1)
    hidden, ids = {layer: torch.randn(9, 32) for layer in head.aux_layers}, torch.randint(49, (10,))
    cache = head.new_cache()
    head.propose({k: h[:5] for k, h in hidden.items()}, ids[1:6], torch.arange(5), cache, 4, greedy)
    second = head.propose({k: h[5:] for k, h in hidden.items()}, ids[6:], torch.arange(5, 9), cache, 4, greedy)
    assert cache.length == 9
    assert torch.equal(second, head.propose(hidden, ids[1:], torch.arange(9), head.new_cache(), 4, greedy))


@pytest.mark.parametrize("vocab_size", [30, 50])
def test_served_layout_round_trip(parts, vocab_size):
    """B15, B31, E07, E09: published names; the LM head is in the file only over a reduced vocabulary."""
    head = make(parts, vocab_size)
    tensors, config = {k: v.clone() for k, v in head.served_tensors().items()}, head.served_config()
    check_served(DflashHead.served_shapes(config), tensors, "export")
    assert config["dflash_config"]["target_layer_ids"] == [0, 2, 4] and config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert config["num_hidden_layers"] == 2 and ("lm_head.weight" in tensors) == ("d2t" in tensors) == (vocab_size < 50)
    other = DflashHead(head.block, parts, served_vocab(tensors, 50))
    other.load_served(tensors)
    for name, value in head.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    for name, rows in (("lm_head", vocab_size), ("embed_tokens", 50)):
        with pytest.raises(ExportError, match=rf"{name}\.weight of the draft \({rows}, 32\) is not the target's rows"):
            other.load_served(tensors | {f"{name}.weight": torch.randn(rows, 32)})
    del tensors["layers.1.self_attn.k_norm.weight"]
    with pytest.raises(ExportError, match=r"missing layers\.1\.self_attn\.k_norm\.weight"):
        other.load_served(tensors)


def test_layer_ids():
    """METHODS §16.4, B17: [1, 9, 17, 25, 33] counted as layer outputs from 0, one more in our convention."""
    assert dflash_layers(5, 36) == [2, 10, 18, 26, 34] and dflash_layers(1, 30) == [16]
    assert Block(mask_token_id=1).feature_layers(36) == [2, 10, 18, 26, 34]
    with pytest.raises(RecipeError, match="distinct layers"):
        dflash_layers(5, 6)
    with pytest.raises(RecipeError, match="distinct layers"):
        Block(mask_token_id=1, aux_layers=[0, 7]).feature_layers(6)


def test_bad_blocks(parts):
    """B34: a mask token outside the vocabulary; more drafts than the block holds."""
    with pytest.raises(RecipeError, match="mask_token_id=50 lies outside"):
        DflashHead(Block(mask_token_id=50, aux_layers=[1], num_layers=1), parts, DraftVocab(torch.arange(50), 50))
    with pytest.raises(RecipeError, match="eval.k=5 asks for more drafted tokens than this head makes in a round, 4"):
        load_recipe("recipes/debug/dflash.yaml", ["eval.k=[3,5]"])
