"""An environment's own reward as a reward term."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokencredit.text.rewards.calls import RewardError, RewardTimeout, Term
from tokencredit.text.turns.protocols.factories import Factory
from tokencredit.text.user_code.user_errors import described
from tokencredit.text.user_code.workers import TimedOut, Workers, begin

TurnRewards = Sequence[tuple[int, float]]
"""Of each turn of a completion, how many tokens the policy acted, and its reward."""


def own_reward(factory: Factory, workers: Workers, timeout: float) -> Term:
    """A term named after the environment's class, with weight 1; None for completions of other environments.

    An environment in TRL's form pays `get_reward()` for the whole episode. One of the plain protocol pays at the last
    token of each turn: the term is a list with one number per acted token.
    """
    kind = factory.kind
    return Term(kind.__name__, 1.0, _of_turns(kind) if factory.steps else _of_episodes(kind, workers, timeout))


def _of_turns(kind: type) -> Callable[..., list[list[float] | None]]:
    def rewards(environments: Sequence[Any], turn_rewards: Sequence[TurnRewards]) -> list[list[float] | None]:
        return [
            [number for count, reward in turns for number in (*[0.0] * (count - 1), reward)]
            if type(environment) is kind
            else None
            for environment, turns in zip(environments, turn_rewards, strict=True)
        ]

    return rewards


def _of_episodes(kind: type, workers: Workers, timeout: float) -> Callable[..., list[Any]]:
    def rewards(environments: Sequence[Any]) -> list[Any]:
        own: list[Any] = [e if type(e) is kind else None for e in environments]
        waiting = [None if e is None else begin(workers, timeout, e.get_reward) for e in own]
        try:
            return [None if result is None else result() for result in waiting]
        except TimedOut as error:
            raise RewardTimeout(f"reward term {kind.__name__!r}: get_reward {error}") from error
        except (Exception, SystemExit) as error:
            raise RewardError(f"reward term {kind.__name__!r}: get_reward {described(error)}") from error

    return rewards
