"""The learner on a small policy whose evaluation costs nothing: a table of logits and values, one row per state."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from helpers.minibatches import FunctionPasses, TablePolicy
from tokencredit.core.losses import token_weights
from tokencredit.core.masked import whiten, whiten_with_divisor
from tokencredit.core.vocab_projection import TokenStats
from tokencredit.distributed.processes import Processes
from tokencredit.learn.experience import Experience
from tokencredit.learn.learner import Learner
from tokencredit.learn.objective import (
    CriticOutputs,
    Interpolation,
    MicroBatchLoss,
    Objective,
    PolicyOutputs,
    SequenceObjective,
    WeightedObjective,
)
from tokencredit.learn.optim import schedule
from tokencredit.learn.update import NonFiniteUpdate, UpdateSettings, ratios

STATES, ACTIONS, ROWS, TIME = 6, 5, 8, 7
OBJECTIVE = Objective(clip=0.2, value_clip=0.3, value_coef=0.5, entropy_coef=0.01)


def nothing(now, at):
    return now.logprobs.sum() * 0


@pytest.fixture
def world():
    torch.manual_seed(0)
    policy = TablePolicy()
    inputs = {"states": torch.randint(STATES, (ROWS, TIME)), "actions": torch.randint(ACTIONS, (ROWS, TIME))}
    inputs["mask"] = mask = torch.arange(TIME) < torch.randint(2, TIME + 1, (ROWS, 1))
    with torch.no_grad():
        now = policy(inputs, nothing)
    advantages = torch.randn(ROWS, TIME)
    returns = now.values + advantages
    return policy, Experience(inputs, mask, mask.sum(1), now.logprobs, now.values, advantages, returns)


def learner_of(policy, objective=OBJECTIVE, evaluate=None, **settings):
    return Learner(
        policy,
        torch.optim.SGD(policy.parameters(), lr=0.5),
        FunctionPasses(lambda states: policy.value[states], evaluate=evaluate),
        objective,
        UpdateSettings(**{"epochs": 1, "minibatches": 1} | settings),
        schedule("constant"),
        torch.Generator().manual_seed(3),
        Processes(),
    )


def update(world, evaluate=None, **settings):
    policy, experience = world
    return learner_of(policy, evaluate=evaluate, **settings).update(experience)


def backward(world, objective=OBJECTIVE, evaluate=None, micro_batch_tokens=None):
    """The loss and its parts, and the gradients, of the whole experience as one minibatch."""
    policy, experience = world
    policy.zero_grad()
    records = learner_of(policy, objective, evaluate, micro_batch_tokens=micro_batch_tokens).accumulate_gradients(
        experience
    )
    parts = {name: torch.stack([record.parts[name] for record in records]).sum() for name in records[0].parts}
    losses = {"loss": torch.stack([record.loss for record in records]).sum(), **parts}
    return losses, [p.grad.clone() for p in policy.parameters()], records


def test_log_probs_of_another_policy_show_in_the_first_ratio_error(world):
    policy, experience = world
    shifted = experience.logprobs.clone()
    row, step = experience.mask.nonzero()[-1].tolist()
    shifted[row, step] += 0.1
    shifted[~experience.mask] = 7.0  # says nothing
    metrics = update((policy, replace(experience, logprobs=shifted)), epochs=2)
    assert metrics["first_ratio_error"] == pytest.approx(math.expm1(0.1), rel=1e-4)


def test_the_ratio_is_exactly_1_before_the_first_step(world):
    metrics = update(world)
    assert metrics["ratio_max"] == metrics["ratio_min"] == 1.0
    assert metrics["first_ratio_error"] == 0.0
    assert metrics["clip_fraction"] == metrics["approx_kl_k1"] == metrics["approx_kl_k3"] == 0.0
    assert metrics["steps"] == 1


def test_the_distance_from_the_behavior_policy_is_without_the_steps_of_the_update(world):
    policy, experience = world
    drawn = replace(experience, behavior_logprobs=experience.logprobs)
    metrics = update((policy, drawn), epochs=2, minibatches=2)
    assert metrics["ratio_max"] > 1.01
    assert (metrics["behavior_ratio"], metrics["behavior_kl"]) == (1, 0)


def test_one_step_is_the_gradient_of_the_papers_objective(world):
    policy, experience = world
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


@pytest.mark.parametrize("reduction", ["token", "sequence", "constant"])
@pytest.mark.parametrize("tokens", [TIME, 5 * TIME, 1000])
def test_micro_batches_change_no_gradient(world, tokens, reduction):
    objective = replace(OBJECTIVE, reduction=reduction)
    losses, expected, whole = backward(world, objective)
    in_parts, gradients, records = backward(world, objective, micro_batch_tokens=tokens)
    torch.testing.assert_close(gradients, expected)
    assert len(records) > 1 or tokens == 1000
    torch.testing.assert_close(in_parts, losses)
    learner = learner_of(world[0])
    clip, processes = learner.objective.clip, learner.processes
    found = [ratios(each, clip, processes).metrics() for each in (records, whole)]
    assert found[0] == pytest.approx(found[1])


def test_a_constant_reduction_divides_by_rows_times_the_horizon(world):
    policy, experience = world
    objective = Objective(clip=0.2, value_coef=0.0, reduction="constant", horizon=3 * TIME)
    losses, *_ = backward(world, objective)
    expected = -experience.advantages[experience.mask].sum() / (ROWS * 3 * TIME)
    torch.testing.assert_close(losses["policy_loss"], expected)
    # Whatever the longest completion of a batch is, a token weighs the same.
    shorter = experience.select(slice(None))
    cut = int(experience.mask.sum(1).max())
    assert cut <= TIME
    padded = replace(
        shorter,
        inputs={name: nn.functional.pad(x, (0, 5)) for name, x in experience.inputs.items()},
        **{
            name: nn.functional.pad(getattr(experience, name), (0, 5))
            for name in ("mask", "logprobs", "values", "advantages", "returns")
        },
    )
    torch.testing.assert_close(backward((policy, padded), objective)[0]["policy_loss"], expected)


def test_kl_in_the_loss_is_estimated_from_the_references_logprobs(world):
    policy, experience = world
    reference = experience.logprobs + 0.3 * torch.randn(ROWS, TIME)
    objective = Objective(clip=0.2, value_coef=0.0, kl_coef=0.3, kl_estimator="k2")
    losses, *_ = backward((policy, replace(experience, ref_logprobs=reference)), objective)
    kl = (0.5 * (experience.logprobs - reference).square())[experience.mask].mean()
    torch.testing.assert_close(losses["kl_in_update"], kl)
    torch.testing.assert_close(losses["loss"], losses["policy_loss"] + 0.3 * kl)


@pytest.mark.parametrize("whiten_minibatches", [False, True])
def test_the_price_of_kl_in_the_loss_is_in_units_of_the_reward(world, whiten_minibatches):
    """A reward of ten times the size, at ten times the price of KL, takes the same steps; without whitening not."""
    policy, experience = world
    experience = replace(experience, ref_logprobs=experience.logprobs + 0.3 * torch.randn(ROWS, TIME))
    start, moved = {name: x.clone() for name, x in policy.state_dict().items()}, []
    for scale in (1.0, 10.0):
        policy.load_state_dict(start)
        batch = replace(experience, advantages=scale * experience.advantages)
        if not whiten_minibatches:
            advantages, divisor = whiten_with_divisor(batch.advantages, batch.mask)
            batch = replace(batch, advantages=advantages, divisor=divisor)
        objective = Objective(clip=0.2, value_coef=0.0, kl_coef=0.3 * scale, kl_estimator="k2")
        learner_of(policy, objective, whiten_minibatches=whiten_minibatches).update(batch)
        moved.append(policy.logits.detach() - start["logits"])
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-4, atol=1e-6)
    plain, *_ = backward(
        (policy, replace(experience, divisor=torch.tensor(4.0))), Objective(kl_coef=0.3, kl_estimator="k2")
    )
    torch.testing.assert_close(
        plain["loss"], plain["policy_loss"] + 0.5 * plain["value_loss"] + 0.3 / 4 * plain["kl_in_update"]
    )


def test_padding_does_not_change_gradients(world):
    _, experience = world
    _, expected, _ = backward(world)
    for tensor in (experience.logprobs, experience.values, experience.advantages, experience.returns):
        tensor[~experience.mask] = math.nan
    _, gradients, _ = backward(world)
    assert all(torch.equal(x, y) for x, y in zip(gradients, expected, strict=True))


def test_rows_without_a_token_in_the_loss_change_nothing(world):
    _, experience = world
    rows = torch.tensor([0, 2, 5])
    few = experience.select(rows)
    _, expected, _ = backward((world[0], few))
    mask = experience.mask.clone()
    mask[[1, 3, 4, 6, 7]] = False
    masked = replace(experience, mask=mask, inputs=experience.inputs | {"mask": mask}, lengths=mask.sum(1))
    for tokens in (None, TIME):
        _, gradients, _ = backward((world[0], masked), micro_batch_tokens=tokens)
        torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("whiten_minibatches", [True, False])
@pytest.mark.parametrize("reduction", ["token", "sequence", "constant"])
def test_a_minibatch_without_a_token_in_the_loss_takes_no_step(world, reduction, whiten_minibatches):
    policy, experience = world
    mask = experience.mask.clone()
    mask[1:] = False
    masked = replace(experience, mask=mask, inputs=experience.inputs | {"mask": mask})
    learner = learner_of(
        policy,
        replace(OBJECTIVE, reduction=reduction),
        epochs=3,
        minibatches=ROWS,
        whiten_minibatches=whiten_minibatches,
    )
    learner.optimizer = torch.optim.SGD(policy.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    metrics = learner.update(masked)
    assert (metrics["steps"], metrics["bad_steps"]) == (3, 0)
    assert all(math.isfinite(value) for value in metrics.values())
    before = [p.detach().clone() for p in policy.parameters()]
    nothing = replace(masked, mask=torch.zeros_like(mask), inputs=masked.inputs | {"mask": torch.zeros_like(mask)})
    assert learner.update(nothing) == {"steps": 0, "bad_steps": 0}
    assert all(torch.equal(p, b) for p, b in zip(policy.parameters(), before, strict=True)), "not by momentum either"


def test_without_a_critic_there_is_no_value_loss(world):
    policy, experience = world

    def actor(model, inputs, loss):
        return model(inputs, loss)._replace(critic=None)

    before = policy.value.detach().clone()
    metrics = update((policy, replace(experience, values=None)), evaluate=actor)
    assert "value_loss" not in metrics
    assert torch.equal(policy.value, before)


def test_advantages_can_be_whitened_in_each_minibatch(world):
    policy, experience = world
    whitened = replace(experience, advantages=whiten(experience.advantages, experience.mask))
    scaled = replace(experience, advantages=3 * experience.advantages + 1)
    start = {name: x.clone() for name, x in policy.state_dict().items()}
    results = []
    for batch, options in ((whitened, {}), (scaled, {"whiten_minibatches": True})):
        policy.load_state_dict(start)
        results.append(update((policy, batch), **options))
    assert results[0] == pytest.approx(results[1], rel=1e-4, abs=1e-6)


def test_target_kl_ends_an_update_before_a_step_from_too_far_away(world):
    policy, experience = world
    metrics = update(world, epochs=6, target_kl=1e-3)
    assert 1 <= metrics["steps"] < 6
    assert metrics["approx_kl_k3"] > 0
    moved = replace(experience, logprobs=experience.logprobs - 0.5)
    metrics = update((policy, moved), target_kl=1e-3)
    assert metrics["steps"] == 0
    assert metrics["grad_norm"] > 0, "of the step that was not taken, as the loss"


@pytest.mark.parametrize(("kind", "order"), [("l2", 2), ("max", math.inf)])
def test_gradients_are_clipped_to_the_norm(world, kind, order):
    policy, _ = world
    before = [p.detach().clone() for p in policy.parameters()]
    metrics = update(world, max_grad_norm=1e-3, grad_norm=kind)
    with torch.no_grad():
        steps = [(p - b).flatten() for p, b in zip(policy.parameters(), before, strict=True)]
        moved = torch.linalg.vector_norm(torch.cat(steps), order)
    assert metrics["grad_norm"] > 1e-3
    assert float(moved) == pytest.approx(0.5 * 1e-3, rel=1e-3)


@pytest.mark.parametrize(("field", "term"), [("advantages", "policy loss"), ("returns", "value loss")])
def test_a_loss_that_is_not_finite_is_named_and_its_step_not_taken(world, field, term):
    policy, experience = world
    getattr(experience, field)[5, 0] = math.nan
    before = [p.detach().clone() for p in policy.parameters()]
    with pytest.raises(NonFiniteUpdate) as caught:
        update(world)
    assert (caught.value.term, caught.value.row) == (term, 5)
    assert all(torch.equal(p, b) for p, b in zip(policy.parameters(), before, strict=True))


def test_a_gradient_that_is_not_finite_is_named(world):
    policy, _ = world

    def spoilt(model, inputs, loss):
        now = model(inputs, loss)
        return now._replace(critic=CriticOutputs(now.values + (policy.value.sum() * 0).sqrt()))  # d√x/dx at 0

    with pytest.raises(NonFiniteUpdate, match="gradient") as caught:
        update(world, evaluate=spoilt)
    assert caught.value.row is None


def test_the_learner_goes_on_from_its_state(world):
    policy, experience = world
    once = learner_of(policy, minibatches=4)
    once.update(experience)
    state = once.state()
    state["weights"] = {key: x.detach().clone() for key, x in state["weights"].items()}
    expected = once.update(experience)
    again = learner_of(TablePolicy(), minibatches=4)
    again.load(state)
    assert again.update(experience) == expected
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), again.model.parameters(), strict=True))


def test_rates_follow_the_schedule_and_are_metrics():
    policy = TablePolicy()
    groups = [{"params": [policy.logits], "lr": 0.1}, {"params": [policy.value], "lr": 1.0, "metric": "value_lr"}]
    learner = learner_of(policy)
    learner.optimizer = torch.optim.SGD([group | {"initial_lr": group["lr"]} for group in groups])
    learner.schedule = schedule("linear", total=2)
    assert learner.set_rates(1) == {"lr": 0.1, "value_lr": 1.0}
    assert learner.set_rates(2) == {"lr": 0.05, "value_lr": 0.5}


def test_a_step_of_the_critic_alone_by_hand(world):
    """V(s) ← V(s) − lr · Σ (V(s) − R) / tokens over the tokens at s, whatever the value loss weighs in joint steps."""
    policy, experience = world
    before = policy.value.detach().clone()
    objective = Objective(value_clip=None, value_coef=0.0)
    metrics = learner_of(policy, objective, critic_epochs=1).update(experience)
    states, mask = experience.inputs["states"][experience.mask], experience.mask
    errors = before[states] - experience.returns[mask]
    expected = before.index_add(0, states, -0.5 * errors / mask.sum())
    torch.testing.assert_close(policy.value.detach(), expected)
    assert metrics["critic_steps"] == metrics["steps"] == 1
    assert metrics["critic_value_loss"] == pytest.approx(0.5 * errors.square().mean().item(), rel=1e-5)


@pytest.mark.parametrize("tokens", [TIME, 3 * TIME])
def test_micro_batches_change_no_step_of_the_critic_alone(world, tokens):
    policy, experience = world
    learner = learner_of(policy, critic_epochs=2, minibatches=2, micro_batch_tokens=tokens)
    values = []
    for budget in (None, tokens):
        policy.value.data = experience.values.new_zeros(STATES)
        learner.generator.manual_seed(0)
        learner.settings = replace(learner.settings, micro_batch_tokens=budget)
        learner.update(experience)
        values.append(policy.value.detach().clone())
    torch.testing.assert_close(*values)


def test_the_value_loss_of_the_critic_alone_is_that_of_its_last_pass(world):
    """Also where a pass has fewer minibatches with a token in the loss than there are minibatches."""
    policy, experience = world
    start, learners = policy.value.detach().clone(), [learner_of(policy, minibatches=2 * ROWS) for _ in range(2)]

    def loss(learner, passes):
        metrics, _ = learner.critic_steps(experience, OBJECTIVE, passes, lambda *_: None)
        assert metrics["critic_steps"] == passes * ROWS
        return metrics["critic_value_loss"]

    first, second = loss(learners[0], 1), loss(learners[0], 1)
    policy.value.data = start
    assert first > loss(learners[1], 2) == second


@pytest.mark.slow
def test_the_critic_alone_fits_the_returns_and_leaves_the_policy_bit_for_bit(world):
    """A table's best values are the mean returns of its states; momentum and decay move the policy's table no more."""
    policy, experience = world
    start = {name: x.clone() for name, x in policy.state_dict().items()}
    tables, metrics = [], []
    for critic_epochs in (0, 400):
        policy.load_state_dict(start)
        learner = learner_of(policy, Objective(value_clip=None), epochs=2, minibatches=2, critic_epochs=critic_epochs)
        learner.optimizer = torch.optim.AdamW(policy.parameters(), lr=0.05, weight_decay=0.01)
        metrics.append(learner.update(experience))
        tables.append({name: x.clone() for name, x in policy.state_dict().items()})
    assert torch.equal(tables[0]["logits"], tables[1]["logits"])
    own = {"critic_steps": 800, "critic_value_loss": metrics[1]["critic_value_loss"]}
    assert metrics[1] == metrics[0] | own
    states, returns = experience.inputs["states"][experience.mask], experience.returns[experience.mask]
    means = torch.stack([returns[states == state].mean() for state in range(STATES)])
    torch.testing.assert_close(tables[1]["value"], means, atol=0.2, rtol=0)
    best = 0.5 * (returns - means[states]).square().mean().item()
    assert metrics[1]["critic_value_loss"] == pytest.approx(best, rel=0.05)


def test_steps_of_the_critic_alone_that_are_not_finite_are_skipped_and_named(world):
    policy, experience = world
    experience.returns[3, 0] = math.nan
    before = policy.value.detach().clone()
    errors = []
    learner = learner_of(policy, critic_epochs=2)
    metrics = learner.update(experience, on_step=lambda minibatch, error: errors.append(error))
    assert [(error.term, error.row) for error in errors] == [("value loss", 3)] * 3
    assert metrics == {"steps": 0, "bad_steps": 3}
    assert torch.equal(policy.value, before)


def test_pretraining_is_at_the_full_rate_without_a_clip_and_the_critics_alone(world):
    policy, experience = world
    start = {name: x.clone() for name, x in policy.state_dict().items()}
    objective = Objective(value_clip=1e-6)
    groups = [{"params": [x], "lr": 0.1, "initial_lr": 0.1} for x in (policy.logits, policy.value)]
    tables = []
    for factor in (0.01, 1.0):
        policy.load_state_dict(start)
        learner = learner_of(policy, objective, epochs=3, minibatches=2)
        learner.optimizer = torch.optim.AdamW(groups)
        learner.schedule = lambda step, factor=factor: factor
        learner.set_rates(1)
        metrics = learner.pretrain_critic(experience)
        tables.append(policy.value.detach().clone())
        assert torch.equal(policy.logits, start["logits"])
        assert (metrics["critic_steps"], metrics["bad_steps"]) == (6, 0)
        assert learner.objective is objective
        assert all(parameter.grad is None for parameter in policy.parameters())
    assert torch.equal(*tables)
    assert (tables[0] - start["value"]).abs().max() > 0.3  # six steps of Adam, of about 0.1 each


def test_a_sparse_value_loss_by_hand(world):
    """The gradient of the value loss is Σ (V − R) / states over the first and the last token of each row alone."""
    policy, experience = world
    before, rows = policy.value.detach().clone(), torch.arange(ROWS)
    places = torch.stack([torch.zeros(ROWS, dtype=torch.int64), experience.mask.sum(1) - 1], dim=1)
    at = (rows.repeat_interleave(2), places.flatten())
    experience = replace(experience, value_mask=torch.zeros_like(experience.mask).index_put(at, torch.tensor(True)))
    states, returns = experience.inputs["states"][at], experience.returns[at]
    objective = Objective(value_clip=None, value_coef=1.0)
    expected = before.index_add(0, states, -0.5 * (before[states] - returns) / (2 * ROWS))
    for tokens in (None, TIME):  # micro-batches of one row add up to the same
        policy.value.data = before.clone()
        learner_of(policy, objective, micro_batch_tokens=tokens).update(experience)
        torch.testing.assert_close(policy.value.detach(), expected)
    policy.value.data = before.clone()
    learner = learner_of(policy, replace(objective, value_coef=0.0), critic_epochs=1)
    metrics = learner.update(experience)
    torch.testing.assert_close(policy.value.detach(), expected)
    errors = 0.5 * (before[states] - returns).square()
    assert metrics["critic_value_loss"] == pytest.approx(errors.mean().item(), rel=1e-5)


def away(experience, *, weighted=False):
    """The same rows, sampled by a policy that is a little off; optionally with importance weights."""
    torch.manual_seed(1)
    elsewhere = replace(experience, logprobs=experience.logprobs + 0.1 * torch.randn(ROWS, TIME))
    return replace(elsewhere, weights=torch.rand(ROWS, TIME).round(decimals=1)) if weighted else elsewhere


def test_a_micro_batch_without_a_count_weighs_each_token_1(world):
    policy, experience = world
    loss = MicroBatchLoss(Objective(value_coef=0.0), experience)
    losses = loss.complete(policy(experience.inputs, loss))
    total, parts = losses.total, losses.parts
    torch.testing.assert_close(total, -experience.advantages[experience.mask].sum())
    torch.testing.assert_close(parts["policy_loss"], total.detach())


LOSSES = {
    "clip": Objective(clip=0.2, value_coef=0.0),
    "gspo": SequenceObjective(clip=0.1, value_coef=0.0),
    "cispo": WeightedObjective(clip=(0.2, 0.5), value_coef=0.0),
    "sao": WeightedObjective(clip=(0.2, 0.5), outside="mask", value_coef=0.0),
    "dppo_tv": WeightedObjective(divergence="tv", divergence_limit=0.15, value_coef=0.0),
    "dppo_kl": WeightedObjective(divergence="kl", divergence_limit=0.12, value_coef=0.0),
}
each_loss = pytest.mark.parametrize("name", LOSSES)


@pytest.mark.parametrize(
    ("name", "losses", "clipped"),
    [
        ("clip", [-1.2, -1.2, 1.6], None),
        ("gspo", [-1.1, -1.1, 1.8], [True, True, True]),  # mean ratios √2.4 and 0.5
        ("cispo", [-1.2 * math.log(0.6), -1.5 * math.log(0.5), math.log(0.2)], [False, True, False]),
        ("sao", [-1.2 * math.log(0.6), 0.0, 0.0], [False, True, True]),  # 2 and 0.5 are outside 0.8 to 1.5
        ("dppo_tv", [-1.2 * math.log(0.6), 0.0, 0.0], [False, True, True]),  # changes of 0.1, 0.25 and −0.2
        ("dppo_kl", [-1.2 * math.log(0.6), 0.0, math.log(0.2)], [False, True, False]),  # 0.02, 0.131 and 0.105 nats
    ],
)
def test_each_loss_by_hand(name, losses, clipped):
    """Ratios 1.2, 2 and 0.5; the last number of each tensor is padding."""
    mask = torch.tensor([[True, True], [True, False]])
    old, now = torch.tensor([[0.5, 0.25], [0.4, 0.1]]).log(), torch.tensor([[0.6, 0.5], [0.2, 0.9]]).log()
    advantages = torch.tensor([[1.0, 1.0], [-2.0, 9.0]])
    rows = Experience({}, mask, mask.sum(1), old, None, advantages, advantages)
    acted = mask.flatten().nonzero().squeeze(1)
    found = LOSSES[name].token_losses(TokenStats(now[mask], None, None), rows, acted)
    torch.testing.assert_close(found, {"policy_loss": torch.tensor(losses)})
    shown = LOSSES[name].clipped(now, rows)
    assert clipped == (None if shown is None else shown[mask].tolist())
    weighted = replace(rows, weights=torch.tensor([[0.5, 0.0], [2.0, 7.0]]))
    found = LOSSES[name].token_losses(TokenStats(now[mask], None, None), weighted, acted)
    expected = [0.5 * losses[0], 0.0, 2.0 * losses[2]]
    torch.testing.assert_close(found, {"policy_loss": torch.tensor(expected)})
    assert torch.equal(LOSSES[name].clipped(now, weighted), shown) if shown is not None else clipped is None


def test_importance_weights_by_hand():
    """They multiply the surrogate alone, and a token of weight 0 still counts in the divisor."""
    mask = torch.tensor([[True, True], [True, False]])
    old, now = torch.tensor([[0.5, 0.25], [0.4, 0.1]]).log(), torch.tensor([[0.6, 0.25], [0.4, 0.9]]).log()
    advantages, values = torch.tensor([[1.0, 3.0], [-2.0, 9.0]]), torch.tensor([[1.0, 0.0], [2.0, 5.0]])
    weights, entropy, kl = torch.tensor([[0.5, 0.0], [2.0, 7.0]]), torch.tensor([1.0, 2.0, 3.0]), torch.ones(3)
    rows = Experience({}, mask, mask.sum(1), old, values, advantages, torch.zeros(2, 2), weights=weights)
    loss = MicroBatchLoss(Objective(value_coef=1.0, entropy_coef=0.1, kl_coef=0.5), replace(rows, counts=[3.0, 3.0]))
    policy = loss(TokenStats(now[mask], entropy, kl), slice(None))
    parts = loss.complete(PolicyOutputs(policy, TokenStats(now, None, None), CriticOutputs(values))).parts
    surrogate = (-0.5 * 1.2 - 0.0 + 2.0 * 2.0) / 3
    assert float(policy) == pytest.approx(surrogate - 0.1 * 2.0 + 0.5 * 1.0)
    expected = {"policy_loss": surrogate, "entropy_in_update": 2.0, "kl_in_update": 1.0, "value_loss": 0.5 * 5 / 3}
    assert {name: float(x) for name, x in parts.items()} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("correct", "weights"), [("none", [1.0, 1.0, 1.0]), ("clip", [1.0, 1.4, 2.0]), ("mask", [1.0, 1.4, 0.0])]
)
def test_interpolation_by_hand(correct, weights):
    """π / μ is 2 at age 0, 1.96 at age 2 and 16 at age 4: ratios 2, 1.4 and 2, weights 1, 1.4 and 8 before bounds."""
    mask = torch.tensor([[True, True], [True, False]])
    behavior, now = torch.tensor([[0.25, 0.25], [0.05, 0.1]]).log(), torch.tensor([[0.5, 0.49], [0.8, 0.9]]).log()
    advantages, age = torch.tensor([[1.0, 1.0], [-2.0, 9.0]]), torch.tensor([[0, 2], [4, 0]])
    policies = {"behavior_logprobs": behavior, "age": age}
    rows = Experience({}, mask, mask.sum(1), behavior, None, advantages, advantages, **policies)
    objective = Objective(clip=0.2, interpolation=Interpolation(correct))
    acted = mask.flatten().nonzero().squeeze(1)
    logprobs = now[mask].requires_grad_()
    parts = [
        objective.token_losses(TokenStats(logprobs[at], None, None), rows, acted[at]) for at in (slice(2), slice(2, 3))
    ]
    losses = torch.cat([part["policy_loss"] for part in parts])
    expected = torch.tensor([-1.2, -1.2, 4.0]) * torch.tensor(weights)
    torch.testing.assert_close(losses, expected)
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 0.0, 4.0 * weights[2]]))
    centred = objective.around_proximal(now, rows)
    torch.testing.assert_close((now - centred.logprobs).exp()[mask], torch.tensor([2.0, 1.4, 2.0]))


def outcomes(policy, cases, **settings):
    """Metrics and parameters after an update with each objective and experience, from the same weights."""
    start, ends = {name: x.clone() for name, x in policy.state_dict().items()}, []
    for objective, experience in cases:
        policy.load_state_dict(start)
        metrics = learner_of(policy, objective, minibatches=2, **settings).update(experience)
        ends.append((metrics, [p.detach().clone() for p in policy.parameters()]))
    return ends


@each_loss
def test_tokens_of_age_0_are_clipped_around_the_policy_that_drew_them(name, world):
    experience, objective = away(world[1]), replace(LOSSES[name], value_coef=0.5)
    age = torch.zeros(ROWS, TIME, dtype=torch.long)
    drawn = replace(experience, behavior_logprobs=experience.logprobs, age=age)
    interpolated = replace(objective, interpolation=Interpolation("clip"))
    ends = outcomes(world[0], [(objective, experience), (interpolated, drawn)], epochs=2)
    assert ends[0][0] == {key: ends[1][0][key] for key in ends[0][0]}
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))
    assert (ends[1][0]["weight_mean"], ends[1][0]["weight_ess"]) == (1, 1)


@each_loss
def test_weights_of_1_change_no_bit_of_an_update(name, world):
    experience, objective = away(world[1]), replace(LOSSES[name], value_coef=0.5, entropy_coef=0.01)
    weighted = replace(experience, weights=torch.ones(ROWS, TIME))
    ends = outcomes(world[0], [(objective, experience), (objective, weighted)])
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))


@each_loss
@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_the_first_gradient_of_each_loss_is_the_policy_gradient(name, reduction, world):
    policy, experience = world
    _, gradients, records = backward(world, replace(LOSSES[name], reduction=reduction))
    distribution = torch.distributions.Categorical(logits=policy.logits[experience.inputs["states"]])
    logprobs = distribution.log_prob(experience.inputs["actions"])
    loss = -(token_weights(experience.mask, by=reduction) * experience.advantages * logprobs).sum()
    torch.testing.assert_close(gradients[0], torch.autograd.grad(loss, policy.logits)[0])
    assert ratios(records, 0.2, Processes()).metrics()["clip_fraction"] == 0


@each_loss
@pytest.mark.parametrize("weighted", [False, True])
def test_micro_batches_change_no_gradient_of_any_loss(name, weighted, world):
    elsewhere = world[0], away(world[1], weighted=weighted)
    losses, expected, whole = backward(elsewhere, LOSSES[name])
    in_parts, gradients, records = backward(elsewhere, LOSSES[name], micro_batch_tokens=2 * TIME)
    assert len(records) > 1
    torch.testing.assert_close(gradients, expected)
    torch.testing.assert_close(in_parts, losses)
    shares = [ratios(each, 0.2, Processes()).metrics()["clip_fraction"] for each in (records, whole)]
    assert shares[0] == shares[1]


def test_advantages_as_the_loss_used_them_are_means_over_the_passes(world):
    policy, experience = world
    passes = {row: [] for row in range(ROWS)}

    def on_step(minibatch, error):
        for row, advantages in zip(minibatch.rows.tolist(), minibatch.advantages, strict=True):
            passes[row].append(advantages)

    learner = learner_of(policy, epochs=3, minibatches=2, whiten_minibatches=True)
    learner.update(experience, on_step=on_step)
    used = learner.used_advantages(experience, 0, ROWS)
    assert used.isnan().equal(~experience.mask)
    expected = torch.stack([torch.stack(passes[row]).mean(0) for row in range(ROWS)])
    torch.testing.assert_close(used[experience.mask], expected[experience.mask])
    learner = learner_of(policy, epochs=3, minibatches=2)
    learner.update(experience)
    used = learner.used_advantages(experience, 0, ROWS)[experience.mask]
    assert used.equal(experience.advantages[experience.mask]), "nothing is whitened here"
