import pytest
import torch

from tokencredit.settings.model import ModelConfig
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.text.data.prompts import Prompts
from tokencredit.text.engines.local.local_engine import LocalEngine
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.architecture import width
from tokencredit.text.models.critic import Critic, build_value_head
from tokencredit.text.models.model_loading import load_language_model
from tokencredit.text.models.precision import Precision

ENDS = range(60)


@pytest.fixture
def model(architecture, model_folders):
    lm, _ = load_language_model(ModelConfig(name=str(model_folders[architecture])))
    model = ActorCritic(lm, Critic(build_value_head("linear", width(lm))))
    torch.nn.init.normal_(model.critic.head[-1].weight)
    return model


def begin(model, tokenizer, rows=5, limit=60, **settings):
    prompts = Prompts(["This movie was really", "A film", "I did not think that the second act"], tokenizer)
    uniforms = torch.rand(rows, limit, generator=torch.Generator().manual_seed(0))
    settings = SamplingConfig(**{"temperature": 0.8, "max_new_tokens": limit} | settings)
    engine = LocalEngine(model, tokenizer, list(ENDS), Precision("float32", torch.device("cpu")))
    return engine.converse(prompts.batch(0, rows), settings, uniforms)


def play(conversation, rows, turns=4, limit=6):
    """Turns in varying groups of rows, with observations of 0 to 9 tokens; returns the order in which turns ended."""
    ended = []
    conversation.sample(rows, [[]] * len(rows), [limit] * len(rows), ended.append)
    for turn in range(1, turns):
        for group in (rows[turn % 2 :: 2], rows[(turn + 1) % 2 :: 2]):
            observations = [
                [70 + (3 * turn + row + place) % 50 for place in range((4 * row + turn) % 10)] for row in group
            ]
            conversation.sample(group, observations, [limit] * len(group), ended.append)
    return ended


def test_turns_equal_a_full_pass_over_the_whole_text(model, tokenizer):
    conversation = begin(model, tokenizer)
    ended = play(conversation, list(range(5)))
    rollout = conversation.rollout()
    assert sorted(ended) == sorted([*range(5)] * 4)
    assert (rollout.turn_ends.sum(1) == 4).all()
    assert not (rollout.turn_ends & ~rollout.mask).any()
    assert (~rollout.mask[:, : int(rollout.response_lengths().min())]).any(), "there are observations"
    with torch.no_grad():
        now = model(rollout.inputs(), temperature=0.8)
    mask = rollout.mask
    torch.testing.assert_close(rollout.logprobs[mask], now.logprobs[mask], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rollout.values[mask], now.values[mask], atol=1e-4, rtol=1e-4)
    assert (rollout.logprobs[~mask] == 0).all()


def test_behavior_logprobs_of_turns_are_those_of_the_tokens_that_a_filter_leaves(model, tokenizer):
    conversation = begin(model, tokenizer, top_k=3)
    play(conversation, list(range(5)))
    rollout = conversation.rollout()
    with torch.no_grad():
        p = (model.logits(model.response_hidden(rollout.inputs())) / 0.8).softmax(-1)
    mask = rollout.mask
    expected = rollout.logprobs - p.topk(3).values.sum(-1).log()
    torch.testing.assert_close(rollout.behavior_logprobs[mask], expected[mask], atol=1e-4, rtol=1e-4)
    assert (~mask).any(), "there are observations"
    assert (rollout.behavior_logprobs[~mask] == 0).all()


def test_a_row_that_has_ended_keeps_no_cache(model, tokenizer):
    conversation = begin(model, tokenizer)
    play(conversation, [0, 1, 2, 3, 4], turns=2)
    kept = set(conversation._kept)
    conversation.end(1)
    conversation.end(3)
    assert set(conversation._kept) == kept - {1, 3}
    conversation.sample([0, 2, 4], [[5], [6], [7]], [3] * 3, lambda _: None)
    rollout = conversation.rollout()
    with torch.no_grad():
        now = model(rollout.inputs(), temperature=0.8)
    torch.testing.assert_close(rollout.logprobs[rollout.mask], now.logprobs[rollout.mask], atol=1e-4, rtol=1e-4)
