"""Runs that were made of parts from Python name them everywhere, and are told apart by them."""

import json

import pytest
import yaml
from datasets import Dataset, DatasetDict

from helpers.configs import quiet, text_config
from tokencredit.cli import main
from tokencredit.report.comparison.stats import group_runs
from tokencredit.report.reading import read_run
from tokencredit.settings.data import FunctionTerm, PromptsConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.training import EvalConfig
from tokencredit.text.callbacks import Callback
from tokencredit.text.data.prompts import load_prompts
from tokencredit.text.data.tasks import Tasks
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.text.rewards.calls import Term
from tokencredit.text.run_parts import part_of, parts_of

ROWS = [{"prompt": "This movie"}, {"prompt": "I"}]


def rewarded(sign):
    def score(completions, **columns):
        return [float(sign * len(text)) for text in completions]

    return score


class Log(Callback):
    def __init__(self):
        self.rows = []

    def after_iteration(self, trainer, metrics, samples):
        self.rows.append(metrics)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder, log = tmp_path_factory.mktemp("parts"), Log()
    for name, sign, seed in (("a", 1, 1), ("b", 1, 2), ("c", -1, 2)):
        small = {"rollout": RolloutConfig(batch_size=4, max_new_tokens=4), "run": quiet(folder / name, 1)}
        args = text_config(folder / name, seed=seed, **small)
        PPOTrainer(args=args, reward_funcs=[rewarded(sign)], train_dataset=ROWS, callbacks=[log]).train()
    return folder


def test_a_runs_folder_names_its_parts_and_no_default_in_their_place(runs):
    config = yaml.safe_load((runs / "a" / "config.yaml").read_text())
    assert config["reward"] == []
    assert config["python"]["train_dataset"].startswith("2 rows of prompt (")
    assert config["python"]["reward_funcs"][0].startswith("rewarded.score(sign=1) (test_run_parts.py, ")
    assert config["python"]["callbacks"][0].startswith("Log (test_run_parts.py, ")
    parts = json.loads((runs / "a" / "parts.json").read_text())
    assert "sign * len(text)" in parts["reward_funcs[0]"]["source"]
    assert parts["train_dataset"] | {"digest": ""} == {"rows": 2, "columns": ["prompt"], "digest": ""}
    card = (runs / "a" / "policy" / "README.md").read_text()
    assert "- reward: `rewarded.score(sign=1) (test_run_parts.py, " in card
    assert json.loads((runs / "a" / "summary.json").read_text())["environment"]["versions"]["torch"]


def test_a_term_of_a_configuration_from_python_is_known_by_its_code(tmp_path):
    file = tmp_path / "s.py"
    term = FunctionTerm(function=f"{file}:score", weight=-1.0)
    digests = set()
    for sign in "+-":
        file.write_text(f"def score(completions, **columns):\n    return [{sign}1.0 for _ in completions]\n")
        part = part_of(term)
        assert part["arguments"] == {"function": f"{file}:score", "weight": -1.0}
        digests.add(part["digest"])
    assert len(digests) == 2
    assert part_of(FunctionTerm(function="repetition"))["arguments"] == {"function": "repetition"}


def test_a_functions_own_argument_weight_is_told_from_its_terms():
    def score(completions, weight=1.0, **columns):
        return [weight for _ in completions]

    def arguments(term_weight, weight):
        return part_of(Term("score", term_weight, score, {"weight": weight}))["arguments"]

    assert arguments(1.0, 2.0) == {"weight": 2.0}
    assert arguments(0.5, 2.0) == {"weight": 2.0, "term_weight": 0.5}


def test_the_rows_of_evaluations_are_a_part_where_they_are_others(tokenizer, tmp_path):
    place, start = str(tmp_path / "rows"), {"model": "", "tokenizer": ""}
    DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS[:1])).save_to_disk(place)

    def named(args, given, *rows):
        parts = parts_of(args, given, *rows, start)
        return {key: part["rows"] for key, part in parts.items() if "rows" in part}

    held_out = EvalConfig(every=1, samples=2, dataset=place, split="test")
    args = text_config(tmp_path, prompts=PromptsConfig(dataset=place), eval=held_out)
    groups = {"prompts": args.prompts, "eval": args.held_out_prompts()}
    rows = [load_prompts(x, tokenizer, seed=1, limit=None, group=group) for group, x in groups.items()]
    assert named(args, {}, *rows) == {"prompts.dataset": 2, "eval.dataset": 1}
    trained, evaluated = (Tasks(ROWS, name=name, seed=1) for name in ("train_dataset", "eval_dataset"))
    assert named(text_config(tmp_path), {"train_dataset": ROWS}, trained, evaluated) == {"train_dataset": 2}


def test_runs_of_other_rewards_are_no_repetitions_and_other_files_are(runs):
    read = [read_run(runs / name) for name in "abc"]
    assert [len(group.runs) for group in group_runs(read)] == [2, 1]


def test_a_command_refuses_them_with_the_line_of_python(runs, capsys):
    file = runs / "a" / "config.yaml"
    assert main(["train", "--config", str(file)]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    call = "PPOTrainer(args=args, reward_funcs=…, train_dataset=…, callbacks=…).train()"
    assert f"args = PPOConfig.from_yaml({str(file)!r}); {call}" in line
