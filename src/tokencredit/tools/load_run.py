"""Load a model to sample from: `tokencredit.load`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tokencredit.errors import ConfigError
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.fields import check_value
from tokencredit.settings.reader import read_yaml
from tokencredit.settings.run_kind import CONTROL, read_config, read_source, run_kind_of

if TYPE_CHECKING:
    from tokencredit.control.trained_agent import TrainedAgent
    from tokencredit.tools.trained_policy import Policy


def load(name: str | Path, which: str = "policy") -> Policy | TrainedAgent:
    """The policy of a language model's run, a model by itself, or the agent of a run of `tokencredit control`.

    Args:
        name: the folder of a finished run, the folder of a model or an adapter, or a hub id.
        which: of a run, `policy`, `best`, or `base` for the model it started from; an agent has only `policy`.

    Raises:
        ConfigError: there is no such model, or the run has no such policy.
    """
    name = str(name) if isinstance(name, Path) else name
    check_value("name", name, str, {})
    check_value("which", which, Literal["policy", "best", "base"], {})
    file = Path(name).expanduser() / "config.yaml"
    if not file.is_file() or run_kind_of(read_yaml(file)) is not CONTROL:
        from tokencredit.tools.trained_policy import Policy

        return Policy(read_source(name), which)
    if which != "policy":
        raise ConfigError(f"which is {which!r}; the run of an agent has only its 'policy'")
    from tokencredit.control.trained_agent import TrainedAgent

    return TrainedAgent(file.parent, read_config(file, ControlConfig))
