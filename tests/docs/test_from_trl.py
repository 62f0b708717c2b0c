"""docs/from-trl.md: its tables name real things on both sides, and its scripts are real programs."""

import json
import re
import runpy
from dataclasses import fields, is_dataclass
from inspect import signature
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from helpers.configs import keys
from helpers.docs import names_in, table_rows
from tokencredit import DPOConfig, PPOConfig, PPOTrainer, RewardModelConfig, SFTConfig
from tokencredit.settings.projects.trl import TRL

PAGE = (Path(__file__).parents[2] / "docs" / "from-trl.md").read_text(encoding="utf-8")
TRL_FIELDS = names_in(Path(__file__).with_name("trl_ppo_config_fields.txt"))


def rows(heading: str) -> list[list[str]]:
    """The cells of the tables of a section, without their headers."""
    section = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    return table_rows(next(part for part in section if part.startswith(heading)).split("\n### ")[0])


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


OURS = rows("Every field of TRL's PPOConfig") + rows("From GRPOTrainer")


def test_every_field_of_trls_config_has_a_row():
    named = [row[0].strip("`") for row in rows("Every field of TRL's PPOConfig")]
    assert len(TRL_FIELDS) == 33
    assert named[: len(TRL_FIELDS)] == TRL_FIELDS
    assert len(set(named)) == len(named)


@pytest.mark.parametrize("row", OURS, ids=lambda row: row[0])
def test_what_a_row_names_is_there(row):
    known = keys(PPOConfig)
    named = re.findall(r"`([^`]+)`", row[1])
    assert named or row[1] in ("none", "the same"), row
    assert row[1] != "none" or row[2] or "`tools`" in row[0] or "vllm" in row[0], "a row without a key says why"
    for name in named:
        argument = re.fullmatch(r"PPOTrainer(\.train)?\((\w+)\)", name)
        called = PPOTrainer.train if argument and argument[1] else PPOTrainer
        assert argument[2] in signature(called).parameters if argument else name in known, name


def test_the_messages_on_trls_names_are_the_tables():
    ours = {*keys(PPOConfig), *signature(PPOTrainer).parameters}
    for row in OURS:
        names, here = (re.findall(r"`(\w+)`", row[0]), row[1].replace("`", ""))
        parts = here.split(", ")
        for number, name in enumerate(names):
            if name not in ours and here != "the same":
                own, reason = TRL.answer(name)
                expected = parts[number] if len(parts) == len(names) > 1 else here
                assert ", ".join(own or ["none"]) == expected, name
                assert own or reason == row[2].replace("`", ""), name
                assert ("the opposite" in reason) == ("the opposite" in row[2]), name


def test_every_key_in_the_text_is_there():
    groups = {field.name for field in fields(PPOConfig) if is_dataclass(get_type_hints(PPOConfig)[field.name])}
    named = {n for n in re.findall(r"`([a-z]+\.[a-z_]+)(?::[^`]*)?`", PAGE) if n.split(".")[0] in groups}
    assert len(named) > 30
    assert named <= keys(PPOConfig) | keys(SFTConfig) | {"prompts.jsonl"}


@pytest.fixture
def folder(tmp_path, monkeypatch, model_folders):
    """What the page's scripts expect: a policy, a reward model of the same vocabulary, prompts."""
    tokenizer = AutoTokenizer.from_pretrained(model_folders["gpt2"])
    AutoModelForCausalLM.from_pretrained(model_folders["gpt2"]).save_pretrained(tmp_path / "policy")
    torch.manual_seed(0)
    reward = AutoModelForSequenceClassification.from_pretrained(model_folders["gpt2"], num_labels=1)
    reward.save_pretrained(tmp_path / "reward-model")
    for name in ("policy", "reward-model"):
        tokenizer.save_pretrained(tmp_path / name)
    prompts = ["This movie was", "The acting", "I thought that the film"]
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
    (tmp_path / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.proof
def test_the_script_with_one_line_changed_runs(folder):
    script = blocks("python")[0].replace("=2560", "=16").replace("=64", "=8")
    (folder / "script.py").write_text(script, encoding="utf-8")
    names = runpy.run_path(str(folder / "script.py"))
    assert names["trainer"].trainer.record.history[-1]["iteration"] == 2
    AutoModelForCausalLM.from_pretrained(folder / "runs" / "first" / "policy")


def methods() -> dict[str, dict[str, object]]:
    """The settings of each column of the table of methods without a critic."""
    header, _, *lines = [
        line for line in PAGE.split("### GRPO, Dr. GRPO, RLOO")[1].splitlines() if line.startswith("|")
    ]
    names = [cell.strip(" `") for cell in header.strip("|").split("|")][1:]
    found: dict[str, dict[str, object]] = {name: {} for name in names}
    for line in lines:
        key, *values = (cell.strip(" `") for cell in line.strip("|").split("|"))
        for name, value in zip(names, values, strict=True):
            if value:
                found[name][key] = float(value) if "e-" in value else yaml.safe_load(value)
    return found


METHODS = methods()
LONGEST, SIZE = 8, 16
"""Tokens of a completion, and completions of a batch, in the tests below."""


def group_scores(scores: torch.Tensor, scale: bool) -> torch.Tensor:
    """GRPO's advantages, one group of scores after another."""
    credit = []
    for group in scores.tolist():
        mean = sum(group) / len(group)
        deviation = (sum((s - mean) ** 2 for s in group) / (len(group) - 1)) ** 0.5
        credit += [(s - mean) / (deviation + 1e-4 if scale else 1.0) for s in group]
    return torch.tensor(credit)


def leave_one_out_scores(scores: torch.Tensor) -> torch.Tensor:
    """RLOO's advantages."""
    return torch.tensor([s - sum(g[:i] + g[i + 1 :]) / (len(g) - 1) for g in scores.tolist() for i, s in enumerate(g)])


def formula(name: str, logprobs: torch.Tensor, ref: torch.Tensor, scores: torch.Tensor, mask: torch.Tensor):
    """The page's formulas for one step, where the ratio is 1 and has the gradient of log π."""
    tokens, ratio = mask.float(), (logprobs - logprobs.detach()).exp()
    kl = (ref - logprobs).exp() - (ref - logprobs) - 1
    groups = scores.view(-1, METHODS[name]["rollout.per_prompt"])
    if name == "GRPO":
        credit = group_scores(groups, scale=True)[:, None]
        return -(((ratio * credit - METHODS[name]["kl.coef"] * kl) * tokens).sum(1) / tokens.sum(1)).mean()
    if name == "Dr. GRPO":
        return -(ratio * group_scores(groups, scale=False)[:, None] * tokens).sum() / (SIZE * LONGEST)
    if name == "RLOO":
        price = METHODS[name]["kl.coef"] * ((logprobs - ref).detach() * tokens).sum(1)
        credit = leave_one_out_scores((scores - price).view(groups.shape))
        # −A log π has this gradient; its value differs by a constant, since the ratio stands for log π.
        return -(credit[:, None] * ratio * tokens).sum(1).mean() / LONGEST
    return -(ratio * group_scores(groups, scale=True)[:, None] * tokens).sum() / tokens.sum()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("GRPO", "RLOO") else pytest.mark.proof) for name in METHODS]
)
def test_each_column_has_the_loss_and_the_gradient_of_its_formula(name, tmp_path):
    """In the second iteration, when the policy is no longer its reference."""
    settings = {"model.dtype": "float32", "optim.max_grad_norm": None, "run.dir": str(tmp_path / "run")}
    settings |= {"rollout.batch_size": SIZE, "rollout.max_new_tokens": LONGEST, "rollout.stop": ["y"]}
    args = PPOConfig.from_dict(METHODS[name] | settings | {"optim.lr": 3e-4})
    trainer = PPOTrainer(
        args=args, reward_funcs=lambda completions, **_: [c.count("a") - 0.1 * len(c.split()) for c in completions]
    )
    trainer.learner.set_rates(1)
    trainer.update(1, *trainer.credit.give(trainer.collect()))
    scored = trainer.collect()
    rollout = scored.rollout
    assert len(set(rollout.mask.sum(1).tolist())) > 1, "completions of different lengths"
    inputs = torch.cat([rollout.prompt_ids, rollout.response_ids], 1)
    attention = torch.cat([rollout.prompt_mask, rollout.mask], 1).long()
    positions = (attention.cumsum(1) - 1).clamp(min=0)

    def logprobs(model):
        start = rollout.prompt_ids.shape[1] - 1
        logits = model.lm(input_ids=inputs, attention_mask=attention, position_ids=positions).logits[:, start:-1]
        return logits.log_softmax(-1).gather(-1, rollout.response_ids[..., None]).squeeze(-1)

    reference = PPOTrainer(args=args).policy  # the model that both began with
    with torch.no_grad():
        before = logprobs(reference)
    assert (before - rollout.logprobs)[rollout.mask].abs().max() > 1e-3
    loss = formula(name, logprobs(trainer.policy), before, scored.scores, rollout.mask)
    weights = [p for p in trainer.policy.lm.parameters() if p.requires_grad]
    expected = torch.autograd.grad(loss, weights)
    for weight in weights:
        weight.grad = None
    record = trainer.learner.accumulate_gradients(trainer.credit.give(scored)[1])
    assert sum(float(micro.loss) for micro in record) == pytest.approx(float(loss.detach()), abs=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in expected)
    for weight, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-3, atol=1e-5 * largest)


@pytest.mark.parametrize("row", rows("From SFTTrainer"), ids=lambda row: row[0])
def test_what_a_row_on_the_other_trainers_names_is_there(row):
    known = keys(SFTConfig) | keys(RewardModelConfig) | keys(DPOConfig)
    named = re.findall(r"`([a-z_]+\.[a-z_.]+)(?::[^`]*)?`", f"{row[1]} {row[2]}")
    assert named or row[1] == "none"
    assert set(named) <= known


@pytest.mark.parametrize("kind", ["SFTConfig", "RewardConfig", "DPOConfig"])
def test_names_of_the_other_trainers_are_theirs(kind):
    import trl

    theirs = {name for row in rows("From SFTTrainer") for name in re.findall(r"`(\w+)`", row[0])}
    own = {field.name for config in (trl.SFTConfig, trl.RewardConfig, trl.DPOConfig) for field in fields(config)}
    assert theirs - own == {"model_name_or_path", "peft_config", "dataset_name"}, "of scripts and trainers"
    assert {"learning_rate", "max_length"} <= {field.name for field in fields(getattr(trl, kind))}
