"""Critics of users: values, a fit to returns and a state, in training, audits, records and resumed runs."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from helpers.configs import quiet, text_config
from helpers.files import read_metrics, without_times
from tokencredit import AdvantageConfig, AuditConfig, CriticConfig, PPOConfig
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.report.reading import read_run
from tokencredit.report.story import story
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.run_kind import read_config
from tokencredit.settings.training import UpdateConfig
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.tools.audit_run import audit_completions
from tokencredit.user_code.parts import load_critic

FILE = """
import torch

class PerPosition:
    def __init__(self, width=64, decay=0.8):
        self.sums, self.decay = torch.zeros(2, width), decay

    def values(self, mask):
        sums, counts = self.sums[:, : mask.shape[1]]
        return (sums / counts.clamp(min=1)).expand(mask.shape)

    def fit(self, returns, mask):
        self.sums *= self.decay
        self.sums[:, : mask.shape[1]] += torch.stack([(returns * mask).sum(0), mask.sum(0)])

    def state_dict(self):
        return {"sums": self.sums}

    def load_state_dict(self, state):
        self.sums = state["sums"].clone()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a critic from a file, audited twice, with checkpoints."""
    folder = tmp_path_factory.mktemp("critic")
    (folder / "mine.py").write_text(FILE)
    args = config(folder, "run", 3)
    trainer = PPOTrainer(args=args)
    trainer.train()
    return folder, trainer


def config(folder, name, iterations, **groups):
    critic = CriticConfig(kind=f"{folder}/mine.py:PerPosition", kwargs={"decay": 0.5})
    audit = AuditConfig(every=2, completions=8, continuations=4, states=4)
    return text_config(folder / name, iterations, critic=critic, audit=audit, **groups)


def test_the_values_are_the_critics_and_it_learns_after_it_is_read(run):
    folder, trainer = run
    first, *others = read_metrics(folder / "run")
    assert first["value_mean"] == 0
    assert all(row["value_mean"] != 0 for row in others)
    assert "value_loss" not in first
    assert trainer.policy.critic is None
    part = trainer.credit.own.part
    batch, _ = trainer.credit.give(trainer.collect(), fit=False)
    expected = part.values(batch.rollout.mask).masked_fill(~batch.rollout.mask, 0.0)
    torch.testing.assert_close(batch.rollout.values, expected)


def test_an_audit_judges_the_critic_and_leaves_it_as_it_is(run):
    folder, trainer = run
    audit = json.loads((folder / "run" / "audit.json").read_text())
    assert {sample["values"][0] != 0 for sample in audit["samples"]} == {True}
    assert audit["critic"] is not None
    before = trainer.credit.own.part.sums.clone()
    trainer.auditor.audit(7)
    assert torch.equal(trainer.credit.own.part.sums, before)


def test_a_resumed_run_goes_on_with_the_critics_state(run, tmp_path):
    folder, _ = run
    (tmp_path / "mine.py").write_text(FILE)
    args = config(tmp_path, "run", 2)
    args.run.save_every = 1
    PPOTrainer(args=args).train()
    args.run.iterations = 3
    PPOTrainer(args=args).train(resume_from_checkpoint=True)
    keys = ("reward", "value_mean", "explained_variance")
    whole, parts = (without_times(read_metrics(x / "run")) for x in (folder, tmp_path))
    assert [parts[1][key] for key in keys] == [whole[1][key] for key in keys]
    assert parts[2]["value_mean"] != 0


class Broken:
    def __init__(self):
        raise ValueError("no table")


class NoFit:
    def values(self, mask):
        return mask


class Short(NoFit):
    def fit(self):
        pass

    state_dict = dict

    def load_state_dict(self, state):
        pass

    def values(self, mask):
        return mask[:, 1:]


@pytest.mark.parametrize(
    ("critic", "groups", "message"),
    [
        ({"kind": NoFit()}, {}, "NoFit.* has no method fit, state_dict, load_state_dict"),
        ({"kind": "none.py:C"}, {}, "there is no critic file"),
        ({"kind": Broken}, {}, r"critic.kind Broken .* raised ValueError: no table at .*test_own_critics.py:\d+"),
        ({"kind": Short, "kwargs": {"a": 1}}, {}, "critic.kwargs has 'a'"),
        (
            {"kind": Short, "lr": 0.1},
            {},
            "critic.lr is 0.1, which has no effect with critic.kind: none, one of your own",
        ),
        ({"kind": Short}, {"advantage": AdvantageConfig(bootstrap=True)}, "advantage.bootstrap is True, which has no"),
    ],
)
def test_what_cannot_work_is_refused_before_training(critic, groups, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        PPOTrainer(args=text_config(tmp_path / "run", critic=CriticConfig(**critic), **groups))


class Mean:
    """A critic with one value, which a state can miss in two ways."""

    def __init__(self, saves=True, loads=True):
        self.mean, self.saves, self.loads = 0.0, saves, loads

    def values(self, mask):
        return torch.full(mask.shape, self.mean)

    def fit(self, returns):
        self.mean = float(returns.mean()) + 1

    def state_dict(self):
        return {"mean": self.mean} if self.saves else {}

    def load_state_dict(self, state):
        self.mean = state["mean"] if self.loads and self.saves else 0.0


@pytest.mark.parametrize(("broken", "built"), [("saves", True), ("loads", False)])
def test_a_critic_that_a_resumed_run_would_begin_anew_stops_the_run(broken, built, tmp_path):
    critic = CriticConfig(kind=Mean(**{broken: False}) if built else Mean, kwargs={} if built else {broken: False})
    trainer = PPOTrainer(args=text_config(tmp_path / "run", critic=critic))
    shown = r"Mean\(saves=false, .*\)" if built else rf"Mean\({broken}=false\)"
    message = rf"critic.kind {shown} \(test_own_critics.py\): a new one that loads its state has other values, so"
    with pytest.raises(RunStopped, match=message):
        trainer.train()


def test_completions_that_are_left_out_of_the_loss_are_left_out_of_its_fit(tmp_path):
    seen = []

    class Seen(Mean):
        def fit(self, returns, mask):
            super().fit(returns)
            seen.append(mask)

    rollout = RolloutConfig(batch_size=16, max_new_tokens=20)
    groups = {"critic": CriticConfig(kind=Seen), "rollout": rollout, "ppo": UpdateConfig(mask_truncated=True)}
    trainer = PPOTrainer(args=text_config(tmp_path / "run", **groups))
    scored = trainer.collect()
    for cut in (scored.rollout.truncated, torch.ones(16, dtype=torch.bool)):
        assert cut.any()
        trainer.credit.give(replace(scored, rollout=replace(scored.rollout, truncated=cut)))
    (mask,) = seen  # nothing is left of the second batch
    assert torch.equal(mask, scored.rollout.mask & ~scored.rollout.truncated.unsqueeze(1))


class Table(Mean):
    """A critic whose state is a dict by position."""

    def state_dict(self):
        return {"sums": {0: self.mean}}


def test_a_state_that_no_checkpoint_holds_stops_the_run_by_its_key(tmp_path):
    trainer = PPOTrainer(args=text_config(tmp_path / "run", critic=CriticConfig(kind=Table)))
    message = r"critic.kind Table.*: state_dict\(\)/sums has the key 0; keys in a checkpoint must be texts"
    with pytest.raises(RunStopped, match=message):
        trainer.train()


def test_an_object_is_trained_as_a_copy_and_runs_with_it_are_alike(tmp_path):
    part = Mean()
    runs = [text_config("", critic=CriticConfig(kind=part), run=quiet(tmp_path / x, 2, save_every=1)) for x in "ab"]
    for args in runs:
        PPOTrainer(args=args).train()
    one, two = (without_times(read_metrics(tmp_path / name)) for name in "ab")
    assert one == two
    assert part.mean == 0.0
    longer = replace(runs[0], run=replace(runs[0].run, iterations=3))
    assert PPOTrainer(args=longer).train(resume_from_checkpoint=True).iterations == 3


class Twice(Mean):
    """A critic whose state has one tensor under two names."""

    def state_dict(self):
        mean = torch.full((), float(self.mean))
        return {"mean": mean, "best": mean}


def test_a_tensor_under_two_names_is_kept_in_a_checkpoint(tmp_path):
    run = quiet(tmp_path / "run", save_every=1)
    PPOTrainer(args=text_config("", critic=CriticConfig(kind=Twice), run=run)).train()
    run.iterations = 2
    assert PPOTrainer(args=text_config("", critic=CriticConfig(kind=Twice), run=run)).train(True).iterations == 2


class Drawn(Mean):
    """A critic that begins with a random number."""

    def __init__(self):
        super().__init__()
        self.mean = float(torch.rand(()))


def test_the_seed_decides_a_critics_first_values(tmp_path):
    before, means = torch.get_rng_state(), []
    for seed in (1, 1, 2):
        args = text_config(tmp_path / "run", seed=seed, critic=CriticConfig(kind=Drawn))
        means.append(PPOTrainer(args=args).credit.own.part.mean)
    assert means[0] == means[1] != means[2]
    assert torch.equal(before, torch.get_rng_state())


def test_an_object_whose_functions_act_on_it_is_trained_itself():
    part = Mean()
    assert load_critic(CriticConfig(kind=part), ()).kind.part is not part
    part.add = lambda x: setattr(part, "mean", part.mean + x)  # a copy would keep this one, which acts on the original
    assert load_critic(CriticConfig(kind=part), ()).kind.part is part


def test_agents_take_no_critic_of_a_user():
    message = (
        "critic.kind is 'mine.py:PerPosition'; it must be one of shared, separate, none; agents take none of your own"
    )
    with pytest.raises(ConfigError, match=message):
        ControlConfig.from_dict({"critic.kind": "mine.py:PerPosition"})


def test_values_of_another_shape_stop_the_run(tmp_path):
    trainer = PPOTrainer(args=text_config(tmp_path / "run", critic=CriticConfig(kind=Short)))
    with pytest.raises(RunStopped, match=r"values of critic.kind Short.* is of shape \(8, 7\); it must be a tensor"):
        trainer.train()


def test_the_page_names_it(run):
    folder, _ = run
    assert ("with the critic", "PerPosition (mine.py)", "") in story(read_run(folder / "run"))


def test_its_arguments_are_in_the_record_and_an_edited_file_is_not_audited(run, tmp_path):
    folder, _ = run
    part = json.loads((folder / "run" / "parts.json").read_text())["critic.kind"]
    assert part["arguments"]["decay"] == 0.5
    copy = tmp_path / "run"
    shutil.copytree(folder / "run", copy)
    (tmp_path / "mine.py").write_text(FILE.replace("self.sums *= self.decay", "self.sums *= 0"))
    args = read_config(copy / "config.yaml", PPOConfig)
    args = replace(args, critic=replace(args.critic, kind=f"{tmp_path}/mine.py:PerPosition"))
    with pytest.raises(ConfigError, match=r"critic\.kind is PerPosition.*; the run had PerPosition.*: give the same"):
        audit_completions(copy, args, AuditConfig(every=1, completions=8, continuations=2, states=1))
