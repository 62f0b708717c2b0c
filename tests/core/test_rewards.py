import math

import pytest
import torch

from tokencredit.core.rewards import token_rewards

T, F = True, False
NAN = math.nan
MASK = torch.tensor([[T, T, F], [T, F, T]])
KL = torch.tensor([[1.0, 2.0, NAN], [3.0, NAN, -4.0]])


def test_the_score_stands_on_the_last_acted_token():
    rewards = token_rewards(torch.tensor([5.0, 7.0]), MASK)
    assert rewards.tolist() == [[0.0, 5.0, 0.0], [0.0, 0.0, 7.0]]


def test_every_token_pays_for_its_kl():
    rewards = token_rewards(torch.tensor([5.0, 7.0]), MASK, kl=KL, kl_coef=0.5)
    assert rewards.tolist() == [[-0.5, 4.0, 0.0], [-1.5, 0.0, 9.0]]
    assert torch.equal(
        token_rewards(torch.tensor([5.0, 7.0]), MASK, kl=KL), token_rewards(torch.tensor([5.0, 7.0]), MASK)
    )
    # so that the row's sum is the score less β times the KL of the sequence
    assert rewards.sum(1).tolist() == [5 - 0.5 * 3, 7 + 0.5 * 1]


def test_dense_scores():
    scores = torch.tensor([[1.0, 2.0, NAN], [4.0, NAN, 6.0]])
    assert token_rewards(scores, MASK).tolist() == [[1.0, 2.0, 0.0], [4.0, 0.0, 6.0]]
    rewards = token_rewards(scores, MASK, kl=KL, kl_coef=1.0, eos=torch.tensor([T, F]), missing_eos_penalty=2.0)
    assert rewards.tolist() == [[0.0, 0.0, 0.0], [1.0, 0.0, 8.0]]
    assert token_rewards(scores, MASK, clip=3.0).tolist() == [[1.0, 2.0, 0.0], [3.0, 0.0, 3.0]]


def test_clipping_comes_before_the_penalty():
    scores = torch.tensor([-50.0, 70.0])
    rewards = token_rewards(scores, MASK, eos=torch.tensor([F, T]), missing_eos_penalty=1.0, clip=10.0)
    assert rewards.tolist() == [[0.0, -11.0, 0.0], [0.0, 0.0, 10.0]]


def test_types():
    assert token_rewards(torch.tensor([5, 7]), MASK).dtype == torch.float32
    assert token_rewards(torch.tensor([5.0, 7.0]).half(), MASK).dtype == torch.float32
    assert token_rewards(torch.tensor([5.0, 7.0]).double(), MASK).dtype == torch.float64
    scores = torch.tensor([5.0, 7.0], requires_grad=True)
    assert not token_rewards(scores, MASK, kl=KL.requires_grad_(), kl_coef=1.0).requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": torch.zeros(3)}, r"scores has shape \(3,\); it must be \(2,\)"),
        ({"scores": torch.zeros(2, 4)}, "scores has shape"),
        ({"scores": torch.tensor(1.0)}, "scores has shape"),
        ({"mask": MASK[0]}, "mask has shape"),
        ({"mask": MASK.float()}, "mask has dtype"),
        ({"mask": MASK & torch.tensor([[T], [F]])}, "mask has no acted step in row 1"),
        ({"kl": torch.zeros(2)}, "kl has shape"),
        ({"kl": KL, "kl_coef": -1.0}, "kl_coef is -1.0"),
        ({"clip": -1.0}, "clip is -1.0"),
        ({"missing_eos_penalty": -1.0}, "missing_eos_penalty is -1.0"),
        ({"missing_eos_penalty": 1.0}, "eos is None"),
        ({"missing_eos_penalty": 1.0, "eos": torch.ones(2)}, "eos has dtype"),
        ({"missing_eos_penalty": 1.0, "eos": MASK}, "eos has shape"),
    ],
)
def test_refusals(changes, message):
    arguments = {"scores": torch.zeros(2), "mask": MASK, **changes}
    with pytest.raises(ValueError, match=message):
        token_rewards(**arguments)
