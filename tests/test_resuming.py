"""A run that is cut short and resumed is the run that was never stopped."""

import json
import random
import re
import shutil
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers.configs import control_config, quiet, quiet_agent, text_config
from helpers.files import data_of, read_events
from helpers.proofs import proofs
from helpers.runs import assert_same, metrics
from tokencredit.cli import main
from tokencredit.control.control_trainer import ControlTrainer
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.report.reading import read_run
from tokencredit.report.story import story
from tokencredit.settings.control import AgentConfig, AgentCriticConfig, AgentUpdateConfig, EnvConfig, EpisodesConfig
from tokencredit.settings.data import ClassifierTerm, EnvironmentConfig, FunctionTerm, PromptsConfig, ScoreConfig
from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AdvantageConfig, EvalConfig, KLConfig, OptimConfig, StopConfig, UpdateConfig
from tokencredit.text.models.model_loading import resolve
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.text.rewards.terms import Term


def text(folder, iterations=3, **groups):
    small = {
        "rollout": RolloutConfig(batch_size=8, max_new_tokens=6),
        "ppo": UpdateConfig(epochs=1, minibatches=2),
        "optim": OptimConfig(schedule="cosine"),
        "run": quiet(folder, iterations, save_every=1, samples=3),
    }
    return text_config(folder, **small | groups)


def control(folder, iterations=3, **groups):
    small = {"steps": 50, "eval": EpisodesConfig(episodes=0), "run": quiet_agent(folder, iterations, save_every=1)}
    return control_config(folder, **small | groups)


class Killed(BaseException):
    """Ends a run as SIGKILL would: nobody handles it."""


def die_in(trainer, number):
    """Let a trainer's process end in the middle of an iteration."""
    iteration = trainer.iteration

    def until(now):
        result = iteration(now)
        if now == number:
            raise Killed
        return result

    trainer.iteration = until
    return trainer


def cut(kind, args, number):
    """A run that ended in iteration `number`, whose line was not written any more."""
    with pytest.raises(Killed):
        die_in(kind(args=args), number).train()


def resumed(kind, args):
    trainer = kind(args=args)
    trainer.train(resume_from_checkpoint=True)
    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("resuming") / "whole"
    PPOTrainer(args=text(folder)).train()
    return folder


@pytest.fixture(scope="module")
def cut_in_3(tmp_path_factory):
    """The same run, which ended in its last iteration; tests take copies."""
    folder = tmp_path_factory.mktemp("resuming") / "cut"
    cut(PPOTrainer, text(folder), 3)
    return folder


TEXTS = {
    "everything that remembers": {
        "critic": CriticConfig(prefix_every=1),
        "advantage": AdvantageConfig(lam="auto"),
        "kl": KLConfig(target=1.0),
        "score": ScoreConfig(normalize="running"),
        "eval": EvalConfig(every=1, samples=4, max_new_tokens=6),
        "prompts": PromptsConfig(text=["This movie", "The film was", "I"], shuffle=True),
    },
    "LoRA with dropout, a probe on the first layer": {
        "model": ModelConfig(dtype="float32", lora=LoraConfig(rank=2, dropout=0.1)),
        "critic": CriticConfig(layers=1, detach=True, epochs=1),
    },
    "a half critic, large rewards": {
        "reward": [FunctionTerm(function="length", kwargs={"unit": "characters"})],
        "critic": CriticConfig(kind="separate", clip=None, layers=1, epochs=1),
    },
    "episodes of several turns, credit by turn": {
        "model": ModelConfig(name="builtin:grid", dtype="float32"),
        "env": EnvironmentConfig(factory="builtin:grid", turn_tokens=4, max_turns=3),
        "rollout": RolloutConfig(batch_size=4, max_new_tokens=100),
        "advantage": AdvantageConfig(unit="turn"),
        "critic": CriticConfig(epochs=1),
        "eval": EvalConfig(every=2, samples=2, max_new_tokens=100),
    },
    "pretrained separate critic of histograms": {
        "critic": CriticConfig(kind="separate", layers=1, epochs=1, loss="histogram", pretrain=2),
        "score": ScoreConfig(normalize="running"),
    },
}


# The other proofs: test_pretraining.py resumes a separate critic, and text/test_adapter_runs.py and
# text/offline/test_trainer.py adapters, with dropout too.
IN_SUITE = ("everything that remembers", "episodes of several turns, credit by turn")


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=() if what in IN_SUITE else pytest.mark.proof) for what in TEXTS]
)
def test_a_resumed_language_model_equals_an_uninterrupted_run(what, tmp_path):
    PPOTrainer(args=text(tmp_path / "whole", 2, **TEXTS[what])).train()
    cut(PPOTrainer, text(tmp_path / "cut", 2, **TEXTS[what]), 2)
    resumed(PPOTrainer, text(tmp_path / "cut", 2, **TEXTS[what]))
    assert_same(tmp_path / "whole", tmp_path / "cut")
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "cut")]
    for name in ("reward_first", "reward_last", "kl_last", "iterations", "stopped_by"):
        assert summaries[0][name] == summaries[1][name]


AGENTS = {
    "a transformer, steps of the critic alone": {
        "agent": AgentConfig(policy="transformer", hidden=[16], context=4),
        "critic": AgentCriticConfig(epochs=2, coef=0.0),
    },
    "MuJoCo, normalised, in processes": {
        "env": EnvConfig(id="Hopper-v5", number=2, processes=True, normalize_observations=True, normalize_rewards=True),
        "steps": 64,
    },
    "whole episodes, normalised": {
        "env": EnvConfig(id="CartPole-v1", number=2, normalize_observations=True, normalize_rewards=True),
        "steps": 16,
        "whole_episodes": True,
    },
    "episodes that end with the rollout, normalised, in processes": {
        "env": EnvConfig(
            id="Acrobot-v1",
            kwargs={"max_episode_steps": 10},
            number=2,
            processes=True,
            normalize_observations=True,
            normalize_rewards=True,
        ),
        "steps": 10,
        "ppo": AgentUpdateConfig(minibatches=2),
    },
}


@pytest.mark.parametrize(
    "what",
    [
        *proofs("a transformer, steps of the critic alone", "MuJoCo, normalised, in processes"),
        *list(AGENTS)[2:],
    ],
)
def test_a_resumed_agent_equals_an_uninterrupted_run(what, tmp_path):
    ControlTrainer(args=control(tmp_path / "whole", 2, **AGENTS[what])).train()
    cut(ControlTrainer, control(tmp_path / "cut", 2, **AGENTS[what]), 2)
    resumed(ControlTrainer, control(tmp_path / "cut", 2, **AGENTS[what]))
    assert_same(tmp_path / "whole", tmp_path / "cut")


class Elsewhere(gym.Env):
    """Draws its observations from a generator that nobody knows of."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)
    unknown = np.random.default_rng()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.unknown.random(1, dtype=np.float32), {}

    def step(self, action):
        return self.unknown.random(1, dtype=np.float32), 1.0, False, False, {}


def test_an_environment_that_cannot_be_brought_back_is_named_and_begins_anew(tmp_path):
    gym.register("Elsewhere-v0", Elsewhere, max_episode_steps=30)
    args = control(tmp_path / "run", env=EnvConfig(id="Elsewhere-v0", number=2))
    cut(ControlTrainer, args, 2)
    trainer = resumed(ControlTrainer, args)
    assert any("environments 0, 1 could not be restored" in event for event in read_events(tmp_path / "run"))
    assert [m["iteration"] for m in metrics(tmp_path / "run")] == [1, 2, 3]
    assert set(trainer.episodes) == {(30.0, 30)}, "no episode is counted that was not whole"


def test_resuming_restores_python_numpy_and_torch_rng_state(tmp_path):
    seen = {}

    def judge(completions, **columns):
        numbers = (random.random(), float(np.random.rand()), float(torch.rand(())))
        seen.setdefault(where[0], []).append(numbers)
        return [numbers[0]] * len(completions)

    where = ["whole"]
    random.seed(1), np.random.seed(1)
    PPOTrainer(reward_funcs=judge, args=text(tmp_path / "whole", 2)).train()
    where = ["cut"]
    random.seed(1), np.random.seed(1)
    with pytest.raises(Killed):
        die_in(PPOTrainer(reward_funcs=judge, args=text(tmp_path / "cut", 2)), 2).train()
    random.seed(2), np.random.seed(2)
    PPOTrainer(reward_funcs=judge, args=text(tmp_path / "cut", 2)).train(resume_from_checkpoint=True)
    assert seen["cut"][:2] == seen["whole"][:2]
    assert seen["cut"][2:] == seen["whole"][1:], "iteration 2 came twice"


def test_before_the_first_checkpoint_a_run_begins_anew(whole, tmp_path):
    args = text(tmp_path / "cut")
    args = replace(args, run=replace(args.run, save_every=2))
    cut(PPOTrainer, args, 2)
    assert metrics(tmp_path / "cut")
    resumed(PPOTrainer, args)
    assert_same(whole, tmp_path / "cut")
    assert "no checkpoint yet: the run begins anew" in read_events(tmp_path / "cut")


def test_without_checkpoints_nothing_is_thrown_away(tmp_path):
    args = text(tmp_path / "cut")
    args = replace(args, run=replace(args.run, save_every=0))
    cut(PPOTrainer, args, 2)
    before = (tmp_path / "cut" / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"has no checkpoint: run\.save_every is 0"):
        resumed(PPOTrainer, args)
    assert (tmp_path / "cut" / "metrics.jsonl").read_bytes() == before


def test_a_trainer_that_has_learned_does_not_begin_anew_with_its_weights(tmp_path):
    args = control_config(tmp_path / "run", 3)
    trainer = ControlTrainer(args)
    trainer.train()
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # as if it had been killed before the first one
    (tmp_path / "run" / "summary.json").unlink()
    trainer.summary = None
    with pytest.raises(ConfigError, match="this trainer's weights may have changed; make another trainer"):
        trainer.train(resume_from_checkpoint=True)
    ControlTrainer(args).train(resume_from_checkpoint=True)


def test_a_finished_run_needs_more_iterations_to_resume(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"has done all its 3 iterations; raise run\.iterations to continue, above 3 \(it is \d\)"
    ):
        resumed(PPOTrainer, text(tmp_path / "run"))
    assert (tmp_path / "run" / "summary.json").is_file()
    resumed(PPOTrainer, text(tmp_path / "run", 4))
    assert [m["iteration"] for m in metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert "run.iterations is now 4; it was 3" in read_events(tmp_path / "run")


def test_a_run_killed_after_its_last_iteration_is_finished_by_resuming(tmp_path):
    args = text(tmp_path / "run", 1)
    trainer = PPOTrainer(args=args)
    trainer.finish = lambda stopped_by: (_ for _ in ()).throw(Killed)
    with pytest.raises(Killed):
        trainer.train()
    assert not (tmp_path / "run" / "policy").exists()
    resumed(PPOTrainer, args)
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy")
    assert len(metrics(tmp_path / "run")) == 1


def test_a_stopping_rule_that_was_met_stops_the_resumed_run(tmp_path):
    args = text(tmp_path / "run", stop=StopConfig(reward=-1.0, patience=2))
    trainer = PPOTrainer(args=args)
    trainer.finish = lambda stopped_by: (_ for _ in ()).throw(Killed)
    with pytest.raises(Killed):
        trainer.train()
    trainer = resumed(PPOTrainer, args)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["iterations"], summary["stopped_by"]) == (2, "stop.reward")


TENSORS = "tensors/shard-00001-model-00001-of-00001.safetensors"


def half(content):
    return content[: len(content) // 2]


def flipped(content):
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        (TENSORS, flipped),
        *proofs(("manifest.json", half), ("state.json", half), (TENSORS, half), ("process-0.json", half)),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(file, damage, whole, cut_in_3, tmp_path):
    shutil.copytree(cut_in_3, tmp_path / "cut")
    damaged = tmp_path / "cut" / "checkpoints" / "000002" / file
    damaged.write_bytes(damage(damaged.read_bytes()))
    resumed(PPOTrainer, text(tmp_path / "cut"))
    assert any(f"000002 cannot be used, trying the one before it: {file}" in e for e in read_events(tmp_path / "cut"))
    assert "resumed after iteration 1" in read_events(tmp_path / "cut")
    assert_same(whole, tmp_path / "cut")


def test_when_every_checkpoint_is_damaged_nothing_is_touched(cut_in_3, tmp_path):
    shutil.copytree(cut_in_3, tmp_path / "cut")
    for manifest in (tmp_path / "cut" / "checkpoints").glob("*/manifest.json"):
        manifest.write_text("{}")
    before = (tmp_path / "cut" / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"000002 cannot be used.*000001 cannot be used.*begin a new run"):
        resumed(PPOTrainer, text(tmp_path / "cut"))
    assert (tmp_path / "cut" / "metrics.jsonl").read_bytes() == before


def test_metrics_that_lost_lines_take_an_older_checkpoint(whole, cut_in_3, tmp_path):
    shutil.copytree(cut_in_3, tmp_path / "cut")
    file = tmp_path / "cut" / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1][:40])
    resumed(PPOTrainer, text(tmp_path / "cut"))
    assert any("metrics.jsonl has lost lines" in event for event in read_events(tmp_path / "cut"))
    assert_same(whole, tmp_path / "cut")


def test_the_newest_checkpoints_are_kept_and_the_one_that_evaluated_best(tmp_path):
    args = text(tmp_path / "run", 4, eval=EvalConfig(every=1, samples=4, max_new_tokens=4))
    PPOTrainer(args=args).train()
    rewards = [m["eval/reward"] for m in metrics(tmp_path / "run")]
    best = rewards.index(max(rewards)) + 1
    kept = {int(folder.name) for folder in (tmp_path / "run" / "checkpoints").iterdir()}
    assert best in kept
    assert {3, 4} <= kept
    assert len(kept) <= 3


def test_settings_may_change_and_that_is_written_down(cut_in_3, tmp_path):
    shutil.copytree(cut_in_3, tmp_path / "run")
    args = text(tmp_path / "run")
    args = replace(args, optim=replace(args.optim, lr=3e-5, schedule="constant"), kl=KLConfig(coef=0.2))
    trainer = resumed(PPOTrainer, args)
    rows = metrics(tmp_path / "run")
    assert [row["lr"] == 3e-5 for row in rows] == [False, False, True]
    assert [row["kl_coef"] for row in rows] == [0.05, 0.05, 0.2]
    assert "optim.lr is now 3e-05; it was 0.0001" in read_events(tmp_path / "run")
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["optim"]["lr"] == 3e-5
    assert all(state["step"] > 0 for state in trainer.learner.optimizer.state.values())


def test_the_headline_starts_anew_where_the_reward_changed(tmp_path, capsys):
    def files(*names):
        for name, content in names:
            (tmp_path / name).write_text(content, encoding="utf-8")

    files(("mine.py", "def judge(completions, **k):\n    return [float(len(c)) for c in completions]\n"))
    files(("rows.jsonl", '{"prompt": "This movie"}\n'))
    groups = {"reward": [FunctionTerm(function=f"{tmp_path / 'mine.py'}:judge")]}
    groups |= {"prompts": PromptsConfig(dataset=str(tmp_path / "rows.jsonl")), "stop": StopConfig(reward=1.0)}
    args, run = text(tmp_path / "run", 4, **groups), tmp_path / "run"
    assert PPOTrainer(args=args).train().stopped_by == "stop.reward"
    files(("mine.py", "def judge(completions, **k):\n    return [-3.0 for c in completions]\n"))
    files(("rows.jsonl", '{"prompt": "This movie was"}\n'))
    args = replace(args, kl=KLConfig(coef=0.2))
    with pytest.raises(ConfigError, match=r"reward\[0\]\.function is judge \(mine\.py, .*run\.allow_changed: "):
        PPOTrainer(args=args).train(resume_from_checkpoint=True)
    args = replace(args, run=replace(args.run, allow_changed=["reward[0].function", "prompts.dataset"]))
    summary = PPOTrainer(args=args).train(resume_from_checkpoint=True)
    assert (summary.first, summary.last, summary.iterations) == (-3.0, -3.0, 4)
    shown = capsys.readouterr().out
    assert re.search(r"reward\[0\]\.function is now judge \(mine\.py, \w{8}\); it was judge \(mine\.py, \w{8}\)", shown)
    assert re.search(r"prompts\.dataset is now 1 row of prompt \(\w{8}\); it was 1 row of prompt", shown)
    assert "reward -3 → -3" in shown
    assert "after what is scored changed in iteration 2" in shown
    read = read_run(run)
    assert read.since == 1
    assert next(fact.text for fact in story(read) if fact.label == "reward") == "-3 → -3"
    [mark] = data_of((run / "report.html").read_text(encoding="utf-8"))["changes"]
    assert mark == {"x": 1.5, "text": "kl.coef, reward[0].function, prompts.dataset"}


def test_another_reward_from_python_is_refused_or_allowed_by_name_and_an_event(tmp_path):
    def short(completions, **columns):
        return [-1.0 for _ in completions]

    def long(completions, **columns):
        return [1.0 for _ in completions]

    running = {"score": ScoreConfig(normalize="running")}
    PPOTrainer(args=text(tmp_path / "run", 1, **running), reward_funcs=long).train()
    args = text(tmp_path / "run", 2, **running)
    with pytest.raises(ConfigError, match=r"reward_funcs is .*short \(test_resuming\.py, .*begun with .*long \("):
        PPOTrainer(args=args, reward_funcs=short).train(resume_from_checkpoint=True)
    args = replace(args, run=replace(args.run, allow_changed=["reward_funcs"]))
    trainer = PPOTrainer(args=args, reward_funcs=short)
    summary = trainer.train(resume_from_checkpoint=True)
    assert (trainer.credit.scores.count, trainer.credit.scores.mean) == (8, -1.0), "none of the other reward's"
    [event] = [line for line in read_events(tmp_path / "run") if "reward_funcs" in line]
    assert re.search(r"reward_funcs is now .*short \(.*; it was .*long \(", event)
    assert (summary.first, summary.last) == (-1.0, -1.0)


def test_models_whose_files_changed_are_events(tmp_path):
    """The weights of a reward model and of a frozen critic, and the policy's configuration."""
    for part, name in (("sentiment", "judge"), ("policy", "start"), ("policy", "critic")):
        shutil.copytree(resolve("builtin:reviews", part), tmp_path / name)

    def changed_weights(folder):
        weights = load_file(folder / "model.safetensors")
        name = min(weights)
        save_file(weights | {name: weights[name] + 1e-3}, folder / "model.safetensors", metadata={"format": "pt"})

    def events(iterations):
        args = text(
            tmp_path / "run",
            iterations,
            model=ModelConfig(name=str(tmp_path / "start")),
            critic=CriticConfig(kind="separate", name=str(tmp_path / "critic"), detach=True),
            reward=[ClassifierTerm(classifier=str(tmp_path / "judge"), label="POSITIVE")],
        )
        args = replace(args, run=replace(args.run, allow_changed=["model.name", "critic.name", "reward[0].classifier"]))
        PPOTrainer(args=args).train(resume_from_checkpoint=iterations > 1)
        lines = [line for line in read_events(tmp_path / "run") if "it was" in line and "run." not in line]
        return [line.partition(" is now")[0] for line in lines]

    events(1)
    (tmp_path / "judge" / "README.md").write_text("no file that is loaded")
    assert events(2) == []
    changed_weights(tmp_path / "judge")
    changed_weights(tmp_path / "critic")
    config = json.loads((tmp_path / "start" / "config.json").read_text())
    (tmp_path / "start" / "config.json").write_text(json.dumps(config | {"use_cache": False}))
    assert events(3) == ["model.name", "critic.name", "reward[0].classifier"]


def test_a_setting_that_may_not_change_is_refused_before_a_file_is_touched(cut_in_3, tmp_path):
    shutil.copytree(cut_in_3, tmp_path / "run")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    with pytest.raises(ConfigError, match=r"seed is .*, but this run was begun with .*; it cannot change any more"):
        resumed(PPOTrainer, text(tmp_path / "run", seed=2))
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")} == before


@pytest.mark.parametrize("part", ["model", *proofs("tokenizer")])
def test_another_model_or_tokenizer_under_the_same_name_is_refused(part, model_folders, tokenizer, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_folders["gpt2"])
    folder = tmp_path / "model"
    model.save_pretrained(folder), tokenizer.save_pretrained(folder)
    args = text(tmp_path / "run", model=ModelConfig(name=str(folder), dtype="float32"))
    cut(PPOTrainer, args, 2)
    if part == "model":
        model.get_input_embeddings().weight.data[0, 0] += 1
        model.save_pretrained(folder)
    else:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings["chat_template"] = "{{ messages }}"
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match=rf"the {part} that model\.name .* stands for is not what it was"):
        resumed(PPOTrainer, args)
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


def test_an_iteration_whose_reward_failed_is_repeated_with_the_same_random_numbers(tmp_path):
    """With the same random numbers, the iteration that failed comes again."""
    down = [False]

    def judge(completions, **columns):
        if down[0]:
            raise ConnectionError("down")
        return [len(completion) / 100 for completion in completions]

    terms = [Term("judge", 1.0, judge, retries=0)]
    PPOTrainer(reward_funcs=terms, args=text(tmp_path / "whole", 2)).train()
    trainer = PPOTrainer(reward_funcs=terms, args=text(tmp_path / "cut", 2))
    iteration = trainer.iteration

    def falling(number):
        down[0] = number == 2
        return iteration(number)

    trainer.iteration = falling
    with pytest.raises(RunStopped, match=r"stopped in iteration 2: .*down") as caught:
        trainer.train()
    said = str(caught.value).partition("; mend it, then ")[2]
    lines = re.findall(r"args\.run\.\w+ = \S.*?(?=,? and | \()", said)
    assert lines == [f"args.run.dir = {str(tmp_path / 'cut')!r}", 'args.run.allow_changed = ["reward_funcs[0]"]']
    assert said.endswith("and call trainer.train(resume_from_checkpoint=True)")
    down[0] = False
    assert (tmp_path / "cut" / "checkpoints" / "000001").is_dir()
    PPOTrainer(reward_funcs=terms, args=text(tmp_path / "cut", 2)).train(resume_from_checkpoint=True)
    assert_same(tmp_path / "whole", tmp_path / "cut")
    # And as the message says, with a function that is mended.
    mended = [Term("judge", 1.0, lambda completions: [0.5 for _ in completions])]
    args = text(tmp_path / "anywhere", 3)
    args.run.dir, args.run.allow_changed = str(tmp_path / "cut"), ["reward_funcs[0]"]
    assert PPOTrainer(reward_funcs=mended, args=args).train(resume_from_checkpoint=True).last == 0.5


def test_a_tracker_that_fails_is_left_out(tmp_path):
    args = text(tmp_path / "run", 2)
    (tmp_path / "run").mkdir()
    trainer = PPOTrainer(args=replace(args, run=replace(args.run, trackers=["tensorboard"])))
    begin = trainer.record.begin

    def then_break(*arguments):
        begin(*arguments)
        trainer.record.trackers.active[0].log = lambda *_, **__: (_ for _ in ()).throw(OSError("disk gone"))

    trainer.record.begin = then_break
    trainer.train()
    assert "the tracker tensorboard is disabled from here on: OSError: disk gone" in read_events(tmp_path / "run")
    assert len(metrics(tmp_path / "run")) == 2


def test_a_manifest_cannot_lead_out_of_its_folder(cut_in_3, tmp_path):
    shutil.copytree(cut_in_3, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "000002")
    manifest = tmp_path / "run" / "checkpoints" / "000001" / "manifest.json"
    told = json.loads(manifest.read_text())
    for name in ("../../../secret", str(tmp_path / "secret"), "tensors/../../../../secret"):
        (tmp_path / "secret").write_text("{}")
        files = told["files"] | {name: {"bytes": 2, "sha256": "0"}}
        manifest.write_text(json.dumps(told | {"files": files}))
        with pytest.raises(ConfigError, match=r"is not a file of the folder"):
            resumed(PPOTrainer, text(tmp_path / "run"))


def test_files_have_the_users_own_permissions(whole, tmp_path):
    (tmp_path / "plain").write_text("")
    usual = (tmp_path / "plain").stat().st_mode
    assert {p.stat().st_mode for p in whole.rglob("*") if p.is_file()} == {usual}


def test_only_the_flag_resumes_and_a_moved_folder_where_it_is(cut_in_3, tmp_path, capsys):
    run, left = shutil.copytree(cut_in_3, tmp_path / "run"), (cut_in_3 / "metrics.jsonl").read_bytes()
    (tmp_path / "sly.yaml").write_text(
        f"resume: {run}\nrun: {{dir: {tmp_path / 'other'}, iterations: 1, trackers: []}}\n"
    )
    assert main(["train", "--config", str(tmp_path / "sly.yaml")]) == 2
    assert "resume is an option of the command" in capsys.readouterr().err
    assert main(["train", f"--resume={run}"]) == 0
    assert len(metrics(run)) == 3
    assert (cut_in_3 / "metrics.jsonl").read_bytes() == left


def test_the_default_prompts_are_the_same_by_name_and_by_null(cut_in_3, tmp_path):
    shutil.copytree(cut_in_3, tmp_path / "run")
    resumed(PPOTrainer, text(tmp_path / "run", prompts=PromptsConfig(text=["This movie was really"])))
    assert read_events(tmp_path / "run") == ["resumed after iteration 2"]


def test_code_that_a_configuration_names_is_said_and_written_down(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def judge(completions):\n    return [1.0] * len(completions)\n")
    function = f"{tmp_path / 'mine.py'}:judge"
    args = text(tmp_path / "run", 1, reward=[FunctionTerm(function=function)])
    PPOTrainer(args=args).train()
    assert read_events(tmp_path / "run") == [f"reward[0].function runs {function}"]
    assert f"reward[0].function runs {function}" in capsys.readouterr().out


def test_a_run_begun_with_a_reward_of_pythons_is_not_resumed_with_another(tmp_path, capsys):
    """No file holds it."""

    def long(completions, **columns):
        return [float(len(text)) for text in completions]

    args = PPOConfig(
        model=ModelConfig(dtype="float32"),
        rollout=RolloutConfig(batch_size=4, max_new_tokens=4),
        ppo=UpdateConfig(epochs=1, minibatches=1),
        run=quiet(tmp_path / "run", save_every=1),
    )
    PPOTrainer(args=args, reward_funcs=long).train()
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert main(["train", "--resume", str(tmp_path / "run"), "--run.iterations", "2"]) == 2
    said = capsys.readouterr().err
    assert "a part of this run was given as an object of Python, which no configuration holds (reward_funcs: " in said
    file = tmp_path / "run" / "config.yaml"
    again = "PPOTrainer(args=args, reward_funcs=…).train(resume_from_checkpoint=True)"
    assert f"args = PPOConfig.from_yaml({str(file)!r}); {again}" in said
    assert "run its script again, with resume_from_checkpoint=True, or give it" in said
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    longer = replace(args, run=replace(args.run, iterations=2))
    assert PPOTrainer(args=longer, reward_funcs=long).train(resume_from_checkpoint=True)["iterations"] == 2
