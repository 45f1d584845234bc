"""P-EAGLE: slot d is real parallel drafting from the prefix, and the served layout is complete."""

import pytest
import torch

from heads import shift
from heads.exported import check_served, served_vocab
from heads.layers import document_starts
from heads.peagle import PeagleHead
from heads.vocab import DraftVocab
from recipes.errors import RecipeError
from recipes.head_blocks import PeagleHead as Block
from recipes.schema import load_recipe

MASK = 49
SWITCHES = [
    {"num_layers": 1},
    {"num_layers": 3},
    {"num_layers": 2, "fc_norm": True, "norm_before_residual": True},
    {"num_layers": 2, "norm_before_fc": True},
]


def make(parts, vocab_size=30, slots=4, **switches) -> PeagleHead:
    torch.manual_seed(1)
    vocab = DraftVocab(torch.randperm(50)[:vocab_size].sort().values, 50)
    block = Block(aux_layers=[1, 3, 5], draft_vocab_size=vocab_size, unroll_steps=slots, mask_token_id=MASK, **switches)
    head = PeagleHead(block, parts, vocab)
    with torch.no_grad():  # far from the initial weights, so that every part matters
        for p in head.parameters():
            p.normal_(std=0.3)
    return head.eval()


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_slots_are_parallel_drafting(parts, switches):
    """METHODS §16.8, B34: slot d at anchor t is what one pass over the prefix <= t and d masks gives; no slot sees another document."""
    head, slots, lengths = make(parts, **switches), 4, [9, 1, 6]
    ids = torch.randint(49, (sum(lengths),))
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    hidden = {layer: torch.randn(len(ids), 32) for layer in head.aux_layers}
    kept = [torch.tensor(r) for r in ([0, 2, 3, 4, 6, 10, 12], [2, 3, 4, 6, 10, 12], [2, 4, 10], [4, 10])]
    tokens = [shift.draft_inputs(ids, 0)] + [torch.full_like(ids, MASK)] * (slots - 1)
    with torch.no_grad():
        states = head.rollout(head.fuse(hidden), tokens, positions, document_starts(document), kept)
        for depth, rows in enumerate(kept):
            for place, t in enumerate(rows.tolist()):
                prefix = slice(int((document == document[t]).nonzero()[0]), t + 1)
                drafted, eaten = [], shift.draft_inputs(ids, 0)[prefix]
                head.propose(
                    {k: h[prefix] for k, h in hidden.items()}, eaten, positions[prefix], head.new_cache(), depth + 1,
                    lambda logits, drafted=drafted: drafted.append(logits) or logits.argmax(-1),
                )  # fmt: skip
                torch.testing.assert_close(head.logits(states[depth][place : place + 1])[0], drafted[0][depth], rtol=1e-4, atol=1e-4)


def test_propose_leaves_only_committed_entries(parts):
    """Mask slots are transient: a second round gives what a fresh start gives."""
    head, greedy = make(parts, num_layers=2), lambda logits: logits.argmax(-1)
    hidden, ids = {layer: torch.randn(9, 32) for layer in head.aux_layers}, torch.randint(49, (10,))
    cache = head.new_cache()
    head.propose({k: h[:5] for k, h in hidden.items()}, ids[1:6], torch.arange(5), cache, 4, greedy)
    assert cache.length == 5
    second = head.propose({k: h[5:] for k, h in hidden.items()}, ids[6:], torch.arange(5, 9), cache, 4, greedy)
    assert torch.equal(second, head.propose(hidden, ids[1:], torch.arange(9), head.new_cache(), 4, greedy))
    assert len(second) == 4 and set(second.tolist()) <= set(head.vocab.ids.tolist())


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
@pytest.mark.parametrize("vocab_size", [30, 50])
def test_served_layout_round_trip(parts, switches, vocab_size):
    """B15, B31, E07: `mask_hidden` and `ptd_token_id` are there; published shapes of `mask_hidden` are read."""
    head = make(parts, vocab_size, **switches)
    tensors, config = {k: v.clone() for k, v in head.served_tensors().items()}, head.served_config()
    check_served(PeagleHead.served_shapes(config), tensors, "export")
    assert config["ptd_token_id"] == MASK and config["num_hidden_layers"] == switches["num_layers"]
    for shape in ((1, 1, 96), (1, 96), (96,)):
        other = PeagleHead(head.block, parts, served_vocab(tensors, 50))
        other.load_served(tensors | {"mask_hidden": tensors["mask_hidden"].reshape(shape)})
        for name, value in head.state_dict().items():
            assert torch.equal(other.state_dict()[name], value), name


def test_bad_blocks(parts):
    """B34: a mask token outside the vocabulary; a switch without effect; more drafts than slots."""
    with pytest.raises(RecipeError, match="mask_token_id=50 lies outside the target's vocabulary of 50"):
        PeagleHead(Block(aux_layers=[1, 3, 5], mask_token_id=50, draft_vocab_size=None), parts, DraftVocab(torch.arange(50), 50))
    with pytest.raises(RecipeError, match="norm_output"):
        Block(mask_token_id=1, norm_output=True)
    with pytest.raises(RecipeError, match="eval.k=5 asks for more drafted tokens than this head makes in a round, 4"):
        load_recipe("recipes/debug/peagle.yaml", ["eval.k=[3,5]"])
    head = make(parts, num_layers=1)
    with pytest.raises(RecipeError, match="set eval.tree: chain"):
        head.advance(torch.zeros(1, 32), torch.tensor([1]), torch.tensor([0]), head.new_cache())
