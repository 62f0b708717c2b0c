"""The audit of episodes of several turns: against exact values, with and without chance, and from every state."""

import random
from dataclasses import replace
from itertools import count

import pytest
import torch

from helpers.configs import quiet
from helpers.files import read_events, read_metrics
from helpers.proofs import proofs
from helpers.words import END, PROMPT, WORTH, model, tokenizer
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.settings.data import EnvironmentConfig
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AdvantageConfig, AuditConfig, KLConfig, UpdateConfig
from tokencredit.text.data.tasks import Tasks
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.text.turns.replay import EpisodeStart

TURN, LENGTH = 2, 5
"""Tokens of a turn, and of two turns with the observation between them."""


class Coin:
    """Tosses a coin after each of two turns; heads ends the episode if the turn has an "a"."""

    tossed = True

    def reset(self, row):
        self.rng, self.turns = random.Random(row["seed"]), 0
        return "a b"

    def step(self, completion):
        words = completion.split()
        heads = self.rng.random() < 0.5 if self.tossed else "b" in words
        self.turns += 1
        return "c" if heads else "d", paid(words, heads), self.turns == 2 or (heads and "a" in words)


class Rule(Coin):
    """The same without chance, which holds a generator no longer than it needs it."""

    tossed = False

    def reset(self, row):
        super().reset(row)
        del self.rng
        return "a b"


def paid(words, heads):
    return sum(float(WORTH["eabcd".index(word)]) for word in words) + (0.7 if heads else -0.2) * len(words)


def trainer_of(folder, factory=Coin, **changes):
    """A trainer whose policy has moved away from its reference."""
    groups = {
        "model": ModelConfig(dtype="float32"),
        "env": EnvironmentConfig(turn_tokens=TURN, max_turns=2),
        "rollout": RolloutConfig(batch_size=64, max_new_tokens=LENGTH),
        "ppo": UpdateConfig(epochs=1, minibatches=1),
        "kl": KLConfig(coef=0.3),
        "audit": AuditConfig(every=1, completions=4, continuations=20, states=None),
        "run": quiet(folder, 2),
    }
    args = PPOConfig(**(groups | changes))
    trainer = PPOTrainer(model(), args=args, environment_factory=factory, processing_class=tokenizer())
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in trainer.policy.parameters():
            parameter += 0.15 * torch.randn_like(parameter)
    return trainer


class Exact:
    """V of each state, and Q of each token, by going through all turns and coins."""

    def __init__(self, trainer, factory, gamma, by_turn):
        self.lms, self.coef = (trainer.policy.lm, trainer.reference.lm), trainer.credit.kl.coef
        self.tossed, self.gammas = factory.tossed, (1.0 if by_turn else gamma, gamma)
        self.known = {}

    @torch.no_grad()
    def state(self, before, turn, first):
        """V of the state after the turn's tokens, and Q of its next ones; `before` are earlier turns and coins."""
        if (before, turn) in self.known:
            return self.known[before, turn]
        ids = torch.tensor([[*PROMPT, *before, *turn]])
        log_p, log_ref = (lm(ids).logits[0, -1].double().log_softmax(-1) for lm in self.lms)
        q = -self.coef * (log_p - log_ref)
        within, between = self.gammas
        for token in range(5):
            longer = (*turn, token)
            if token != END and len(longer) < TURN:
                q[token] += within * self.state(before, longer, first)[0]
                continue
            words = ["eabcd"[x] for x in longer if x != END]
            coins = (True, False) if self.tossed else ("b" in words,)
            for heads in coins:
                over = not first or (heads and "a" in words)
                after = 0 if over else self.state((*before, *longer, 3 if heads else 4), (), first=False)[0]
                q[token] += (paid(words, heads) + between * after) / len(coins)
        self.known[before, turn] = float((log_p.exp() * q).sum()), q
        return self.known[before, turn]


CASES = [(Coin, "token", "local"), (Rule, "turn", "local")]
MORE_CASES = [(Coin, "turn", "local"), (Rule, "token", "local"), (Coin, "token", "continuous")]


@pytest.mark.parametrize(("factory", "unit", "engine"), [*CASES, *proofs(*MORE_CASES)])
def test_true_values_of_episodes_are_within_their_standard_errors_of_the_exact_ones(
    factory, unit, engine, tmp_path, covered
):
    """An environment's chance is none of the policy's merit: it is drawn anew after the state, and after the turn."""
    rollout = RolloutConfig(batch_size=64, max_new_tokens=LENGTH, engine=engine)
    trainer = trainer_of(tmp_path, factory, advantage=AdvantageConfig(gamma=0.9, unit=unit), rollout=rollout)
    exact = Exact(trainer, factory, 0.9, unit == "turn")
    errors = {"values": [], "advantages": []}
    for seed in range(4):
        audit = trainer.auditor.audit(seed)
        for row, ids in enumerate(audit.batch.rollout.response_ids.tolist()):
            spans = audit.batch.episodes[row].spans
            for span in (span for span in spans if span.role == "assistant"):
                for at in range(span.start, span.end):
                    turn = tuple(ids[span.start : at])
                    value, action = exact.state(tuple(ids[: span.start]), turn, span.start == 0)
                    truth = audit.truth
                    errors["values"].append(float((truth.values[row, at] - value) / truth.value_errors[row, at]))
                    error = float(truth.advantages[row, at]) - (float(action[ids[at]]) - value)
                    errors["advantages"].append(error / float(truth.advantage_errors[row, at]))
    for found in errors.values():
        covered(found)
    assert not audit.truth.values[~audit.batch.rollout.mask].isfinite().any()


SAMPLING = {"plain": {}, "stop": {"stop": ["a b", "c c"]}, "min": {"min_new_tokens": 2}, "filters": {"top_k": 3}}


class Echo:
    """Says a word of each turn; five turns at most."""

    def reset(self, row):
        self.turns = 0
        return ["a b", "c", "d d a"][row["seed"] % 3]

    def step(self, completion):
        self.turns += 1
        return f"{completion.split()[-1] if completion else 'd'} b", float(len(completion)), self.turns == 5


@pytest.mark.parametrize("name", ["stop", "filters", *proofs("plain", "min")])
def test_an_episode_that_goes_on_from_any_state_is_the_one_that_was_played(name, tmp_path):
    """The same tokens, turns, rewards and ends from the same random numbers."""
    trainer = trainer_of(tmp_path, Echo, env=EnvironmentConfig(turn_tokens=3, max_turns=4))
    player, settings = trainer.pipeline.player, RolloutConfig(max_new_tokens=12, **SAMPLING[name])
    tasks = Tasks(None, name="rows", seed=3).batch(0, 12)
    uniforms = torch.rand(12, 12, generator=torch.Generator().manual_seed(7))
    whole = player.play(tasks, settings, uniforms)
    lengths = whole.rollout.response_lengths()
    assert {x.ending for x in whole.transcripts} >= {"length"}
    for first in range(int(lengths.max()) + 1):
        # Rows go on at different places, after a token of the policy's or an observation.
        places = [
            sorted({0, *(x.end for x in e.spans), *m.nonzero()[:, 0].tolist()})
            for e, m in zip(whole.transcripts, whole.rollout.mask, strict=True)
        ]
        at = torch.tensor([row[(first + number) % len(row)] for number, row in enumerate(places)])
        begun = [ids[:n] for ids, n in zip(whole.rollout.response_ids, at, strict=True)]
        recorded = zip(whole.transcripts, whole.prompts.prompts, at.tolist(), strict=True)
        part = player.resume(whole.prompts, [EpisodeStart(*x) for x in recorded], begun, settings, uniforms)
        for x, y in zip(part.transcripts, whole.transcripts, strict=True):
            assert vars(x) | {"episode": None} == vars(y) | {"episode": None}, first
        for x in ("response_ids", "truncated"):
            assert torch.equal(getattr(part.rollout, x), getattr(whole.rollout, x)), (x, first)
        new = torch.arange(whole.rollout.mask.shape[1]) >= at.unsqueeze(1)
        for x in ("mask", "turn_ends"):
            assert torch.equal(getattr(part.rollout, x) & new, getattr(whole.rollout, x) & new), (x, first)
        acted = new & whole.rollout.mask
        close = {"atol": 1e-5, "rtol": 1e-5}
        torch.testing.assert_close(part.rollout.logprobs[acted], whole.rollout.logprobs[acted], **close)


def test_in_the_calculators_world_the_number_that_was_handed_in_decides(tmp_path):
    """After it everything is known: the true value is the reward, and no later token has credit."""
    trainer = PPOTrainer(
        args=PPOConfig(
            model=ModelConfig(name="builtin:calculator", dtype="float32"),
            env=EnvironmentConfig(factory="builtin:calculator"),
            rollout=RolloutConfig(batch_size=64, max_new_tokens=160),
            kl=KLConfig(coef=0),
            audit=AuditConfig(every=1, completions=12, continuations=4, states=3),
            run=quiet(tmp_path, 1),
        )
    )
    audit = trainer.auditor.audit(1)
    scores, known = audit.batch.scores, []
    assert set(scores.tolist()) == {0.0, 1.0}
    for row, episode in enumerate(audit.batch.episodes):
        calls = [[call["function"]["name"] for call in turn.message.get("tool_calls") or ()] for turn in episode.turns]
        spans = [span for span in episode.spans if span.role == "assistant"]
        answered = [span.end for span, names in zip(spans, calls, strict=True) if "answer" in names]
        values, advantages = audit.truth.values[row, answered[-1] :], audit.truth.advantages[row, answered[-1] :]
        known += values[values.isfinite()].tolist()
        assert (values[values.isfinite()] == scores[row]).all()
        assert (advantages[advantages.isfinite()] == 0).all()
    assert set(known) == {0.0, 1.0}


NUMBERS = count()


class Unseeded(Coin):
    """Its coin is nobody's."""

    def reset(self, row):
        super().reset(row)
        self.rng = random.Random(next(NUMBERS))
        return "a b"


def test_an_environment_that_answers_otherwise_is_refused_in_a_line_and_training_goes_on(tmp_path):
    trainer = trainer_of(tmp_path, Unseeded, audit=AuditConfig(every=1, completions=16))
    trainer.train()
    events = [event for event in read_events(tmp_path) if "an audit is skipped" in event]
    assert "environment_factory cannot be audited: reset with an episode's row and seed" in events[0]
    assert not any(name.startswith("audit/") for row in read_metrics(tmp_path) for name in row)
    with pytest.raises(RunStopped, match=r"it differs in the answer to turn \d; an audit replays episodes"):
        trainer.audit(AuditConfig(completions=16))


def test_a_run_with_an_environment_is_audited_in_training_and_afterwards(tmp_path):
    trainer = trainer_of(tmp_path, audit=AuditConfig(every=2, completions=8, continuations=4))
    trainer.train()
    with pytest.raises(ConfigError, match="settings is 'x'; it must be an AuditConfig"):
        trainer.audit("x")
    assert {"audit/noise", "audit/explained_variance"} <= read_metrics(tmp_path)[-1].keys()
    audit = trainer.audit(replace(trainer.args.audit, completions=8))
    [sample, *_] = audit["samples"]
    known = [x is not None for x in sample["true_values"]]
    assert any(known)
    assert all(acted or not x for acted, x in zip(sample["mask"], known, strict=True))
    assert (tmp_path / "report.html").read_text().count("no audit") == 0
