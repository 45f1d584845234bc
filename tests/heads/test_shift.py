"""Index shifts: the table of KNOWN_FAULTS B20."""

import torch

from heads import shift


def test_mask_moves_with_the_teacher():
    """B20: (feature row, token eaten, predicted, weight) for ids 10..14 with mask 0 0 1 1 1."""
    ids, mask, document = torch.arange(10, 15), torch.tensor([0, 0, 1, 1, 1]).bool(), torch.zeros(5, dtype=torch.long)
    table = list(
        zip(
            shift.draft_inputs(ids, 0).tolist(),
            shift.draft_labels(ids, 0).tolist(),
            shift.draft_weight(mask, document, 0).tolist(),
            strict=True,
        )
    )
    assert table[:3] == [(11, 12, False), (12, 13, True), (13, 14, True)]
    assert table[3][0] == 14 and table[3][2] and not shift.has_label(document, 0)[3]  # soft teacher only
    assert not table[4][2]
    for depth in range(4):
        weight = shift.draft_weight(mask, document, depth)
        assert weight.int().tolist() == [int(t + 1 + depth < 5 and mask[t + 1 + depth]) for t in range(5)]


def test_no_pair_crosses_a_document():
    """B20: rollouts end where their row ends."""
    document = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    mask = torch.ones(7, dtype=torch.bool)
    for depth in range(3):
        for t, supervised in enumerate(shift.draft_weight(mask, document, depth).tolist()):
            assert supervised == (t + 1 + depth < 7 and document[t + 1 + depth] == document[t])


def test_rollout_rows_keep_what_later_depths_need():
    weights = [torch.tensor([0, 1, 0, 1]).bool(), torch.tensor([1, 0, 0, 0]).bool()]
    first, second = shift.rollout_rows(weights)
    assert first.int().tolist() == [1, 1, 0, 1] and second.int().tolist() == [1, 0, 0, 0]
