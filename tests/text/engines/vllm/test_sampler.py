"""vLLM as a sampler: its log-probs and endings, syncs that fail, adapters, failures. `make test-vllm` runs them."""

import gc
import importlib
import os
import sys
import time
import warnings
from copy import deepcopy
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from helpers.engines import (
    BROKEN,
    CPU,
    ENDS,
    FAMILIES,
    LIMIT,
    TEXTS,
    assert_equal_logprobs,
    changed,
    generate,
    policy_of,
    with_first_weights,
)
from helpers.models import random_lm
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.learn.rng import random_state
from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.text.data.detokenizer import StopSearch
from tokencredit.text.data.prompts import Prompts
from tokencredit.text.engines.local.sampling import Decoding, logits_warpers
from tokencredit.text.engines.request_engine import RequestEngine
from tokencredit.text.engines.requests import EngineFailure, Request
from tokencredit.text.engines.vllm import sampler as vllm
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.model_loading import load_language_model
from tokencredit.text.models.precision import Precision
from tokencredit.text.models.run_models import build_policy

SYNCS, SECONDS = 1000, 120
"""Syncs of the memory test, unless the seconds are over before."""


def engine_of(policy, tokenizer, dtype="float32", ends=ENDS):
    precision = Precision(dtype, CPU)
    sampler = vllm.VllmSampler(policy, tokenizer, ends, precision)
    return RequestEngine(policy, tokenizer, ends, precision, sampler=sampler, report=lambda _: None)


@pytest.fixture(scope="module")
def started(tokenizer):
    engine = engine_of(policy_of(tokenizer), tokenizer)
    yield engine, deepcopy(engine.policy.lm.state_dict())
    engine.sampler.close()


@pytest.fixture
def engine(started):
    """The engine with its first weights."""
    return with_first_weights(*started)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"gpt2"}))
def test_families(family, tokenizer):
    engine = engine_of(policy_of(tokenizer, family), tokenizer)
    engine.weights_changed()
    changed(engine.policy)
    engine.weights_changed()
    assert_equal_logprobs(generate(engine), engine.policy)
    engine.sampler.close()


def test_a_model_that_vllm_does_not_run_is_refused_in_a_line(tokenizer, monkeypatch):
    def refuse(**options):
        raise ValueError("no implementation\nof this model")

    monkeypatch.setattr(importlib.import_module("vllm"), "LLM", refuse)
    message = r"^rollout\.engine is vllm, which cannot run this model: ValueError: no implementation of this model$"
    with pytest.raises(ConfigError, match=message):
        engine_of(policy_of(tokenizer), tokenizer)


FILTERS = [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.8}, {"top_k": 4, "min_p": 0.3}]


@pytest.mark.parametrize("filters", [*FILTERS, {"min_new_tokens": 4}, {"min_new_tokens": 4, "stop_at_eos": False}])
def test_log_probs_of_draws_are_those_of_the_filtered_distribution(filters, engine):
    rollout = generate(engine, **filters)
    settings, policy = SamplingConfig(**filters), engine.policy
    with torch.no_grad():
        hidden = policy.response_hidden(rollout.inputs())
        logits = policy.logits(hidden) / 0.7
    logits[:, : settings.min_new_tokens, ENDS] = -torch.inf
    scores = logits.flatten(0, 1)
    for warper in logits_warpers(settings):
        scores = warper(rollout.response_ids, scores)
    filtered = scores.log_softmax(-1).view_as(logits).gather(-1, rollout.response_ids[..., None]).squeeze(-1)
    mask = rollout.mask
    torch.testing.assert_close(rollout.behavior_logprobs[mask], filtered[mask], atol=1e-4, rtol=0)
    assert not torch.isin(rollout.response_ids[:, : settings.min_new_tokens], torch.tensor(ENDS)).any()


def local_ending(settings, prompts, row, ids, tokenizer):
    """The completion that the local engine makes of these draws, and true if it is truncated."""
    one = Prompts([TEXTS[row % len(TEXTS)]], tokenizer).batch(0, 1)
    assert torch.equal(one.ids[one.mask], prompts.ids[row][prompts.mask[row]])
    searches = {0: StopSearch(settings.stop, tokenizer, one.ids[0].tolist())}
    state = Decoding(torch.zeros(1, LIMIT), [one.ids.new_zeros(0)], settings, torch.tensor(ENDS), searches)
    for token in ids:
        logits = torch.full((1, len(tokenizer)), -torch.inf)
        logits[0, token] = 0
        state.draw(logits, one.ids, None)
        if not any(state.check()):
            break
    return state.ids(0), bool(state.truncated[0])


LETTERS = [chr(letter) for letter in range(ord("a"), ord("i"))]


@pytest.mark.parametrize(
    "settings",
    [
        {},  # many end ids
        {"min_new_tokens": 6},
        {"stop_at_eos": False},
        {"stop": LETTERS, "stop_at_eos": False},
        {"stop": ["th", "in", "er", " a", "s "]},
        {"stop": LETTERS, "min_new_tokens": 5},
        {"stop": ["<special>"], "stop_at_eos": False},
    ],
)
def test_completions_end_where_the_local_engine_ends_them(settings, engine):
    tokenizer, special = engine.tokenizer, engine.tokenizer.eos_token
    if settings.get("stop") == ["<special>"]:
        settings = settings | {"stop": [special]}
        often = int(generate(engine, rows=36).response_ids.flatten().bincount()[60:].argmax()) + 60
        with torch.no_grad():
            engine.policy.lm.lm_head.weight[tokenizer.eos_token_id] = engine.policy.lm.lm_head.weight[often]
        engine.weights_changed()
    rows = 36
    rollout = generate(engine, rows=rows, **settings)
    shortest = settings.get("min_new_tokens", 0)
    drawn = generate(engine, rows=rows, stop_at_eos=False, min_new_tokens=shortest)
    prompts, config = Prompts(TEXTS, tokenizer).batch(0, rows), SamplingConfig(max_new_tokens=LIMIT, **settings)
    assert drawn.mask.all()
    for row, ids in enumerate(drawn.response_ids.tolist()):
        expected, truncated = local_ending(config, prompts, row, ids, tokenizer)
        assert rollout.response_ids[row, : len(expected)].tolist() == expected, row
        assert int(rollout.mask[row].sum()) == len(expected)
        assert bool(rollout.truncated[row]) == truncated
    assert settings == {"stop_at_eos": False} or not rollout.truncated.all()


def test_a_seed_gives_the_same_completion_again(engine):
    first, again, other = generate(engine, seed=1), generate(engine, seed=1), generate(engine, seed=2)
    assert torch.equal(first.response_ids, again.response_ids)
    assert first.response_ids.shape != other.response_ids.shape or not torch.equal(
        first.response_ids, other.response_ids
    )


def test_tokens_come_as_often_as_their_probability(engine):
    rows = 600
    prompts = Prompts(TEXTS[:1], engine.tokenizer).batch(0, rows)
    uniforms = torch.rand(rows, 1, generator=torch.Generator().manual_seed(1))
    rollout = engine.generate(prompts, SamplingConfig(temperature=0.6, max_new_tokens=1), uniforms)
    with torch.no_grad():
        probs = (engine.policy.lm(prompts.ids[:1]).logits[0, -1] / 0.6).softmax(-1)
    counts = torch.bincount(rollout.response_ids[:, 0], minlength=len(probs)).double()
    likely = probs > 0.01
    assert likely.sum() > 5
    deviations = (counts - rows * probs) / (rows * probs * (1 - probs)).sqrt()
    assert deviations[likely].abs().max() < 4


def test_turns_equal_a_full_pass_over_the_whole_text(engine):
    uniforms = torch.rand(4, 40, generator=torch.Generator().manual_seed(0))
    settings = SamplingConfig(temperature=0.7, max_new_tokens=40)
    conversation = engine.converse(Prompts(TEXTS, engine.tokenizer).batch(0, 4), settings, uniforms)
    ended = []
    conversation.sample(range(4), [[]] * 4, [5] * 4, ended.append)
    conversation.sample([2, 0], [[70, 71, 72], [73]], [4, 6], ended.append)
    conversation.sample([1, 2, 3], [[74]] * 3, [5] * 3, ended.append)
    assert sorted(ended) == [0, 0, 1, 1, 2, 2, 2, 3, 3]
    rollout = conversation.rollout()
    assert_equal_logprobs(rollout, engine.policy)
    assert rollout.turn_ends.sum(1).tolist() == [2, 2, 3, 2]


def test_after_a_sync_of_other_weights_log_probs_are_equal_again(engine):
    before = engine.probe
    changed(engine.policy)
    engine.weights_changed()
    assert (engine.probe.logprobs - before.logprobs).abs().mean() > 0.1
    rollout = generate(engine, rows=24)
    assert_equal_logprobs(rollout, engine.policy)
    assert rollout.values.shape == rollout.mask.shape


def test_vllm_has_copies_of_the_weights(engine):
    tokens = [Request(list(range(100, 400)), 4, 0, 0)]
    first, again = [], []
    engine.sampler.complete(tokens, SamplingConfig(), lambda _, done: first.append(done))
    changed(engine.policy)
    engine.sampler.llm.reset_prefix_cache()
    engine.sampler.complete(tokens, SamplingConfig(), lambda _, done: again.append(done))
    assert first == again


@pytest.mark.parametrize(
    ("broken", "cause"),
    [
        ("skipped", "the sync changed nothing"),
        ("half", "some weights did not arrive"),
        ("without the tied head", "some weights did not arrive"),
        ("rounded", "in fewer bits"),
        ("stale keys and values", "only texts that it has seen before differ"),
    ],
)
def test_a_sync_that_failed_is_found(broken, cause, engine, monkeypatch):
    whole = vllm.plain_weights
    changed(engine.policy)
    engine.weights_changed()
    changed(engine.policy)
    if broken == "skipped":
        monkeypatch.setattr(engine.sampler, "_load", lambda _: None)
    elif broken == "stale keys and values":
        monkeypatch.setattr(engine.sampler.llm, "reset_prefix_cache", lambda: True)
    else:
        monkeypatch.setattr(vllm, "plain_weights", lambda policy: iter(BROKEN[broken](dict(whole(policy))).items()))
    with pytest.raises(RunStopped, match=rf"engine vllm are not the policy's .*{cause}.*Nothing was learned"):
        engine.weights_changed()


@pytest.mark.parametrize("broken", ["half", "without the tied head"])
def test_a_first_sync_that_failed_is_found(broken, tokenizer, monkeypatch):
    engine, whole = engine_of(policy_of(tokenizer), tokenizer), vllm.plain_weights
    monkeypatch.setattr(vllm, "plain_weights", lambda policy: iter(BROKEN[broken](dict(whole(policy))).items()))
    with pytest.raises(RunStopped, match="some weights did not arrive"):
        engine.weights_changed()
    engine.sampler.close()


def test_another_vocabulary_is_refused(engine):
    other = deepcopy(engine.policy)
    other.lm.resize_token_embeddings(len(engine.tokenizer) + 8)
    engine.policy, policy = other, engine.policy
    try:
        with pytest.raises(RunStopped, match=r"the policy has 2056 tokens in its vocabulary, and vLLM .* with 2048"):
            engine.weights_changed()
    finally:
        engine.policy = policy


def resident():
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_syncs_do_not_grow_the_memory(engine):
    begun, count, first = time.monotonic(), 0, 0
    while count < SYNCS and time.monotonic() - begun < SECONDS:
        changed(engine.policy, 1e-5)
        engine.sampler.sync(engine.policy)
        count += 1
        if count == 100:
            gc.collect()
            first = resident()
    gc.collect()
    seconds, growth = time.monotonic() - begun, resident() - first
    print(f"{count} syncs in {seconds:.0f} s; memory grew by {growth / 1e6:.1f} MB after the first 100")
    assert count >= 200
    assert growth < 20e6
    engine.weights_changed()


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_merged(dora, tokenizer, tmp_path):
    peft = pytest.importorskip("peft")
    random_lm("llama", tokenizer, **FAMILIES["llama"]).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    args = ModelConfig(name=str(tmp_path), lora=LoraConfig(rank=0 if dora else 4))
    lm, _ = load_language_model(args)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], use_dora=True) if dora else None
    policy, _ = build_policy(lm, tokenizer, args, CriticConfig(kind="none"), config)
    engine = engine_of(policy, tokenizer)
    engine.weights_changed()
    for _ in range(2):
        with torch.no_grad():
            for parameter in lm.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) / 10)
        engine.weights_changed()
    assert_equal_logprobs(generate(engine), policy)
    engine.sampler.close()


def test_bfloat16(tokenizer):
    policy = ActorCritic(load_language_model(ModelConfig())[0])
    engine = engine_of(policy, tokenizer, "bfloat16", [tokenizer.eos_token_id])
    engine.weights_changed()
    rollout = generate(engine, rows=24)
    difference = (rollout.behavior_logprobs - rollout.logprobs).abs()[rollout.mask].mean()
    assert 1e-4 < difference < 0.1
    engine.sampler.close()


def test_a_failure_is_one_line_and_the_next_call_works(engine, monkeypatch):
    core = engine.sampler.llm.llm_engine
    with monkeypatch.context() as patch:
        patch.setattr(core, "step", lambda: [][1])
        with pytest.raises(EngineFailure, match=r"^IndexError: list index out of range$"):
            engine.sampler.complete([Request([100, 101], 3, 0, 0)], SamplingConfig(), lambda *_: None)
    assert not core.has_unfinished_requests()
    with pytest.raises(RunStopped, match=r"^a prompt and its completion may have 514 tokens, and .* takes 512"):
        engine.sampler.complete([Request([100] * 510, 4, 0, 0)], SamplingConfig(), lambda *_: None)
    with pytest.raises(EngineFailure, match=r"^\w+: .*range"):
        engine.sampler.complete([Request([99999], 4, 0, 0)], SamplingConfig(), lambda *_: None)
    assert_equal_logprobs(generate(engine), engine.policy)


def test_errors_of_the_caller_pass_through(engine):
    def ended(index, done):
        raise KeyError(index)

    with pytest.raises(KeyError):
        engine.sampler.complete([Request([100], n, 0, 0) for n in (1, 9)], SamplingConfig(stop_at_eos=False), ended)
    assert not engine.sampler.llm.llm_engine.has_unfinished_requests()
    assert_equal_logprobs(generate(engine), engine.policy)


def test_settings_that_would_change_the_distribution_are_refused(engine):
    for settings in ({"temperature": 0.001}, {"min_p": 0.1, "top_p": 0.9}):
        with pytest.raises(ConfigError, match="vLLM"):
            generate(engine, **settings)


def snapshot():
    """What a library may change in the process."""
    return {
        "environment": dict(os.environ),
        "random numbers": random_state(),
        "threads": (torch.get_num_threads(), torch.set_num_threads),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "hook": sys.excepthook,
        "frozen objects": gc.get_freeze_count(),
        "warnings": list(warnings.filters),
        "compiler": torch._dynamo.eval_frame._stance,
    }


def test_the_process_stays_as_it_was(tokenizer, capfd):
    policy = policy_of(tokenizer)
    before = snapshot()
    engine = engine_of(policy, tokenizer)
    assert snapshot() == before
    engine.sampler.sync(policy)
    engine.sampler.complete([Request([100, 101], 6, 0, 0)], SamplingConfig(stop=["e"]), lambda *_: None)
    assert snapshot() == before
    engine.sampler.close()
    engine.sampler.close()
    assert snapshot() == before
    assert capfd.readouterr() == ("", "")
