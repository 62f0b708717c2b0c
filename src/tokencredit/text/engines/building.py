"""Build a run's sampling engine from its settings and models."""

from __future__ import annotations

from collections.abc import Callable

from tokencredit.distributed.processes import Processes
from tokencredit.distributed.sharding import is_sharded
from tokencredit.errors import ConfigError
from tokencredit.learn.rng import preserved
from tokencredit.settings.text import PPOConfig
from tokencredit.text.engines.continuous import ContinuousSampler
from tokencredit.text.engines.engine import Engine
from tokencredit.text.engines.local.local_engine import LocalEngine
from tokencredit.text.engines.local.static_kv_cache import StaticDecoding, static_decoding
from tokencredit.text.engines.plain_weights import check_gathered
from tokencredit.text.engines.request_engine import RequestEngine
from tokencredit.text.engines.requests import Sampler
from tokencredit.text.engines.vllm.sampler import VllmSampler
from tokencredit.text.engines.vllm.server import VllmServer
from tokencredit.text.models.actor_critic import ActorCritic, cache_argument
from tokencredit.text.models.architecture import trunk_of
from tokencredit.text.models.model_loading import end_ids
from tokencredit.text.models.precision import Precision
from tokencredit.text.models.run_models import Models


def build_engine(args: PPOConfig, models: Models, processes: Processes, report: Callable[[str], None]) -> Engine:
    """The engine of `rollout.engine` for the models' policy, whose weights it has; `report` is called with its events.

    Raises:
        ConfigError: the engine is not installed, does not run in several processes, cannot take over a sharded policy
            with its adapter, or the model does not support `rollout.cache`.
        RunStopped: it does not take the model.
    """
    policy, tokenizer, precision, rollout = models.policy, models.tokenizer, models.precision, args.rollout
    ends = end_ids(policy.lm, tokenizer)
    common = (policy, tokenizer, ends, precision, args.ppo.micro_batch_tokens, models.in_step, processes)
    if rollout.engine == "local":
        decoding, notes = choose_decoding(args, policy, precision)
        kept = args.off_policy.support == "truncated"
        return LocalEngine(*common, notes, decoding, kept)
    sampler: Sampler
    if rollout.engine == "vllm":
        check_gathered(policy)
    if rollout.server is not None:
        sampler = VllmServer(policy, tokenizer, ends, rollout, report, processes)
    elif rollout.engine == "vllm":
        sampler = VllmSampler(policy, tokenizer, ends, precision, rollout.engine_memory)
    else:
        sampler = ContinuousSampler(policy, tokenizer, ends)
    engine = RequestEngine(*common, sampler=sampler, report=report)
    with preserved():
        engine.weights_changed()
    return engine


def choose_decoding(
    args: PPOConfig, policy: ActorCritic, precision: Precision
) -> tuple[StaticDecoding | None, list[str]]:
    """Static decoding if `rollout.cache` is static, or auto on a GPU, else None; and notes for the user.

    Raises:
        ConfigError: `rollout.cache` is static, and the model does not support it.
    """
    cache, trunk = args.rollout.cache, trunk_of(policy.lm)
    if cache_argument(trunk) is None:
        reason = f"{type(trunk).__name__} takes no KV cache (cache or past_key_values)"
        if cache == "static":
            raise ConfigError(f"rollout.cache is static, and {reason}; leave it out")
        return None, [f"{reason}, so each sampled token costs a full forward pass"]
    if cache == "dynamic" or (cache == "auto" and precision.device.type != "cuda"):
        return None, []
    if is_sharded(policy.lm):
        return None, ["rollout.cache auto: dynamic, since the policy is sharded"]
    decoding = static_decoding(policy, precision, compiled=policy.compiled)
    if not isinstance(decoding, str):
        return decoding, []
    if cache == "static":
        raise ConfigError(f"rollout.cache is static, which this model does not support: {decoding}; set it to dynamic")
    return None, [f"rollout.cache auto: dynamic, which is slower on a GPU, since {decoding}"]
