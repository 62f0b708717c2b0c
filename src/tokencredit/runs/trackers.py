"""TensorBoard, W&B and their kin, through Accelerate; one that fails is left out: no picture is worth the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from tokencredit.errors import ConfigError


def require_installed(names: list[str]) -> None:
    """Raise `ConfigError` for a tracker that is not installed, which Accelerate would leave out in silence."""
    installed = [str(tracker) for tracker in get_available_trackers()]
    for tracker in names:
        if tracker not in installed:
            raise ConfigError(f"run.trackers has {tracker}, which is not installed: pip install {tracker}")


class Trackers:
    """The trackers of one run. What they raise is of any kind, and all of it is caught."""

    def __init__(self, accelerator: Accelerator, names: list[str], say: Callable[[str], None]):
        """`say` is told what failed."""
        self.accelerator, self.names, self.say = accelerator, names, say

    def start(self, first: int) -> None:
        """Begin with this iteration; TensorBoard then hides what it was told of it and later ones before."""
        if not self.names:
            return
        options = {"tensorboard": {"purge_step": first}} if first > 1 else {}
        try:
            self.accelerator.init_trackers("tokencredit", init_kwargs=options)
        except Exception as error:
            self.accelerator.trackers = []
            self.say(f"the trackers {', '.join(self.names)} are left out: {type(error).__name__}: {error}")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Tell them an iteration's metrics."""
        for tracker in list(self.accelerator.trackers):
            try:
                tracker.log(values, step=step)
            except Exception as error:
                self.accelerator.trackers.remove(tracker)
                self.say(f"the tracker {tracker.name} is left out from here: {type(error).__name__}: {error}")

    def end(self) -> None:
        """Let them finish."""
        try:
            self.accelerator.end_training()
        except Exception as error:
            self.say(f"a tracker could not end: {type(error).__name__}: {error}")
