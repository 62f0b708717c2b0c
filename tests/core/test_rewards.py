import math

import pytest
import torch

from tokencredit.core.rewards import overlong_penalty, token_rewards

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


def test_the_overlong_penalty_by_hand():
    # DAPO's eq. 13 with L_max 20 and L_cache 4: 0 up to 16 tokens, then a quarter more with each, −1 at 20
    lengths = torch.tensor([1, 16, 17, 18, 19, 20])
    assert overlong_penalty(lengths, limit=20, tokens=4, penalty=1.0).tolist() == [0, 0, 0.25, 0.5, 0.75, 1]
    assert overlong_penalty(lengths, limit=20, tokens=4, penalty=2.0).tolist() == [0, 0, 0.5, 1, 1.5, 2]
    assert overlong_penalty(lengths, limit=20, tokens=1, penalty=2.0).tolist() == [0, 0, 0, 0, 0, 2]
    # the example of TRL's get_soft_overlong_punishment: 90 of 100 tokens, the last 20 of which cost something
    assert overlong_penalty(torch.tensor([90]), limit=100, tokens=20, penalty=1.0).tolist() == [0.5]


@pytest.mark.parametrize(("limit", "tokens", "penalty"), [(8, 8, 1.0), (20, 4, 0.5), (1, 1, 3.0)])
def test_the_overlong_penalty_is_dapo_s(limit, tokens, penalty):
    for length in range(1, limit + 1):
        # The first two lines of eq. 13; the third is for what is longer than the limit.
        expected = 0.0 if length <= limit - tokens else ((limit - tokens) - length) / tokens
        taken_off = overlong_penalty(torch.tensor([length]), limit=limit, tokens=tokens, penalty=penalty)
        assert -taken_off.item() == pytest.approx(penalty * expected)


def test_the_overlong_penalty_stands_on_the_last_token_after_clipping():
    overlong = torch.tensor([0.0, 0.5])
    rewards = token_rewards(torch.tensor([50.0, 70.0]), MASK, overlong=overlong, clip=10.0)
    assert rewards.tolist() == [[0.0, 10.0, 0.0], [0.0, 0.0, 9.5]]
    dense = torch.tensor([[1.0, 2.0, NAN], [4.0, NAN, 6.0]])
    assert token_rewards(dense, MASK, overlong=overlong).tolist() == [[1.0, 2.0, 0.0], [4.0, 0.0, 5.5]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, "tokens is 0; it must be at least 1 and at most limit, 20"),
        ({"tokens": 21}, "tokens is 21; it must be at least 1 and at most limit, 20"),
        ({"penalty": -1.0}, "penalty is -1.0"),
    ],
)
def test_the_overlong_penalty_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        overlong_penalty(torch.tensor([3]), **({"limit": 20, "tokens": 4, "penalty": 1.0} | changes))


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
        ({"overlong": torch.zeros(3)}, r"overlong has shape \(3,\); it must be \(2,\)"),
        ({"missing_eos_penalty": 1.0, "eos": torch.ones(2)}, "eos has dtype"),
        ({"missing_eos_penalty": 1.0, "eos": MASK}, "eos has shape"),
    ],
)
def test_refusals(changes, message):
    arguments = {"scores": torch.zeros(2), "mask": MASK, **changes}
    with pytest.raises(ValueError, match=message):
        token_rewards(**arguments)
