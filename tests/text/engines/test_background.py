"""Sampling in the background, with weights that change while tokens are drawn."""

import gc
import threading
import time
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from helpers.proofs import proofs
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.text.data.prompts import Prompts
from tokencredit.text.engines.background import BackgroundEngine, BackgroundSampler
from tokencredit.text.engines.continuous import ContinuousSampler, spared
from tokencredit.text.engines.request_engine import RequestEngine
from tokencredit.text.engines.requests import EngineFailure, Progress, Request
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.model_loading import load_language_model
from tokencredit.text.models.precision import Precision

LIMIT, ROWS = 40, 6
NO_END = SamplingConfig(max_new_tokens=LIMIT, stop_at_eos=False)


@pytest.fixture
def model(request, model_folders):
    family = getattr(request, "param", "llama")
    lm, _ = load_language_model(ModelConfig(name=str(model_folders[family])))
    return ActorCritic(lm).requires_grad_(False)


@pytest.fixture
def start(tokenizer):
    """Start samplers, which are closed at the end."""
    started = []

    def sampler(model, settings=NO_END, ends=(), rows=ROWS):
        started.append(BackgroundSampler(model, tokenizer, list(ends), settings, rows, 64))
        return started[-1]

    yield sampler
    for each in started:
        each.close()


def requests(seed=0):
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(60, 2000, (4 + row,), generator=generator).tolist() for row in range(ROWS)]
    return [Request(prompt, LIMIT, 0, row) for row, prompt in enumerate(prompts)]


def logprobs_of(lm, prompt, ids):
    """Log-probs of tokens after a prompt, by a forward pass."""
    logits = lm(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None]).squeeze(-1)


def sample_while(sampler, model, settings=NO_END, syncs=2):
    """Sample, and change the weights in between; returns the completions and the weights of each version."""
    done, weights = {}, [deepcopy(model.lm)]
    sampler.lm.register_forward_pre_hook(lambda *_: time.sleep(0.01))  # slower than a look at new tokens
    asked = requests()
    thread = threading.Thread(target=sampler.complete, args=(asked, settings, done.__setitem__))
    thread.start()
    generator = torch.Generator().manual_seed(1)
    for number in range(1, syncs + 1):
        while (
            len(done) < ROWS
            and min((len(f.progress.ids) for f in list(sampler.flights.values())), default=0) < 8 * number
        ):
            time.sleep(0.001)
        for parameter in model.lm.parameters():
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
        sampler.sync(model)
        weights.append(deepcopy(model.lm))
    thread.join()
    return [(request.tokens, done[row]) for row, request in enumerate(asked)], weights


def test_draws_neither_depend_on_the_global_generator_nor_change_it(model, start):
    """Gradient checkpointing, in the trainer's thread, sets it back to where it was."""
    sampler, done = start(model, flat := replace(NO_END, temperature=100.0)), {}
    sampler.lm.register_forward_pre_hook(lambda *_: torch.manual_seed(0) and None)
    sampler.complete(requests(), flat, done.__setitem__)
    again = [len(set(completion.ids)) < 0.9 * LIMIT for completion in done.values()]
    assert not any(again), "the same numbers at each step draw the same tokens"
    state = torch.manual_seed(0).get_state()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("model", ["llama", *proofs("gpt2")], indirect=True)
def test_each_token_has_the_log_prob_of_the_version_that_drew_it(model, start):
    completions, weights = sample_while(start(model), model)
    seen, apart = set(), []
    for prompt, done in completions:
        assert len(done.ids) == len(done.versions) == len(done.logprobs) == LIMIT
        assert done.versions == sorted(done.versions)
        for version in set(done.versions):
            expected = logprobs_of(weights[version], prompt, done.ids)
            at = torch.tensor(done.versions) == version
            torch.testing.assert_close(torch.tensor(done.logprobs)[at], expected[at], atol=1e-5, rtol=0)
            apart += (torch.tensor(done.logprobs) - expected)[at].abs().tolist()
        seen |= set(done.versions)
    assert seen == {0, 1, 2}
    assert sum(apart) / len(apart) < 1e-6


def test_calls_of_several_threads_share_the_batch(model, start):
    sampler = start(model)
    done = [{}, {}]
    threads = [
        threading.Thread(target=sampler.complete, args=(requests(seed), NO_END, done[seed].__setitem__))
        for seed in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, completions in enumerate(done):
        for row, request in enumerate(requests(seed)):
            now = logprobs_of(model.lm, request.tokens, completions[row].ids)
            torch.testing.assert_close(torch.tensor(completions[row].logprobs), now, atol=1e-5, rtol=0)


def test_completions_end_where_they_should_across_a_change_of_weights(model, start, tokenizer):
    stop = ["e", "a"]
    settings = SamplingConfig(max_new_tokens=LIMIT, stop_at_eos=False, stop=stop)
    completions, _ = sample_while(start(model, settings), model, settings, syncs=3)
    for _, done in completions:
        assert done.truncated == (not any(mark in tokenizer.decode(done.ids) for mark in stop))
        assert not any(mark in tokenizer.decode(done.ids[:-1]) for mark in stop)
    ends = list(range(100))
    settings = SamplingConfig(max_new_tokens=LIMIT)
    completions, _ = sample_while(start(model, settings, ends=ends), model, settings, syncs=1)
    for _, done in completions:
        assert done.truncated == (done.ids[-1] not in ends)
        assert not set(done.ids[:-1]) & set(ends)


def failure_of(call, *args, meanwhile=lambda: None):
    """The failure of a call, in a thread that may hang."""
    failures = []

    def run():
        try:
            call(*args)
        except EngineFailure as failure:
            failures.append(str(failure))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    meanwhile()
    thread.join(20)
    assert not thread.is_alive(), "the call never returns"
    return failures[0]


def test_a_closed_sampler_fails_requests_on_their_way_and_later_ones(model, start):
    sampler = start(model)

    def close():
        while not sampler.flights:
            time.sleep(0.001)
        sampler.close()

    running = failure_of(sampler.complete, requests(), NO_END, lambda *_: None, meanwhile=close)
    assert "thread has ended" in running
    assert "it was closed" in failure_of(sampler.complete, requests(), NO_END, lambda *_: None)


def test_a_sampler_whose_thread_has_ended_fails_requests_and_syncs(model, start):
    sampler = start(model)
    sampler.manager.stop(hard_stop=True)
    assert "thread has ended" in failure_of(sampler.sync, model)
    assert "thread has ended" in failure_of(sampler.complete, requests(), NO_END, lambda *_: None)


def test_the_cache_grows_for_a_request_that_does_not_fit(model, start):
    sampler = start(model, rows=1)
    sampler.lm.register_forward_pre_hook(lambda *_: time.sleep(0.01))
    short, long = requests()[0], Request([60 + i for i in range(80)], LIMIT, 0, 5)
    done = {}
    thread = threading.Thread(target=sampler.complete, args=([short], NO_END, done.__setitem__), daemon=True)
    thread.start()
    while min((len(flight.progress.ids) for flight in list(sampler.flights.values())), default=0) < 8:
        time.sleep(0.001)
    sampler.complete([long], NO_END, lambda _, completion: done.__setitem__(1, completion))
    thread.join(60)
    for number, request in enumerate((short, long)):
        assert len(done[number].ids) == len(done[number].versions) == LIMIT
        expected = logprobs_of(model.lm, request.tokens, done[number].ids)
        torch.testing.assert_close(torch.tensor(done[number].logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_objects_that_the_user_has_frozen_stay_so():
    theirs = [[]]
    gc.freeze()
    try:
        with spared():
            pass
        # Frozen objects are not among those that a collection looks at.
        assert not any(one is theirs for one in gc.get_objects())
    finally:
        gc.unfreeze()
    with spared():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    assert any(one is theirs for one in gc.get_objects())


def test_a_conversation_carries_the_versions_of_its_turns(model, start, tokenizer):
    settings = SamplingConfig(max_new_tokens=LIMIT, stop_at_eos=False)
    sampler = start(model, settings)
    precision = Precision("float32", torch.device("cpu"))
    engine = BackgroundEngine(model, tokenizer, [0], precision, sampler=sampler)
    prompts = Prompts(["This movie was really", "A film"], tokenizer).batch(0, 2)
    conversation = engine.converse(prompts, settings, torch.rand(2, LIMIT))
    conversation.sample([0, 1], [[], []], [5, 5], lambda _: None)
    sampler.sync(model)
    conversation.sample([1], [[70, 71]], [4], lambda _: None)
    rollout = conversation.rollout()
    assert rollout.versions[0].tolist() == [0] * 5 + [-1] * 6
    assert rollout.versions[1].tolist() == [0] * 5 + [-1] * 2 + [1] * 4
    assert torch.equal(rollout.mask, rollout.versions >= 0)
    now = ContinuousSampler(model, tokenizer, [0])
    exact = RequestEngine(model, tokenizer, [0], precision, sampler=now).exact(rollout, settings)
    torch.testing.assert_close(exact.logprobs[rollout.mask], exact.behavior_logprobs[rollout.mask], atol=1e-5, rtol=0)


def test_an_error_in_reading_tokens_fails_the_requests(model, start, monkeypatch):
    sampler = start(model)
    monkeypatch.setattr(Progress, "take", lambda *_: 1 / 0)
    with pytest.raises(EngineFailure, match="could not be read: ZeroDivisionError"):
        sampler.complete(requests(), NO_END, lambda *_: None)
