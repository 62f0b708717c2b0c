"""docs/names.md: every name of others has a row, and every name of ours in it exists."""

import inspect
import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from helpers.configs import keys
from helpers.docs import names_in, table_rows
from tokencredit.control.control_trainer import ControlTrainer
from tokencredit.core.advantages import gae
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.fields import settings_of
from tokencredit.settings.foreign_names import suggestion
from tokencredit.settings.text import PPOConfig
from tokencredit.text.ppo_trainer import PPOTrainer

PAGE = (Path(__file__).parents[2] / "docs" / "names.md").read_text(encoding="utf-8")
SECTIONS = {text.partition("\n")[0]: text for text in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}


ROWS = [(section, *row) for section in SECTIONS for row in table_rows(SECTIONS[section])]


AGENTS, TEXTS = keys(ControlConfig), keys(PPOConfig)


@pytest.mark.parametrize(
    ("section", "file"),
    [("CleanRL", "cleanrl_arguments.txt"), ("The Berkeley homework", "cs285_arguments.txt")],
)
def test_every_argument_of_theirs_has_one_row(section, file):
    named = [name for row in table_rows(SECTIONS[section]) for name in re.findall(r"`--([\w-]+)`", row[0])]
    assert sorted(named) == sorted(names_in(Path(__file__).with_name(file)))


@pytest.mark.slow
@pytest.mark.parametrize("section", ["CleanRL", pytest.param("The Berkeley homework", marks=pytest.mark.proof)])
def test_no_message_on_a_name_says_another_key_than_its_row(section):
    for names, here, _ in table_rows(SECTIONS[section]):
        for name in re.findall(r"`--([\w-]+)`", names):
            advice = suggestion(name, settings_of(ControlConfig))
            wanted = re.findall(r"`([^`]+)`", here) or ["no counterpart"]
            assert any(key in advice for key in [*wanted, "see --print_config"]), (name, advice)


@pytest.mark.slow
def test_the_flags_for_stable_baselines3_are_its_defaults():
    sb3 = pytest.importorskip("stable_baselines3")
    theirs = {name: value.default for name, value in inspect.signature(sb3.PPO).parameters.items()}
    flags = re.search(r"`--(env\.number 1 [^`]*)`", PAGE)[1].split("--")
    args = ControlConfig.from_dict({key: yaml.safe_load(value) for key, value in map(str.split, flags)})
    assert (args.steps, args.ppo.epochs, args.ppo.clip) == (theirs["n_steps"], theirs["n_epochs"], theirs["clip_range"])
    assert args.ppo.minibatches == args.env.number * args.steps / theirs["batch_size"]
    assert args.optim.lr == args.critic.lr == theirs["learning_rate"]
    assert (args.ppo.entropy_coef, args.critic.coef) == (theirs["ent_coef"], 2 * theirs["vf_coef"])
    assert (args.advantage.gamma, args.advantage.lam) == (theirs["gamma"], theirs["gae_lambda"])
    assert (args.critic.clip, args.ppo.target_kl) == (theirs["clip_range_vf"], theirs["target_kl"])
    assert (args.optim.schedule, args.optim.max_grad_norm) == ("constant", theirs["max_grad_norm"])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Metrics, fields of a sample and of the summary that a small run of each world writes."""
    folder = tmp_path_factory.mktemp("names")
    run = {"iterations": 1, "trackers": []}
    text = {"model.dtype": "bfloat16", "rollout": {"batch_size": 4, "max_new_tokens": 4}, "ppo": {"minibatches": 1}}
    agent = {"steps": 32, "eval": {"episodes": 1}}
    PPOTrainer(args=PPOConfig.from_dict(text | {"run": run | {"dir": str(folder / "text")}})).train()
    ControlTrainer(ControlConfig.from_dict(agent | {"run": run | {"dir": str(folder / "agent")}})).train()
    found = {}
    for world in ("text", "agent"):
        files = [folder / world / name for name in ("metrics.jsonl", "samples.jsonl", "summary.json")]
        texts = [
            file.read_text().splitlines()[0] if file.suffix == ".jsonl" else file.read_text() for file in files[::2]
        ]
        found[world] = {name for text in texts for name in json.loads(text)}
    found["text"] |= json.loads((folder / "text" / "samples.jsonl").read_text().splitlines()[0]).keys()
    return found


def test_the_lines_for_cleanrl_s_buffers_give_its_advantages():
    code = re.search(r"^```python\n(.*?)^```$", SECTIONS["CleanRL"], re.MULTILINE | re.DOTALL)[1]
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 40, 6, generator=generator)
    dones = (torch.rand(41, 6, generator=generator) < 0.2).float()
    dones, next_done, next_value = dones[:-1], dones[-1], torch.randn(1, 6, generator=generator)
    assert 0 < next_done.sum() < 6
    after = [*zip(values[1:], dones[1:], strict=True), (next_value[0], next_done)]
    expected, following = torch.zeros(40, 6), torch.zeros(6)
    for t, (value, done) in reversed(list(enumerate(after))):  # the recursion of CleanRL's ppo.py
        following = rewards[t] + 0.99 * (1 - done) * (value + 0.95 * following) - values[t]
        expected[t] = following
    buffers = {"rewards": rewards, "values": values, "dones": dones, "next_done": next_done, "next_value": next_value}
    names = buffers | {"torch": torch, "gae": gae}
    exec(code, names)
    torch.testing.assert_close(names["advantages"], expected)
    torch.testing.assert_close(names["returns"], expected + values)


def ours(section: str, cell: str) -> list[str]:
    """The names of ours in a cell."""
    names = re.findall(r"`([^`]+)`", cell)
    assert names or cell == "none", f"{section}: {cell}"
    return names


def test_every_name_of_ours_exists(written):
    agents, texts = AGENTS | written["agent"], TEXTS | written["text"]
    for section, _, cell, _ in ROWS:
        known = agents | texts if section == "Symbols of papers" else agents
        assert [name for name in ours(section, cell) if name not in known] == [], cell
    assert len({name for section, _, cell, _ in ROWS for name in ours(section, cell)}) > 60


def test_every_setting_in_the_text_exists():
    groups = {key.partition(".")[0] for key in AGENTS | TEXTS if "." in key}
    named = {name for name in re.findall(r"`([a-z]+\.[a-z_]+)(?:: [^`]*)?`", PAGE) if name.split(".")[0] in groups}
    assert len(named) > 40
    assert named <= AGENTS | TEXTS | {"ppo.py"}


def test_every_value_in_the_text_is_one_that_the_setting_may_have():
    """Of agents; with what else the value needs."""
    needs = {
        "advantage.estimator": {"critic.kind": "separate"},
        "critic.kind": {"advantage.estimator": "reward_to_go"},
        "kl.place": None,  # of texts
        "ppo.loss": None,
        "off_policy.correct": None,
        "env.id": None,
    }
    given = re.findall(r"`([a-z_]+(?:\.[a-z_]+)?): ([^`]+)`", PAGE)
    assert len(given) > 10
    for key, value in given:
        if needs.get(key, {}) is not None:
            ControlConfig.from_dict({key: yaml.safe_load(value)} | needs.get(key, {}))
