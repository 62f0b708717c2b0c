"""Load the `function` of a reward term: ready-made, from a module, or from a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokencredit.errors import ConfigError
from tokencredit.text.rewards.ready_made import READY_MADE, RewardFunction
from tokencredit.text.user_code.user_objects import check_kwargs, load_object


def load_function(spec: str, kwargs: Mapping[str, Any]) -> RewardFunction:
    """Load the function named by `spec`.

    Args:
        spec: `pkg.module:name`, `path/file.py:name`, or the bare name of a ready-made function.
        kwargs: settings; passed to a ready-made function's factory, only checked for any other function.

    Raises:
        ConfigError: the file, module, attribute or ready-made function does not exist, its code fails, or it does not
            take these settings.
    """
    location, colon, name = spec.rpartition(":")
    if not colon:
        if spec not in READY_MADE:
            raise ConfigError(
                f"function {spec!r} is none of the ready-made ones, {', '.join(READY_MADE)}; "
                "name your own as 'pkg.module:name' or 'path/file.py:name'"
            )
        check_kwargs(spec, READY_MADE[spec], kwargs)
        return READY_MADE[spec](**kwargs)
    function: Any = load_object(spec, "reward")
    if not callable(function):
        raise ConfigError(f"{name!r} of {location!r} is a {type(function).__name__}, not a function")
    check_kwargs(spec, function, kwargs, others=("prompts", "completions"))
    return function  # type: ignore[no-any-return]
