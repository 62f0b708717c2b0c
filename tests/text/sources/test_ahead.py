"""Training while sampling: runs whose batches are sampled ahead."""

import re
import threading
import time
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from helpers.configs import quiet, text_config
from helpers.files import read_jsonl, read_metrics
from helpers.proofs import proofs
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.settings.data import EnvironmentConfig
from tokencredit.settings.model import LoraConfig, ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import EvalConfig, KLConfig, UpdateConfig
from tokencredit.text.callbacks import Callback
from tokencredit.text.engines import background
from tokencredit.text.engines.background import BackgroundSampler
from tokencredit.text.engines.requests import EngineFailure
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.text.rewards.terms import as_terms

pytestmark = pytest.mark.slow


def ahead(folder, iterations=4, max_age=1, rollout=None, **groups):
    rollout = {"batch_size": 8, "max_new_tokens": 8, "engine": "continuous", "max_age": max_age} | (rollout or {})
    groups = {"ppo": UpdateConfig(epochs=1, minibatches=1), "run": quiet(folder, iterations, save_every=10)} | groups
    return text_config(folder, rollout=RolloutConfig(**rollout), **groups)


def sampling_threads():
    return [thread for thread in threading.enumerate() if "sampling" in thread.name or "generation" in thread.name]


class Patient(Callback):
    """Lets the update begin only when all batches ahead are sampled, so that ages do not depend on timing."""

    def before_update(self, trainer):
        for _, sampled in trainer.source.batches:
            sampled.result()


class Weights(Patient):
    """Keeps what was learned from, and the weights before each update."""

    def __init__(self):
        self.rollouts, self.weights = [], []

    def after_rollout(self, trainer, rollout, **_):
        self.rollouts.append(rollout)
        self.weights.append({name: x.clone() for name, x in trainer.policy.lm.state_dict().items()})


STOPS = {
    "rollout": {"per_prompt": 4, "stop": ["."], "max_new_tokens": 16},
    "eval": EvalConfig(every=1, samples=8, max_new_tokens=8),
}
LORA = {"model": ModelConfig(dtype="float32", lora=LoraConfig(rank=2)), "rollout": {"temperature": 0.7}}


@pytest.mark.parametrize(
    ("groups", "max_age"),
    [(STOPS, 2), *proofs((STOPS, 1), (LORA, 1), (LORA, 2))],
)
def test_tokens_have_the_log_probs_of_the_weights_of_their_age(groups, max_age, tmp_path):
    seen = Weights()
    args = ahead(tmp_path / "run", max_age + 1, max_age, **groups)
    trainer = PPOTrainer(args=args, callbacks=[seen])
    trainer.train()
    metrics = read_metrics(tmp_path / "run")
    assert [row["age_max"] for row in metrics] == list(range(max_age + 1))
    assert all("log_ratio" in row and "kl" not in row for row in metrics), "old samples do not estimate the KL"
    assert "eval" not in groups or "eval/kl" in metrics[-1]
    lm = trainer.policy.lm
    for number, rollout in enumerate(seen.rollouts):
        assert (rollout.age[~rollout.mask] == 0).all()
        for age in range(max_age + 1):
            at = rollout.mask & (rollout.age == age)
            if not at.any():
                continue
            lm.load_state_dict(seen.weights[number - age])
            with torch.no_grad():
                then = trainer.policy.logprobs(rollout.inputs(), args.rollout.temperature)[0]
            torch.testing.assert_close(rollout.behavior_logprobs[at], then[at], atol=1e-5, rtol=0)
        lm.load_state_dict(seen.weights[number])
        with torch.no_grad():
            now = trainer.policy(rollout.inputs(), args.rollout.temperature, entropy=True)
        torch.testing.assert_close(rollout.logprobs[rollout.mask], now.logprobs[rollout.mask], atol=1e-5, rtol=0)
        exact = float(now.stats.entropy[rollout.mask].mean())
        assert metrics[number]["entropy"] == pytest.approx(exact, rel=1e-4), "old draws do not estimate it"
    assert not sampling_threads()
    samples = read_jsonl(tmp_path / "run/samples.jsonl")
    for sample in samples:
        assert len(sample["age"]) == len(sample["tokens"])
        assert max(sample["age"]) <= sample["iteration"] - 1
    assert any(max(sample["age"]) == 1 for sample in samples if sample["iteration"] == 2)


def test_a_run_goes_on_where_it_was_drained(tmp_path):
    args = ahead(tmp_path / "run", run=quiet(tmp_path / "run", 4, save_every=1))
    drawn = {}

    class Stop(Patient):
        def after_rollout(self, trainer, rollout, **_):
            drawn.setdefault(len(trainer.record.history) + 1, []).append(rollout.prompt_ids)
            if len(trainer.record.history) == 2 and not stopped:
                stopped.append(True)
                raise KeyboardInterrupt

    stopped = []
    with pytest.raises(KeyboardInterrupt):
        PPOTrainer(args=args, callbacks=[Stop()]).train()
    assert not sampling_threads()
    PPOTrainer(args=args, callbacks=[Stop()]).train(resume_from_checkpoint=True)
    metrics = read_metrics(tmp_path / "run")
    assert [row["iteration"] for row in metrics] == [1, 2, 3, 4]
    assert metrics[2]["age_max"] == 0, "the first batch after the resume has the weights of the checkpoint"
    assert metrics[3]["age_max"] == 1
    assert len(drawn[3]) == 2
    assert torch.equal(*drawn[3]), "the same prompts again"


def test_a_copy_that_is_not_the_policy_stops_the_run(tmp_path, monkeypatch):
    def bent(lm):
        other = deepcopy(lm)
        next(other.parameters()).data *= 1.1
        return other

    monkeypatch.setattr(background, "deepcopy", bent)
    with pytest.raises(RunStopped, match=r"does not have its log-probs: they differ by .* Nothing was learned"):
        PPOTrainer(args=ahead(tmp_path / "run", 2)).train()
    assert not sampling_threads()


class Judge:
    """A reward service of which each call takes longer than sampling and learning."""

    def __init__(self):
        self.threads, self.running, self.most = set(), 0, 0
        self.lock = threading.Lock()

    def __call__(self, completions, **columns):
        with self.lock:
            self.threads.add(threading.current_thread())
            self.running += 1
            self.most = max(self.most, self.running)
        time.sleep(0.5)
        with self.lock:
            self.running -= 1
        return [float(len(completion)) for completion in completions]


@pytest.mark.parametrize("timeout", [60.0, *proofs(None)])
def test_slow_rewards_are_asked_as_soon_as_a_batch_is_sampled(timeout, tmp_path):
    judge = Judge()
    terms = [replace(as_terms(judge, torch.device("cpu"))[0], timeout=timeout)]
    PPOTrainer(args=ahead(tmp_path / "run", 3, max_age=2), reward_funcs=terms).train()
    if timeout is None:  # it may be bound to the trainer's thread
        assert judge.threads == {threading.current_thread()}
        assert judge.most == 1
    else:
        assert threading.current_thread() not in judge.threads
        assert judge.most > 1, "a batch's call waits for those before it"
    assert len(read_metrics(tmp_path / "run")) == 3


def test_without_a_reference_a_reward_that_is_asked_early_gets_no_log_probs_of_it(tmp_path):
    def judged(completions, **columns):
        columns_of.append({name: bool(column) for name, column in columns.items()})
        return [0.0] * len(completions)

    columns_of = []
    terms = [replace(as_terms(judged, torch.device("cpu"))[0], timeout=60.0)]
    PPOTrainer(args=ahead(tmp_path / "run", 1, kl=KLConfig(coef=0.0)), reward_funcs=terms).train()
    assert columns_of
    assert "ref_logprobs" not in columns_of[0]


def test_a_reward_that_names_the_reference_is_asked_after_its_pass(tmp_path):
    def named(completions, ref_logprobs, **_):
        return [sum(row) for row in ref_logprobs]

    def unnamed(completions, **columns):
        return [0.0] * len(completions) if columns["ref_logprobs"] else []

    for reward, message in ((named, None), (unnamed, r"reads ref_logprobs before .* give its function")):
        terms = [replace(as_terms(reward, torch.device("cpu"))[0], timeout=60.0, retries=0)]
        trainer = PPOTrainer(args=ahead(tmp_path / reward.__name__, 1), reward_funcs=terms)
        with pytest.raises(RunStopped, match=message) if message else nullcontext():
            trainer.train()
    assert read_metrics(tmp_path / "named")[0]["reward"] < 0


def test_sampling_goes_on_while_rewards_are_computed(tmp_path):
    tokens = []

    def slow(completions, **_):
        sampler = trainer.source.engine.sampler
        before = sum(len(flight.progress.ids) for flight in list(sampler.flights.values()))
        time.sleep(0.5)
        flights = list(sampler.flights.values())
        tokens.append((before, sum(len(flight.progress.ids) for flight in flights), len(flights)))
        return [1.0] * len(completions)

    trainer = PPOTrainer(args=ahead(tmp_path / "run", 3, rollout={"max_new_tokens": 24}), reward_funcs=slow)
    trainer.train()
    assert any(after > before or left == 0 for before, after, left in tokens)


@pytest.mark.parametrize("last", [*proofs(False), True])
def test_a_sampler_that_fails_is_started_anew_once(last, tmp_path, monkeypatch):
    complete = BackgroundSampler.complete
    calls = []

    def failing(self, *args):
        calls.append(1)
        if len(calls) == 2 or (last and len(calls) > 2):
            raise EngineFailure("out of pages")
        complete(self, *args)

    monkeypatch.setattr(BackgroundSampler, "complete", failing)
    trainer = PPOTrainer(args=ahead(tmp_path / "run", 2))
    if last:
        message = r"after a new start, rollout\.engine continuous failed: out of pages; the run can be resumed"
        with pytest.raises(RunStopped, match=message):
            trainer.train()
        last = False
        PPOTrainer(args=ahead(tmp_path / "run", 2)).train(resume_from_checkpoint=True)
    else:
        trainer.train()
    assert not sampling_threads()
    events = [event["event"] for event in read_jsonl(tmp_path / "run/events.jsonl")]
    assert sum("samples the batches ahead anew: out of pages" in event for event in events) == 1
    assert [row["iteration"] for row in read_metrics(tmp_path / "run")] == [1, 2]


@pytest.mark.proof  # engines/test_requests.py: a sync that failed is tried again
def test_a_failed_sync_loses_no_update(tmp_path, monkeypatch):
    sync = BackgroundSampler.sync
    syncs = []

    def failing(self, policy):
        syncs.append(self)
        if len(syncs) == 2:
            raise EngineFailure("its thread has ended")
        sync(self, policy)

    seen = Weights()
    monkeypatch.setattr(BackgroundSampler, "sync", failing)
    trainer = PPOTrainer(args=ahead(tmp_path / "run", 3), callbacks=[seen])
    trainer.train()
    assert len({id(sampler) for sampler in syncs}) == 2
    assert [row["age_max"] for row in read_metrics(tmp_path / "run")] == [0, 1, 0], "the third batch is drawn anew"
    assert trainer.stream.drawn == 3 * 8
    rollout = seen.rollouts[2]
    trainer.policy.lm.load_state_dict(seen.weights[2])
    with torch.no_grad():
        now = trainer.policy.logprobs(rollout.inputs(), 1.0)[0]
    torch.testing.assert_close(rollout.behavior_logprobs[rollout.mask], now[rollout.mask], atol=1e-5, rtol=0)


@pytest.mark.proof  # below: episodes ahead in environments of their own
def test_episodes_of_several_turns_are_played_ahead(tmp_path):
    args = ahead(
        tmp_path / "run",
        3,
        rollout={"max_new_tokens": 32},
        model=ModelConfig(name="builtin:calculator", dtype="float32"),
        env=EnvironmentConfig(factory="builtin:calculator"),
        reward=[],
    )
    PPOTrainer(args=args, callbacks=[Patient()]).train()
    metrics = read_metrics(tmp_path / "run")
    assert [row["age_max"] for row in metrics] == [0, 1, 1]


class Secret:
    """An environment that says in every observation, and when it is scored, whose episode it plays."""

    def reset(self, row):
        self.secret, self.steps = row["seed"], 0
        return f"Episode {self.secret}:"

    def step(self, completion):
        self.steps += 1
        return f"[{self.secret}]", 0.5, self.steps == 3


def test_no_batch_is_begun_that_the_run_does_not_need(tmp_path, monkeypatch):
    complete, begun = BackgroundSampler.complete, []
    monkeypatch.setattr(BackgroundSampler, "complete", lambda self, *args: (begun.append(1), complete(self, *args)))
    PPOTrainer(args=ahead(tmp_path / "run", 2, max_age=4)).train()
    assert len(begun) == 2


def test_batches_ahead_and_evaluations_have_environments_of_their_own(tmp_path):
    def own(prompts, completions, environments, **_):
        for prompt, completion, environment in zip(prompts, completions, environments, strict=True):
            said = set(re.findall(r"\[(\d+)\]", completion))
            scored.append((prompt, said, environment.secret))
        return [0.0] * len(prompts)

    scored = []
    args = ahead(
        tmp_path / "run",
        2,
        rollout={"max_new_tokens": 64},
        env=EnvironmentConfig(turn_tokens=2, max_turns=6),
        eval=EvalConfig(every=1, samples=4, max_new_tokens=64),
    )
    PPOTrainer(args=args, environment_factory=Secret, reward_funcs=own).train()
    assert len(scored) == 2 * (8 + 4)
    assert all(said == {str(secret)} and prompt == f"Episode {secret}:" for prompt, said, secret in scored)
    assert [row["env/ending/done"] for row in read_metrics(tmp_path / "run")] == [1, 1]


class Guesses:
    """An environment whose replies take longer than a run."""

    def reset(self, row):
        return "Guess:"

    def step(self, completion):
        time.sleep(0.3)
        return "again", 0.5, False


def test_a_run_ends_while_environments_of_batches_ahead_reply(tmp_path):
    args = ahead(
        tmp_path / "run",
        2,
        rollout={"max_new_tokens": 48},
        env=EnvironmentConfig(turn_tokens=4, max_turns=4),
    )
    trainer = PPOTrainer(args=args, environment_factory=Guesses, reward_funcs=lambda completions, **_: [1.0] * 8)
    thread = threading.Thread(target=trainer.train, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for an episode whose sampler is closed"
    assert not sampling_threads()


@pytest.mark.proof  # above: a run goes on where it was drained
def test_a_trainer_trains_again(tmp_path):
    def reward(completions, **_):
        calls.append(len(completions))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return [float(len(x)) for x in completions]

    calls = []
    trainer = PPOTrainer(
        args=ahead(tmp_path / "run", run=quiet(tmp_path / "run", 2, save_every=1)), reward_funcs=reward
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    drawn = trainer.stream.drawn
    trainer.train(resume_from_checkpoint=True)
    assert drawn == 16, "the stream stands at the first batch that was not taken"
    assert [row["iteration"] for row in read_metrics(tmp_path / "run")] == [1, 2]


@pytest.mark.proof  # engines/test_background.py: draws are those of the request
def test_draws_depend_on_the_seed(tmp_path):
    seeds = []

    class Seen(BaseException):
        pass

    class Seeds(Callback):
        def after_rollout(self, trainer, **_):
            seeds.append(trainer.source.engine.sampler.room[0].seed)
            raise Seen

    for seed in (1, 2, 2):
        folder = tmp_path / str(len(seeds))
        with pytest.raises(Seen):
            PPOTrainer(args=replace(ahead(folder, 1), seed=seed), callbacks=[Seeds()]).train()
    assert seeds[0] != seeds[1] == seeds[2]


@pytest.mark.parametrize("rule", ["kl.target", "stop.kl"])
def test_rules_that_need_a_kl_are_refused(rule):
    settings = {"rollout.engine": "continuous", "rollout.max_age": 2, rule: 6}
    with pytest.raises(ConfigError, match=r"is 6, and rollout\.max_age is 2; .* do not estimate the KL"):
        PPOConfig.from_dict(settings)
    PPOConfig.from_dict(settings | {"kl.estimator": "full", "kl.place": "both"})
