"""Estimators of users, from a file or from Python: trained, recorded, audited and shown as those of ours are."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
import yaml
from torch.nn.functional import pad

from helpers.configs import control_config, quiet, text_config
from helpers.files import read_metrics, without_times
from tokencredit import ControlConfig, PPOConfig
from tokencredit.audit.estimates import label
from tokencredit.cli import main
from tokencredit.control.control_trainer import ControlTrainer
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.report.page import credit, render
from tokencredit.report.reading import read_run
from tokencredit.settings.control import AgentAdvantageConfig, AgentAuditConfig
from tokencredit.settings.model import CriticConfig
from tokencredit.settings.parts import plain
from tokencredit.settings.reader import build, read_settings
from tokencredit.settings.run_kind import foreign_code, read_config
from tokencredit.settings.training import AdvantageConfig, AuditConfig, KLConfig
from tokencredit.text.data.lam_choice import LAMS, WITHOUT_DATA
from tokencredit.text.ppo_trainer import PPOTrainer

FILE = """
from tokencredit.core import gae

def my_gae(rewards, values, gamma, lam, **where):
    return gae(rewards, values, gamma=gamma, lam=lam, **where)
"""
LAM = {"lam": 0.9}


def unsure(rewards, values, entropy, mask, terminated, truncated, bootstrap, gamma, scale_of_lam=1.0):
    """GAE with a λ per step, lower where the policy was sure of its next step."""
    lam = 1 - (-scale_of_lam * entropy).exp()
    advantages, following, after = torch.zeros_like(rewards), torch.zeros(len(rewards)), torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        after = torch.where(terminated[:, t], 0.0, torch.where(truncated[:, t], bootstrap[:, t], after))
        following = torch.where(terminated[:, t] | truncated[:, t], 0.0, following)
        advantage = rewards[:, t] + gamma * after - values[:, t] + gamma * lam[:, t] * following
        following, after = (torch.where(mask[:, t], a, b) for a, b in ((advantage, following), (values[:, t], after)))
        advantages[:, t] = advantage
    return advantages, advantages + values


def differences(rewards, mask, prefix_scores):
    """Differences of the reward's own scores of prefixes."""
    total = torch.where(mask, rewards, 0.0).sum(1, keepdim=True)
    last = mask & ~pad(mask[:, 1:], (0, 1))
    following = torch.where(last, total, pad(prefix_scores[:, 1:], (0, 1)))
    return following - prefix_scores, total.expand(rewards.shape)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with GAE of ours, and one with the same from a file, audited after its last iteration."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(FILE)
    for name, estimator in {"ours": "gae", "file": f"{folder}/mine.py:my_gae"}.items():
        advantage = AdvantageConfig(estimator=estimator, **LAM)
        audit = AuditConfig(every=2, completions=4, continuations=2, states=2)
        run = quiet(folder / name, 2, save_every=2)
        PPOTrainer(args=text_config(folder / name, run=run, advantage=advantage, audit=audit)).train()
    return folder


def test_gae_from_a_file_trains_exactly_as_ours(runs):
    ours, own = (without_times(read_metrics(runs / name)) for name in ("ours", "file"))
    assert ours == own


def test_the_audit_is_under_the_own_name_beside_all_others(runs):
    ours, own = (json.loads((runs / name / "audit.json").read_text())["credit"] for name in ("ours", "file"))
    assert own["shown"] == "my_gae (mine.py), λ = 0.9"
    assert set(own["estimators"]) == {own["shown"], *ours["estimators"]}
    assert own["estimators"][own["shown"]] == ours["estimators"]["gae, λ = 0.9"]


def test_any_run_is_audited_with_an_estimator_of_ones_own_beside_its_own(runs, tmp_path, capsys):
    run, mine = tmp_path / "ours", f"{runs}/mine.py:my_gae"
    shutil.copytree(runs / "ours", run)
    size = ["--completions", "4", "--continuations", "2", "--states", "2"]
    assert main(["audit", str(run), "--estimator", mine, *size]) == 0, capsys.readouterr().err
    assert f"tokencredit audit {run} --estimator {mine} --completions" in capsys.readouterr().out.replace("\n", " ")
    found = json.loads((run / "audit.json").read_text())["credit"]
    assert found["shown"] == "gae, λ = 0.9", "the page's trust stays that of the run's own"
    assert found["estimators"]["my_gae (mine.py), λ = 0.9"] == found["estimators"]["gae, λ = 0.9"]
    assert main(["audit", str(run), "--estimator", mine, "--no-code"]) == 2
    assert "--estimator executes user code" in capsys.readouterr().err
    # From Python, of a run that another trainer trained; entropies are computed for it alone.
    advantage, audit = AdvantageConfig(estimator="gae", **LAM), AuditConfig(completions=4, continuations=2, states=2)
    trainer = PPOTrainer(args=text_config(run, 2, advantage=advantage, audit=replace(audit, every=2)))
    found = trainer.audit(audit, estimator=unsure)["credit"]
    assert {"gae, λ = 0.9", "unsure(scale_of_lam=1.0) (test_own_estimators.py)"} <= set(found["estimators"])
    with pytest.raises(ConfigError, match="needs temperature, which this run does not have"):
        trainer.audit(audit, estimator=needs_more)
    with pytest.raises(ConfigError, match=r"the default 0\.5, which the setting advantage\.lam, 0\.9, would replace"):
        trainer.audit(audit, estimator=lambda rewards, values, lam=0.5: (rewards, values))  # the run's λ, not a default
    other = replace(trainer.args, kl=KLConfig(coef=0.2))
    with pytest.raises(ConfigError, match=r"kl\.coef is 0\.2; the run in .*ours' had 0\.05: give the same"):
        PPOTrainer(args=other).audit(audit)


def test_a_label_has_the_own_arguments_and_not_what_the_run_gives():
    def entropy_gae(rewards, values, entropy, gamma, lam=0.9, truncated=None, bootstrap=None, low=0.2, high=0.95): ...

    name = "test_a_label_has_the_own_arguments_and_not_what_the_run_gives.entropy_gae"
    assert label(entropy_gae, LAM) == f"{name}(low=0.2, high=0.95) (test_own_estimators.py), λ = 0.9"
    fixed = partial(entropy_gae, bootstrap=0.5, low=0.1)
    assert label(fixed, LAM) == f"{name}(bootstrap=0.5, low=0.1, high=0.95) (test_own_estimators.py), λ = 0.9"


def test_the_page_shows_the_own_advantages_first(runs):
    run = read_run(runs / "file")
    shown = credit(run)[0]
    assert shown["what_if"][0] == shown["numbers"]["advantage"]
    assert "my_gae (mine.py)" in render(run)


def test_config_yaml_names_the_file_and_the_code_is_listed(runs):
    config = read_config(runs / "file" / "config.yaml", PPOConfig)
    assert foreign_code(config)[0] == f"advantage.estimator runs {runs}/mine.py:my_gae"
    with pytest.raises(ConfigError, match="--no-code, but"):
        read_config(runs / "file" / "config.yaml", PPOConfig, no_code=True)


def test_a_function_from_python_is_written_down_by_its_name_and_is_not_taken_from_there(tmp_path, capsys):
    estimator = partial(unsure, scale_of_lam=2.0)
    args = text_config(tmp_path / "run", advantage=AdvantageConfig(estimator=estimator))
    trainer = PPOTrainer(args=args)
    trainer.train()
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    text = written["advantage"]["estimator"]
    assert re.fullmatch(r"python:unsure\(scale_of_lam=2.0\) \(test_own_estimators.py, [0-9a-f]{8}\)", text)
    assert "advantage.estimator runs unsure(scale_of_lam=2.0) (" in (tmp_path / "run" / "events.jsonl").read_text()
    assert written["python"] == {"advantage.estimator": text.removeprefix("python:")}
    with pytest.raises(ConfigError, match=r"advantage.estimator"):
        PPOTrainer(args=build(PPOConfig, read_settings(PPOConfig, tmp_path / "run" / "config.yaml")))
    assert main(["train", "--config", str(tmp_path / "run" / "config.yaml")]) == 2
    flags = f"""--advantage.estimator {__file__}:unsure --advantage.kwargs '{{"scale_of_lam": 2.0}}'"""
    assert f"or name the file, which is then run: {flags}" in capsys.readouterr().err
    # λ by entropy: computed by hand from what the update reads.
    batch, _ = trainer.credit.give(trainer.collect())
    entropy = batch.rollout.entropy
    assert (entropy[batch.rollout.mask] > 0).all()
    values, mask = batch.rollout.values.double(), batch.rollout.mask
    row, length = 0, int(mask[0].sum())
    expected = batch.rewards[row, length - 1].double() - values[row, length - 1]
    assert batch.advantages[row, length - 1] == pytest.approx(float(expected), abs=1e-6)
    lam = 1 - (-2.0 * entropy[row, length - 2].double()).exp()
    delta = batch.rewards[row, length - 2] + values[row, length - 1] - values[row, length - 2]
    assert batch.advantages[row, length - 2] == pytest.approx(float(delta + lam * expected), abs=1e-6)


def test_kwargs_beside_a_function_are_in_its_name_and_digest():
    beside = PPOConfig(advantage=AdvantageConfig(estimator=unsure, kwargs={"scale_of_lam": 2.0}))
    inside = PPOConfig(advantage=AdvantageConfig(estimator=partial(unsure, scale_of_lam=2.0)))
    assert plain(beside)["advantage"]["estimator"] == plain(inside)["advantage"]["estimator"]
    assert foreign_code(beside) == foreign_code(inside)


def test_a_function_that_works_in_place_changes_no_record(tmp_path):
    def in_place(rewards, values, mask):
        result = rewards - values, rewards.clone()
        rewards.zero_(), values.zero_(), mask.zero_()
        return result

    trainer = PPOTrainer(args=text_config(tmp_path / "run", advantage=AdvantageConfig(estimator=in_place)))
    batch, _ = trainer.credit.give(trainer.collect())
    assert all(x.any() for x in (batch.rollout.mask, batch.rewards, batch.rollout.values))
    torch.testing.assert_close(batch.advantages, (batch.rewards - batch.rollout.values) * batch.rollout.mask)


def test_an_automatic_lambda_reaches_the_own_estimator_as_a_number(tmp_path):
    seen = []

    def noting(rewards, values, lam):
        seen.append(lam)
        return rewards - values, rewards

    def length(completions, **columns):
        return [float(len(text)) for text in completions]

    for reward, chosen in ((None, True), (length, False)):
        args = text_config(tmp_path / str(chosen), advantage=AdvantageConfig(estimator=noting))
        trainer = PPOTrainer(None, reward, args)
        trainer.credit.give(trainer.collect())
        assert seen[-1] == trainer.credit.lam == trainer.credit.metrics()["lam"]
        assert seen[-1] in (LAMS if chosen else [WITHOUT_DATA])


def test_prefix_scores_need_no_critic(tmp_path):
    nothing = {"critic": CriticConfig(kind="none"), "advantage": AdvantageConfig(estimator=differences)}
    trainer = PPOTrainer(args=text_config(tmp_path / "run", **nothing))
    batch, _ = trainer.credit.give(trainer.collect())
    assert batch.rollout.values is None
    torch.testing.assert_close(batch.advantages.sum(1), batch.rewards.sum(1) - batch.prefixes[:, 0])
    with pytest.raises(ConfigError, match="reads prefix_scores, and no prefix is scored"):
        PPOTrainer(None, lambda prompts, completions: [0.0] * len(prompts), text_config(tmp_path / "2", **nothing))


def test_an_agent_is_trained_and_audited_by_its_own_estimator(tmp_path):
    """By entropy with a λ of nearly 1 everywhere, which Monte Carlo is."""
    mine = partial(unsure, scale_of_lam=1e6)
    audit = AgentAuditConfig(every=2, episodes=2, continuations=2, states=2)
    advantage = AgentAdvantageConfig(estimator=mine)
    ControlTrainer(control_config(tmp_path / "own", audit=audit, advantage=advantage)).train()
    audited = json.loads((tmp_path / "own" / "audit.json").read_text())["credit"]
    assert audited["shown"] == "unsure(scale_of_lam=1000000.0) (test_own_estimators.py)"
    monte_carlo = audited["estimators"]["monte_carlo (gae, λ = 1)"]
    assert audited["estimators"][audited["shown"]]["sign_agreement"] == monte_carlo["sign_agreement"]
    advantage = replace(advantage, estimator="monte_carlo")
    ControlTrainer(control_config(tmp_path / "ours", audit=audit, advantage=advantage)).train()
    returns = [[row["advantage_std"] for row in read_metrics(tmp_path / name)] for name in ("own", "ours")]
    assert returns[0] == pytest.approx(returns[1], rel=1e-4)


def needs_more(rewards, values, temperature):
    return rewards, values


def of_groups(rewards, group_size):
    return rewards, rewards


def of_reference(rewards, ref_logprobs):
    return ref_logprobs, rewards


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"advantage": AdvantageConfig(estimator=needs_more)}, "needs temperature, which this run does not have"),
        ({"advantage": AdvantageConfig(estimator=f"{__file__}:FILE")}, r"estimator FILE \(test_own_.*\) is not a func"),
        ({"advantage": AdvantageConfig(estimator="none.py:f")}, "there is no estimator file 'none.py'"),
        (
            {"advantage": AdvantageConfig(estimator=needs_more, kwargs={"heat": 1})},
            "advantage.kwargs has 'heat', which needs_more",
        ),
        (
            {"advantage": AdvantageConfig(estimator=lambda rewards, scale=3.0: (rewards, rewards))},
            "gives scale the default 3.0, which the setting advantage.scale, True, would replace",
        ),
        (
            {"advantage": AdvantageConfig(estimator=of_reference), "kl": KLConfig(coef=0.0)},
            "needs ref_logprobs, which this run does not have",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_training(groups, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        PPOTrainer(args=text_config(tmp_path / "run", **groups))


@pytest.mark.parametrize(
    ("advantage", "critic", "message"),
    [
        ({"estimator": of_groups}, "none", "it compares the completions of one prompt"),
        ({"estimator": unsure}, "none", "which needs a critic; set critic.kind"),
        ({"estimator": of_groups, "lam": 0.5}, "none", "advantage.lam is 0.5, which advantage.estimator of_groups"),
        ({"estimator": 3}, "shared", r"it must be one of gae, .* or your own, path/file.py:name"),
    ],
)
def test_a_configuration_checks_what_the_function_names(advantage, critic, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        text_config(tmp_path, advantage=AdvantageConfig(**advantage), critic=CriticConfig(kind=critic))


@pytest.mark.parametrize(
    ("name", "estimator"),
    [
        ("token_ids", lambda rewards, token_ids: (rewards, token_ids)),
        ("scale", lambda rewards, scale: (rewards, scale)),
    ],
)
def test_what_agents_lack_is_refused(name, estimator):
    with pytest.raises(ConfigError, match=f"needs {name}, which this run does not have; it may name rewards") as caught:
        ControlTrainer(ControlConfig(advantage=AgentAdvantageConfig(estimator=estimator)))
    assert f", {name}" not in str(caught.value).partition("it may name")[2]


def test_an_agents_file_draws_nothing_from_the_callers_generators(tmp_path):
    (tmp_path / "mine.py").write_text(f"import torch\n\ntorch.rand(())\n{FILE}")
    before = torch.get_rng_state()
    ControlTrainer(control_config(tmp_path, advantage=AgentAdvantageConfig(estimator=f"{tmp_path}/mine.py:my_gae")))
    assert torch.equal(torch.get_rng_state(), before)


def failing(rewards, values):
    raise KeyError("x")


def short(rewards, values):
    return rewards[:, 1:], rewards


def of_numpy(rewards, values, scale_of_lam=1.0):
    return rewards.numpy(), rewards.numpy()


def of_integers(rewards):
    return rewards.long(), rewards


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (
            failing,
            r"failing .*raised KeyError: 'x' at .*test_own_estimators.py:\d+; .*mend it, .*\[\"advantage.estimator\"\]",
        ),
        (short, r"short returned torch.float32 \[8, \d+\] and torch.float32 .*; it must return advantages"),
        (
            partial(of_numpy, scale_of_lam=2.0),
            "the estimator of_numpy returned ndarray and ndarray; it must return adv",
        ),
        (of_integers, r"of_integers returned torch.int64 .*floating-point tensors of shape"),
    ],
)
def test_what_fails_in_the_run_is_named(estimator, message, tmp_path):
    trainer = PPOTrainer(args=text_config(tmp_path / "run", advantage=AdvantageConfig(estimator=estimator)))
    with pytest.raises(RunStopped, match=message):
        trainer.train()
