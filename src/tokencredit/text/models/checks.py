"""Checks at the start of a run: what it computes of a model must be what the model itself computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from tokencredit.errors import ConfigError
from tokencredit.learn.modes import checkpointing_modules, training
from tokencredit.learn.rng import preserved
from tokencredit.settings.training import SamplingConfig
from tokencredit.text.data.prompts import PromptBatch
from tokencredit.text.engines.sampling import CachedSteps, sample
from tokencredit.text.engines.static import StaticDecoding
from tokencredit.text.models.actor_critic import ActorCritic, Inputs, cache_argument
from tokencredit.text.models.critic import Critic
from tokencredit.text.models.parts import trunk_of
from tokencredit.text.models.precision import Precision

TOLERANCE = 1e-3
"""Largest difference that rounding may explain in float32, in nats; of states, as a share of the largest."""
HALF_TOLERANCE = 0.25
"""Largest mean difference that rounding may explain in bfloat16, in nats."""
SAME_PROMPT = (slice(0, 2), slice(2, 4))
"""Rows of the example with the same prompt."""


def check_policy(name: str, lm: PreTrainedModel) -> None:
    """Make sure that a run samples from and trains the very distribution that a language model itself gives.

    Its hidden states and output projection must give its own logits. A state must be the same in a pass over its row
    alone, in a pass with padding, and with a cache in which a row ends early; it must depend on no later token.

    Raises:
        ConfigError: a difference, with its size, or a pass that fails.
    """
    title = _title(name, lm)
    if lm.config.is_encoder_decoder:
        raise ConfigError(f"{title} has an encoder; model.name must be a causal language model without one")
    with _passes(title):
        model, trunk = ActorCritic(lm), trunk_of(lm)
        if cache_argument(trunk) is None:
            raise ConfigError(
                f"{title} cannot be sampled from: {type(trunk).__name__} takes no KV cache (past_key_values or "
                "cache_params); take a model of another architecture"
            )
        inputs = _example(lm.config.get_text_config().vocab_size, lm.device)
        alone = check_causal(title, model.response_hidden, inputs)
        _check_projection(title, model, alone, inputs)
        expected = _logprobs(model, alone)
        padded = _logprobs(model, model.response_hidden(inputs))
        _compare(title, padded, expected, "for a prompt that is padded on the left")
        for rows, time, hidden in _cached_states(model, inputs):
            _compare(title, _logprobs(model, hidden), expected[rows, time], "with its cache")


def check_critic(name: str, policy: ActorCritic, layers: int | None = None) -> None:
    """Make sure that values of a policy's critic, unless it reads its last states, depend on no later token or padding.

    Args:
        name: of the model that the critic comes from, in messages.
        policy: with the critic.
        layers: `critic.layers`; the trunk of a separate critic, which was cut, must be one that can be loaded again.

    Raises:
        ConfigError: they do, a trunk cannot, or a pass fails.
    """
    assert policy.critic is not None
    for critic in policy.critic.members:
        if critic.reads_last:
            continue
        trunk = policy.lm if critic.trunk is None else critic.trunk
        title = _title(name, trunk)
        title = title if critic.trunk is None else f"the separate critic {title}"
        title += "" if layers is None else f" with critic.layers: {layers}"
        with _passes(title):
            inputs = _example(trunk.config.get_text_config().vocab_size, trunk.device)
            states = policy.critic_states(critic, inputs)
            if states.shape[:-1] != inputs["response_ids"].shape:
                raise ConfigError(f"{title} gives states of a form that no value head reads; leave it out")
            alone = check_causal(title, partial(policy.critic_states, critic), inputs)
            if not _close(states, alone, TOLERANCE * alone.abs().max()):
                raise ConfigError(
                    f"{title} gives other states for a prompt that is padded on the left; take another model"
                )
            if layers is not None and critic.trunk is not None:
                again = Critic(critic.head, _built_again(title, critic.trunk))
                if not _close(policy.critic_states(again, inputs), states, TOLERANCE * states.abs().max()):
                    raise ConfigError(f"{title} computes something else when it is loaded again; leave it out")


def _built_again(title: str, trunk: PreTrainedModel) -> PreTrainedModel:
    """A trunk as it would be loaded from its configuration, around the same weights.

    Raises:
        ConfigError: the configuration does not describe it.
    """
    try:
        with torch.device("meta"):
            again: PreTrainedModel = type(trunk)(type(trunk.config).from_dict(trunk.config.to_dict())).eval()
        again.load_state_dict(trunk.state_dict(), assign=True)
    except Exception as error:  # anybody's code: the library's, or the model's own with trust_remote_code
        reason = " ".join(str(error).split())
        raise ConfigError(f"{title} cannot be cut: {reason}; leave it out") from error
    for key, buffer in trunk.named_buffers():  # those that are not saved
        module, _, name = key.rpartition(".")
        again.get_submodule(module)._buffers[name] = buffer
    return again


def check_checkpointing(name: str, policy: ActorCritic) -> None:
    """Make sure that gradient checkpointing, which needs training mode, changes no log-probability.

    Raises:
        ConfigError: it does.
    """
    title = _title(name, policy.lm)
    with _passes(title):
        inputs = _example(policy.lm.config.get_text_config().vocab_size, policy.lm.device)
        expected = _logprobs(policy, policy.response_hidden(inputs))
        with training(checkpointing_modules(policy)):
            now = _logprobs(policy, policy.response_hidden(inputs))
        _compare(title, now, expected, "with model.gradient_checkpointing")


def static_decoding(policy: ActorCritic, precision: Precision, *, compiled: bool) -> StaticDecoding | str:
    """A policy's decoding with a static cache, or why it cannot be had.

    A few tokens are sampled so, on a GPU by a replayed graph, in float32 and in the dtype of the run. Their log-probs
    must be those of a pass over the whole text.
    """
    lm, kind = policy.lm, type(policy.lm).__name__
    layers = DynamicCache(config=lm.config).layers
    if cache_argument(trunk_of(lm)) != "past_key_values" or any(type(layer) is not DynamicLayer for layer in layers):
        return f"not every layer of {kind} keeps the keys and values of all tokens"
    if lm.config._attn_implementation != "sdpa":
        return f"{kind} computes attention by {lm.config._attn_implementation!r}, not by 'sdpa'"
    if policy.adapter is not None and not policy.adapter.adds:
        return f"the adapter of {kind} is not plain LoRA, and may need the weights beneath it unrounded"
    try:
        with preserved():
            decoding = StaticDecoding(policy, compiled=compiled)
            for each in (replace(precision, dtype="float32"), precision):
                with each.no_grad():
                    static, expected = _sampled(policy, decoding)
                error = (static - expected).abs()
                if not (_close(static, expected, _rounding(expected)) or (each.half and error.mean() < HALF_TOLERANCE)):
                    return f"{kind} then gives other log-probabilities in {each.dtype}, by up to {error.max():.2g} nats"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # anybody's code: the library's, or the model's own with trust_remote_code
        return f"a step of {kind} ends in {type(error).__name__}: {' '.join(str(error).split())}"
    return decoding


def _sampled(policy: ActorCritic, decoding: StaticDecoding) -> tuple[Tensor, Tensor]:
    """Log-probabilities `[4, 6]` of tokens that follow the example's prompts: as sampled, and by a full pass."""
    inputs = _example(policy.lm.config.get_text_config().vocab_size, policy.lm.device)
    prompts = PromptBatch([], [], inputs["prompt_ids"], inputs["prompt_mask"], {})
    uniforms = torch.linspace(0.02, 0.98, 24, device=policy.lm.device).view(4, 6)
    settings = SamplingConfig(max_new_tokens=6, stop_at_eos=False)
    tokenizer: Any = None  # nothing is read before a stop string is looked for
    with decoding.weights() as model:
        rollout = sample(model, prompts, uniforms, settings, tokenizer, [0], 2, steps=decoding.steps, every=6)
    return rollout.logprobs, policy.logprobs(rollout.inputs(), 1.0)[0]


def check_causal(title: str, read: Callable[[Inputs], Tensor], inputs: Inputs) -> Tensor:
    """States `[batch, time, width]` of the example, its rows read without padding.

    Raises:
        ConfigError: states after the same prompt differ by the tokens that follow.
    """
    states = [read({key: x[rows] for key, x in inputs.items()}) for rows in SAME_PROMPT]
    for first, second in (group[:, 0] for group in states):
        if not _close(first, second, TOLERANCE / 10 * first.abs().max()):
            raise ConfigError(
                f"{title} is not causal: its state before a token depends on the tokens that follow; take a model "
                "that reads from left to right"
            )
    return torch.cat(states)


def _example(vocabulary: int, device: torch.device) -> Inputs:
    """Two prompts of 2 and 5 tokens, each before two responses of 3; ids from the middle of the vocabulary."""
    ids = (torch.arange(22, device=device) + vocabulary // 2) % vocabulary
    prompt_ids = ids[:10].view(2, 5).repeat_interleave(2, dim=0)
    prompt_mask = torch.ones_like(prompt_ids, dtype=torch.bool)
    prompt_mask[:2, :3] = False
    response_ids = ids[10:].view(4, 3)
    mask = torch.ones_like(response_ids, dtype=torch.bool)
    return {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "response_ids": response_ids, "mask": mask}


def _check_projection(title: str, model: ActorCritic, alone: Tensor, inputs: Inputs) -> None:
    """Compare the logits of the rows without padding with the model's own."""
    rows = SAME_PROMPT[1]
    ids = torch.cat([inputs["prompt_ids"], inputs["response_ids"][:, :-1]], dim=1)[rows]
    ours = model.logits(alone[rows])
    theirs = model.lm(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -ours.shape[1] :].float()
    if ours.shape != theirs.shape or not _close(ours, theirs, _rounding(theirs)):
        raise ConfigError(f"{title} shapes its logits in a way that is not supported; take another model")


def _cached_states(model: ActorCritic, inputs: Inputs) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Rows, time and states of sampling's passes over the example; the second row ends after its first token."""
    steps = CachedSteps(model, inputs["prompt_mask"], inputs["mask"].shape[1])
    yield steps.rows, 0, steps.prompts(inputs["prompt_ids"], per_prompt=2)
    yield steps.rows, 1, steps.next(inputs["response_ids"][:, :1])
    steps.keep([True, False, True, True])
    yield steps.rows, 2, steps.next(inputs["response_ids"][steps.rows, 1:2])


def _logprobs(model: ActorCritic, hidden: Tensor) -> Tensor:
    """Log-probabilities of all tokens, nats, in a state."""
    return model.logits(hidden).log_softmax(dim=-1)


def _compare(title: str, now: Tensor, expected: Tensor, when: str) -> None:
    """Raise `ConfigError` if log-probabilities differ."""
    if not _close(now, expected, _rounding(expected)):
        size = float((now - expected).abs().max())
        raise ConfigError(
            f"{title} gives other log-probabilities {when}, by up to {size:.2g} nats; a run would train on other "
            "probabilities than it samples with; take a model of another architecture"
        )


def _rounding(expected: Tensor) -> Tensor:
    """Largest difference that rounding may explain for each of these log-probs or logits."""
    return TOLERANCE * (1 + expected.abs() / 10)


def _close(now: Tensor, expected: Tensor, largest: Tensor) -> bool:
    """True if no difference is above the largest that is allowed; not for NaN."""
    return bool(((now - expected).abs() <= largest).all())


@contextmanager
def _passes(title: str) -> Iterator[None]:
    """A context for passes through a model that may be unfit for them; global RNG state stays as it was.

    Raises:
        ConfigError: for whatever its code raises.
    """
    with preserved(), torch.no_grad():
        try:
            yield
        except (ConfigError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # anybody's code: the library's, or the model's own with trust_remote_code
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"{title} cannot be used here: a pass through it ends in {type(error).__name__}: {reason}"
            ) from error


def _title(name: str, model: nn.Module) -> str:
    return f"{name!r} ({type(model).__name__})" if name else type(model).__name__
