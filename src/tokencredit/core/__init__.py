"""The mathematics of PPO: tensors in, tensors out; no models, files, configuration or global state.

The package re-exports the public functions and classes of its modules, such as `core.gae`. It imports them on first
use, so that the settings can read `core.estimator_table` without importing torch. The flat names of estimators are
those of that table.
"""
# ruff: noqa: F403

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokencredit.core.estimator_table import ESTIMATORS

if TYPE_CHECKING:
    from tokencredit.core.advantages import *
    from tokencredit.core.argument_checks import *
    from tokencredit.core.episodes import *
    from tokencredit.core.estimator_table import *
    from tokencredit.core.estimators import *
    from tokencredit.core.logprobs import *
    from tokencredit.core.losses import *
    from tokencredit.core.masked import *
    from tokencredit.core.off_policy import *
    from tokencredit.core.prefix_baseline import *
    from tokencredit.core.rewards import *
    from tokencredit.core.vocab_projection import *

_NAMES = {
    "argument_checks": "empty_rows refuse_foreign refuse_time_first require_acted require_choice require_finite "
    "require_flags require_fraction require_not_negative require_positive require_rows require_shape require_tensors",
    "episodes": "EpisodeBounds Steps prepare_steps reverse_scan",
    "estimator_table": "ESTIMATORS Estimator inputs_named named parameters_of",
    "estimators": "Turns estimate estimate_by_turn",
    "logprobs": "token_loss token_stats",
    "losses": "REDUCTIONS Clip RatioStats clip_range clipped_surrogate histogram_loss histogram_values ratio_stats "
    "reduction_count smoothed_histogram token_weights value_loss weighted_sum",
    "masked": "Reduce above_rounding at_least_float32 explained_variance extents inverse_deviation moments "
    "moments_and_centred whiten whiten_with_divisor zero_outside",
    "off_policy": "CorrectionStats correction correction_stats divergence_mask importance_ratios interpolated_logprobs "
    "sequence_surrogate weighted_policy_gradient",
    "prefix_baseline": "fit_prefixes prefix_moments",
    "rewards": "Attainable KL_ESTIMATORS KL_ROUNDING attainable k1 k2 k3 kl_estimate kl_of_next "
    "overlong_penalty token_rewards",
    "vocab_projection": "Linear TokenLoss TokenStats",
}
"""Public names by module."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES |= dict.fromkeys(ESTIMATORS, "advantages")

__all__ = sorted(_MODULES)

if not TYPE_CHECKING:  # with __getattr__ in view, a type checker would accept any name

    def __getattr__(name: str) -> Any:
        """Import a public name from its module."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value


def __dir__() -> list[str]:
    """The public names."""
    return __all__
