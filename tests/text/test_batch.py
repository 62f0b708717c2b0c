import torch

from tokencredit.text.batch import token_pairs


def test_pairs_by_hand():
    ids = torch.tensor([[1, 2, 1, 2, 9], [1, 2, 3, 3, 3]])
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    count, distinct, in_rows = token_pairs(ids, mask)
    # 12 21 12, and 12 23 33 33
    assert (count, len(distinct), in_rows) == (7, 4, 5)


def test_a_single_token_has_no_pair():
    count, distinct, in_rows = token_pairs(torch.tensor([[7]]), torch.tensor([[True]]))
    assert (count, len(distinct), in_rows) == (0, 0, 0)
