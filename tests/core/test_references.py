"""Against other people's code: TorchRL, Stable-Baselines3, torch.distributions. The first two where installed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokencredit.core.advantages import gae, td
from tokencredit.core.logprobs import token_stats


@st.composite
def rollouts(draw):
    """Rewards, values, terminated, truncated and bootstrap [batch, time], the last step of every row an end."""
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 30))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    chance = draw(st.sampled_from([0.0, 0.1, 0.5]))
    rewards, values, bootstrap = torch.randn(3, *shape, generator=generator)
    ends = torch.rand(shape, generator=generator) < chance
    ends[:, -1] = True
    terminated = ends & (torch.rand(shape, generator=generator) < 0.5)
    return rewards, values, terminated, ends & ~terminated, bootstrap


fractions = st.sampled_from([0.0, 1.0, 0.95]) | st.floats(0.0, 1.0)
close = {"rtol": 1e-4, "atol": 1e-4}


@given(rollouts(), fractions, fractions)
@settings(max_examples=50)
@pytest.mark.proof  # below: Stable-Baselines3's; test_advantages.py: by definition
def test_gae_is_torchrl_s(rollout, gamma, lam):
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    rewards, values, terminated, truncated, bootstrap = rollout
    following = torch.where(truncated, bootstrap, values.roll(-1, dims=-1))
    arguments = [x.unsqueeze(-1) for x in (values, following, rewards, terminated | truncated, terminated)]
    expected = functional.generalized_advantage_estimate(gamma, lam, *arguments[:3], *arguments[3:])
    where = {"terminated": terminated, "truncated": truncated, "bootstrap": bootstrap}
    advantages, returns = gae(rewards, values, gamma=gamma, lam=lam, **where)
    torch.testing.assert_close(advantages, expected[0].squeeze(-1), **close)
    torch.testing.assert_close(returns, expected[1].squeeze(-1), **close)
    # Theirs for λ = 0, another function altogether.
    done, terminated_ = arguments[3:]
    deltas = functional.td0_advantage_estimate(gamma, *arguments[:3], done, terminated_)
    torch.testing.assert_close(td(rewards, values, gamma=gamma, **where)[0], deltas.squeeze(-1), **close)


@pytest.mark.slow
@given(rollouts(), fractions, fractions)
@settings(max_examples=50)
def test_gae_is_stable_baselines_3_s(rollout, gamma, lam):
    buffers = pytest.importorskip("stable_baselines3.common.buffers")
    spaces = pytest.importorskip("gymnasium.spaces")
    rewards, values, terminated, truncated, bootstrap = rollout
    batch, time = rewards.shape
    # Its way: time first; where an episode was cut off, the discounted value of what would have followed is added to
    # the reward, and the episode counts as ended; the value after the last step is an argument of its own.
    inner = truncated.clone()
    inner[:, -1] = False
    space = spaces.Box(-1.0, 1.0, (1,))
    buffer = buffers.RolloutBuffer(time, space, space, gae_lambda=lam, gamma=gamma, n_envs=batch)
    ends = terminated | truncated
    starts = torch.cat([torch.ones(batch, 1, dtype=torch.bool), ends[:, :-1]], dim=1)
    for t in range(time):
        reward = rewards[:, t] + gamma * bootstrap[:, t] * inner[:, t]
        nothing = np.zeros((batch, 1), dtype=np.float32)
        buffer.add(nothing, nothing, reward.numpy(), starts[:, t].numpy(), values[:, t], torch.zeros(batch))
    buffer.compute_returns_and_advantage(last_values=bootstrap[:, -1], dones=terminated[:, -1].numpy())

    advantages, returns = gae(
        rewards, values, gamma=gamma, lam=lam, terminated=terminated, truncated=truncated, bootstrap=bootstrap
    )
    torch.testing.assert_close(advantages, torch.from_numpy(buffer.advantages.T), **close)
    torch.testing.assert_close(returns, torch.from_numpy(buffer.returns.T), **close)


@given(st.integers(0, 2**32), st.sampled_from([0.5, 1.0, 1.7]))
@settings(max_examples=30)
def test_distributions_are_torch_s(seed, temperature):
    generator = torch.Generator().manual_seed(seed)
    hidden, ref_hidden = torch.randn(2, 3, 4, 6, generator=generator)
    weight, ref_weight = torch.randn(2, 13, 6, generator=generator)
    targets = torch.randint(13, (3, 4), generator=generator)
    policy = torch.distributions.Categorical(logits=hidden @ weight.T / temperature)
    reference = torch.distributions.Categorical(logits=ref_hidden @ ref_weight.T / temperature)
    options = {"temperature": temperature, "chunk": 5}
    logprobs, entropy, _ = token_stats(hidden, weight, targets, entropy=True, **options)
    torch.testing.assert_close(logprobs, policy.log_prob(targets))
    torch.testing.assert_close(entropy, policy.entropy(), rtol=1e-4, atol=1e-5)
    expected = torch.distributions.kl_divergence(policy, reference)
    kl = token_stats(hidden, weight, None, ref=(ref_hidden, ref_weight, None), **options).kl
    torch.testing.assert_close(kl, expected, rtol=1e-4, atol=1e-5)
