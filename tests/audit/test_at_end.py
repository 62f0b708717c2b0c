"""The audit at the end of a run: within its time, and without a trace in what was trained."""

import json
import re

import pytest

from helpers.configs import control_config, quiet, text_config
from helpers.files import TIMES, drop_keys, read_metrics
from tokencredit.control.control_trainer import ControlTrainer
from tokencredit.runs import loop
from tokencredit.settings.control import AgentAdvantageConfig, AgentAuditConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.training import AuditConfig
from tokencredit.text.ppo_trainer import PPOTrainer


@pytest.fixture
def any_length(monkeypatch):
    """Tiny runs have the time of long ones."""
    monkeypatch.setattr(loop, "MIN_AUDITED", 0.0)
    monkeypatch.setattr(loop, "AUDIT_SHARE", 20.0)
    monkeypatch.setattr(loop, "AUDIT_ROWS", (1, 3))


def text_run(folder, iterations, resume=False, **groups):
    small = {"run": quiet(folder, iterations, save_every=1)}
    small["rollout"] = RolloutConfig(batch_size=64, max_new_tokens=4)  # as many texts as an audit samples at once
    trainer = PPOTrainer(args=text_config(folder, **small | groups))
    trainer.train(resume_from_checkpoint=resume)
    return drop_keys(read_metrics(folder), *TIMES), [x.tolist() for x in trainer.policy.parameters()]


def test_a_run_and_its_extension_end_with_an_audit_that_changes_nothing(any_length, tmp_path, capsys):
    without = text_run(tmp_path / "without", 2, audit=AuditConfig(at_end=False))
    assert not (tmp_path / "without" / "audit.json").exists()
    text_run(tmp_path / "with", 1)
    shown = capsys.readouterr().out
    assert "\naudit: " in shown
    assert "of the credit is real" not in shown, "three completions have no interval"
    assert f"To measure it: tokencredit audit {tmp_path / 'with'} --completions 16 --states 4 --continuations" in shown
    assert re.search(r"audit at the end: about [\d,.]+ reward calls, [\d,.]+ tokens, \d+ s\n", shown)
    audit = tmp_path / "with" / "audit.json"
    assert json.loads(audit.read_text())["iteration"] == 1
    assert text_run(tmp_path / "with", 2, resume=True) == without
    found = json.loads(audit.read_text())
    assert found["iteration"] == 2
    assert found["settings"] == {"completions": 3, "continuations": 32, "states": 4}
    assert "3 completions" in (tmp_path / "with" / "report.html").read_text(), "the page has its score"


def test_an_agent_is_audited_at_the_end(any_length, tmp_path):
    settings = AgentAuditConfig(at_end=False)
    for name, changes in (("with", {}), ("without", {"audit": settings})):
        ControlTrainer(control_config(tmp_path / name, 2, **changes)).train()
    assert json.loads((tmp_path / "with" / "audit.json").read_text())["settings"]["episodes"] == 3
    assert not (tmp_path / "without" / "audit.json").exists()
    with_audit, without = (drop_keys(read_metrics(tmp_path / name), *TIMES) for name in ("with", "without"))
    assert with_audit == without


def test_a_short_run_says_that_it_has_no_audit(tmp_path, capsys):
    text_run(tmp_path / "run", 1)
    line = r"no audit at the end: it needs a run of \d+ s, to take less than 8 % of its time; to audit anyway: "
    line += r"tokencredit audit \S+/run now, or train with audit\.every\n"
    assert re.search(line, capsys.readouterr().out)
    assert not (tmp_path / "run" / "audit.json").exists()
    own = AgentAdvantageConfig(estimator=lambda rewards, values: (rewards - values, rewards))
    ControlTrainer(control_config(tmp_path / "agent", 1, advantage=own)).train()
    assert "; to audit anyway: train with audit.every\n" in capsys.readouterr().out, "it has no audit on request"


def test_the_audit_at_the_end_keeps_its_limit_of_reward_calls(any_length, tmp_path, capsys):
    calls = []

    def reward(completions, **_):
        calls.append(len(completions))
        return [float(len(text)) for text in completions]

    for limit, audited in ((200, True), (20, False)):
        calls.clear()
        folder = tmp_path / str(limit)
        args = text_config(folder, audit=AuditConfig(calls=limit))
        PPOTrainer(reward_funcs=reward, args=args).train()
        batch = args.run.iterations * args.rollout.batch_size
        assert sum(calls) - batch <= limit
        assert (folder / "audit.json").exists() == audited
        if audited:
            assert json.loads((folder / "audit.json").read_text())["calls"] == sum(calls) - batch > 0
        else:
            assert "no audit at the end: audit.calls is 20, and each completion needs" in capsys.readouterr().out


def test_a_reward_that_fails_in_the_audit_leaves_the_run_as_it_is(any_length, tmp_path, capsys):
    calls = []

    def reward(completions, **_):
        calls.append(len(completions))
        if len(calls) > 1:
            raise ValueError("too many calls")
        return [float(len(text)) for text in completions]

    summary = PPOTrainer(reward_funcs=reward, args=text_config(tmp_path / "run")).train()
    assert summary["stopped_by"] == "iterations"
    assert "no audit at the end: " in capsys.readouterr().out
    assert "too many calls" in (tmp_path / "run" / "events.jsonl").read_text()
    assert (tmp_path / "run" / "report.html").exists()
