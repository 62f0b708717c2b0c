"""Runs whose critic or λ is made ill on purpose, audited, and what the diagnosis names. `make doctor` prints a table.

Two runs of the built-in world are trained: one with a separate critic of a policy that is held still, which is right,
and one with the defaults. A true value belongs to the policy alone, so one truth serves all critics and λ that are put
beside it. Exits with 1 if an illness is not named, or a healthy run is accused.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tokencredit.audit.truth import Returns
from tokencredit.report.reading import read_run
from tokencredit.runs.diagnosis import diagnose
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AuditConfig, RolloutConfig, RunConfig
from tokencredit.text.audit.auditing import Auditor
from tokencredit.text.credit import Credit
from tokencredit.text.trainer import PPOTrainer

CHECKS = {"critic_worse", "critic_flat", "lam_low", "lam_high"}
AUDIT = AuditConfig(every=1, completions=32, continuations=24, states=None)
Head = Callable[[torch.nn.Linear], None]


def vowels(completions: list[str], **columns: Any) -> list[float]:
    """A reward to which each token adds its part, so that each has credit, and luck after it adds up."""
    return [0.1 * sum(text.count(vowel) for vowel in "aeiou") for text in completions]


def right(folder: Path, batch: int = 128, length: int = 8, iterations: int = 40) -> Patient:
    """A run of a critic alone, which learns the values of a policy that is held still."""
    return Patient(
        folder,
        vowels,
        rollout=RolloutConfig(batch_size=batch, max_new_tokens=length, stop_at_eos=False),
        critic=CriticConfig(kind="separate", trunk_lr=1e-3, epochs=4, warmup=iterations),
        run=RunConfig(dir=str(folder), iterations=iterations, trackers=[], show_every=0, save_every=0),
    )


def times(factor: float, bias: float = 0.0) -> Head:
    """Scale a critic's values, around `bias`."""

    def change(head: torch.nn.Linear) -> None:
        head.weight.mul_(factor)
        head.bias.mul_(factor).add_(bias)

    return change


def random(scale: float) -> Head:
    """Another direction of hidden states, of the same length times `scale`."""

    def change(head: torch.nn.Linear) -> None:
        other = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(1))
        head.weight.copy_(other * (scale * head.weight.norm() / other.norm()))

    return change


def shuffled(head: torch.nn.Linear) -> None:
    """Weights in another order, three times as large."""
    order = torch.randperm(head.weight.shape[1], generator=torch.Generator().manual_seed(2))
    head.weight.copy_(3 * head.weight[:, order])


@dataclass(frozen=True)
class Kept(Auditor):
    """An auditor that samples the truth of its completions once, for all critics and λ."""

    kept: list[Returns] = field(default_factory=list)

    def _sample(self, returns: Returns, *rest: Any, **more: Any) -> None:
        if not self.kept:
            super()._sample(returns, *rest, **more)
            self.kept.append(returns)
        vars(returns).update(vars(self.kept[0]))


class Patient:
    """A trained run, to be audited with other critics and other λ."""

    def __init__(self, folder: Path, reward: Callable[..., list[float]] | None = None, **settings: Any):
        """Train it."""
        args = PPOConfig(model=ModelConfig(dtype="float32"), **settings)
        self.trainer = PPOTrainer(args=args, reward_funcs=reward)
        self.trainer.train()
        self.run = read_run(folder)
        self.truths: dict[int, list[Returns]] = {}
        """Sampled so far, by the number of the audit."""

    @contextmanager
    def critic(self, change: Head | None) -> Iterator[None]:
        """The run with a changed critic."""
        head = self.trainer.policy.critic.head[-1]
        before = {name: x.clone() for name, x in head.state_dict().items()}
        with torch.no_grad():
            if change is not None:
                change(head)
        yield
        head.load_state_dict(before)

    def metrics(self, number: int, change: Head | None, lam: float) -> dict[str, float]:
        """The metrics of an audit of completions that `number` chooses."""
        trainer = self.trainer
        args = replace(trainer.args, advantage=replace(trainer.args.advantage, lam=lam))
        credit = Credit(args, trainer.processes.sum)
        credit.load_state_dict(trainer.credit.state_dict())
        kept = self.truths.setdefault(number, [])
        with self.critic(change):
            audit = Kept(trainer.pipeline, credit, trainer.prompts, AUDIT, kept=kept).audit(number)
        found: dict[str, float] = audit.judge(trainer.processes)["metrics"]
        return found

    def named(self, metrics: dict[str, float], lam: float) -> set[str]:
        """What the diagnosis says of the run, of all that audits can tell."""
        *rows, last = self.run.metrics
        config = self.run.config | {"advantage": self.run.config["advantage"] | {"lam": lam}}
        return {finding.name for finding in diagnose([*rows, last | metrics], config)} & CHECKS


ILL: dict[str, list[tuple[Head | None, float]]] = {
    "critic_worse": [(times(-1), 0.95), (times(3), 0.95), (times(-0.5), 0.5), (random(2), 0.95), (times(5), 1.0)],
    "critic_flat": [(times(0), 0.95), (times(0, 0.5), 0.95), (times(0.05), 0.95), (times(0.1), 0.5), (times(0.2), 1.0)],
    "lam_low": [(times(-1), 0.3), (random(3), 0.5), (times(-1), 0.5), (times(-0.5), 0.0), (shuffled, 0.0)],
    "lam_high": [(None, 1.0), (None, 1.0), (None, 0.99), (None, 0.99), (None, 0.98)],
}
"""Changes of a critic that is right, with the λ of the run, by the check that names them."""


def main() -> int:
    """Print a line for each run; returns the exit code."""
    wrong = 0

    def show(patient: Patient, kind: str, number: int, change: Head | None, lam: float) -> bool:
        metrics = patient.metrics(number, change, lam)
        named = patient.named(metrics, lam)
        good = not named if kind == "healthy" else kind in named
        figures = ("noise", "explained_variance_high", "spread_high", "raise_lam", "lower_lam", "correlation")
        numbers = "  ".join(f"{name} {metrics.get(f'audit/{name}', float('nan')):6.2f}" for name in figures)
        verdict = (", ".join(sorted(named)) or "nothing") + ("" if good else "  WRONG")
        print(f"{kind:13} λ {lam:<4g} {numbers}  named: {verdict}", flush=True)
        return not good

    with tempfile.TemporaryDirectory() as folder:
        still = right(Path(folder) / "still")
        for kind, cases in ILL.items():
            for number, (change, lam) in enumerate(cases):
                wrong += show(still, kind, number, change, lam)
        plain = Patient(
            Path(folder) / "plain",
            rollout=RolloutConfig(batch_size=64, max_new_tokens=12),
            run=RunConfig(dir=f"{folder}/plain", iterations=10, trackers=[], show_every=0, save_every=0),
        )
        for patient, lam in ((still, 0.5), (still, 0.0), (plain, 0.95), (plain, 1.0)):
            for number in range(5):
                wrong += show(patient, "healthy", number, None, lam)
    print(f"{wrong} of 40 runs judged wrongly")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
