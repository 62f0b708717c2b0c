import torch

from tokencredit.core.losses import clipped_surrogate, token_weights, total_loss, value_loss


def test_surrogate_by_hand():
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0])
    loss = clipped_surrogate(ratio.log(), torch.zeros(5), advantages, clip=0.2)
    torch.testing.assert_close(loss, torch.tensor([-2.4, 3.0, -1.0, 1.6, -2.2]))


def test_value_loss_by_hand():
    values, old, returns = torch.tensor([3.0, 1.1]), torch.tensor([1.0, 1.0]), torch.tensor([3.0, 2.0])
    torch.testing.assert_close(value_loss(values, old, returns), torch.tensor([0.0, 0.405]))
    # the first clipped to 1.2: ½ (1.2 − 3)² = 1.62
    torch.testing.assert_close(value_loss(values, old, returns, clip=0.2), torch.tensor([1.62, 0.405]))


def test_total_loss_by_hand():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    weights = token_weights(mask, by="sequence")
    torch.testing.assert_close(weights, torch.tensor([[0.25, 0.25, 0.0], [0.5, 0.0, 0.0]]))
    nan = torch.nan
    policy, value = torch.tensor([[1.0, 3.0, nan], [5.0, nan, nan]]), torch.tensor([[2.0, 2.0, nan], [4.0, nan, nan]])
    entropy = torch.tensor([[1.0, 1.0, nan], [3.0, nan, nan]])
    total = total_loss(policy, value, entropy, weights, value_coef=0.5, entropy_coef=0.1)
    torch.testing.assert_close(total, torch.tensor(3.5 + 0.5 * 3 - 0.1 * 2))
