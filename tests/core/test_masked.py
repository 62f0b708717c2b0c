import torch

from tokencredit.core.masked import explained_variance, masked_mean, moments, whiten

X = torch.tensor([[1.0, 2.0, torch.nan], [3.0, torch.inf, 6.0]])
MASK = torch.tensor([[True, True, False], [True, False, True]])


def test_moments_by_hand():
    # (1, 2, 3, 6): mean 3, squared deviations 4 + 1 + 0 + 9 = 14 over 4
    count, mean, variance = moments(X, MASK)
    assert (count, mean, variance) == (4, 3, 3.5)
    assert masked_mean(X, MASK) == 3
    assert masked_mean(X, MASK, count=24) == 0.5


def test_whiten_by_hand():
    deviation = 3.5**0.5
    expected = torch.tensor([[-2, -1, 0], [0, 0, 3]]) / deviation
    torch.testing.assert_close(whiten(X, MASK), expected)
    kept = torch.where(MASK, expected + 3, 0.0)
    torch.testing.assert_close(whiten(X, MASK, shift_mean=False), kept)


def test_explained_variance_by_hand():
    values = torch.tensor([[1.0, 2.0, torch.nan], [3.0, 0.0, 4.0]])
    # residuals (0, 0, 0, 2): variance 1 − 0.25 = 0.75
    torch.testing.assert_close(explained_variance(values, X, MASK), torch.tensor(1 - 0.75 / 3.5))
