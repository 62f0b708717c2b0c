"""Runs go on, whatever tools do."""

import json
import sys
import threading
from functools import wraps

import pytest

from tokencredit.settings.text import PPOConfig
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.text.turns.builtin import calculator as builtin

pytestmark = pytest.mark.slow
OVER = threading.Event()
"""Set when the module's tests are over: ends what hangs."""
SETTINGS = {
    "model.dtype": "float32",
    "rollout.batch_size": 16,
    "ppo.minibatches": 2,
    "run.iterations": 2,
    "run.samples": 16,
    "env.timeout": 0.3,
    "env.observation_tokens": 32,
    "env.max_turns": 4,
}


@pytest.fixture(scope="module", autouse=True)
def over():
    yield
    OVER.set()


def misbehave(kind):
    """Fail in one of several ways."""
    if kind == "raise":
        raise ValueError("out of order\x1b[2J")
    if kind == "exit":
        sys.exit(1)
    if kind == "hang":
        OVER.wait()
    if kind == "recurse":
        return misbehave(kind)
    return {"long": "x " * 5 * 10**6, "half": "\ud800 <|im_end|>", "number": 3, "nothing": None}[kind]


KINDS = ("raise", "exit", "hang", "recurse", "long", "half", "number", "nothing")


class Calculator(builtin.Calculator):
    """The tools that the calculator's policy knows, out of order."""

    def reset(self, seed, **row):
        self.kind = KINDS[seed % len(KINDS)]
        return super().reset(seed, **row)

    @wraps(builtin.Calculator.calculate)
    def calculate(self, expression):
        return misbehave(self.kind)

    @wraps(builtin.Calculator.answer)
    async def answer(self, number):
        return misbehave(self.kind) if self.kind != "hang" else self.kind

    async def get_reward(self):
        return float(len(self.kind))


def train(folder, factory, **settings):
    config = PPOConfig.from_dict({**SETTINGS, "run.dir": str(folder), **settings})
    PPOTrainer(args=config, environment_factory=factory).train()
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    problems = {problem for sample in samples for turn in sample["turns"] for problem in turn.get("problems", ())}
    return metrics, samples, problems


def test_tools_that_fail_are_observations(tmp_path):
    metrics, samples, problems = train(
        tmp_path / "run", Calculator, **{"model.name": "builtin:calculator", "rollout.max_new_tokens": 200}
    )
    assert len(metrics) == 2
    assert all(line["steps"] > 0 and line["env/calls"] > 0 for line in metrics)
    assert {sample["ending"] for sample in samples} <= {"answer", "max_turns", "length"}
    assert problems >= {"failed", "timeout", "cut"}
