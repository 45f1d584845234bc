"""EAGLE-3's objective: the plain loss of real drafting at every depth, and what is supervised."""

import pytest
import torch

from heads import shift
from heads.eagle3 import Eagle3Head
from heads.target import TargetParts
from heads.vocab import DraftVocab
from recipes.head_blocks import Eagle3Head as Block
from recipes.objective_blocks import Eagle3Objective as Settings
from tests.train.plain import assert_reaches_every_parameter, plain_pair
from train.eagle3 import Eagle3Objective
from train.packing import Batch, collate

DEPTHS = 3


def make(target: TargetParts, vocab_size: int = 50, **settings) -> Eagle3Objective:
    vocab = DraftVocab(torch.randperm(50)[:vocab_size].sort().values, 50)
    block = Block(aux_layers=[1, 3, 5], unroll_steps=DEPTHS, draft_vocab_size=vocab_size)
    return Eagle3Objective(Eagle3Head(block, target, vocab), target, Settings(**settings))


def real_drafts(head: Eagle3Head, batch: Batch, t: int, depths: int) -> list[torch.Tensor]:
    """Draft logits [D] of each depth, one token after the other from the prefix <= t, eating the answer's own tokens."""
    start, cache = int((batch.document == batch.document[t]).nonzero()[0]), head.new_cache()
    prefix, position = slice(start, t + 1), batch.positions[t : t + 1]
    feature = head.fuse({layer: states[prefix] for layer, states in batch.hidden.items()})
    state = head.advance(feature, batch.input_ids[start + 1 : t + 2], batch.positions[prefix], cache)[-1:]
    logits = [head.logits(state)[0]]
    for i in range(1, depths):
        state = head.advance(head.feedback(state), batch.input_ids[t + 1 + i : t + 2 + i], position + i, cache)
        logits.append(head.logits(state)[0])
    return logits


@pytest.mark.parametrize("loss", ["kl", "ce"])
@pytest.mark.parametrize("vocab_size", [50, 30])
def test_is_the_plain_loss_of_real_drafts(small_target, packed_batch, loss, vocab_size):
    """METHODS §5.3, §16.8: step_decay ** i times the loss of depth i; a token outside the draft vocabulary has no loss and is a miss."""
    objective = make(small_target, vocab_size, loss=loss, step_decay=0.5).eval()
    batch, total, counts, hits, outside = packed_batch((3, 6), (2, 5)), 0.0, [0] * DEPTHS, [0] * DEPTHS, 0
    with torch.no_grad():
        for p in objective.parameters():
            p.normal_(std=0.2)
        for t in range(len(batch.document)):
            left = int((batch.document[t:] == batch.document[t]).sum()) - 1  # tokens behind t in its document
            depths = [i for i in range(DEPTHS) if i < left and bool(batch.loss_mask[t + 1 + i])]
            logits = real_drafts(objective.head, batch, t, max(depths) + 1) if depths else []
            for i in depths:
                value, has, hit, beyond = plain_pair(objective, batch, t, i, logits[i], loss)
                total, counts[i], hits[i], outside = total + 0.5**i * value, counts[i] + has, hits[i] + hit, outside + beyond
        out = objective(batch)
    assert float(out.loss_sum) == pytest.approx(total, rel=1e-4)
    assert out.depth_count.tolist() == counts and out.depth_correct.tolist() == hits
    assert (outside > 0) == (vocab_size == 30)


def test_alignment_table(small_target, packed_batch):
    """B20: ids 10..14, mask 0 0 1 1 1: teacher and mask move left with the depth, and no depth passes its document's end."""
    batch = packed_batch((2, 3), (2, 2), tokens=torch.tensor([10, 11, 12, 13, 14, 20, 21, 22, 23]))
    out = make(small_target).eval()(batch)
    assert out.depth_count.tolist() == [3, 3, 1]  # labels 13 14 23 from rows 1 2 6; the same from rows 0 1 5; 14 from row 0
    assert out.hits.shape == (DEPTHS, 9)


def test_unsupervised_tokens_teach_nothing(small_target, packed_batch):
    """What the target says behind prompt tokens, and where no draft is compared, does not matter."""
    objective, batch = make(small_target).eval(), packed_batch((4, 6), (3, 2))
    compared = torch.cat([shift.draft_weight(batch.loss_mask, batch.document, i).nonzero()[:, 0] + 1 + i for i in range(DEPTHS)])
    unused = torch.ones(len(batch.document), dtype=torch.bool).index_fill_(0, compared, False)
    with torch.no_grad():
        before = objective(batch).loss_sum
        batch.last_hidden[unused] = torch.randn(int(unused.sum()), 32)
        assert torch.equal(objective(batch).loss_sum, before)
        batch.last_hidden[compared[0]] += 1.0
        assert not torch.equal(objective(batch).loss_sum, before)


def test_depth_warmup_trains_the_first_depth_alone_and_measures_all(small_target, packed_batch):
    """Until that share of the run is behind, the loss and its gradient are those of depth 0; validation always sees every depth."""
    objective, batch = make(small_target, depth_warmup=0.4, step_decay=0.5), packed_batch((3, 6), (2, 5))
    whole = objective.eval()(batch)
    objective.train()
    warming = objective(batch)
    assert warming.depth_count.tolist() == [int(whole.depth_count[0]), 0, 0]
    assert float(warming.loss_sum) == pytest.approx(float(whole.depth_loss[0]), rel=1e-5)
    warming.loss_sum.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in objective.parameters())
    objective.progress = 0.4
    assert objective(batch).depth_count.tolist() == whole.depth_count.tolist()


@pytest.mark.parametrize("loss", ["kl", "ce", "lk"])
def test_batches_without_supervision_touch_every_parameter(small_target, packed_batch, loss):
    """B03, B36: a rank with nothing to do still takes part in the step."""
    objective = make(small_target, 30, loss=loss)
    assert_reaches_every_parameter(objective, (packed_batch((7, 0)), packed_batch((4, 1)), collate([], [1, 3, 5], 32)))


def test_a_frozen_lm_head_stays_the_targets(small_target, packed_batch):
    block = Block(aux_layers=[1, 3, 5], unroll_steps=DEPTHS, draft_vocab_size=30, train_lm_head=False)
    vocab = DraftVocab(torch.randperm(50)[:30].sort().values, 50)
    objective = Eagle3Objective(Eagle3Head(block, small_target, vocab), small_target, Settings())
    objective(packed_batch((3, 8))).loss_sum.backward()
    without = {name for name, p in objective.named_parameters() if p.grad is None}
    assert without == {"head.lm_head.weight"} and torch.equal(objective.head.lm_head.weight, small_target.lm_head[vocab.ids])
