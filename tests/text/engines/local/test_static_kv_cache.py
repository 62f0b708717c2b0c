"""Decoding with a static cache: the same tokens and numbers as with one that grows, and no wait in a step."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from helpers.files import read_metrics
from helpers.models import random_lm
from helpers.proofs import proofs
from tokencredit import PPOConfig, PPOTrainer
from tokencredit.errors import ConfigError
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.rollout import RolloutConfig, SamplingConfig
from tokencredit.settings.training import RunConfig, UpdateConfig
from tokencredit.text.data.prompts import Prompts
from tokencredit.text.engines.local.sampling import Decoding, sample
from tokencredit.text.engines.local.static_kv_cache import StaticDecoding, static_decoding
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.adapters import Adapter
from tokencredit.text.models.architecture import width
from tokencredit.text.models.critic import Critic, build_value_head
from tokencredit.text.models.kv_cache import CachedSteps
from tokencredit.text.models.peft_models import adopt
from tokencredit.text.models.precision import Precision, matrix_layers

pytestmark = pytest.mark.slow

FLOAT = Precision("float32", torch.device("cpu"))
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
GATED = SHAPE | {"num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
SHAPES = {"gpt2": SHAPE, "qwen3": GATED | {"tie_word_embeddings": True}, "gpt_neox": SHAPE | {"intermediate_size": 48}}


def build(kind, tokenizer, **shape):
    lm = random_lm(kind, tokenizer, **SHAPES.get(kind, GATED) | shape)
    model = ActorCritic(lm, Critic(build_value_head("linear", width(lm))))
    torch.nn.init.normal_(model.critic.head[-1].weight)
    return model


@pytest.fixture(params=["gpt2", "qwen3", *proofs("gpt_neox")])
def model(request, tokenizer):
    return build(request.param, tokenizer)


def prompts(tokenizer, size=12):
    texts = ["This movie was really", "A film", "I did not think that the second act"]
    return Prompts(texts, tokenizer).batch(0, size)


def uniforms(rows=12, time=80):
    return torch.rand(rows, time, generator=torch.Generator().manual_seed(0))


def both(model, tokenizer, batch=None, started=None, per_prompt=1, every=None, ends=range(40), **settings):
    """A rollout with each cache."""
    batch = prompts(tokenizer) if batch is None else batch
    args = batch, uniforms(), SamplingConfig(temperature=0.8, **settings), tokenizer, ends, per_prompt, started
    decoding = StaticDecoding(model)
    with torch.no_grad(), decoding.weights() as copy:
        return sample(model, *args), sample(copy, *args, steps=decoding.steps, every=every)


def assert_same(dynamic, static):
    assert torch.equal(dynamic.response_ids, static.response_ids)
    assert torch.equal(dynamic.mask, static.mask)
    assert torch.equal(dynamic.truncated, static.truncated)
    for name in ("logprobs", "values", "entropy", "behavior_logprobs"):
        torch.testing.assert_close(getattr(static, name), getattr(dynamic, name), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("every", [7, *proofs(1, 100)])
def test_the_same_tokens_and_numbers_as_with_a_growing_cache(every, model, tokenizer):
    dynamic, static = both(model, tokenizer, every=every)
    lengths = sorted(dynamic.mask.sum(1).tolist())
    assert lengths[0] < 20
    assert lengths[-1] > 64, "longer than the first segment of columns, and most rows have left by then"
    assert_same(dynamic, static)


@pytest.mark.parametrize(
    "settings", [{"top_p": 0.9, "min_new_tokens": 5}, {"stop": ["the", "a"]}, {"stop": ["e"], "min_new_tokens": 9}]
)
@pytest.mark.parametrize("every", [*proofs(1), 6])
@pytest.mark.parametrize("model", ["gpt2", *proofs("qwen3", "gpt_neox")], indirect=True)
def test_filters_and_stops_end_the_same(settings, every, model, tokenizer):
    assert_same(*both(model, tokenizer, every=every, **settings))


@pytest.mark.parametrize("model", ["gpt2", *proofs("qwen3", "gpt_neox")], indirect=True)
def test_prompts_that_are_shared_and_completions_that_have_begun(model, tokenizer):
    batch = prompts(tokenizer)
    batch = replace(batch, **{name: getattr(batch, name)[:3].repeat_interleave(4, dim=0) for name in ("ids", "mask")})
    started = [torch.arange(300, 300 + row // 4) for row in range(12)]
    assert_same(*both(model, tokenizer, batch, started, per_prompt=4, every=5))


@pytest.mark.parametrize("model", ["gpt2", *proofs("qwen3", "gpt_neox")], indirect=True)
def test_the_weights_are_those_of_now(model, tokenizer):
    decoding = StaticDecoding(model)
    args = prompts(tokenizer), uniforms(), SamplingConfig(max_new_tokens=12), tokenizer, range(40)
    for _ in range(2):
        with torch.no_grad(), decoding.weights() as copy:
            assert_same(sample(model, *args), sample(copy, *args, steps=decoding.steps))
            for parameter in model.lm.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    model.lm.get_input_embeddings().weight = torch.nn.Parameter(model.lm.get_input_embeddings().weight * 2)
    with torch.no_grad(), decoding.weights() as copy:
        assert_same(sample(model, *args), sample(copy, *args, steps=decoding.steps))


def test_weights_that_are_rounded_once_give_what_autocast_gives(model, tokenizer):
    decoding = StaticDecoding(model)
    batch, token = prompts(tokenizer), torch.full((12, 1), 300)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        states = []
        for rounded in (True, False):
            with decoding.weights() as copy:
                dtypes = {name: p.dtype for name, p in copy.lm.named_parameters()}
                assert set(dtypes.values()) == {torch.bfloat16, torch.float32}
                assert copy.lm.get_output_embeddings().weight.dtype == torch.float32, "on a GPU in bfloat16"
                assert copy.lm.get_input_embeddings().weight.dtype == torch.float32
            if rounded:
                with decoding.weights() as copy:
                    states.append(one_step(decoding, copy, batch, token))
            else:
                states.append(one_step(decoding, decoding.model, batch, token))
        assert torch.equal(*states)
    assert {p.dtype for p in decoding.model.lm.parameters()} == {torch.float32}, "nothing is held between rollouts"


def one_step(decoding, copy, batch, token):
    steps, states = decoding.steps(copy, batch.mask, 3), []
    steps.prompts(batch.ids, 1)
    steps.repeat(lambda: states.append(steps.next(token)), 3)
    return torch.cat(states)


def decoding_step(model, tokenizer, cls, **settings):
    """A rollout after its prompts, and its step."""
    batch = prompts(tokenizer)
    settings = SamplingConfig(**settings)
    state = Decoding(uniforms(), [batch.ids.new_zeros(0)] * 12, settings, torch.arange(40), {})
    steps = cls(model, batch.mask, 80)
    state.draw(model.logits(steps.prompts(batch.ids, 1)), batch.ids, None)
    steps.repeat(lambda: None, 1)

    def step():
        tokens = state.last().unsqueeze(-1)
        hidden = steps.next(tokens)
        state.draw(model.logits(hidden), tokens, model.critic(hidden))

    return state, step


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1, "min_new_tokens": 3}])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_a_step_waits_for_nothing(cache, settings, model, tokenizer, counts, monkeypatch):
    decoding = StaticDecoding(model)
    with decoding.weights() as copy:
        if cache == "static":
            _, step = decoding_step(copy, tokenizer, decoding.steps, **settings)
        else:
            _, step = decoding_step(model, tokenizer, CachedSteps, **settings)
        with counts() as seen:
            step()
        own = {where for where in seen.syncs if "masking_utils" not in where}
        assert not own
        assert cache == "dynamic" or not seen.syncs, "with a growing cache Transformers looks at the mask"
        assert 30 < sum(seen.kernels.values()) < 250
        draw = Decoding.draw
        monkeypatch.setattr(Decoding, "draw", lambda *args: draw(*args) or args[0].lengths.max().item())
        before = sum(seen.syncs.values())
        with counts() as seen:
            step()
        assert sum(seen.syncs.values()) == before + 1, "an .item() in a step is seen"


@pytest.mark.parametrize("half", [False, True])
@torch.no_grad()
def test_a_step_needs_no_number_of_a_tensor(half, model, tokenizer):
    """On tensors that have shapes and no numbers, whatever waits for one raises."""
    decoding = StaticDecoding(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=half), decoding.weights() as copy:
        state, step = decoding_step(copy, tokenizer, decoding.steps, top_p=0.9)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            for name, x in vars(state).items():
                if isinstance(x, torch.Tensor):
                    setattr(state, name, fake.from_tensor(x))
            step()
            with pytest.raises(DataDependentOutputException):
                state.check()


def train(tokenizer, folder, cache, lm=None):
    torch.manual_seed(0)
    args = PPOConfig(
        model=ModelConfig(dtype="float32"),
        rollout=RolloutConfig(batch_size=8, per_prompt=2, max_new_tokens=12, cache=cache),
        ppo=UpdateConfig(epochs=1, minibatches=1),
        run=RunConfig(dir=str(folder), iterations=2, trackers=[], samples=0),
    )
    lm = build("qwen3", tokenizer).lm if lm is None else lm
    rows = [{"prompt": text} for text in ("This movie was really", "A film")]
    trainer = PPOTrainer(lm, lengths, args, rows, processing_class=tokenizer)
    return trainer, trainer.train()


def lengths(prompts, completions):
    return [len(text) / 10 for text in completions]


def test_runs_with_both_caches_agree(tokenizer, tmp_path):
    rewards = {}
    for cache in ("dynamic", "static"):
        trainer, _ = train(tokenizer, tmp_path / cache, cache)
        assert (trainer.pipeline.engine.decoding is None) == (cache == "dynamic")
        rewards[cache] = [row["reward"] for row in read_metrics(tmp_path / cache)]
    assert rewards["static"] == pytest.approx(rewards["dynamic"], abs=1e-5)


MISFITS = {
    "mistral": ({"sliding_window": 4}, "not every layer of MistralForCausalLM keeps the keys and values of all tokens"),
    "mamba": ({"state_size": 8}, "not every layer of MambaForCausalLM keeps"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_a_model_that_cannot_be_decoded_so_is_refused(kind, tokenizer, tmp_path):
    shape, reason = MISFITS[kind]
    policy = build(kind, tokenizer, **shape)
    assert reason in static_decoding(policy, FLOAT, compiled=False)
    with pytest.raises(ConfigError, match=f"rollout.cache is static.*{reason}.*set it to dynamic"):
        train(tokenizer, tmp_path, "static", policy.lm)


def test_attention_of_another_kind_is_told_apart(tokenizer):
    policy = build("qwen3", tokenizer)
    policy.lm.set_attn_implementation("eager")
    assert "'eager', not by 'sdpa'" in static_decoding(policy, FLOAT, compiled=False)


def test_a_model_whose_attention_does_something_else_is_found_out(tokenizer):
    policy = build("qwen3", tokenizer)
    inner = policy.lm.model.layers[0].self_attn
    inner.forward = partial(shifted, inner.forward)
    assert "then gives other log-probabilities" in static_decoding(policy, FLOAT, compiled=False)


def shifted(forward, *args, **kwargs):
    """A layer that takes every column of its mask for a token."""
    output, weights = forward(*args, **kwargs)
    mask = kwargs["attention_mask"]
    return output + (0 if mask is None else mask.shape[-1]), weights


@pytest.mark.parametrize("kind", SHAPES)
def test_the_check_passes_in_bfloat16_too(kind, tokenizer):
    assert isinstance(
        static_decoding(build(kind, tokenizer), replace(FLOAT, dtype="bfloat16"), compiled=False), StaticDecoding
    )


def test_what_is_wrong_in_bfloat16_alone_is_found_out(tokenizer, monkeypatch):
    def numb(self, dtype):
        """Rounding to one bit."""
        for module in matrix_layers(self.model.lm):
            module._parameters["weight"] = torch.nn.Parameter(module.weight.sign().to(dtype), requires_grad=False)

    monkeypatch.setattr(StaticDecoding, "_round", numb)
    policy = build("qwen3", tokenizer)
    assert isinstance(static_decoding(policy, FLOAT, compiled=False), StaticDecoding)
    reason = static_decoding(policy, replace(FLOAT, dtype="bfloat16"), compiled=False)
    assert "gives other log-probabilities in bfloat16" in reason


@pytest.mark.parametrize(("dora", "fits"), [(False, True), (True, False)])
def test_of_adapters_plain_lora_is_decoded_so(dora, fits, tokenizer):
    peft = pytest.importorskip("peft")
    lm = peft.get_peft_model(build("qwen3", tokenizer).lm, peft.LoraConfig(r=4, use_dora=dora, init_lora_weights=False))
    lm = adopt(lm)
    policy = ActorCritic(lm, adapter=Adapter(lm))
    found = static_decoding(policy, FLOAT, compiled=False)
    assert isinstance(found, StaticDecoding) if fits else "is not plain LoRA" in found
