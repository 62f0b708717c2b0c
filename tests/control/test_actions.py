import numpy as np
import pytest
import torch
from gymnasium import spaces

from tokencredit.control.actions import actions_of
from tokencredit.errors import ConfigError

GENERATOR = torch.Generator().manual_seed(0)


def test_a_choice_is_that_of_torch_distributions():
    distribution = actions_of(spaces.Discrete(5), 0.0, "clip")
    logits = torch.randn(7, 3, 5)
    actions = torch.randint(5, (7, 3, 1))
    reference = torch.distributions.Categorical(logits=logits)
    logprobs, entropy = distribution.logprobs(logits, actions), distribution.entropy(logits)
    torch.testing.assert_close(logprobs, reference.log_prob(actions[..., 0]))
    torch.testing.assert_close(entropy, reference.entropy())


def test_several_choices_add_up():
    distribution = actions_of(spaces.MultiDiscrete([2, 3]), 0.0, "clip")
    logits = torch.randn(7, 5)
    actions = torch.stack([torch.randint(2, (7,)), torch.randint(3, (7,))], -1)
    parts = [torch.distributions.Categorical(logits=part) for part in logits.split([2, 3], -1)]
    logprobs, entropy = distribution.logprobs(logits, actions), distribution.entropy(logits)
    torch.testing.assert_close(logprobs, sum(p.log_prob(a) for p, a in zip(parts, actions.unbind(-1), strict=True)))
    torch.testing.assert_close(entropy, sum(p.entropy() for p in parts))
    assert distribution.to_env(actions.numpy()).shape == (7, 2)


@pytest.mark.parametrize("shape", [3, (2, 2)])
def test_bits_are_choices_of_two(shape):
    space = spaces.MultiBinary(shape)
    distribution = actions_of(space, 0.0, "clip")
    logits = torch.randn(7, 2 * distribution.parts)
    actions = distribution.sample(logits, distribution.noise((7,), GENERATOR))
    reference = torch.distributions.Bernoulli(logits=logits[:, 1::2] - logits[:, ::2])
    torch.testing.assert_close(distribution.logprobs(logits, actions), reference.log_prob(actions.float()).sum(-1))
    assert all(map(space.contains, distribution.to_env(actions.numpy())))


def test_continuous_actions_are_those_of_torch_distributions():
    distribution = actions_of(spaces.Box(-1, 1, (3,)), -0.5, "clip")
    mean, actions = torch.randn(7, 3), torch.randn(7, 3)
    reference = torch.distributions.Normal(mean, torch.tensor(-0.5).exp())
    logprobs, entropy = distribution.logprobs(mean, actions), distribution.entropy(mean)
    torch.testing.assert_close(logprobs, reference.log_prob(actions).sum(-1))
    torch.testing.assert_close(entropy, reference.entropy().sum(-1))


@pytest.mark.parametrize("space", [spaces.Discrete(4), spaces.MultiDiscrete([4, 2])])
def test_choices_come_as_often_as_they_should(space):
    distribution = actions_of(space, 0.0, "clip")
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4] + [0.5, 0.5] * (distribution.parts - 1)).log()
    drawn = distribution.sample(logits.expand(20_000, -1), distribution.noise((20_000,), GENERATOR))
    shares = torch.bincount(drawn[:, 0], minlength=4) / 20_000
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.2, 0.3, 0.4]), atol=0.015, rtol=0)
    assert (distribution.greedy(logits.expand(2, -1))[:, 0] == 3).all()


def test_actions_are_clipped_or_scaled_to_the_bounds():
    space = spaces.Box(np.float32([-2, 0]), np.float32([2, 10]))
    actions = np.float32([[-3, 0.5], [0.5, -3]])
    assert actions_of(space, 0, "clip").to_env(actions).tolist() == [[-2, 0.5], [0.5, 0]]
    assert actions_of(space, 0, "scale").to_env(actions).tolist() == [[-2, 7.5], [1, 0]]


def test_a_choice_starts_where_its_space_starts():
    assert actions_of(spaces.Discrete(3, start=5), 0, "clip").to_env(np.array([[0], [2]])).tolist() == [5, 7]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, start=-1),
        spaces.Discrete(3, dtype=np.int32),
        spaces.MultiDiscrete([[2, 3], [3, 2]], dtype=np.int32, start=[[1, 0], [0, -1]]),
        spaces.MultiBinary((2, 3)),
        spaces.Box(-1, 1, (2, 2), np.float64),
    ],
    ids=str,
)
def test_actions_are_of_their_space(space):
    distribution = actions_of(space, 0, "clip")
    action = distribution.to_env(distribution.greedy(torch.zeros(1, distribution.outputs)).numpy())[0]
    assert space.contains(action)
    assert action.dtype == space.dtype


def test_actions_that_are_not_supported():
    with pytest.raises(ConfigError, match=r"its actions are Text.*Discrete, MultiDiscrete, MultiBinary and continuous"):
        actions_of(spaces.Text(3), 0, "clip")
    with pytest.raises(ConfigError, match=r"agent\.actions is scale, but the bounds of .* are not finite"):
        actions_of(spaces.Box(-np.inf, 1, (2,)), 0, "scale")
