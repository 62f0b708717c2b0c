"""Arguments of a wrong kind: each public function names the one, and what to give instead."""

import inspect
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tokencredit import core

ROWS = torch.zeros(2, 3)
MASK = torch.ones(2, 3, dtype=torch.bool)
EDGES = torch.linspace(0.0, 1.0, 5)
WHERE = {"mask": MASK, "terminated": MASK, "truncated": MASK, "bootstrap": ROWS}
CREDIT = {"rewards": ROWS, "values": ROWS, **WHERE}
LAST = torch.tensor([[False, False, True]] * 2)
SCORES = {"rewards": ROWS, "mask": MASK, "terminated": LAST, "truncated": LAST}
RATIOS = {"logprobs": ROWS, "old_logprobs": ROWS, "mask": MASK}
BEHAVIOR = {"logprobs": ROWS, "behavior_logprobs": ROWS, "mask": MASK}
KL = {"logprobs": ROWS, "ref_logprobs": ROWS, "mask": MASK}
STATES = {"hidden": torch.zeros(2, 3, 4), "weight": torch.zeros(5, 4), "bias": torch.zeros(5), "mask": MASK}
TARGETS = {"targets": torch.zeros(2, 3, dtype=torch.int64)}
ALONE = {"mask": MASK}
DEVIATION = {"deviation": ROWS[0], "mean": ROWS[0]}
OVER = {"x": ROWS, "mask": MASK}

TENSORS: dict[str, dict[str, Tensor]] = {
    **dict.fromkeys(("gae", "td", "monte_carlo", "n_step", "decoupled_gae", "length_adaptive_gae"), CREDIT),
    **dict.fromkeys(("estimate", "reward_to_go", "total_return", "prepare_steps"), CREDIT),
    **dict.fromkeys(("uniform", "group_relative", "leave_one_out"), SCORES),
    **dict.fromkeys(("k1", "k2", "k3", "kl_estimate"), KL),
    "token_stats": STATES | TARGETS,
    "token_loss": STATES | TARGETS | {"support": torch.zeros(2, 3, 2, dtype=torch.int64)},
    "clipped_surrogate": RATIOS | {"advantages": ROWS},
    "sequence_surrogate": RATIOS | {"advantages": ROWS},
    "ratio_stats": RATIOS | {"clipped": MASK},
    **dict.fromkeys(("importance_ratios", "correction"), BEHAVIOR),
    "correction_stats": BEHAVIOR | {"weights": ROWS},
    "divergence_mask": BEHAVIOR | {"advantages": ROWS},
    "interpolated_logprobs": {"behavior_logprobs": ROWS, "logprobs": ROWS, "age": ROWS.long()},
    "weighted_policy_gradient": {"logprobs": ROWS, "advantages": ROWS, "weights": ROWS, "mask": MASK},
    "value_loss": {"values": ROWS, "old_values": ROWS, "returns": ROWS, "mask": MASK},
    "smoothed_histogram": {"targets": ROWS, "edges": EDGES},
    "histogram_loss": {"logits": torch.zeros(2, 3, 4), "returns": ROWS, "edges": EDGES},
    "histogram_values": {"logits": torch.zeros(2, 3, 4), "edges": EDGES},
    **dict.fromkeys(("reduction_count", "token_weights", "require_acted", "empty_rows"), ALONE),
    "weighted_sum": {"x": ROWS, "weights": ROWS},
    **dict.fromkeys(("moments", "moments_and_centred", "whiten", "zero_outside"), OVER),
    "whiten_with_divisor": OVER,
    "kl_of_next": {"kl": ROWS, "mask": MASK},
    "attainable": {"rewards": ROWS[0]},
    "explained_variance": {"values": ROWS, "returns": ROWS, "mask": MASK},
    **dict.fromkeys(("above_rounding", "inverse_deviation"), DEVIATION),
    "at_least_float32": {"x": ROWS},
    "token_rewards": {"scores": ROWS[:, 0], "mask": MASK, "kl": ROWS, "eos": MASK[:, 0], "overlong": ROWS[:, 0]},
    "overlong_penalty": {"lengths": ROWS[0]},
    "reverse_scan": {"deltas": ROWS, "decays": ROWS},
    "extents": ALONE,
    "prefix_moments": {"scores": ROWS, "returns": ROWS, "mask": MASK, "critic": ROWS},
    "fit_prefixes": {"moments": torch.ones(10, 3, dtype=torch.float64)},
    "estimate_by_turn": {name: x for name, x in CREDIT.items() if name != "mask"},
}
"""Tensor arguments of each public function."""
OTHERS: dict[str, Any] = {
    "turns": core.Turns.of(MASK, MASK),
    "gamma": 1.0,
    "lam": 0.95,
    "n": 2,
    "group_size": 2,
    "loss": lambda stats, at: stats.logprobs.sum(),
    "limit": 8,
    "tokens": 4,
    "penalty": 1.0,
    "width": 4.0,
    "coef": 0.05,
    "prior": 3.0,
    "options": {"gamma": 1.0, "lam": 0.95},
    "missing_eos_penalty": 1.0,
}
NAMES = {"estimate_by_turn": "gae", "estimate": "gae", "kl_estimate": "k1"}
CHECKED = [(function, argument) for function, arguments in TENSORS.items() for argument in arguments]


def call(function: str, arguments: dict[str, Any]) -> Any:
    parameters = inspect.signature(getattr(core, function)).parameters
    others = {name: value for name, value in OTHERS.items() if name in parameters}
    named = {name: NAMES[function] for name in ("name", "estimator") if function in NAMES and name in parameters}
    return getattr(core, function)(**named, **others, **arguments)


def test_every_public_function_of_tensors_is_here():
    functions = {name for name in core.__all__ if inspect.isfunction(getattr(core, name))}
    taking = {name for name in functions if "Tensor" in str(inspect.signature(getattr(core, name)))}
    # These take a name for the message, and their tensor may be any.
    own = {"refuse_time_first", *(f"require_{what}" for what in ("shape", "flags", "finite", "rows"))}
    assert taking - own == set(TENSORS)


@pytest.mark.parametrize("function", TENSORS)
def test_each_takes_these_tensors(function):
    call(function, TENSORS[function])


@pytest.mark.parametrize(("function", "argument"), CHECKED, ids=lambda name: name)
def test_a_list_is_refused_by_the_name_of_its_argument(function, argument):
    arguments = TENSORS[function]
    with pytest.raises(TypeError) as caught:
        call(function, arguments | {argument: arguments[argument].tolist()})
    assert str(caught.value) == f"{argument} is of type list; give a tensor, torch.tensor({argument})"


@pytest.mark.parametrize(
    ("function", "argument"),
    [(name, "rewards") for name, arguments in TENSORS.items() if "rewards" in arguments and name != "attainable"]
    + [("token_rewards", "mask")],
)
def test_a_single_row_without_a_batch_is_answered_with_how_to_make_one(function, argument):
    row = TENSORS[function][argument][0]
    message = (
        rf"^{argument} has shape \(3,\); it must be \[batch, time\]; for a single row give {argument}\.unsqueeze\(0\)$"
    )
    with pytest.raises(ValueError, match=message):
        call(function, TENSORS[function] | {argument: row})


def test_an_argument_beside_rows_is_told_how_to_become_one():
    with pytest.raises(
        ValueError, match=re.escape("values has shape (3,); it must be (1, 3); give values.unsqueeze(0)")
    ):
        core.gae(ROWS[:1], ROWS[0], gamma=1.0, lam=0.95)
    with pytest.raises(ValueError, match=re.escape("values has shape (3,); it must be (2, 3)") + "$"):
        core.gae(ROWS, ROWS[0], gamma=1.0, lam=0.95)


def test_one_lambda_per_token_is_refused_by_its_name():
    with pytest.raises(ValueError, match=re.escape("lam is a tensor of shape [2, 3]; it must be one number in [0, 1]")):
        core.gae(ROWS, ROWS, gamma=1.0, lam=ROWS)


def test_an_argument_of_an_own_estimator_is_no_option():
    def two_lams(rewards, values, gamma, low=0.2):
        return rewards, values

    with pytest.raises(ValueError, match=r"'low' is the estimator's own argument; give it with functools\.partial"):
        core.estimate(two_lams, ROWS, ROWS, options={"gamma": 1.0, "low": 0.1})
    core.estimate(partial(two_lams, low=0.1), ROWS, ROWS, options={"gamma": 1.0})
