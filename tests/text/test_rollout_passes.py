import pytest
import torch
from torch import nn

from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.settings.training import KLConfig
from tokencredit.text.data.rollout import Rollout
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.model_loading import load_language_model
from tokencredit.text.models.run_models import build_policy
from tokencredit.text.rollout_passes import (
    ReferenceOutputs,
    evaluate_rollout,
    reference_outputs,
    rollout_values,
    values_after,
)

pytestmark = pytest.mark.slow

TEMPERATURE = 0.7


@pytest.fixture
def rollout():
    """Six texts of very different lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([20, 1, 3, 20, 2, 7])
    prompts = torch.tensor([9, 2, 4, 1, 9, 3])
    mask = torch.arange(20) < lengths[:, None]
    return Rollout(
        prompt_ids=torch.randint(100, (6, 9), generator=generator),
        prompt_mask=torch.arange(9) >= 9 - prompts[:, None],
        response_ids=torch.randint(100, (6, 20), generator=generator),
        mask=mask,
        logprobs=-torch.rand(6, 20, generator=generator) * mask,
        values=torch.zeros(6, 20),
        truncated=torch.zeros(6, dtype=torch.bool),
    )


def load(folders, architecture, critic="shared", **changes):
    args = ModelConfig(name=str(folders[architecture]), **changes)
    model, _ = build_policy(*load_language_model(args), args, CriticConfig(kind=critic, head="linear"))
    nn.init.normal_(model.critic.head[-1].weight)
    return model


@torch.no_grad()
def test_entropies_need_no_pass_of_a_separate_critic(model_folders, rollout):
    model = load(model_folders, "llama", critic="separate")
    model.critic.trunk.register_forward_pre_hook(lambda *_: pytest.fail("the critic has made a pass"))
    now = evaluate_rollout(model, rollout, TEMPERATURE, None, entropy=True)
    assert now.values is rollout.values
    assert now.entropy[rollout.mask].min() > 0


@pytest.mark.parametrize("overhead", [0, 10_000])
@torch.no_grad()
def test_micro_batches_do_not_change_log_probs_or_values(architecture, overhead, model_folders, rollout, monkeypatch):
    model = load(model_folders, architecture)
    whole = model(rollout.inputs(), temperature=TEMPERATURE)
    monkeypatch.setattr("tokencredit.learn.minibatches.PASS_OVERHEAD", overhead)
    for budget in (None, 30):
        now = evaluate_rollout(model, rollout, TEMPERATURE, budget)
        torch.testing.assert_close(now.logprobs, whole.logprobs, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(now.values, whole.values, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_values_of_a_separate_critic_equal_those_in_training(architecture, model_folders, rollout):
    model = load(model_folders, architecture, critic="separate")
    in_training = model(rollout.inputs(), temperature=TEMPERATURE).values
    torch.testing.assert_close(rollout_values(model, rollout, 30), in_training, atol=1e-5, rtol=1e-5)
    assert in_training[rollout.mask].abs().min() > 0


@pytest.mark.parametrize("critic", ["shared", "separate"])
@torch.no_grad()
def test_the_value_after_a_cut_is_that_of_the_text_read_so_far(critic, architecture, model_folders, rollout):
    model = load(model_folders, architecture, critic=critic)
    rollout.truncated[[0, 2, 3]] = True
    # The longest text has 29 tokens, all of which are read: the budget that they fit is enough.
    after = values_after(model, rollout, 29)
    for row in range(6):
        if not rollout.truncated[row]:
            assert after[row] == 0
            continue
        text = torch.cat(
            [rollout.prompt_ids[row][rollout.prompt_mask[row]], rollout.response_ids[row][rollout.mask[row]]]
        )
        trunk = model.lm.get_decoder() if critic == "shared" else model.critic.trunk
        expected = model.critic(trunk(input_ids=text[None]).last_hidden_state)[0, -1]
        torch.testing.assert_close(after[row], expected, atol=1e-4, rtol=1e-4)
    assert after[[0, 2, 3]].unique().numel() == 3
    rollout.truncated[:] = False
    assert (values_after(model, rollout, None) == 0).all()


@torch.no_grad()
def test_reference_outputs_equal_those_of_the_reference_model(model_folders, rollout):
    policy, reference = load(model_folders, "llama"), ActorCritic(load(model_folders, "qwen3").lm)
    expected = reference(rollout.inputs(), temperature=TEMPERATURE).logprobs

    def ask(**changes):
        return reference_outputs(policy, reference, rollout, KLConfig(**changes), TEMPERATURE, 30)

    paid = ask()
    torch.testing.assert_close(paid.logprobs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(paid.kl, (rollout.logprobs - expected) * rollout.mask, atol=1e-5, rtol=1e-5)
    assert paid.hidden is None

    exact = ask(place="both", estimator="full").kl
    hidden = policy.response_hidden(rollout.inputs()), reference.response_hidden(rollout.inputs())
    log_p, log_q = (
        (model.logits(h) / TEMPERATURE).log_softmax(-1) for model, h in zip((policy, reference), hidden, strict=True)
    )
    by_hand = (log_p.exp() * (log_p - log_q)).sum(-1) * rollout.mask
    torch.testing.assert_close(exact, by_hand, atol=1e-4, rtol=1e-4)

    in_loss = ask(place="loss", estimator="k2")
    assert in_loss.kl is None
    torch.testing.assert_close(in_loss.logprobs, expected, atol=1e-5, rtol=1e-5)
    assert in_loss.hidden is None
    in_loss = ask(place="loss", estimator="full")
    mask = rollout.mask
    torch.testing.assert_close(in_loss.hidden[mask], hidden[1][mask], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_adapter_is_off_in_the_reference_pass(model_folders, rollout):
    plain = load(model_folders, "llama")
    policy = load(model_folders, "llama", lora=LoraConfig(rank=2))
    for name, parameter in policy.lm.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    said = reference_outputs(policy, policy, rollout, KLConfig(), TEMPERATURE, None).logprobs
    without = plain(rollout.inputs(), temperature=TEMPERATURE).logprobs
    torch.testing.assert_close(said, without, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(policy(rollout.inputs(), temperature=TEMPERATURE).logprobs, without)


def test_without_a_reference_its_outputs_are_empty(model_folders, rollout):
    policy = load(model_folders, "llama")
    assert reference_outputs(policy, None, rollout, KLConfig(), TEMPERATURE, None) == ReferenceOutputs()


def test_an_exact_kl_below_1e_5_counts_as_rounding(model_folders, rollout, monkeypatch):
    """A model's KL to itself is up to 1.4e-6 nats with 2,048 tokens and 5.7e-6 with 151,936; negative, even -4e-5."""
    policy = load(model_folders, "llama")
    outputs = {"logprobs": rollout.logprobs, "kl": torch.tensor([[1.4e-6, 5.7e-6, -4e-5, 1.1e-5]])}
    monkeypatch.setattr("tokencredit.text.rollout_passes.read_by_length", lambda *_: outputs)
    kl = reference_outputs(policy, policy, rollout, KLConfig(place="both", estimator="full"), TEMPERATURE, None).kl
    assert torch.equal(kl, torch.tensor([[0.0, 0.0, 0.0, 1.1e-5]]))
