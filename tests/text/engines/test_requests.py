"""The engine of requests, with Transformers' continuous batching as its sampler."""

import random
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch

from helpers import engines
from helpers.engines import ENDS, TEXTS, assert_equal_logprobs, changed
from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError, EngineLost, RunStopped
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.text.data.prompts import Prompts
from tokencredit.text.engines.continuous import ContinuousSampler
from tokencredit.text.engines.local.sampling import logits_warpers
from tokencredit.text.engines.request_engine import RequestEngine
from tokencredit.text.engines.requests import EngineFailure, Request
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.architecture import width
from tokencredit.text.models.critic import Critic, build_value_head
from tokencredit.text.models.model_loading import load_language_model
from tokencredit.text.models.precision import Precision

generate = partial(engines.generate, limit=10)


@pytest.fixture
def model(model_folders):
    lm, _ = load_language_model(ModelConfig(name=str(model_folders["llama"])))
    model = ActorCritic(lm, Critic(build_value_head("linear", width(lm)))).requires_grad_(False)
    torch.nn.init.normal_(model.critic.head[-1].weight)
    return model


def engine_of(model, tokenizer, sampler=None, ends=ENDS):
    sampler = sampler or ContinuousSampler(model, tokenizer, ends)
    return RequestEngine(
        model, tokenizer, ends, Precision("float32", torch.device("cpu")), sampler=sampler, report=lambda _: 0
    )


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_its_log_probs_are_those_of_a_full_pass(name, model_folders, tokenizer):
    lm, _ = load_language_model(ModelConfig(name=str(model_folders[name])))
    model = ActorCritic(lm)
    attention = lm.config._attn_implementation
    rollout = generate(engine_of(model, tokenizer))
    assert_equal_logprobs(rollout, model, atol=1e-5)
    assert_equal_logprobs(replace(rollout, behavior_logprobs=rollout.logprobs), model, atol=1e-5)
    assert lm.config._attn_implementation == attention


def test_completions_end_at_an_end_or_at_the_limit(model, tokenizer):
    rollout = generate(engine_of(model, tokenizer), rows=24)
    lengths = rollout.mask.sum(1)
    last = rollout.response_ids.gather(1, lengths[:, None] - 1).squeeze(1)
    assert torch.equal(rollout.truncated, ~torch.isin(last, torch.tensor(ENDS)))
    assert (lengths[rollout.truncated] == 10).all()
    assert 0 < rollout.truncated.sum() < 24
    before = rollout.response_ids[rollout.mask & (torch.arange(rollout.mask.shape[1]) < lengths[:, None] - 1)]
    assert not torch.isin(before, torch.tensor(ENDS)).any()
    assert rollout.values.shape == rollout.mask.shape
    assert rollout.turn_ends is None
    whole = generate(engine_of(model, tokenizer), stop_at_eos=False)
    assert whole.mask.all()
    assert whole.truncated.all()


def test_a_text_can_end_a_completion(model, tokenizer):
    stop = [chr(letter) for letter in range(ord("a"), ord("i"))]
    rollout = generate(engine_of(model, tokenizer), rows=24, stop=stop, stop_at_eos=False)
    texts = rollout.texts(tokenizer)
    ended = [any(mark in text for mark in stop) for text in texts]
    assert rollout.truncated.tolist() == [not end for end in ended]
    assert any(ended)
    for row, length in enumerate(rollout.response_lengths().tolist()):
        shorter = tokenizer.decode(rollout.response_ids[row, : length - 1])
        assert not any(mark in shorter for mark in stop)


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.8}])
def test_with_filters_the_draw_has_the_log_prob_of_the_filtered_distribution(filters, model, tokenizer, caplog):
    rollout = generate(engine_of(model, tokenizer), **filters)
    assert not caplog.records
    now = model(rollout.inputs(), temperature=0.7, entropy=True)
    ids = torch.cat([rollout.prompt_ids, rollout.response_ids], 1)
    mask = torch.cat([rollout.prompt_mask, rollout.mask], 1)
    logits = model.lm(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    logits = logits[:, rollout.prompt_ids.shape[1] - 1 : -1] / 0.7
    scores = logits.flatten(0, 1)
    for warper in logits_warpers(SamplingConfig(**filters)):
        scores = warper(ids, scores)
    filtered = scores.log_softmax(-1).view_as(logits).gather(-1, rollout.response_ids[..., None]).squeeze(-1)
    acted = rollout.mask
    torch.testing.assert_close(rollout.behavior_logprobs[acted], filtered[acted], atol=1e-4, rtol=0)
    torch.testing.assert_close(rollout.entropy[acted], now.stats.entropy[acted], atol=1e-5, rtol=0)
    assert (rollout.behavior_logprobs >= rollout.logprobs - 1e-5)[acted].all()


def test_tokens_come_as_often_as_their_probability(model, tokenizer):
    rows = 600
    prompts = Prompts(TEXTS[:1], tokenizer).batch(0, rows)
    uniforms = torch.rand(rows, 1, generator=torch.Generator().manual_seed(1))
    settings = SamplingConfig(temperature=0.6, max_new_tokens=1)
    rollout = engine_of(model, tokenizer).generate(prompts, settings, uniforms)
    probs = (model.lm(prompts.ids[:1]).logits[0, -1] / 0.6).softmax(-1)
    counts = torch.bincount(rollout.response_ids[:, 0], minlength=len(probs)).double()
    likely = probs > 0.01
    assert likely.sum() > 5
    deviations = (counts - rows * probs) / (rows * probs * (1 - probs)).sqrt()
    assert deviations[likely].abs().max() < 4


def test_started_completions_are_continued(model, tokenizer):
    started = [torch.tensor([70, 71]), torch.tensor([]).long(), torch.tensor([72])]
    rollout = generate(engine_of(model, tokenizer), rows=3, started=started)
    for row, tokens in enumerate(started):
        assert rollout.response_ids[row, : len(tokens)].tolist() == tokens.tolist()
    assert rollout.mask.sum(1).max() <= 10
    assert_equal_logprobs(replace(rollout, behavior_logprobs=rollout.logprobs), model, atol=1e-5)


def test_a_stop_string_may_begin_in_the_started_tokens(model, tokenizer):
    started = [torch.tensor([70]), torch.tensor([]).long(), torch.tensor([]).long()]
    prompts = Prompts(TEXTS, tokenizer).batch(0, 3)
    settings = SamplingConfig(temperature=1e-3, max_new_tokens=10, stop_at_eos=False)
    greedy = engine_of(model, tokenizer).generate(prompts, settings, torch.rand(3, 10), 1, started)
    stop = [tokenizer.decode(greedy.response_ids[0, :2])]
    assert len(stop[0]) > len(tokenizer.decode(greedy.response_ids[0, 1])), "it takes both tokens"
    engine = engine_of(model, tokenizer)
    stopped = engine.generate(prompts, replace(settings, stop=stop), torch.rand(3, 10), 1, started)
    assert stopped.response_lengths()[0] == 2
    assert not stopped.truncated[0]


def test_turns_equal_a_full_pass_over_the_whole_text(model, tokenizer):
    engine = engine_of(model, tokenizer)
    rows = list(range(4))
    uniforms = torch.rand(4, 40, generator=torch.Generator().manual_seed(0))
    settings = SamplingConfig(temperature=0.8, max_new_tokens=40)
    conversation = engine.converse(Prompts(TEXTS, tokenizer).batch(0, 4), settings, uniforms)
    ended = []
    conversation.sample(rows, [[]] * 4, [5] * 4, ended.append)
    turn, cut = conversation.turn(2)
    assert 1 <= len(turn) <= 5
    assert cut == (turn[-1] not in ENDS)
    conversation.sample([2, 0], [[70, 71, 72], [73]], [4, 6], ended.append)
    conversation.sample(rows[1:], [[74]] * 3, [5] * 3, ended.append)
    assert sorted(ended) == [0, 0, 1, 1, 2, 2, 2, 3, 3]
    rollout = conversation.rollout()
    now = model(rollout.inputs(), temperature=0.8)
    mask = rollout.mask
    torch.testing.assert_close(rollout.behavior_logprobs[mask], now.logprobs[mask], atol=1e-5, rtol=0)
    torch.testing.assert_close(rollout.values[mask], now.values[mask], atol=1e-4, rtol=1e-4)
    assert (~mask).sum(1)[2] >= 4, "two observations"
    assert rollout.turn_ends.sum(1).tolist() == [2, 2, 3, 2]
    assert not (rollout.turn_ends & ~mask).any()
    assert (
        rollout.response_ids[2, : conversation.left(2) * -1 + 40].tolist()
        == conversation.tokens(2)[-40 + conversation.left(2) :]
    )


class OwnWeights(ContinuousSampler):
    """A sampler with a copy of the weights, as an engine elsewhere has, and a sync that can be broken."""

    shares_weights = False

    def __init__(self, model, tokenizer):
        super().__init__(ActorCritic(deepcopy(model.lm)), tokenizer, ENDS)
        self.broken = None
        self.seen, self.stale = set(), None

    def complete(self, requests, settings, ended):
        for number, request in enumerate(requests):
            old = self.stale is not None and tuple(request.tokens) in self.seen
            one = ContinuousSampler(self.stale if old else self.policy, self.tokenizer, ENDS)
            one.complete([request], settings, lambda _, done, number=number: ended(number, done))
        self.seen |= {tuple(request.tokens) for request in requests}

    def sync(self, policy):
        weights = policy.lm.state_dict()
        if self.broken == "prefix cache":
            self.stale = deepcopy(self.policy)
        if self.broken == "skipped":
            return
        if self.broken == "half":
            weights = dict(list(weights.items())[::2])
        if self.broken == "dtype":
            weights = {name: x.bfloat16().float() for name, x in weights.items()}
        self.policy.lm.load_state_dict(weights, strict=False)


def test_a_probe_fits_into_a_sampler_that_takes_less_than_the_model(model, tokenizer):
    sampler = OwnWeights(model, tokenizer)
    sampler.longest = 64
    engine = engine_of(model, tokenizer, sampler)
    engine.weights_changed()
    assert engine.probe.rollout.prompt_ids.shape[1] == 56


def test_a_probe_is_longer_than_rows_that_a_small_budget_limits(model, tokenizer):
    engine = engine_of(model, tokenizer, OwnWeights(model, tokenizer))
    engine.budget = 8
    engine.weights_changed()
    assert engine.probe.rollout.prompt_ids.shape[1] == 56


@pytest.mark.parametrize(
    ("broken", "size", "cause"),
    [
        pytest.param("skipped", 0.05, "the sync changed nothing", marks=pytest.mark.proof),
        ("skipped", 1e-5, "the sync changed nothing"),
        ("half", 0.05, "some weights did not arrive"),
        ("dtype", 0.05, "in fewer bits|did not arrive"),
        ("prefix cache", 0.05, "only texts that it has seen before differ"),
    ],
)
def test_a_sync_that_failed_is_found(broken, size, cause, model, tokenizer):
    engine = engine_of(model, tokenizer, OwnWeights(model, tokenizer))
    engine.weights_changed()
    changed(model, size)
    engine.weights_changed()
    changed(model, size)
    engine.sampler.broken = broken
    with pytest.raises(RunStopped, match=rf"engine continuous are not the policy's .*{cause}.*Nothing was learned"):
        engine.weights_changed()


def test_weights_that_change_after_a_sync_are_found_in_the_rollout(model, tokenizer):
    engine = engine_of(model, tokenizer, OwnWeights(model, tokenizer))
    engine.weights_changed()
    generate(engine, rows=4, started=[torch.tensor([70, 71])] * 4)
    changed(engine.sampler.policy, 0.05)
    with pytest.raises(RunStopped, match=r"engine continuous are not the policy's in a rollout.*Nothing was learned"):
        generate(engine, rows=4)
    generate(engine, rows=4, top_k=5)  # filters change the log-probs too


def test_syncs_without_a_change_are_no_failure(model, tokenizer):
    engine = engine_of(model, tokenizer, OwnWeights(model, tokenizer))
    for _ in range(2):
        engine.weights_changed()
    changed(model, 1e-9)
    engine.weights_changed()


class Failing(ContinuousSampler):
    """Fails after the first completion, `failures` times."""

    shares_weights = False

    def __init__(self, model, tokenizer, failures):
        super().__init__(model, tokenizer, ENDS)
        self.failures, self.asked = failures, []

    def complete(self, requests, settings, ended):
        self.asked.append(len(requests))
        if self.failures and settings.max_new_tokens == 10:
            self.failures -= 1
            super().complete(requests[:1], settings, ended)
            raise EngineFailure("the connection was lost")
        super().complete(requests, settings, ended)


def test_after_a_failure_the_rest_is_asked_for_again(model, tokenizer):
    events = []
    engine = engine_of(model, tokenizer, Failing(model, tokenizer, 1))
    engine.report = events.append
    rollout = generate(engine)
    assert engine.sampler.asked == [12, 4, 11], "the probe of another sync is between them"
    assert events == ["rollout.engine continuous failed, and is asked again: the connection was lost"]
    assert_equal_logprobs(rollout, model, atol=1e-5)


def test_a_second_failure_ends_the_run(model, tokenizer):
    engine = engine_of(model, tokenizer, Failing(model, tokenizer, 2))
    with pytest.raises(RunStopped, match=r"failed twice in a row: the connection was lost; .* rollout\.engine: local"):
        generate(engine)


@pytest.mark.parametrize("in_step", ["passes", "syncs"])
def test_one_of_several_processes_that_sync_in_step_does_not_sync_again_alone(in_step, model, tokenizer):
    engine = engine_of(model, tokenizer, Failing(model, tokenizer, 1))
    if in_step == "passes":
        engine.in_step = Processes()
    engine.sampler.syncs_in_step = in_step == "syncs"
    generate(engine)
    assert engine.sampler.asked == [12, 11], "no probe of another sync"


class Dead(Failing):
    """Never answers."""

    def complete(self, requests, settings, ended):
        self.asked.append(len(requests))
        raise EngineFailure("the connection was lost")


def test_an_engine_that_never_answers_ends_the_run(model, tokenizer):
    engine = engine_of(model, tokenizer, Dead(model, tokenizer, 0))
    with pytest.raises(EngineLost, match="engine continuous failed: the connection was lost"):
        engine.weights_changed()
    assert engine.sampler.asked == [4], "a probe is tried once"
    with pytest.raises(EngineLost, match="engine continuous failed: the connection was lost"):
        generate(engine)
    assert engine.sampler.asked == [4, 4], "it is synced before it is asked again"
    engine.lost = False
    with pytest.raises(EngineLost, match="engine continuous failed: the connection was lost"):
        generate(engine)
    assert engine.sampler.asked == [4, 4, 12, 4]


class Unsynced(Failing):
    """Takes over no weights, `failures` times."""

    def sync(self, policy):
        if self.failures:
            self.failures -= 1
            raise EngineFailure("no connection")


def test_a_sync_that_failed_is_tried_again(model, tokenizer):
    engine = engine_of(model, tokenizer, Unsynced(model, tokenizer, 0))
    engine.weights_changed()
    engine.sampler.failures = 1
    with pytest.raises(EngineLost, match="could not take over the policy's weights: no connection"):
        engine.weights_changed()
    assert engine.lost
    engine.recover()
    assert not engine.lost
    probe = engine.probe
    engine.recover()
    assert engine.probe is probe, "nothing to do"
    first = engine_of(model, tokenizer, Unsynced(model, tokenizer, 1))
    with pytest.raises(RunStopped, match="no connection") as raised:
        first.weights_changed()
    assert not isinstance(raised.value, EngineLost), "an engine that never worked is not started again"


def test_user_code_that_draws_while_completions_end_never_draws_the_same_numbers(model, tokenizer):
    engine, drawn = engine_of(model, tokenizer), []
    requests = [Request([100 + row], 4, 0, row) for row in range(6)]
    for _ in range(2):
        engine.complete(requests, SamplingConfig(), lambda *_: drawn.append((random.random(), torch.rand(()).item())))
    assert len(set(drawn)) == 12


def test_the_random_numbers_of_the_process_stay_as_they_were(model, tokenizer):
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    generate(engine_of(model, tokenizer))
    assert torch.equal(torch.rand(3), expected)


def test_a_least_length_is_refused():
    with pytest.raises(ConfigError, match=r"rollout\.min_new_tokens is 2"):
        PPOConfig.from_dict({"rollout.engine": "continuous", "rollout.min_new_tokens": 2})
