"""Callbacks: user code that runs before and after each stage of an iteration."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

from tokencredit.errors import ConfigError, RunStopped, pages_by_title

if TYPE_CHECKING:  # callbacks are checked before anything heavy is imported
    from tokencredit.text.data.rollout import Rollout
    from tokencredit.text.rewards.terms import Scores
    from tokencredit.text.rollout_passes import ReferenceOutputs


class Callback:
    """Base class of callbacks: override any of the methods, and pass an instance in `PPOTrainer(callbacks=[…])`.

    An iteration runs the stages rollout, reference, reward and update, then evaluation and audit if they are due. Every
    process calls its own callbacks, with its `PPOTrainer`; `trainer.processes.main` is true in one of them. Numbers may
    be added to `metrics`, and keys to the records of `samples`; another change to the arguments ends the run, as does
    an exception, once what was trained is saved. The `after_` method of a failed stage is not called; a batch that is
    not finite skips all stages up to the update.
    """

    def before_iteration(self, trainer: Any) -> None:
        """Called before the learning rate is set and prompts are drawn."""

    def after_iteration(self, trainer: Any, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
        """Called before the iteration is written to metrics.jsonl and samples.jsonl.

        Args:
            trainer: the trainer.
            metrics: the record for metrics.jsonl, without times; numbers added here are written and tracked too.
            samples: the records for samples.jsonl; empty if this iteration keeps none.
        """

    def before_rollout(self, trainer: Any) -> None:
        """Called before completions are sampled."""

    def after_rollout(self, trainer: Any, rollout: Rollout) -> None:
        """Called with this process's completions: their tokens, masks, log-probs and values."""

    def before_reference(self, trainer: Any) -> None:
        """Called before the reference model scores the completions."""

    def after_reference(self, trainer: Any, reference: ReferenceOutputs) -> None:
        """Called with the reference log-probs and KL, which are None without a reference model."""

    def before_reward(self, trainer: Any) -> None:
        """Called before the reward's terms are computed."""

    def after_reward(self, trainer: Any, scores: Scores) -> None:
        """Called with the scores of this process's completions, in total, per token and per term."""

    def before_update(self, trainer: Any) -> None:
        """Called before the weights change."""

    def after_minibatch(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Called after each step of the optimizer with the metrics of its minibatch, numbered by `minibatch`.

        Among them are those of a loss of your own. They are written nowhere.
        """

    def after_update(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Called with the update's metrics: losses, ratio, clip fractions, gradient norm."""

    def before_evaluation(self, trainer: Any) -> None:
        """Called before the policy is evaluated."""

    def after_evaluation(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Called with the evaluation's metrics, before the best policy is saved."""

    def before_audit(self, trainer: Any) -> None:
        """Called before credit is audited."""

    def after_audit(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Called with the audit's metrics, before audit.json is written."""


def contents(value: Any, name: str = "") -> dict[str, Any]:
    """What a callback is given, by name: it may add metrics, and change nothing.

    A tensor is known by its version, or one of inference mode, which has none, by its numbers.
    """
    parts = value if isinstance(value, Mapping) else value._asdict() if hasattr(value, "_asdict") else None
    parts = vars(value) if parts is None and is_dataclass(value) else parts
    if parts is not None:
        inner = [contents(x, f"{name}.{key}" if name else str(key)) for key, x in parts.items()]
        return {key: x for found in inner for key, x in found.items()}
    if isinstance(value, list) and value and isinstance(value[0], Mapping):  # samples, which may get further keys
        return {key: x for row, part in enumerate(value) for key, x in contents(part, f"{name}[{row}]").items()}
    if not hasattr(value, "is_inference"):
        return {name: repr(value)}
    return {name: (id(value), str(value.tolist()) if value.is_inference() else value._version)}


def refuse_changes(before: Mapping[str, Any], after: Mapping[str, Any], event: str, name: str) -> None:
    """Raise `RunStopped` if a callback changed something that it was given."""
    for key in before:
        if after.get(key) != before[key]:
            cure = "; a critic of your own is critic.kind (docs/your-own.md)" * key.endswith("values")
            reason = f"{event} of the callback {name} changed {key}; it may add metrics, and change nothing{cure}"
            raise RunStopped(pages_by_title(reason))


EVENTS = tuple(name for name in vars(Callback) if not name.startswith("_"))
"""Names of callback methods."""

TRANSFORMERS_EVENTS = {
    "on_step_begin": "before_iteration",
    "on_step_end": "after_iteration",
    "on_log": "after_iteration",
    "on_save": "after_iteration",
    "on_pre_optimizer_step": "before_update",
    "on_optimizer_step": "after_update",
    "on_evaluate": "after_evaluation",
}
"""Common methods of `transformers.TrainerCallback` and their replacements here."""
METHODS = f"subclass tokencredit.Callback, which has {', '.join(EVENTS)}"


def check_callbacks(callbacks: Iterable[object] | None) -> list[object]:
    """Check callbacks and return them as a list; raises `ConfigError` for missing, unknown or wrong methods."""
    if callbacks is not None and not isinstance(callbacks, Iterable):
        raise ConfigError(f"callbacks is {callbacks!r}; it must be a list of callbacks")
    callbacks = list(callbacks or ())
    for position, callback in enumerate(callbacks):
        name, kind = f"callbacks[{position}]", type(callback).__name__
        if isinstance(callback, type):
            raise ConfigError(f"{name} is the class {callback.__name__}; pass an instance, {callback.__name__}()")
        for base in type(callback).__mro__:  # without an import of Transformers
            if base.__name__ == "TrainerCallback" and base.__module__.startswith("transformers."):
                pairs = TRANSFORMERS_EVENTS.items()
                own = [f"{old} → {new}" for old, new in pairs if getattr(type(callback), old) is not getattr(base, old)]
                raise ConfigError(
                    f"{name} ({kind}) is a transformers.TrainerCallback, which PPOTrainer never calls; "
                    + "; ".join([METHODS, *own])
                )
        for method in dir(callback):
            prefixed = method.startswith(("before_", "after_", "on_"))
            if prefixed and method not in EVENTS and callable(getattr(callback, method)):
                advice = _suggestion(method)
                raise ConfigError(f"{name} ({kind}) has a method {method}, which is never called; {advice}")
        _check_signatures(callback, f"{name} ({kind})")
        if not any(callable(getattr(callback, event, None)) for event in EVENTS):
            raise ConfigError(f"{name} is {callback!r}, which has no callback method; {METHODS}")
    return callbacks


def _check_signatures(callback: object, name: str) -> None:
    """Raise `ConfigError` for a method whose signature does not match its call."""
    for event in EVENTS:
        method = getattr(callback, event, None)
        if method is None:
            continue
        if not callable(method):
            raise ConfigError(f"{name} has {event}, which is {method!r}; it must be a method")
        _, trainer, *results = inspect.signature(getattr(Callback, event)).parameters
        try:
            inspect.signature(method).bind(None, **dict.fromkeys(results))
        except TypeError as error:
            expected = ", ".join(["self", trainer, *results])
            raise ConfigError(f"{name} has {event} of another signature ({error}); it takes {expected}") from error
        except ValueError:  # written in C, without a signature
            continue


def _suggestion(method: str) -> str:
    if method in TRANSFORMERS_EVENTS:
        return f"use {TRANSFORMERS_EVENTS[method]}"
    when = "before" if method.startswith("before_") or method.endswith(("_begin", "_start")) else "after"
    stage = re.sub(r"^(before|after|on)_|_(begin|start|end)$", "", method)
    near = difflib.get_close_matches(f"{when}_{stage}", EVENTS, n=1)
    return f"did you mean {near[0]}?" if near else METHODS
