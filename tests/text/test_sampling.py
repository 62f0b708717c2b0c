import pytest
import torch

from tokencredit.text.models import ActorCritic, load_language_model
from tokencredit.text.prompts import Prompts
from tokencredit.text.sampling import draw, sample


@pytest.fixture(params=["gpt2", "llama"])
def model(request, model_folders):
    lm, _ = load_language_model(str(model_folders[request.param]))
    model = ActorCritic(lm)
    torch.nn.init.normal_(model.value_head.weight)
    return model


def prompts(tokenizer, size=12):
    return Prompts(["This movie was really", "A film", "I did not think that the second act"], tokenizer).batch(
        0, size
    )[1:]


def roll(model, tokenizer, uniforms, ends=None, temperature=0.8):
    ids, mask = prompts(tokenizer, len(uniforms))
    ends = range(0, 300) if ends is None else ends  # a random model would hardly ever say the one real end
    return sample(model, ids, mask, uniforms, temperature=temperature, end_ids=ends)


def uniforms(rows=12, time=10, seed=0):
    return torch.rand(rows, time, generator=torch.Generator().manual_seed(seed))


def test_a_cached_rollout_equals_a_full_pass(model, tokenizer):
    rollout = roll(model, tokenizer, uniforms())
    assert 0 < rollout.truncated.sum() < len(rollout.truncated), "some rows end early and some do not"
    with torch.no_grad():
        logprobs, values, *_ = model(**rollout.inputs(), temperature=0.8)
    mask = rollout.mask
    torch.testing.assert_close(rollout.logprobs[mask], logprobs[mask], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rollout.values[mask], values[mask], atol=1e-4, rtol=1e-4)


def test_the_mask_ends_with_the_end(model, tokenizer):
    rollout = roll(model, tokenizer, uniforms())
    for ids, mask, truncated in zip(rollout.response_ids, rollout.mask, rollout.truncated, strict=True):
        said = ids[mask].tolist()
        assert mask.tolist() == [True] * len(said) + [False] * (len(mask) - len(said)), "no gaps"
        assert all(token >= 300 for token in said[:-1]), "nothing after an end"
        assert truncated == (said[-1] >= 300)
    assert (rollout.logprobs[~rollout.mask] == 0).all()


def test_a_row_depends_on_its_own_numbers_alone(model, tokenizer):
    whole = roll(model, tokenizer, uniforms())
    ids, mask = prompts(tokenizer)
    for part in (slice(0, 5), slice(5, 12)):
        alone = sample(model, ids[part], mask[part], uniforms()[part], temperature=0.8, end_ids=range(300))
        width = alone.mask.shape[1]
        assert torch.equal(alone.mask, whole.mask[part, :width])
        assert torch.equal(alone.response_ids[alone.mask], whole.response_ids[part, :width][alone.mask])


def test_time_is_no_longer_than_the_longest_completion(model, tokenizer):
    rollout = roll(model, tokenizer, uniforms(time=30), ends=range(0, 900))
    assert rollout.mask.shape[1] == rollout.mask.sum(1).max() < 30


def test_texts_leave_special_tokens_out(model, tokenizer):
    rollout = roll(model, tokenizer, uniforms(), ends=[tokenizer.eos_token_id])
    rollout.response_ids[:, -1] = tokenizer.eos_token_id
    assert all(tokenizer.eos_token not in text for text in rollout.texts(tokenizer))


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
    cold = roll(model, tokenizer, uniforms(), temperature=0.01)
    assert cold.logprobs[cold.mask].mean() > -0.1
