"""Numbers that the tests of other trainers of language models publish, computed with our functions."""

import math
from itertools import chain

import pytest
import torch

from tokencredit.core.losses import clipped_surrogate, token_weights, weighted_sum
from tokencredit.core.off_policy import (
    correction,
    correction_stats,
    divergence_mask,
    importance_ratios,
    interpolated_logprobs,
    sequence_surrogate,
    weighted_policy_gradient,
)


def rows(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


# NeMo-RL, tests/unit/algorithms/data/clipped_pg_loss_goldens.json, without the first token, which has no log-prob. The
# log-probs of the policy before the update and of the engine that drew the tokens, then those of the pass.
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool()
ADVANTAGES = rows([1.2, -0.7, 0.4, 2.0], [-1.1, 0.6, 1.5, -0.3])
BEFORE = rows([-1.0, -1.1, -0.8, -1.3], [-0.9, -1.0, -1.2, -0.8])
ENGINE = rows([-1.2, -1.5, -0.7, -1.1], [-1.4, -0.7, -1.3, -1.0])
NOW = rows([-1.6, -0.8, -1.1, -1.4], [-0.7, -1.4, -0.9, -1.2])
FAR = rows([-1.0, -3.0, -0.8, -1.3], [-0.9, -1.0, -1.2, -0.8])
ROW_MEANS = rows([0.3, 0.3, 0.3, 0.0], [-0.25, -0.25, 0.0, 0.0])


def ppo(now):
    return clipped_surrogate(now, BEFORE, ADVANTAGES, MASK, clip=0.2)


def cispo(now):
    weights = correction(now, BEFORE, MASK, low=0.8, high=1.2)
    return weighted_policy_gradient(now, ADVANTAGES, weights, MASK) * importance_ratios(BEFORE, ENGINE, MASK)


def gspo(now):
    weights = importance_ratios(BEFORE, ENGINE, MASK, level="sequence")
    return sequence_surrogate(now, BEFORE, ROW_MEANS, MASK, clip=0.2) * weights


def rejected(now):
    kept = correction(BEFORE, ENGINE, MASK, level="geometric", outside="mask", low=0.95, high=1.15)
    return ppo(now) * kept * importance_ratios(BEFORE, ENGINE, MASK)


NEMO = {
    "ppo_token": (ppo, 0.18627018364, [[-0.131714792, 0.188980233, -0.059265458], [0.268708606, -0.080438405]]),
    "dual_clip": (
        lambda now: clipped_surrogate(now, FAR, ADVANTAGES, MASK, clip=0.2, dual_clip=3.0),
        0.41728995012,
        [[-0.131714792, 0, -0.059265458], [0.268708606, -0.080438405]],
    ),
    "tis_token": (
        lambda now: ppo(now) * correction(BEFORE, ENGINE, MASK, high=1.3),
        0.32090283998,
        [[-0.160876811, 0.245674302, -0.053625604], [0.349321188, -0.059590236]],
    ),
    "icepop_token": (
        lambda now: ppo(now) * correction(BEFORE, ENGINE, MASK, outside="mask", low=0.75, high=1.25),
        -0.21450241430,
        [[-0.160876811, 0, -0.053625604], [0, 0]],
    ),
    "cispo_with_token_is": (
        cispo,
        0.03329652014,
        [[-0.234509329, 0.250626549, -0.057909595], [0.435262415, -0.071118549]],
    ),
    "seq_mask_tis": (rejected, 0.38343535842, [[0, 0, 0], [0.443025595, -0.059590236]]),
    "gspo_sequence_is": (gspo, -0.06433245614, [[-0.06749294] * 3, [0.069073181] * 2]),
}


@pytest.mark.parametrize("name", NEMO)
def test_losses_and_gradients_of_nemo_rl(name):
    losses, loss, gradient = NEMO[name]
    now = NOW.clone().requires_grad_()
    weights = token_weights(MASK, by="sequence" if name == "gspo_sequence_is" else "token").double()
    found = weighted_sum(losses(now), weights)
    found.backward()
    assert float(found.detach()) == pytest.approx(loss, abs=1e-6)  # its divisor is the count + 1e-8
    torch.testing.assert_close(now.grad[MASK], rows(*map(float, chain(*gradient))), atol=1e-6, rtol=0)
    assert not now.grad[~MASK].any()


def test_the_importance_ratio_of_nemo_rl():
    found = correction_stats(None, BEFORE, ENGINE, MASK).metrics()["behavior_ratio"]
    assert found == pytest.approx(1.2015208706, abs=1e-7)


@pytest.mark.parametrize(
    ("now", "old", "advantages", "weights", "low", "high", "gradient"),
    [
        ([-1.5, -3.0, -1.0], [-2.0] * 3, [2.0, -3.0, 100.0], [1.0, 1.0, 0.0], 0.0, 1.2, [-2.4, 1.1036383, 0.0]),  # verl
        ([-1.5, -3.0], [-2.0] * 2, [2.0, -3.0], [0.5, 2.0], 0.0, 1.2, [-1.2, 2.2072766]),  # verl, with weights
        ([math.log(2), math.log(0.5)], [0.0] * 2, [1.0, -1.0], [1.0, 1.0], 0.9, 1.2, [-1.2, 0.9]),  # verl
        ([0.0, 0.5, -1.0], [0.0, -0.5, -1.0], [1.0, -2.0, 0.25], [1.0] * 3, 0.0, 1.5, [-1.0, 3.0, -0.25]),  # slime
    ],
)
def test_gradients_of_cispo_of_verl_and_slime(now, old, advantages, weights, low, high, gradient):
    now, mask = rows(now).requires_grad_(), rows(weights) > 0
    bounded = correction(now, rows(old), mask, low=low, high=high)
    (weighted_policy_gradient(now, rows(advantages), bounded, mask) * rows(weights)).sum().backward()
    torch.testing.assert_close(now.grad, rows(gradient))


@pytest.mark.parametrize(
    ("policy", "engine", "options", "expected"),
    [
        ([-1.0, -1.5, -0.5], [-1.5, -1.0, -1.5], {"high": 2.0}, [1.6487, 0.6065, 2.0]),
        ([-1.0, -1.5, -0.5], [-1.5, -1.0, -1.5], {"level": "sequence", "high": 5.0}, [2.7183] * 3),
        ([-1.0] * 3, [-2.0] * 3, {"level": "sequence", "high": 5.0}, [5.0] * 3),
        (
            [-1.0, -1.1, -1.0],
            [-1.1, -1.0, -1.0],
            {"level": "geometric", "outside": "mask", "low": 0.9, "high": 1.1},
            [1.0] * 3,
        ),
        ([-1.0] * 3, [-1.5] * 3, {"level": "geometric", "outside": "mask", "low": 0.9, "high": 1.1}, [0.0] * 3),
        (
            [-1.0, -1.1, -1.2],
            [-1.2] * 3,
            {"level": "sequence", "outside": "mask", "low": 0.5, "high": 2.0},
            [1.3499] * 3,
        ),
    ],
)
def test_corrections_of_skyrl(policy, engine, options, expected):
    every = torch.ones(1, 3, dtype=torch.bool)
    found = correction(rows(policy), rows(engine), every, **options)
    torch.testing.assert_close(found, rows(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("engine", "policy", "version", "present", "expected"),
    [
        (-1.0, -1.5, 0, 2, -1.25),
        (-2.0, -2.5, 0, 2, -2.25),
        (-1.0, -1.5, 0, 4, -1.375),
        (-2.0, -2.2, 2, 4, -2.1),
        (-1.0, -2.0, 4, 5, -1.0),
        (-1.0, -2.0, 3, 3, -1.0),
    ],
)
def test_proximal_log_probs_of_areal(engine, policy, version, present, expected):
    found = interpolated_logprobs(rows(engine), rows(policy), torch.tensor([present - version]))
    assert float(found) == pytest.approx(expected)


def test_the_mask_of_dppo_of_rllm():
    policy, engine = rows([0.9, 0.52]).log(), rows([0.5, 0.5]).log()
    every = torch.ones(1, 2, dtype=torch.bool)
    found = divergence_mask(policy, engine, rows([1.0, 1.0]), every, divergence="tv", limit=0.2)
    torch.testing.assert_close(found, rows([0.0, 1.04]))
