"""Runs of several turns: what a trainer makes of the episodes."""

import json
import sys
import threading
from dataclasses import replace
from functools import wraps

import pytest
import torch

from helpers.configs import quiet
from helpers.files import read_events, read_metrics
from helpers.proofs import proofs
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.learn.objective import CriticOutputs, MicroBatchLoss
from tokencredit.settings.data import (
    EnvironmentConfig,
    EvaluationEnvironment,
    FunctionTerm,
    PromptsConfig,
    ScoreConfig,
)
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.run_kind import read_source
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AdvantageConfig, EvalConfig, KLConfig, UpdateConfig
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.text.turns.builtin.calculator import Calculator
from tokencredit.tools.scoring_options import EvaluateOptions


def config(folder, iterations=1, **groups):
    small = {
        "model": ModelConfig(name="builtin:grid", dtype="float32"),
        "env": EnvironmentConfig(factory="builtin:grid", turn_tokens=6, max_turns=4),
        "rollout": RolloutConfig(batch_size=8, max_new_tokens=160),
        "ppo": UpdateConfig(epochs=1, minibatches=2),
        "run": quiet(folder, iterations, samples=3),
    }
    return PPOConfig(**small | groups)


def from_python(folder, **groups):
    return config(folder, env=EnvironmentConfig(turn_tokens=6, max_turns=4), **groups)


class Dice:
    """Pays a different reward at the end of each of three turns."""

    def reset(self, row):
        self.taken = 0
        return "Reach the goal in 8 moves and avoid the holes.\n"

    def step(self, completion):
        self.taken += 1
        return "\nMoved.\nMove:", float(10**self.taken), self.taken == 3


def samples(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_rewards_fall_at_the_ends_of_their_turns(tmp_path):
    PPOTrainer(args=from_python(tmp_path / "run", kl=KLConfig(coef=0)), environment_factory=Dice).train()
    for sample in samples(tmp_path / "run"):
        ends = [turn["end"] - 1 for turn in sample["turns"] if turn["role"] == "assistant"]
        assert [(at, x) for at, x in enumerate(sample["rewards"]) if x] == list(zip(ends, (10, 100, 1000), strict=True))
        assert sample["reward"] == 1110
        assert sample["terms"] == {"Dice": 1110}
        assert [turn["reward"] for turn in sample["turns"] if turn["role"] == "assistant"] == [10, 100, 1000]
        for name in ("logprobs", "rewards", "advantages", "returns", "values", "mask", "tokens"):
            assert len(sample[name]) == sample["turns"][-1]["end"], name
        for name in ("logprobs", "rewards", "advantages", "returns", "values"):
            assert not any(x for x, acted in zip(sample[name], sample["mask"], strict=True) if not acted), name


def test_credit_by_turn_is_shared_by_the_tokens_of_a_turn(tmp_path):
    """With γ = λ = 1 and an untrained critic of 0, the advantage of a turn is what was paid from it on."""
    args = from_python(tmp_path / "run", kl=KLConfig(coef=0), advantage=AdvantageConfig(unit="turn", lam=1.0))
    trainer = PPOTrainer(args=args, environment_factory=Dice)
    batch, experience = trainer.credit.give(trainer.collect())
    for row, episode in enumerate(batch.episodes):
        spans = [span for span in episode.spans if span.role == "assistant"]
        for span, expected in zip(spans, (1110, 1100, 1000), strict=True):
            assert batch.advantages[row, span.start : span.end].tolist() == [expected] * (span.end - span.start)
        first = [span.start for span in spans]
        assert experience.value_mask[row].nonzero().flatten().tolist() == first
    trainer.update(1, batch, experience)


def test_the_value_loss_counts_first_tokens_only(tmp_path):
    settings = {"advantage": AdvantageConfig(unit="turn"), "critic": CriticConfig(clip=None)}
    trainer = PPOTrainer(args=from_python(tmp_path / "run", **settings), environment_factory=Dice)
    _, experience = trainer.credit.give(trainer.collect())
    objective, first = trainer.learner.objective, experience.value_mask
    counts = objective.count(experience.mask, first)
    assert counts.tolist() == [experience.mask.sum(), first.sum()] == [experience.mask.sum(), 24]
    values = torch.where(first, experience.returns, 1e6)
    loss = MicroBatchLoss(objective, replace(experience, counts=counts.tolist()))
    assert loss.value_loss(CriticOutputs(values)) == 0, "values of other tokens do not count"
    assert loss.value_loss(CriticOutputs(values.masked_fill(first, 0))) > 0


def test_leave_one_out_compares_whole_episodes(tmp_path):
    args = config(
        tmp_path / "run",
        critic=CriticConfig(kind="none"),
        advantage=AdvantageConfig(estimator="leave_one_out", whiten="none"),
        rollout=RolloutConfig(batch_size=16, per_prompt=8, max_new_tokens=160),
        kl=KLConfig(coef=0),
    )
    trainer = PPOTrainer(args=args)
    batch, experience = trainer.credit.give(trainer.collect())
    groups = batch.total_scores().view(2, 8)
    expected = ((groups - groups.mean(1, keepdim=True)) * 8 / 7).flatten()
    for row in range(16):
        mask = experience.mask[row]
        torch.testing.assert_close(experience.advantages[row][mask], expected[row].expand(int(mask.sum())))
    assert not experience.advantages[~experience.mask].any()
    for first in (0, 8):
        assert len(set(batch.prompts.texts[first : first + 8])) == 1, "the episodes of a group begin alike"


def test_reward_functions_get_environments_and_whole_texts(tmp_path):
    seen = {}

    def length(prompts, completions, environments, completion_ids, completion_mask, **columns):
        seen.update(
            columns, environments=environments, completions=completions, ids=completion_ids, mask=completion_mask
        )
        return [float(environment.taken) for environment in environments]

    rows = [{"word": "a"}, {"word": "b"}]
    trainer = PPOTrainer(
        args=from_python(tmp_path / "run"), environment_factory=Dice, reward_funcs=length, train_dataset=rows
    )
    scored = trainer.collect()
    assert scored.terms == {"Dice": [1110.0] * 8, "length": [3.0] * 8}
    assert sorted(set(seen["word"])) == ["a", "b"]
    assert all(text.count("Moved.") == 2 for text in seen["completions"])
    for ids, mask, turns in zip(seen["ids"], seen["mask"], scored.episodes, strict=True):
        assert len(ids) == len(mask)
        assert sum(mask) == sum(len(turn.ids) for turn in turns.turns)


def test_a_batch_by_hand_is_not_scored_with_the_environments_of_later_episodes(tmp_path):
    args = from_python(tmp_path / "run", iterations=3, rollout=RolloutConfig(batch_size=2, max_new_tokens=80))
    trainer = PPOTrainer(args=args, environment_factory=Dice)
    batch = trainer.sample()
    trainer.score(batch)
    assert trainer.learn(batch)["reward"] == 1110, "as sampled, not as scored"
    later = trainer.sample()
    assert len({id(transcript.episode.environment) for transcript in later.episodes}) == 2
    for again in (trainer.score, trainer.learn):
        with pytest.raises(ConfigError, match="these episodes cannot be scored again"):
            again(batch)
    assert trainer.learn(later)["reward"] == 1110
    trainer.close()


def test_evaluations_play_other_episodes_than_training(tmp_path):
    evaluated = EvalConfig(every=1, samples=8, max_new_tokens=160)
    trainer = PPOTrainer(args=config(tmp_path / "run", eval=evaluated))
    assert not set(trainer.prompts.batch(0, 50).seeds) & set(trainer.eval_prompts.batch(0, 50).seeds)
    trainer.train()
    (metrics,) = read_metrics(tmp_path / "run")
    assert 1 <= metrics["eval/env/turns"] <= 4
    assert metrics["env/turns"] > 1
    endings = [metrics[f"env/ending/{name}"] for name in ("done", "answer", "max_turns", "length", "error")]
    assert sum(endings) == 1


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"rollout": RolloutConfig(batch_size=8, cache="static")}, "rollout.cache is static; episodes of several"),
        (
            {"eval": EvalConfig(every=1, max_new_tokens=24)},
            "eval.max_new_tokens is 24; it must be at least rollout.max_new_tokens",
        ),
        (
            {"rollout": RolloutConfig(batch_size=8, max_new_tokens=160, min_new_tokens=6)},
            "env.turn_tokens is 6; it must be above rollout.min_new_tokens, 6, or every turn would be cut",
        ),
    ],
)
def test_settings_that_episodes_do_not_have_are_refused(groups, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        config(tmp_path / "run", **groups)
    with pytest.raises(ConfigError, match=message):
        PPOTrainer(args=from_python(tmp_path / "run", **groups), environment_factory=Dice)


def test_a_run_without_any_reward_is_refused(tmp_path):
    class Silent:
        def reset(self, **row):
            return None

        def look(self, word: str) -> str:
            """Look a word up.

            Args:
                word: The word.
            """
            return word

    with pytest.raises(
        ConfigError, match="there is no reward: reward is empty, and no environment has its own; give a term"
    ):
        PPOTrainer(args=config(tmp_path / "run", env=EnvironmentConfig()), environment_factory=Silent)
    with pytest.raises(ConfigError, match=r"reward is \[\]; give at least one term"):
        PPOConfig.from_dict({"tools": ["file.py:search"]})


def test_problems_of_episodes_are_events_once_each(tmp_path):
    class Loud(Dice):
        def reset(self, row):
            self.fails = row["seed"] % 2
            return super().reset(row)

        def step(self, completion):
            if self.fails and self.taken == 1:
                raise ValueError("\x1b[31mno such field")
            return super().step(completion)

    class Long(Dice):
        def step(self, completion):
            return "Moved. " * 400, 0.0, False

    args = from_python(tmp_path / "loud", iterations=2)
    PPOTrainer(args=args, environment_factory=Loud).train()
    (failed,) = [event for event in read_events(tmp_path / "loud") if "env/" in event]
    assert failed.startswith("a call of an environment or tool failed: ")
    assert "no such field" in failed
    assert "\x1b" not in failed
    assert failed.endswith("(the first case; env/failed counts all)")
    args = from_python(tmp_path / "long", reward=[FunctionTerm(function="length")])
    PPOTrainer(args=args, environment_factory=Long).train()
    cut, unfit = [event for event in read_events(tmp_path / "long") if "env/" in event]
    assert cut.startswith("an observation was cut to env.observation_tokens: Moved. Moved.")
    assert unfit.startswith("an observation has ")
    assert "were left of rollout.max_new_tokens, with one for the next turn: its episode ended there" in unfit


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (("o", 0.0, False, False, {}), r"turn 1: error: step returned 5 values; it must return \(obs"),
        *proofs(
            (("o", None, False), "step returned the reward None; it must be a finite number"),
            (("o", 0.0, 1), "step returned 1 for done; it must be True or False"),
        ),
    ],
)
def test_an_environment_that_fails_in_every_episode_stops_the_run(result, message, tmp_path):
    class Broken(Dice):
        def step(self, completion):
            return result

    with pytest.raises(RunStopped, match="the environment failed in every episode of a batch, .*" + message):
        PPOTrainer(args=from_python(tmp_path / "run"), environment_factory=Broken).train()


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"rollout": RolloutConfig(batch_size=8, max_new_tokens=256)}, "it is 256, and the model's context has 256"),
        ({"eval": EvalConfig(every=1, max_new_tokens=300)}, "it is 300, and the model's context has 256"),
    ],
)
def test_a_length_that_leaves_no_room_for_a_prompt_is_refused_before_the_run(groups, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        PPOTrainer(args=config(tmp_path / "run", **groups))


def test_pretraining_by_turn_is_measured_where_the_critic_learns(tmp_path):
    """Every episode has three turns, whose returns do not depend on their numbers of tokens."""
    settings = {"advantage": AdvantageConfig(unit="turn"), "critic": CriticConfig(kind="separate", pretrain=1)}
    PPOTrainer(args=from_python(tmp_path / "run", **settings), environment_factory=Dice).train()
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "pretrain.jsonl").read_text().splitlines()]
    assert row["return_mean"] == pytest.approx((1110 + 1100 + 1000) / 3)
    assert row["tokens"] > 24


def test_evaluations_of_a_run_from_python_keep_its_limits(tmp_path, capsys):
    folder = tmp_path / "run"
    PPOTrainer(args=from_python(folder), environment_factory=Dice).train()
    assert "generate" in (told := capsys.readouterr().out)
    assert "--prompt TEXT" in told, "the folder has no environment to play in"
    source, given = read_source(str(folder)), EvaluationEnvironment(factory="builtin:grid", timeout=5.0)
    config = EvaluateOptions(env=given).configure(source, ["environment_factory"])
    assert config.env == EnvironmentConfig(factory="builtin:grid", turn_tokens=6, max_turns=4, timeout=5.0)


def test_an_evaluation_keeps_what_it_does_not_replace():
    own = EnvironmentConfig(factory="builtin:grid", max_turns=4)
    source = read_source("builtin:grid")
    source = replace(source, config=PPOConfig(env=own, tools=["a.py:f"]), scored=True)
    assert EvaluateOptions(tools=["b.py:g"]).configure(source, []).env == own
    for tools in ([], ["b.py:g"]):
        limited = EvaluateOptions(tools=tools, env=EvaluationEnvironment(max_turns=8)).configure(source, [])
        assert limited.env == replace(own, max_turns=8), "which is the default"
    plain = replace(source, config=PPOConfig())
    with pytest.raises(ConfigError, match=r"env\.max_turns is 3, which has no effect without env\.factory"):
        EvaluateOptions(env=EvaluationEnvironment(max_turns=3)).configure(plain, [])
    other = EvaluateOptions(env=EvaluationEnvironment(factory="builtin:calculator")).configure(source, [])
    assert (other.env.factory, other.env.max_turns, other.tools) == ("builtin:calculator", 4, ["a.py:f"])


@pytest.mark.parametrize("unit", ["token", "turn"])
def test_an_episode_without_turns_left_bootstraps_from_where_the_next_would_begin(unit, tmp_path):
    class Endless:
        def reset(self, row):
            self.taken = row["seed"] % 3
            return "Reach the goal in 8 moves and avoid the holes.\n"

        def step(self, completion):
            self.taken += 1
            return "\nMoved." * (self.taken % 3 + 1) + "\nMove:", 1.0, False

    def collected(turns):
        args = config(
            tmp_path / f"run{turns}",
            env=EnvironmentConfig(turn_tokens=3, max_turns=turns),
            rollout=RolloutConfig(batch_size=8, max_new_tokens=80),
            advantage=AdvantageConfig(unit=unit, bootstrap=True),
            critic=CriticConfig(init="orthogonal"),
        )
        return PPOTrainer(args=args, environment_factory=Endless).collect()

    short, longer = collected(2), collected(3)
    starts = [episode.spans[4].start for episode in longer.episodes]
    assert len({len(episode.following) for episode in short.episodes}) > 1
    expected = torch.stack([longer.rollout.values[row, start] for row, start in enumerate(starts)])
    assert expected.abs().min() > 0
    torch.testing.assert_close(short.bootstrap, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("score", [{"normalize": "running"}, *proofs({"normalize": "batch", "clip": 2.0})])
def test_settings_of_scores_are_refused_where_every_reward_is_paid_by_turn(score, tmp_path):
    trainer = PPOTrainer(args=from_python(tmp_path / "run", score=ScoreConfig(**score)), environment_factory=Dice)
    keys = " and ".join(f"score.{key}" for key in score) + " act" + "s" * (len(score) == 1)
    with pytest.raises(RunStopped, match=f"^{keys} on scores of whole completions, and the reward gives one"):
        trainer.credit.give(trainer.collect())
    both, calls = from_python(tmp_path / "both", score=ScoreConfig(**score)), []

    def once(completions, **columns):
        calls.append(1)
        return [float(len(text)) if len(calls) == 1 else None for text in completions]

    trainer = PPOTrainer(args=both, environment_factory=Dice, reward_funcs=once)
    trainer.credit.give(trainer.collect())
    assert not trainer.credit.give(trainer.collect())[0].of_texts, "the term may pass over a batch"


def test_a_reward_that_is_named_counts_even_if_it_equals_the_default():
    named = {"env.factory": "builtin:grid", "reward": [{"classifier": "builtin:reviews"}]}
    (term,) = PPOConfig.from_dict(named).reward
    assert term.classifier == "builtin:reviews"
    assert PPOConfig.from_dict({"env.factory": "builtin:grid"}).reward == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"word": "a"}, "the column of prompts is 'question', and train_dataset has only word; name one column"),
        ({"question": "a", "prompt": "b"}, "the column of prompts is 'question', and train_dataset has another column"),
    ],
)
def test_a_column_of_prompts_that_episodes_would_lose_is_refused(row, message, tmp_path):
    args = from_python(tmp_path / "run", prompts=PromptsConfig(column="question"))
    with pytest.raises(ConfigError, match=message):
        PPOTrainer(args=args, environment_factory=Dice, train_dataset=[row])


def misbehave(kind, over):
    """Fail in one of several ways."""
    if kind == "raise":
        raise ValueError("out of order\x1b[2J")
    if kind == "exit":
        sys.exit(1)
    if kind == "hang":
        over.wait()
    if kind == "recurse":
        return misbehave(kind, over)
    return {"long": "x " * 10**5, "half": "\ud800 <|im_end|>", "number": 3}.get(kind)


def test_a_run_goes_on_whatever_its_tools_do(tmp_path):
    kinds, over = ("raise", "exit", "hang", "recurse", "long", "half", "number", "nothing"), threading.Event()

    class OutOfOrder(Calculator):
        def reset(self, seed, **row):
            self.kind = kinds[seed % len(kinds)]
            return super().reset(seed, **row)

        @wraps(Calculator.calculate)
        def calculate(self, expression):
            return misbehave(self.kind, over)

        @wraps(Calculator.answer)
        async def answer(self, number):
            return misbehave(self.kind, over) if self.kind != "hang" else self.kind

        async def get_reward(self):
            return float(len(self.kind))

    args = config(
        tmp_path / "run",
        iterations=2,
        model=ModelConfig(name="builtin:calculator", dtype="float32"),
        rollout=RolloutConfig(batch_size=16, max_new_tokens=200),
        env=EnvironmentConfig(timeout=0.3, observation_tokens=32, max_turns=4),
    )
    args = replace(args, run=replace(args.run, samples=16))
    PPOTrainer(args=args, environment_factory=OutOfOrder).train()
    over.set()
    metrics = read_metrics(tmp_path / "run")
    assert len(metrics) == 2
    assert all(row["steps"] > 0 and row["env/calls"] > 0 for row in metrics)
    assert {sample["ending"] for sample in samples(tmp_path / "run")} <= {"answer", "max_turns", "length"}
    turns = [turn for sample in samples(tmp_path / "run") for turn in sample["turns"]]
    assert {problem for turn in turns for problem in turn.get("problems", ())} >= {"failed", "timeout", "cut"}
