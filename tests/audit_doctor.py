"""Runs whose critic or λ is made ill on purpose, audited, and what the diagnosis names. `make doctor` prints a table.

Three small runs are trained: two of a separate critic and a policy that is held still, and one with the defaults. A
true value belongs to the policy alone, so one truth serves all critics and λ that are put beside it. Exits with 1 if an
illness is not named, or a healthy run is accused.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tokencredit.audit.truth import Returns
from tokencredit.report.reading import read_run
from tokencredit.runs.diagnosis import diagnose
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AuditConfig, RunConfig, UpdateConfig
from tokencredit.text.audit.completion_auditor import CompletionAuditor
from tokencredit.text.credit import Credit
from tokencredit.text.ppo_trainer import PPOTrainer

CHECKS = {"critic_worse", "critic_flat", "lam_low", "lam_high"}
AUDIT = AuditConfig(every=1, completions=64, continuations=32, states=None)
Head = Callable[[torch.nn.Linear], None]


def vowels(completions: list[str], **columns: Any) -> list[float]:
    """A reward at the end to which each token adds its part; values are learnt, since they hold what was written."""
    return [0.1 * sum(text.count(vowel) for vowel in "aeiou") for text in completions]


def odd(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[list[float]]:
    """A reward for each token with an odd number: its own reward is its credit, all that follows is luck."""
    return [[0.2 * (i % 2) for i in ids] for ids in completion_ids]


def scale(head: torch.nn.Linear, factor: float, bias: float = 0.0) -> None:
    """Scale a critic's values, around `bias`."""
    head.weight.mul_(factor)
    head.bias.mul_(factor).add_(bias)


def redirect(head: torch.nn.Linear, factor: float) -> None:
    """Another direction of hidden states, of the same length times `factor`."""
    other = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(1))
    head.weight.copy_(other * (factor * head.weight.norm() / other.norm()))


def times(factor: float, bias: float = 0.0) -> Head:
    """`scale` with these arguments."""
    return partial(scale, factor=factor, bias=bias)


@dataclass(frozen=True)
class Kept(CompletionAuditor):
    """An auditor that samples the truth of its completions once, for all critics and λ."""

    kept: list[Returns] = field(default_factory=list)

    def _sample(self, returns: Returns, *rest: Any, **more: Any) -> None:
        if not self.kept:
            super()._sample(returns, *rest, **more)
            self.kept.append(returns)
        vars(returns).update(vars(self.kept[0]))


class Patient:
    """A trained run, to be audited with other critics and other λ."""

    def __init__(self, folder: Path, reward: Callable[..., Any] | None = None, **settings: Any):
        args = PPOConfig(model=ModelConfig(dtype="float32"), **settings)
        self.trainer = PPOTrainer(args=args, reward_funcs=reward)
        self.trainer.train()
        self.run = read_run(folder)
        self.truths: dict[int, list[Returns]] = {}

    def metrics(self, number: int, change: Head | None, lam: float) -> dict[str, float]:
        """The metrics of an audit of completions that `number` chooses."""
        trainer = self.trainer
        args = replace(trainer.args, advantage=replace(trainer.args.advantage, lam=lam))
        credit = Credit(args, trainer.processes.sum)
        credit.load_state_dict(trainer.credit.state_dict())
        kept = self.truths.setdefault(number, [])
        head = trainer.policy.critic.head[-1]
        before = {name: x.clone() for name, x in head.state_dict().items()}
        with torch.no_grad():
            if change is not None:
                change(head)
        audit = Kept(trainer.pipeline, credit, trainer.prompts, AUDIT, kept=kept).audit(number)
        head.load_state_dict(before)
        metrics: dict[str, float] = audit.judge(trainer.processes)["metrics"]
        return metrics

    def named(self, metrics: dict[str, float], lam: float) -> set[str]:
        """What the diagnosis says of the run, of all that audits can tell."""
        *rows, last = self.run.metrics
        config = self.run.config | {"advantage": self.run.config["advantage"] | {"lam": lam}}
        return {finding.name for finding in diagnose([*rows, last | metrics], config)} & CHECKS


Case = tuple[str, Head | None, float]
ILL: dict[str, list[Case]] = {
    "critic_worse": [
        ("vowels", times(-1), 0.95),
        ("vowels", times(3), 0.95),
        ("vowels", times(-0.5), 0.5),
        ("odd", times(-1), 0.0),
        ("vowels", times(5), 1.0),
    ],
    "critic_flat": [
        ("vowels", times(0), 0.95),
        ("odd", times(0, 0.5), 0.0),
        ("vowels", times(0.05), 0.95),
        ("vowels", times(0.1), 0.5),
        ("vowels", times(0.15), 1.0),
    ],
    "lam_low": [
        ("vowels", times(-1), 0.3),
        ("vowels", times(-0.5), 0.0),
        ("vowels", partial(redirect, factor=3), 0.3),
        ("vowels", times(-1), 0.0),
        ("vowels", times(-0.5), 0.2),
    ],
    "lam_high": [("odd", None, lam) for lam in (1.0, 0.99, 1.0, 0.99, 0.98)],
}
"""The run, the change of its critic, and its λ, by the check that names them."""
HEALTHY: list[Case] = [("vowels", None, 0.5), ("vowels", None, 0.0), ("odd", None, 0.0), ("plain", None, 0.95)]
REWARDS = {"vowels": vowels, "odd": odd}
LENGTHS = {"vowels": 8, "odd": 16}
"""Tokens of each text; the more follow a token, the more luck there is in what λ = 1 credits to it."""


def trained(folder: Path, name: str, iterations: int = 20, epochs: int = 8) -> Patient:
    """The run `plain`, with the defaults, or one of a critic alone, which learns the values of a policy held still."""
    run = RunConfig(dir=str(folder), iterations=iterations, trackers=[], show_every=0, save_every=0)
    if name == "plain":
        return Patient(folder, run=run, rollout=RolloutConfig(batch_size=64, max_new_tokens=12))
    return Patient(
        folder,
        REWARDS[name],
        run=run,
        rollout=RolloutConfig(batch_size=64, max_new_tokens=LENGTHS[name], stop_at_eos=False),
        ppo=UpdateConfig(epochs=1),
        critic=CriticConfig(kind="separate", trunk_lr=1e-3, epochs=epochs, warmup=iterations),
    )


def main() -> int:
    """Print a line for each run; returns the exit code."""
    cases = [(kind, number, case) for kind, listed in ILL.items() for number, case in enumerate(listed)]
    cases += [("healthy", number, case) for case in HEALTHY for number in range(5)]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        patients = {name: trained(Path(folder) / name, name) for name in (*REWARDS, "plain")}
        for kind, number, (name, change, lam) in cases:
            metrics = patients[name].metrics(number, change, lam)
            named = patients[name].named(metrics, lam)
            good = not named if kind == "healthy" else kind in named
            wrong += not good
            figures = ("noise", "explained_variance_high", "spread_high", "raise_lam", "lower_lam", "correlation")
            numbers = "  ".join(f"{figure} {metrics.get(f'audit/{figure}', float('nan')):6.2f}" for figure in figures)
            verdict = (", ".join(sorted(named)) or "nothing") + ("" if good else "  WRONG")
            print(f"{kind:12} {name:6} λ {lam:<4g}  {numbers}  named: {verdict}", flush=True)
    print(f"{wrong} of {len(cases)} runs judged wrongly")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
