"""TRL's losses on the rows that are made here, against their formulae."""

import math
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from helpers.models import SHAPE, random_lm
from tokencredit.learn.training_mode import training
from tokencredit.settings.model import TunedModelConfig
from tokencredit.settings.offline import DPOConfig, RewardModelConfig, SFTConfig
from tokencredit.text.models.precision import Precision
from tokencredit.text.offline.offline_losses import OfflineLoss
from tokencredit.text.offline.offline_setup import load_examples, load_model

pytestmark = pytest.mark.slow
CPU = Precision("float32", torch.device("cpu"))


@pytest.fixture
def folder(model_folders):
    """A language model whose texts differ."""
    return str(model_folders["llama"])


def built(config, rows):
    torch.manual_seed(1)
    model = load_model(config)
    examples, held_out, *_ = load_examples(config, model, rows, None)
    assert held_out == []
    return model, examples, OfflineLoss(config, model.lm, model.tokenizer, CPU)


def logprobs(lm, ids):
    """Log-probs of all tokens but the first."""
    tensor = torch.tensor([ids])
    with torch.no_grad():
        return lm(tensor).logits[0, :-1].log_softmax(-1).gather(1, tensor[0, 1:, None])[:, 0]


def total(lm, row, name):
    prompt = row["prompt_ids"]
    return logprobs(lm, prompt + row[name])[len(prompt) - 1 :].sum()


def changed(lm):
    """The model after some training."""
    torch.manual_seed(2)
    for parameter in lm.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)


def test_sft_is_the_mean_negative_log_prob_of_completion_tokens(folder, answers):
    config = SFTConfig.from_dict({"model.name": folder})
    model, rows, loss = built(config, answers)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    numbers = [
        -value
        for row in rows
        for value, label in zip(logprobs(plain, row["input_ids"]).tolist(), row["labels"][1:], strict=True)
        if label != -100
    ]
    assert loss.size(rows) == len(numbers)
    whole = loss(model.lm, rows, loss.size(rows))
    assert whole.item() == pytest.approx(sum(numbers) / len(numbers), rel=1e-5)


def test_rewards_are_those_that_a_reward_term_gives(folder, preferences):
    from tokencredit.text.rewards.reward_models import RewardModel

    config = RewardModelConfig.from_dict({"model.name": folder, "reward_model.center": 0.1})
    model, rows, loss = built(config, preferences)
    scorer = RewardModel("it", model.lm, model.tokenizer)
    prompts = [row["prompt"] for row in preferences]
    chosen, rejected = (
        torch.tensor(scorer(prompts, [row[name] for row in preferences])) for name in ("chosen", "rejected")
    )
    expected = -logsigmoid(chosen - rejected).mean() + 0.1 * ((chosen + rejected) ** 2).mean()
    assert (chosen - rejected).abs().min() > 1e-4
    assert loss(model.lm, rows, len(rows)).item() == pytest.approx(expected.item(), rel=1e-4)
    with training([model.lm]):
        loss(model.lm, rows, len(rows))
        measured = loss.metrics()
    assert measured["accuracy"] == pytest.approx((chosen > rejected).float().mean().item())
    assert measured["score_mean"] == pytest.approx(torch.cat([chosen, rejected]).mean().item(), abs=1e-5)


BETA, NOISE = 0.3, 0.2
LOSSES = {
    "sigmoid": lambda difference, per_token: -logsigmoid(BETA * difference),
    "ipo": lambda difference, per_token: (per_token - 1 / (2 * BETA)) ** 2,
    "hinge": lambda difference, per_token: (1 - BETA * difference).clamp(min=0),
    "robust": lambda difference, per_token: (
        (-(1 - NOISE) * logsigmoid(BETA * difference) + NOISE * logsigmoid(-BETA * difference)) / (1 - 2 * NOISE)
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_dpo_and_its_kin_by_definition(name, folder, preferences):
    """Rafailov et al. 2023, Azar et al. 2023 (per token), Zhao et al. 2023, Chowdhury et al. 2024."""
    settings = {"dpo.loss": name, "dpo.beta": BETA} | ({"dpo.label_noise": NOISE} if name == "robust" else {})
    model, rows, loss = built(DPOConfig.from_dict({"model.name": folder, **settings}), preferences)
    rows = [row | found for row, found in zip(rows, loss.reference(rows), strict=True)]
    start = AutoModelForCausalLM.from_pretrained(folder)
    at_start = LOSSES[name](torch.zeros(1), torch.zeros(1)).item()
    assert loss(model.lm, rows, len(rows)).item() == pytest.approx(at_start, rel=1e-4)
    changed(model.lm)
    after = deepcopy(start)
    changed(after)
    ratios = {
        column: torch.stack([total(after, row, column) - total(start, row, column) for row in rows])
        for column in ("chosen_ids", "rejected_ids")
    }
    lengths = {column: torch.tensor([len(row[column]) for row in rows]) for column in ratios}
    difference = ratios["chosen_ids"] - ratios["rejected_ids"]
    per_token = ratios["chosen_ids"] / lengths["chosen_ids"] - ratios["rejected_ids"] / lengths["rejected_ids"]
    expected = LOSSES[name](difference, per_token).mean().item()
    assert expected != pytest.approx(at_start, rel=1e-3)
    with training([model.lm]):
        assert loss(model.lm, rows, len(rows)).item() == pytest.approx(expected, rel=1e-3)
        measured = loss.metrics()
    assert measured["chosen_log_ratio"] == pytest.approx(ratios["chosen_ids"].mean().item(), rel=1e-3)
    assert measured["margin"] == pytest.approx(BETA * difference.mean().item(), rel=1e-3)


@pytest.mark.parametrize("kind", [SFTConfig, RewardModelConfig, DPOConfig])
def test_micro_batches_add_up_to_the_gradient_of_the_batch(kind, folder, answers, preferences):
    model, rows, loss = built(kind.from_dict({"model.name": folder}), answers if kind is SFTConfig else preferences)
    if kind is DPOConfig:
        rows = [row | found for row, found in zip(rows, loss.reference(rows), strict=True)]
        changed(model.lm)
    gradients = []
    for cuts in ([0, 12], [0, 1, 6, 12]):
        model.lm.zero_grad()
        for start, end in pairwise(cuts):
            loss(model.lm, rows[start:end], loss.size(rows)).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.lm.parameters() if p.grad is not None]))
    assert gradients[0].norm() > 1e-3
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-5)


def test_no_telemetry_is_sent_and_the_setting_stays(folder, answers, monkeypatch):
    import huggingface_hub.constants as hub
    from trl.trainer import base_trainer

    sent = []

    def send(*args, **options):
        if not hub.HF_HUB_DISABLE_TELEMETRY:
            sent.append(options)

    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(base_trainer, "send_telemetry", send)
    monkeypatch.setattr(hub, "HF_HUB_DISABLE_TELEMETRY", False)
    built(SFTConfig(model=TunedModelConfig(name=folder)), answers)
    assert sent == []
    assert hub.HF_HUB_DISABLE_TELEMETRY is False


def test_log_2_at_the_start():
    assert LOSSES["sigmoid"](torch.zeros(1), None).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("kind", [SFTConfig, DPOConfig])
def test_a_mixture_of_experts_has_no_loss_but_the_documented_one(kind, tokenizer, answers, preferences, tmp_path):
    """TRL would add the router's loss, a statistic of a micro-batch."""
    experts = {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    lm = random_lm("mixtral", tokenizer, **SHAPE, **experts, router_aux_loss_coef=0.5)
    lm.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    rows = answers if kind is SFTConfig else preferences
    model, rows, loss = built(kind.from_dict({"model.name": str(tmp_path)}), rows)
    if kind is DPOConfig:
        rows = [row | found for row, found in zip(rows, loss.reference(rows), strict=True)]
        assert loss(model.lm, rows, len(rows)).item() == pytest.approx(math.log(2), rel=1e-4)
    else:
        whole = loss(model.lm, rows, loss.size(rows)).item()
        parts = sum(loss(model.lm, [row], loss.size(rows)).item() for row in rows)
        assert whole == pytest.approx(parts, rel=1e-4)


def test_the_reference_is_in_the_runs_own_format(folder, preferences, monkeypatch):
    """`accelerate launch` may ask for another one."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    model, rows, loss = built(DPOConfig.from_dict({"model.name": folder}), preferences)
    rows = [row | found for row, found in zip(rows, loss.reference(rows), strict=True)]
    assert loss(model.lm, rows, len(rows)).item() == pytest.approx(math.log(2), abs=1e-6)


def test_metrics_of_passes_are_not_piled_up(folder, answers):
    model, rows, loss = built(SFTConfig.from_dict({"model.name": folder}), answers)
    with training([model.lm]):
        for _ in range(3):
            loss(model.lm, rows, loss.size(rows))
            loss.metrics()
    assert loss.trainer.state.log_history == []
