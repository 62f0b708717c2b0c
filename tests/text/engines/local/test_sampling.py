from dataclasses import replace

import pytest
import torch

from tokencredit.settings.model import ModelConfig
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.text.data.prompts import Prompts
from tokencredit.text.engines.local.sampling import draw, sample
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.architecture import width
from tokencredit.text.models.critic import Critic, build_value_head
from tokencredit.text.models.model_loading import load_language_model


@pytest.fixture
def model(architecture, model_folders):
    lm, _ = load_language_model(ModelConfig(name=str(model_folders[architecture])))
    model = ActorCritic(lm, Critic(build_value_head("linear", width(lm))))
    torch.nn.init.normal_(model.critic.head[-1].weight)
    return model


def prompts(tokenizer, size=12):
    texts = ["This movie was really", "A film", "I did not think that the second act"]
    return Prompts(texts, tokenizer).batch(0, size)


def roll(model, tokenizer, uniforms, ends=None, **settings):
    ends = range(0, 120) if ends is None else ends  # a random model would hardly ever say the one real end
    settings = SamplingConfig(**{"temperature": 0.8} | settings)
    return sample(model, prompts(tokenizer, len(uniforms)), uniforms, settings, tokenizer, ends)


def uniforms(rows=12, time=10, seed=0):
    return torch.rand(rows, time, generator=torch.Generator().manual_seed(seed))


def test_a_cached_rollout_equals_a_full_pass(model, tokenizer):
    rollout = roll(model, tokenizer, uniforms())
    assert 0 < rollout.truncated.sum() < len(rollout.truncated), "some rows end early and some do not"
    with torch.no_grad():
        now = model(rollout.inputs(), temperature=0.8)
    mask = rollout.mask
    torch.testing.assert_close(rollout.logprobs[mask], now.logprobs[mask], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rollout.values[mask], now.values[mask], atol=1e-4, rtol=1e-4)


def test_a_prompt_prefilled_once_for_several_rows_gives_the_same_completions(model, tokenizer):
    batch = prompts(tokenizer)
    batch = replace(batch, **{name: getattr(batch, name)[:3].repeat_interleave(4, dim=0) for name in ("ids", "mask")})
    settings, ends = SamplingConfig(temperature=0.8, max_new_tokens=10), range(0, 60)
    apart, together = (sample(model, batch, uniforms(), settings, tokenizer, ends, per_prompt) for per_prompt in (1, 4))
    assert torch.equal(apart.response_ids, together.response_ids)
    torch.testing.assert_close(apart.logprobs, together.logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(apart.values, together.values, atol=1e-5, rtol=1e-5)


def test_the_mask_covers_the_tokens_up_to_the_first_end_token(model, tokenizer):
    rollout = roll(model, tokenizer, uniforms())
    for ids, mask, truncated in zip(rollout.response_ids, rollout.mask, rollout.truncated, strict=True):
        drawn = ids[mask].tolist()
        assert mask.tolist() == [True] * len(drawn) + [False] * (len(mask) - len(drawn)), "no gaps"
        assert all(token >= 120 for token in drawn[:-1]), "nothing after an end"
        assert truncated == (drawn[-1] >= 120)
    assert (rollout.logprobs[~rollout.mask] == 0).all()


def test_a_row_depends_on_its_own_numbers_alone(model, tokenizer):
    whole = roll(model, tokenizer, uniforms())
    batch = prompts(tokenizer)
    for part in (slice(0, 5), slice(5, 12)):
        settings = SamplingConfig(temperature=0.8)
        rows = replace(batch, ids=batch.ids[part], mask=batch.mask[part])
        alone = sample(model, rows, uniforms()[part], settings, tokenizer, range(120))
        time = alone.mask.shape[1]
        assert torch.equal(alone.mask, whole.mask[part, :time])
        assert torch.equal(alone.response_ids[alone.mask], whole.response_ids[part, :time][alone.mask])


def test_time_is_no_longer_than_the_longest_completion(model, tokenizer):
    rollout = roll(model, tokenizer, uniforms(time=30), ends=range(0, 900))
    assert rollout.mask.shape[1] == rollout.mask.sum(1).max() < 30


def test_tokens_come_as_often_as_their_probability():
    probabilities = torch.tensor([0.5, 0.0, 0.25, 0.125, 0.125])
    count = 40_000
    numbers = torch.rand(count, generator=torch.Generator().manual_seed(0))
    drawn = draw(probabilities.log().expand(count, -1), numbers).bincount(minlength=5) / count
    deviation = (probabilities * (1 - probabilities) / count).sqrt()
    assert ((drawn - probabilities).abs() <= 4 * deviation).all()
    assert drawn[1] == 0


def test_draws_at_the_edges():
    log = torch.tensor([[0.25, 0.75]]).log().repeat(3, 1)
    assert draw(log, torch.tensor([0.0, 0.25, 1 - 2**-24])).tolist() == [0, 1, 1]
    assert draw(torch.tensor([[0.0, -torch.inf]]), torch.tensor([1 - 2**-24])).tolist() == [0]


def test_temperature_sharpens(model, tokenizer):
    cold = roll(model, tokenizer, uniforms(), temperature=0.001)
    assert cold.logprobs[cold.mask].mean() > -0.1


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"min_new_tokens": 2}])
def test_with_filters_the_entropy_of_the_whole_distribution_is_kept(filters, model, tokenizer):
    rollout = roll(model, tokenizer, uniforms(rows=6, time=6), **filters)
    with torch.no_grad():
        now = model(rollout.inputs(), temperature=0.8, entropy=True)
    torch.testing.assert_close(rollout.entropy, now.stats.entropy * rollout.mask, atol=1e-4, rtol=1e-4)
    assert (rollout.entropy[rollout.mask] > 0).all()


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"min_new_tokens": 4}])
def test_behavior_logprobs_are_those_of_the_tokens_that_the_filters_leave(filters, model, tokenizer):
    rollout = roll(model, tokenizer, uniforms(rows=6, time=6), **filters)
    with torch.no_grad():
        p = (model.logits(model.response_hidden(rollout.inputs())) / 0.8).softmax(-1)
    descending, order = p.sort(-1, descending=True)
    if "top_k" in filters:
        kept = descending >= descending[..., 2:3]
    elif "top_p" in filters:
        kept = descending.cumsum(-1) - descending < 0.5  # up to the token with which the sum reaches top_p
    elif "min_p" in filters:
        kept = descending >= 0.3 * descending[..., :1]
    else:
        early = torch.arange(p.shape[1])[:, None] < 4
        kept = ~(early & (order < 120))
    left = torch.zeros_like(p).scatter(-1, order, descending * kept)
    drawn = (left / left.sum(-1, keepdim=True)).gather(-1, rollout.response_ids.unsqueeze(-1)).squeeze(-1)
    mask = rollout.mask
    torch.testing.assert_close(rollout.behavior_logprobs[mask], drawn[mask].log(), atol=1e-4, rtol=1e-4)
    whole = p.gather(-1, rollout.response_ids.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(rollout.logprobs[mask], whole[mask].log(), atol=1e-4, rtol=1e-4)
    assert (rollout.behavior_logprobs[~mask] == 0).all()
    assert (rollout.behavior_logprobs > rollout.logprobs + 1e-3).any(), "something was left out"
    torch.testing.assert_close(rollout.head(2).behavior_logprobs, rollout.behavior_logprobs[:2])


@pytest.mark.parametrize("settings", [{}, {"top_p": 1.0}, {"stop": ["e"]}])
def test_without_filters_a_token_is_drawn_with_its_own_logprob(settings, model, tokenizer):
    rollout = roll(model, tokenizer, uniforms(rows=2, time=4), **settings)
    assert rollout.behavior_logprobs is None
    assert rollout.entropy is None, "samples estimate it"


def test_no_completion_ends_before_its_least_length(model, tokenizer):
    rollout = roll(model, tokenizer, uniforms(), min_new_tokens=4)
    assert rollout.mask.sum(1).min() >= 5
    assert (rollout.response_ids[:, :4] >= 120).all()


def test_without_an_end_of_sequence_all_are_full_length(model, tokenizer):
    rollout = roll(model, tokenizer, uniforms(), stop_at_eos=False)
    assert rollout.mask.all()
    assert rollout.truncated.all()
    assert (rollout.response_ids < 120).any()


def test_a_text_can_end_a_completion(model, tokenizer):
    rollout = roll(model, tokenizer, uniforms(rows=24, time=12), ends=[1], stop=["e", "o"])
    texts = [tokenizer.decode(ids[mask]) for ids, mask in zip(rollout.response_ids, rollout.mask, strict=True)]
    for text, mask, ids, cut in zip(texts, rollout.mask, rollout.response_ids, rollout.truncated, strict=True):
        before = tokenizer.decode(ids[: int(mask.sum()) - 1])
        assert not any(stop in before for stop in "eo")
        assert any(stop in text for stop in "eo") != bool(cut)
