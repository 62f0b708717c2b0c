import pytest
import torch
from torch import nn

from tokencredit.text.models.critic import Critic, build_value_head
from tokencredit.tools.inspect.lens import attention_from, critic_lens, input_gradient, logit_lens
from tokencredit.tools.inspect.question import Question
from tokencredit.tools.inspect.recording import record

POSITIONS = [3, 4, 10]


@pytest.fixture
def head():
    torch.manual_seed(1)
    return build_value_head("linear", 32, "default")


def read(models, ids):
    return logit_lens(models, tuple(record("it", parts, ids) for parts in models), POSITIONS, ids)


def test_the_last_layer_is_the_model(models, ids):
    lens = read(models, ids)
    base, tuned = (x.lm(input_ids=ids[None]).logits[0, POSITIONS].log_softmax(-1) for x in models)
    following = ids[torch.tensor(POSITIONS) + 1]
    for side, logprobs in enumerate((base, tuned)):
        probability = logprobs[range(3), following].exp()
        assert torch.allclose(lens.probabilities[side][-1], probability, atol=1e-4)
        assert lens.tokens[side][-1].tolist() == logprobs.argmax(-1).tolist()
        order = logprobs.argsort(descending=True).tolist()
        ranks = [row.index(token) + 1 for row, token in zip(order, following.tolist(), strict=True)]
        assert lens.ranks[side][-1].tolist() == ranks
    assert torch.allclose(lens.kl[-1], (tuned.exp() * (tuned - base)).sum(-1), atol=1e-4)


def test_one_row_per_layer_and_the_embedding(models, ids):
    lens, parts = read(models, ids), models[0]
    assert all(x.shape == (3, 3) for pair in lens[:3] for x in pair)
    embedded = parts.logprobs(parts.norm(record("it", parts, ids).embedding))
    assert lens.tokens[0][0].tolist() == embedded[POSITIONS].argmax(-1).tolist()


def test_a_model_and_itself_have_no_kl(models, ids):
    assert read((models[0], models[0]), ids).kl.abs().max() == 0


def test_a_critic_of_the_last_states(models, ids, head):
    trunk = models[0].trunk
    values = critic_lens(Critic(head), trunk, ids)
    assert values.shape == (3, 12)
    assert torch.allclose(values[-1], head(trunk(input_ids=ids[None]).last_hidden_state)[0, :, 0], atol=1e-5)


def test_a_critic_of_an_inner_layer_reads_as_it_was_trained(models, ids, head):
    parts = models[0]
    states = record("it", parts, ids).states
    values = critic_lens(Critic(head, tap=1), parts.trunk, ids)
    for row, x in zip(values[1:], states, strict=True):
        assert torch.allclose(row, head(nn.functional.layer_norm(x, (32,)))[:, 0], atol=1e-4)


def test_a_separate_critic_reads_its_own_trunk(models, ids, head):
    base, tuned = models
    assert torch.equal(
        critic_lens(Critic(head, tuned.trunk), base.trunk, ids), critic_lens(Critic(head), tuned.trunk, ids)
    )


QUESTION = Question(9, torch.tensor([5, 6]), torch.tensor([9]), "")


def test_attention_is_a_distribution_over_the_past(models, ids):
    weights = attention_from(models[0], ids, 6)
    assert weights.shape == (2, 4, 7)
    assert torch.allclose(weights.sum(-1), torch.ones(2, 4), atol=1e-5)
    assert models[0].lm.config._attn_implementation == "sdpa"


def test_attention_is_that_of_transformers(gpt2, ids):
    parts = gpt2[0]
    weights = attention_from(parts, ids, 6)
    parts.lm.set_attn_implementation("eager")
    theirs = parts.lm(input_ids=ids[None], output_attentions=True).attentions
    for mine, expected in zip(weights, theirs, strict=True):
        assert torch.allclose(mine, expected[0, :, 6, :7], atol=1e-6)


def test_attention_that_is_not_returned_is_none(gpt2, ids):
    parts = gpt2[0]
    parts.layers[0].attention.register_forward_hook(lambda _module, _args, output: (output[0], None), prepend=True)
    assert attention_from(parts, ids, 6) is None


def test_gradient_times_input_is_a_derivative(models, ids):
    """The derivative of the log-odds by a factor of one token's embedding, by finite differences."""
    parts, token, step = models[0], 4, 1e-2
    gradient = input_gradient(parts, ids, QUESTION)
    assert gradient.shape == (10,)

    def odds(factor):
        def scale(_module, _args, output):
            return torch.cat([output[:, :token], factor * output[:, token : token + 1], output[:, token + 1 :]], dim=1)

        hook = parts.lm.get_input_embeddings().register_forward_hook(scale)
        logits = parts.lm(input_ids=ids[None]).logits[0, 9]
        hook.remove()
        return float(logits[[5, 6]].mean() - logits[9])

    expected = (odds(1 + step) - odds(1 - step)) / (2 * step)
    assert float(gradient[token]) == pytest.approx(expected, rel=0.05, abs=5e-3)
