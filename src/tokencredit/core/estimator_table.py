"""Registry of advantage estimators and their inputs. Imports no torch, so that settings are checked quickly."""

from typing import Literal, NamedTuple

AgentEstimatorName = Literal[
    "gae",
    "td",
    "monte_carlo",
    "n_step",
    "decoupled_gae",
    "length_adaptive_gae",
    "total_return",
    "reward_to_go",
]
EstimatorName = Literal[AgentEstimatorName, "uniform", "group_relative", "leave_one_out"]
"""Names of the estimators below; those of agents need no score of a whole text."""


class Estimator(NamedTuple):
    """Inputs of an advantage estimator besides rewards."""

    critic: Literal["required", "baseline", "unused"]
    """Values are required, subtracted if present, or ignored."""
    settings: tuple[str, ...] = ()
    """Settings that it reads."""
    group: bool = False
    """Compares completions of one prompt; needs `group_size` and one score per row."""
    baseline: bool = False
    """Subtracts the running mean of earlier scores; needs `baseline` and one score per row."""

    @property
    def options(self) -> tuple[str, ...]:
        """Keyword arguments of its function, other than mask, flags and bootstrap."""
        return self.settings + ("group_size",) * self.group + ("baseline",) * self.baseline


ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator("required", ("gamma", "lam")),
    "td": Estimator("required", ("gamma",)),
    "monte_carlo": Estimator("required", ("gamma",)),
    "n_step": Estimator("required", ("gamma", "n")),
    "decoupled_gae": Estimator("required", ("gamma", "lam", "lam_returns")),
    "length_adaptive_gae": Estimator("required", ("gamma", "alpha", "lam_returns")),
    "total_return": Estimator("baseline", ("gamma",)),
    "reward_to_go": Estimator("baseline", ("gamma",)),
    "uniform": Estimator("unused", baseline=True),
    "group_relative": Estimator("unused", ("scale",), group=True),
    "leave_one_out": Estimator("unused", group=True),
}
"""The functions of these names are in `core.advantages` and `core.critic_free`."""
