"""The update on a small policy whose evaluation costs nothing: a table of logits and values, one row a state."""

import math
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from tokencredit.core.masked import whiten
from tokencredit.core.projection import TokenStats
from tokencredit.learn.experience import Experience
from tokencredit.learn.update import Evaluation, NonFiniteUpdate, Objective, backward, measure, ppo_update

STATES, ACTIONS, ROWS, TIME = 6, 5, 8, 7
OBJECTIVE = Objective(clip=0.2, value_clip=0.3, value_coef=0.5, entropy_coef=0.01)


def nothing(now, at):
    return now.logprobs.sum() * 0


class TablePolicy(nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.randn(STATES, ACTIONS))
        self.value = nn.Parameter(torch.randn(STATES))

    def forward(self, inputs, policy_loss, kl=None):
        distribution = torch.distributions.Categorical(logits=self.logits[inputs["states"]])
        logprobs, entropy = distribution.log_prob(inputs["actions"]), distribution.entropy()
        kl = None if kl is None else kl(logprobs)
        mask = inputs["mask"]
        stats = TokenStats(logprobs[mask], entropy[mask], None if kl is None else kl[mask])
        loss = policy_loss(stats, slice(None))
        values = self.value[inputs["states"]]
        return Evaluation(loss, values, logprobs.detach(), entropy.detach(), None if kl is None else kl.detach())


@pytest.fixture
def world():
    torch.manual_seed(0)
    policy = TablePolicy()
    inputs = {"states": torch.randint(STATES, (ROWS, TIME)), "actions": torch.randint(ACTIONS, (ROWS, TIME))}
    inputs["mask"] = mask = torch.arange(TIME) < torch.randint(2, TIME + 1, (ROWS, 1))
    with torch.no_grad():
        _, values, logprobs, *_ = policy(inputs, nothing)
    advantages = torch.randn(ROWS, TIME)
    experience = Experience(inputs, mask, mask.sum(1), logprobs, values, advantages, values + advantages)
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(torch.optim.SGD(policy.parameters(), lr=0.5))
    return policy, experience, optimizer, accelerator


def update(world, **changes):
    policy, experience, optimizer, accelerator = world
    settings = {"epochs": 1, "minibatches": 1} | changes
    evaluate = settings.pop("evaluate", policy)
    generator = torch.Generator().manual_seed(3)
    return ppo_update(experience, evaluate, OBJECTIVE, policy, optimizer, accelerator, generator, **settings)


def test_a_policy_that_is_not_the_one_that_sampled_is_noticed(world):
    policy, experience, *rest = world
    shifted = experience.logprobs.clone()
    row, step = experience.mask.nonzero()[-1].tolist()
    shifted[row, step] += 0.1
    shifted[~experience.mask] = 7.0  # says nothing
    metrics = update((policy, replace(experience, logprobs=shifted), *rest), epochs=2)
    assert metrics["first_ratio_error"] == pytest.approx(math.expm1(0.1), rel=1e-4)


def test_the_ratio_is_exactly_1_before_the_first_step(world):
    metrics = update(world)
    assert metrics["ratio_max"] == metrics["ratio_min"] == 1.0
    assert metrics["first_ratio_error"] == 0.0
    assert metrics["clip_fraction"] == metrics["approx_kl_k1"] == metrics["approx_kl_k3"] == 0.0
    assert metrics["steps"] == 1


def test_one_step_is_the_gradient_of_the_papers_objective(world):
    policy, experience, *_ = world
    distribution = torch.distributions.Categorical(logits=policy.logits[experience.inputs["states"]])
    logprobs, entropy = distribution.log_prob(experience.inputs["actions"]), distribution.entropy()
    values = policy.value[experience.inputs["states"]]
    mask, tokens = experience.mask, experience.mask.sum()
    ratio = (logprobs - experience.logprobs).exp()
    surrogate = torch.minimum(ratio * experience.advantages, ratio.clamp(0.8, 1.2) * experience.advantages)
    clipped = experience.values + (values - experience.values).clamp(-0.3, 0.3)
    critic = 0.5 * torch.maximum((values - experience.returns) ** 2, (clipped - experience.returns) ** 2)
    loss = ((-surrogate + 0.5 * critic - 0.01 * entropy) * mask).sum() / tokens
    gradients = torch.autograd.grad(loss, list(policy.parameters()))
    expected = [p.detach() - 0.5 * g for p, g in zip(policy.parameters(), gradients, strict=True)]
    metrics = update(world)
    for parameter, wanted in zip(policy.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), wanted)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(math.sqrt(sum(g.square().sum().item() for g in gradients)), rel=1e-5)


@pytest.mark.parametrize("tokens", [TIME, 2 * TIME, 5 * TIME, 1000])
def test_micro_batches_change_no_gradient(world, tokens):
    policy, experience, _, accelerator = world
    whole = backward(experience, policy, OBJECTIVE, policy, accelerator, None)
    expected = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    parts = backward(experience, policy, OBJECTIVE, policy, accelerator, tokens)
    for parameter, wanted in zip(policy.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted)
    assert len(parts) > 1 or tokens == 1000
    parts, whole = (measure(seen, OBJECTIVE) for seen in (parts, whole))
    torch.testing.assert_close(parts.losses, whole.losses)
    assert parts.ratios.metrics() == pytest.approx(whole.ratios.metrics())


@pytest.mark.parametrize("reduction", ["token", "sequence", "constant"])
def test_every_reduction_adds_up(world, reduction):
    policy, experience, _, accelerator = world
    objective = replace(OBJECTIVE, reduction=reduction)
    losses = [
        measure(backward(experience, policy, objective, policy, accelerator, tokens), objective).losses["loss"]
        for tokens in (None, 2 * TIME)
    ]
    torch.testing.assert_close(*losses)


def test_kl_in_the_loss_has_its_price(world):
    policy, experience, _, accelerator = world

    def evaluate(inputs, policy_loss):
        return policy(inputs, policy_loss, kl=torch.square)

    objective = Objective(clip=0.2, value_coef=0.0, kl_coef=0.3)
    stats = measure(backward(experience, evaluate, objective, policy, accelerator, None), objective)
    kl = experience.logprobs.square()[experience.mask].mean()
    torch.testing.assert_close(stats.losses["kl_in_update"], kl)
    torch.testing.assert_close(stats.losses["loss"], stats.losses["policy_loss"] + 0.3 * kl)


def test_padding_changes_nothing(world):
    policy, experience, _, accelerator = world
    backward(experience, policy, OBJECTIVE, policy, accelerator, None)
    expected = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    for tensor in (experience.logprobs, experience.values, experience.advantages, experience.returns):
        tensor[~experience.mask] = math.nan
    backward(experience, policy, OBJECTIVE, policy, accelerator, None)
    for parameter, wanted in zip(policy.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, wanted)


def test_advantages_can_be_whitened_in_each_minibatch(world):
    policy, experience, optimizer, accelerator = world
    whitened = replace(experience, advantages=whiten(experience.advantages, experience.mask))
    scaled = replace(experience, advantages=3 * experience.advantages + 1)
    start = {name: x.clone() for name, x in policy.state_dict().items()}
    results = []
    for batch, options in ((whitened, {}), (scaled, {"whiten_minibatches": True})):
        policy.load_state_dict(start)
        results.append(update((policy, batch, optimizer, accelerator), **options))
    assert results[0] == pytest.approx(results[1], rel=1e-4, abs=1e-6)


def test_every_row_is_in_one_minibatch_of_an_epoch(world):
    _, experience, *_ = world
    parts = list(experience.minibatches(3, torch.Generator().manual_seed(0)))
    assert sorted(torch.cat(parts).tolist()) == list(range(ROWS))
    assert {len(part) for part in parts} == {2, 3}


def test_epochs_times_minibatches_steps(world):
    assert update(world, epochs=3, minibatches=4)["steps"] == 12


def test_more_steps_raise_the_chance_of_what_paid(world):
    policy, experience, *_ = world
    update(world, epochs=4, minibatches=2)
    with torch.no_grad():
        logprobs = policy(experience.inputs, nothing).logprobs
    gain = (logprobs - experience.logprobs) * experience.advantages
    assert gain[experience.mask].mean() > 0


def test_target_kl_ends_an_update_before_a_step_from_too_far_away(world):
    metrics = update(world, epochs=6, target_kl=1e-3)
    assert 1 <= metrics["steps"] < 6
    assert metrics["approx_kl_k3"] > 0


def test_gradients_are_clipped_to_the_norm(world):
    policy, *_ = world
    before = [p.detach().clone() for p in policy.parameters()]
    metrics = update(world, max_grad_norm=1e-3)
    with torch.no_grad():
        moved = (
            torch.stack([(p - b).square().sum() for p, b in zip(policy.parameters(), before, strict=True)]).sum().sqrt()
        )
    assert metrics["grad_norm"] > 1e-3
    assert float(moved) == pytest.approx(0.5 * 1e-3, rel=1e-3)


@pytest.mark.parametrize(("field", "term"), [("advantages", "policy loss"), ("returns", "value loss")])
def test_a_loss_that_is_not_finite_is_named_and_its_step_not_taken(world, field, term):
    policy, experience, *_ = world
    getattr(experience, field)[5, 0] = math.nan
    before = [p.detach().clone() for p in policy.parameters()]
    with pytest.raises(NonFiniteUpdate) as caught:
        update(world)
    assert (caught.value.term, caught.value.row) == (term, 5)
    assert all(torch.equal(p, b) for p, b in zip(policy.parameters(), before, strict=True))


def test_a_gradient_that_is_not_finite_is_named(world):
    policy, *_ = world

    def evaluate(inputs, policy_loss):
        now = policy(inputs, policy_loss)
        return now._replace(values=now.values + (policy.value.sum() * 0).sqrt())  # d√x/dx at 0

    with pytest.raises(NonFiniteUpdate, match="gradient") as caught:
        update(world, evaluate=evaluate)
    assert caught.value.row is None
