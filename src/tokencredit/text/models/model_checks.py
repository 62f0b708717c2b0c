"""Start-up checks: a run's forward passes must give the same numbers as the model's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from tokencredit.distributed.processes import connection_lost
from tokencredit.distributed.sharding import kind_of, shard_alike
from tokencredit.errors import ConfigError
from tokencredit.learn.rng import preserved
from tokencredit.learn.training_mode import checkpointing_modules, training
from tokencredit.text.models.actor_critic import ActorCritic, Inputs
from tokencredit.text.models.critic import Critic
from tokencredit.text.models.kv_cache import steps_of

TOLERANCE = 1e-3
"""Largest rounding difference in float32: of log-probs in nats, of hidden states relative to the largest."""
PADDED = "let yours step over tokens whose attention_mask is 0, or "
"""What to change in a model of one's own that does not skip padding."""
SAME_PROMPT = (slice(0, 2), slice(2, 4))
"""Groups of example rows with the same prompt."""


def check_policy(name: str, lm: PreTrainedModel) -> None:
    """Check that a run samples from and trains the distribution that the language model itself computes.

    Hidden states and output projection must reproduce the model's logits. States must be causal, and the same without
    padding, with left padding, and with a KV cache from which a row is dropped. It must be possible to save it.

    Raises:
        ConfigError: they differ, by a number of nats that the message names, or a forward pass fails.
    """
    title = _title(name, lm)
    if lm.config.is_encoder_decoder:
        raise ConfigError(f"{title} has an encoder; model.name must be a causal language model without one")
    if lm.generation_config is not None:
        make_savable(title, lm.generation_config)
    with _passes(title):
        model = ActorCritic(lm)
        inputs = example_inputs(lm.config.get_text_config().vocab_size, lm.device)
        alone = check_causal(title, model.response_hidden, inputs)
        _check_projection(title, model, alone, inputs)
        expected = _logprobs(model, alone)
        padded = _logprobs(model, model.response_hidden(inputs))
        _compare(title, padded, expected, "for a prompt that is padded on the left", PADDED)
        for rows, time, hidden in _cached_states(model, inputs):
            _compare(title, _logprobs(model, hidden), expected[rows, time], "with its cache")


def make_savable(title: str, config: GenerationConfig) -> None:
    """Turn on sampling in a generation config that sets how to sample, which Transformers does not save without it.

    Raises:
        ConfigError: something else is wrong with it, so that a trained policy could not be saved.
    """
    with suppress(ValueError):
        config.validate(strict=True)
        return
    config.do_sample = True
    try:
        config.validate(strict=True)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the generation config of {title} could not be saved: {reason}") from error


def check_critic(name: str, policy: ActorCritic, layers: int | None = None) -> None:
    """Check that a critic's input states are causal and independent of padding, unless it reads the policy's last ones.

    `name` names the critic's model in messages. With `layers`, the truncated trunk of a separate critic must also
    survive saving and loading.

    Raises:
        ConfigError: a check or a forward pass fails.
    """
    critic = policy.critic
    assert critic is not None
    if critic.reads_last:
        return
    trunk = policy.lm if critic.trunk is None else critic.trunk
    title = _title(name, trunk)
    title = title if critic.trunk is None else f"the separate critic {title}"
    title += "" if layers is None else f" with critic.layers: {layers}"
    with _passes(title):
        inputs = example_inputs(trunk.config.get_text_config().vocab_size, trunk.device)
        states = policy.critic_states(critic, inputs)
        if states.shape[:-1] != inputs["response_ids"].shape:
            raise ConfigError(f"{title} has hidden states of a shape that no value head can read; leave it out")
        alone = check_causal(title, partial(policy.critic_states, critic), inputs)
        if not close(states, alone, TOLERANCE * alone.abs().max()):
            raise ConfigError(f"{title} gives other states for a prompt that is padded on the left; take another model")
        if layers is not None and critic.trunk is not None:
            reloaded = Critic(critic.head, _reloaded(title, critic.trunk))
            if not close(policy.critic_states(reloaded, inputs), states, TOLERANCE * states.abs().max()):
                raise ConfigError(f"{title} gives other states once it is saved and loaded; leave it out")


def _reloaded(title: str, trunk: PreTrainedModel) -> PreTrainedModel:
    """A trunk built from its configuration, as if saved and loaded, with the same weights."""
    try:
        with torch.device("meta"):
            reloaded: PreTrainedModel = type(trunk)(type(trunk.config).from_dict(trunk.config.to_dict())).eval()
        shard_alike(reloaded, trunk)
        reloaded.load_state_dict(trunk.state_dict(), assign=True)
    except Exception as error:  # model code may raise anything, above all with trust_remote_code
        raise ConfigError(f"{title} cannot be truncated: {error_line(error)}; leave it out") from error
    for key, buffer in trunk.named_buffers():  # also the non-persistent ones
        module, _, name = key.rpartition(".")
        reloaded.get_submodule(module)._buffers[name] = buffer
    return reloaded


def check_checkpointing(name: str, policy: ActorCritic) -> None:
    """Raise `ConfigError` if gradient checkpointing, which needs training mode, changes a log-prob."""
    title = _title(name, policy.lm)
    with _passes(title):
        inputs = example_inputs(policy.lm.config.get_text_config().vocab_size, policy.lm.device)
        expected = _logprobs(policy, policy.response_hidden(inputs))
        with training(checkpointing_modules(policy)):
            checkpointed = _logprobs(policy, policy.response_hidden(inputs))
        _compare(title, checkpointed, expected, "with model.gradient_checkpointing")


def check_causal(title: str, read: Callable[[Inputs], Tensor], inputs: Inputs) -> Tensor:
    """States `[batch, time, width]` of the example rows, computed without padding.

    Raises:
        ConfigError: states after the same prompt depend on the tokens that follow.
    """
    states = [read({key: x[rows] for key, x in inputs.items()}) for rows in SAME_PROMPT]
    _refuse_nonfinite(title, *states)
    for first, second in (group[:, 0] for group in states):
        if not close(first, second, TOLERANCE / 10 * first.abs().max()):
            raise ConfigError(
                f"{title} is not causal: its state before a token depends on the tokens that follow; take a model "
                "that reads from left to right"
            )
    return torch.cat(states)


def example_inputs(vocabulary: int, device: torch.device) -> Inputs:
    """Two prompts of 2 and 5 tokens, each before two responses of 3; ids from the middle of the vocabulary."""
    ids = (torch.arange(22, device=device) + vocabulary // 2) % vocabulary
    prompt_ids = ids[:10].view(2, 5).repeat_interleave(2, dim=0)
    prompt_mask = torch.ones_like(prompt_ids, dtype=torch.bool)
    prompt_mask[:2, :3] = False
    response_ids = ids[10:].view(4, 3)
    mask = torch.ones_like(response_ids, dtype=torch.bool)
    return {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "response_ids": response_ids, "mask": mask}


def _check_projection(title: str, model: ActorCritic, alone: Tensor, inputs: Inputs) -> None:
    """Compare logits from hidden states and output projection with the model's own."""
    rows = SAME_PROMPT[1]
    ids = torch.cat([inputs["prompt_ids"], inputs["response_ids"][:, :-1]], dim=1)[rows]
    ours = model.logits(alone[rows])
    theirs = model.lm(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -ours.shape[1] :].float()
    _refuse_nonfinite(title, theirs)
    if ours.shape != theirs.shape or not close(ours, theirs, rounding(theirs)):
        raise ConfigError(f"{title} shapes its logits in a way that is not supported; take another model")


def _refuse_nonfinite(title: str, *results: Tensor) -> None:
    """Raise `ConfigError` for NaN or infinity in a model's states or logits."""
    if not all(x.isfinite().all() for x in results):
        raise ConfigError(f"{title} computes NaN or infinity, so its weights are damaged; give a sound copy of them")


def _cached_states(model: ActorCritic, inputs: Inputs) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Rows, time step and states of cached decoding of the example; the second row ends after its first token."""
    steps = steps_of(model, inputs["prompt_mask"], inputs["mask"].shape[1])
    yield steps.rows, 0, steps.prompts(inputs["prompt_ids"], per_prompt=2)
    yield steps.rows, 1, steps.next(inputs["response_ids"][:, :1])
    steps.keep([True, False, True, True])
    yield steps.rows, 2, steps.next(inputs["response_ids"][steps.rows, 1:2])


def _logprobs(model: ActorCritic, hidden: Tensor) -> Tensor:
    """Log-probs over the vocabulary, in nats."""
    return model.logits(hidden).log_softmax(dim=-1)


def _compare(title: str, logprobs: Tensor, expected: Tensor, when: str, cure: str = "") -> None:
    """Raise `ConfigError` if log-probs differ; `cure` is one beside another model."""
    if not close(logprobs, expected, rounding(expected)):
        size = float((logprobs - expected).abs().max())
        raise ConfigError(
            f"{title} gives other log-probabilities {when}, by up to {size:.2g} nats; a run would train on other "
            f"probabilities than it samples with; {cure}take a model of another architecture"
        )


def rounding(expected: Tensor) -> Tensor:
    """Tolerance for rounding of each of these log-probs or logits."""
    return TOLERANCE * (1 + expected.abs() / 10)


def close(actual: Tensor, expected: Tensor, tolerance: Tensor) -> bool:
    """True if all differences are within the tolerance; False for NaN."""
    return bool(((actual - expected).abs() <= tolerance).all())


@contextmanager
def _passes(title: str) -> Iterator[None]:
    """A context for passes without gradients that preserves RNG state; errors of the model's code are `ConfigError`."""
    with preserved(), torch.no_grad():
        try:
            yield
        except (ConfigError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # model code may raise anything, above all with trust_remote_code
            if connection_lost(error):  # to a process that has a part of this model
                raise
            raise ConfigError(f"{title} cannot be used here: a pass through it ends in {error_line(error)}") from error


def error_line(error: Exception) -> str:
    """An error's type and message in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _title(name: str, model: nn.Module) -> str:
    kind = kind_of(model).__name__
    return f"{name!r} ({kind})" if name else kind
