import pytest
import torch
from torch import nn

from tokencredit.text.models.critic import Critic, Ensemble, build_value_head
from tokencredit.tools.inspect.lens import critic_lens, logit_lens
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


def test_an_ensemble_is_averaged(gpt2, ids, head):
    members = [Critic(head, parts.trunk) for parts in gpt2]
    each = torch.stack([critic_lens(member, gpt2[0].trunk, ids) for member in members])
    assert torch.allclose(critic_lens(Ensemble(members), gpt2[0].trunk, ids), each.mean(0))
