import pytest
import torch
from torch import nn

from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.text.models import actor_critic
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.architecture import trunk_of, width
from tokencredit.text.models.critic import Critic, build_value_head
from tokencredit.text.models.model_loading import load_language_model
from tokencredit.text.models.run_models import build_policy


@pytest.fixture
def loaded(architecture, model_folders):
    return load_language_model(ModelConfig(name=str(model_folders[architecture])))


def with_critic(lm, kind="linear", **options):
    """The model with a new critic on its trunk."""
    return ActorCritic(lm, Critic(build_value_head(kind, width(lm)), **options))


def padded_batch():
    """Two prompts of different lengths, two responses of different lengths."""
    prompt_ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    prompt_mask = torch.tensor([[False, False, True, True], [True] * 4])
    response_ids = torch.tensor([[11, 12, 13], [14, 15, 0]])
    mask = torch.tensor([[True] * 3, [True, True, False]])
    return {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "response_ids": response_ids, "mask": mask}


def test_log_probabilities_are_those_of_the_plain_model_without_padding(loaded):
    lm, _ = loaded
    batch = padded_batch()
    now = with_critic(lm)(batch, temperature=0.7, entropy=True)
    logprobs, entropy = now.logprobs, now.stats.entropy
    for row in range(2):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row]]
        response = batch["response_ids"][row][batch["mask"][row]]
        logits = lm(torch.cat([prompt, response]).unsqueeze(0)).logits[0] / 0.7
        expected = torch.distributions.Categorical(logits=logits[len(prompt) - 1 : -1])
        torch.testing.assert_close(logprobs[row, : len(response)], expected.log_prob(response), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(entropy[row, : len(response)], expected.entropy(), atol=1e-4, rtol=1e-4)
    assert logprobs[1, 2] == 0
    assert (now.values == 0).all(), "an untrained critic says 0"


def test_what_stands_in_the_padding_changes_nothing(loaded):
    model = with_critic(loaded[0], "mlp")
    torch.nn.init.normal_(model.critic.head[-1].weight)
    batch = padded_batch()
    before = model(batch, temperature=1.0)
    batch["prompt_ids"][0, :2] = 99
    batch["response_ids"][1, 2] = 98
    after = model(batch, temperature=1.0)
    torch.testing.assert_close(before.logprobs, after.logprobs)
    torch.testing.assert_close(before.values, after.values)


def test_gradients_reach_the_trunk_from_both_heads(loaded):
    model = noisy(with_critic(loaded[0]))
    now = model(padded_batch(), temperature=1.0, policy_loss=Unlikelihood())
    trunk = model.lm.get_input_embeddings().weight
    for output in (now.policy_loss, now.values):
        assert torch.autograd.grad(output.sum(), trunk, retain_graph=True)[0].abs().sum() > 0


def test_a_value_head_of_two_layers_is_four_times_as_wide():
    head = build_value_head("mlp", 8)
    assert [tuple(p.shape) for p in head.parameters()] == [(32, 8), (32,), (1, 32), (1,)]
    assert (head(torch.randn(3, 8)) == 0).all()


def test_the_activation_of_a_value_head_is_gelu_or_relu():
    states = torch.randn(3, 8)
    for name, function in (("gelu", torch.nn.functional.gelu), ("relu", torch.relu)):
        head = build_value_head("mlp", 8, "default", activation=name)
        torch.testing.assert_close(head(states), head[2](function(head[0](states))))


class Unlikelihood:
    """A loss to minimise."""

    additive = True

    def __call__(self, now, at):
        return now.logprobs.sum()


def noisy(model):
    """The model with a critic that says something."""
    for parameter in model.critic.head.parameters():
        nn.init.normal_(parameter)
    return model


def test_a_detached_critic_moves_only_its_head(loaded):
    model = noisy(with_critic(loaded[0], detach=True))
    values = model(padded_batch(), temperature=1.0).values
    values.sum().backward()
    assert all(p.grad is None for p in model.lm.parameters())
    assert model.critic.head[-1].weight.grad.abs().sum() > 0


@pytest.mark.slow
def test_a_separate_critic_has_a_trunk_of_its_own(loaded):
    lm, tokenizer = loaded
    model = noisy(build_policy(lm, tokenizer, ModelConfig(), CriticConfig(kind="separate", head="linear"))[0])
    shared = ActorCritic(lm, Critic(model.critic.head))
    batch = padded_batch()
    values = model(batch, temperature=1.0).values
    torch.testing.assert_close(values, shared(batch, temperature=1.0).values)  # a copy says the same at first
    values.sum().backward()
    assert all(p.grad is None for p in lm.parameters())
    assert {id(p) for p in model.critic.parameters()}.isdisjoint({id(p) for p in lm.parameters()})
    model.zero_grad()
    model(batch, temperature=1.0, policy_loss=Unlikelihood()).policy_loss.backward()
    assert all(p.grad is None or p.grad.abs().sum() == 0 for p in model.critic.parameters())


@pytest.mark.slow
def test_gradient_checkpointing_changes_no_gradient(architecture, model_folders):
    gradients = []
    for checkpointing in (False, True):
        args = ModelConfig(name=str(model_folders[architecture]), gradient_checkpointing=checkpointing)
        model, _ = build_policy(*load_language_model(args), args, CriticConfig())
        model.train(checkpointing)
        model(padded_batch(), temperature=1.0, policy_loss=Unlikelihood()).policy_loss.backward()
        gradients.append([p.grad for p in model.lm.parameters()])
        marked = any(getattr(module, "gradient_checkpointing", False) for module in model.lm.modules())
        assert marked == checkpointing
    for without, with_checkpoints in zip(*gradients, strict=True):
        torch.testing.assert_close(without, with_checkpoints)


@pytest.mark.slow
def test_the_fast_attention_of_short_texts_is_as_near_to_float32_as_the_fused_kernel(loaded, monkeypatch):
    errors = torch.zeros(2)
    for seed in range(8):  # one draw of a head alone may favour either kernel by half
        torch.manual_seed(seed)
        model, gradients = noisy(with_critic(loaded[0])), []
        for half, short in ((False, 0), (True, 0), (True, actor_critic.SHORT)):
            monkeypatch.setattr(actor_critic, "SHORT", short)
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                now = model(padded_batch(), temperature=1.0, policy_loss=Unlikelihood())
            (now.policy_loss + now.values.sum()).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        exact, *halves = gradients
        errors += torch.stack([(half - exact).norm() for half in halves])
    fused, plain = errors
    assert 0 < plain < 1.5 * fused


def test_it_is_for_short_texts_in_bfloat16_with_gradients_and_without(loaded):
    trunk = trunk_of(loaded[0])
    short, long = torch.zeros(1, actor_critic.SHORT, dtype=torch.long), torch.zeros(1, actor_critic.SHORT + 1)
    fused = torch.backends.cuda.flash_sdp_enabled  # the flags are one for all devices
    with actor_critic.attention_for(trunk, short):
        assert fused()
    with torch.autocast("cpu", torch.bfloat16):
        with actor_critic.attention_for(trunk, short):
            assert not fused()
        with actor_critic.attention_for(trunk, long):
            assert fused()
        with torch.no_grad(), actor_critic.attention_for(trunk, short):
            assert not fused()


def test_dropout_is_off_even_in_training_mode(loaded):
    model = with_critic(loaded[0]).train()
    first, second = (model(padded_batch(), temperature=1.0).logprobs for _ in range(2))
    assert torch.equal(first, second)


def test_dropout_is_on_when_asked_for(model_folders):
    args = ModelConfig(name=str(model_folders["gpt2"]), dropout=True)
    model, notes = build_policy(*load_language_model(args), args, CriticConfig())
    first, second = (model.train()(padded_batch(), temperature=1.0).logprobs for _ in range(2))
    assert not torch.equal(first, second)
    assert notes == []


@pytest.mark.parametrize("rank", [0, 2])
def test_dropout_of_a_model_that_has_none_is_noted(rank):
    args = ModelConfig(dropout=True, lora=LoraConfig(rank=rank, dropout=rank / 4))
    (note,) = build_policy(*load_language_model(args), args, CriticConfig())[1]
    assert note == "model.dropout is true, which has no effect: the model has no dropout"


def test_an_orthogonal_head_has_gains_of_1_and_the_root_of_2():
    head = build_value_head("mlp", 8, "orthogonal")
    assert float(head[-1].weight.detach().norm()) == pytest.approx(1, rel=1e-4)
    torch.testing.assert_close(head[0].weight.T @ head[0].weight, 2 * torch.eye(8), atol=1e-5, rtol=1e-5)
