import pytest
import torch

from tokencredit.tools.inspect.attention import attention_from, input_gradient
from tokencredit.tools.inspect.question import Question

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
