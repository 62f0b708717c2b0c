"""vLLM in this process as a sampler, with weights of its own that are synced after each update."""

from __future__ import annotations

import importlib.util
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, distributed
from transformers import PreTrainedTokenizerBase

from tokencredit.distributed.sharding import kind_of
from tokencredit.errors import ConfigError, NotInstalled
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.text.engines.plain_weights import plain_weights
from tokencredit.text.engines.requests import EngineFailure, OnCompletion, Progress, Request, Sampler
from tokencredit.text.engines.vllm.process import classes_of, contained, leave_groups, own_randomness, shut_down
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.model_checks import error_line
from tokencredit.text.models.precision import Precision

CACHE_ON_CPU = 2**30
"""Bytes of the KV cache on a CPU; vLLM's VLLM_CPU_KVCACHE_SPACE replaces it."""
MEMORY = 0.4
"""Share of a GPU's memory, beside the trainer's."""
Result = TypeVar("Result")


class VllmSampler(Sampler):
    """A `Sampler` with weights of its own, in the trainer's dtype and on its device.

    It starts with random weights, so that the proof of the first sync shows that every weight was transferred.
    """

    name = "vllm"
    _alive: ClassVar[weakref.WeakSet[VllmSampler]] = weakref.WeakSet()

    def __init__(
        self,
        policy: ActorCritic,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
        precision: Precision,
        memory: float | None = None,
    ):
        """Start vLLM for a policy, which takes half a minute; `memory` is `rollout.engine_memory`.

        Raises:
            ConfigError: vLLM is not installed, or does not run this model.
        """
        if importlib.util.find_spec("vllm") is None:
            raise NotInstalled("the engine vllm", "vLLM", "tokencredit[vllm]")
        self.tokenizer, self.end_ids, self.device = tokenizer, list(end_ids), precision.device
        self.vocabulary = rows_of(policy)
        first = next(iter(VllmSampler._alive), None)
        self.in_job: bool = distributed.is_initialized() if first is None else first.in_job
        with contained(), classes_of(policy.lm):
            self.llm = _start(policy, precision, memory or MEMORY, self.in_job)
        self.longest = self.llm.llm_engine.vllm_config.model_config.max_model_len
        self._asleep: list[str] = []
        self.llm.llm_engine.engine_core._finalizer.detach()  # it would destroy the job's process group
        VllmSampler._alive.add(self)
        self._close = weakref.finalize(self, _shut_down, self.llm, self.in_job)
        self._close.atexit = False

    def complete(self, requests: Sequence[Request], settings: SamplingConfig, ended: OnCompletion) -> None:
        """Sample all requests in batches that vLLM schedules."""
        settings.check_vllm()
        self.check_lengths(requests)
        self._wake("weights", "kv_cache")
        left: dict[str, Progress] = {}
        try:
            for number, request in enumerate(requests):
                _ask(self._add, str(number), request, settings)
                left[str(number)] = Progress(request, settings, self.tokenizer)
            while left:
                with own_randomness(self.device):
                    outputs = _ask(self.llm.llm_engine.step)
                for output in outputs:
                    new = output.outputs[0]
                    places = zip(new.token_ids, new.logprobs, strict=True)
                    logprobs = [place[token].logprob for token, place in places]
                    done = left[output.request_id].take(new.token_ids, logprobs, new.finish_reason)
                    if done is not None:
                        del left[output.request_id]
                        if not output.finished:
                            _ask(self.llm.llm_engine.abort_request, [output.request_id])
                        ended(int(output.request_id), done)
        finally:
            with suppress(Exception):  # after an error, which is raised
                self.llm.llm_engine.abort_request(list(left))

    def sync(self, policy: ActorCritic) -> None:
        """Replace vLLM's weights in place by the policy's, and drop its prefix cache."""
        rows, weights = rows_of(policy), plain_weights(policy)
        try:
            if rows != self.vocabulary:
                raise EngineFailure(
                    f"the policy has {rows} tokens in its vocabulary, and vLLM was started with {self.vocabulary}"
                )
            self._wake("weights")
            _ask(self._load, weights)
        finally:
            deque(weights, maxlen=0)  # of a sharded policy, which other processes may still gather
        if not _ask(self.llm.reset_prefix_cache):
            raise EngineFailure("its prefix cache could not be dropped")

    def sleep(self) -> None:
        """Free a GPU's memory until the next call: vLLM's weights go to the CPU, and its KV cache is dropped."""
        if self.device.type == "cuda" and not self._asleep:
            self._asleep = ["weights", "kv_cache"]  # also if it fails on the way
            _ask(self.llm.sleep, level=1)

    def close(self) -> None:
        """Stop vLLM and free its memory."""
        VllmSampler._alive.discard(self)
        self._close()

    def _add(self, name: str, request: Request, settings: SamplingConfig) -> None:
        from vllm.inputs import tokens_input

        parameters = sampling_params(request, settings, self.end_ids)
        self.llm.llm_engine.add_request(name, tokens_input(request.tokens), parameters)

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load the weights, which vLLM copies in its own layout."""
        with torch.no_grad(), own_randomness(self.device):
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})

    def _wake(self, *parts: str) -> None:
        if tags := [part for part in self._asleep if part in parts]:
            _ask(self.llm.wake_up, tags=tags)
            self._asleep = [part for part in self._asleep if part not in tags]


def sampling_arguments(request: Request, settings: SamplingConfig, end_ids: Sequence[int]) -> dict[str, Any]:
    """Arguments of vLLM's `SamplingParams`; stop strings are searched for here, in the text after the prompt."""
    return {
        "temperature": settings.temperature,
        "top_k": settings.top_k or 0,
        "top_p": 1.0 if settings.top_p is None else settings.top_p,
        "min_p": settings.min_p or 0.0,
        "max_tokens": request.limit,
        "min_tokens": min(request.shortest, request.limit),
        "seed": request.seed,
        "stop_token_ids": list(end_ids) if settings.stop_at_eos else [],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


def sampling_params(request: Request, settings: SamplingConfig, end_ids: Sequence[int]) -> Any:
    """vLLM's sampling parameters of a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    output_kind = RequestOutputKind.DELTA if settings.stop else RequestOutputKind.FINAL_ONLY
    parameters = SamplingParams(**sampling_arguments(request, settings, end_ids), output_kind=output_kind)
    parameters.all_stop_token_ids.update(end_ids)  # min_tokens also holds where an end token ends nothing
    return parameters


def rows_of(policy: ActorCritic) -> int:
    """Rows of a policy's vocabulary projection."""
    return len(policy.lm.get_output_embeddings().weight)


def _start(policy: ActorCritic, precision: Precision, memory: float, in_job: bool) -> Any:
    """vLLM's engine for a model, with random weights; in a job of several processes each has its own."""
    config = deepcopy(policy.lm.config)
    config.architectures = [kind_of(policy.lm).__name__]
    on_gpu = precision.device.type == "cuda"
    size = {"gpu_memory_utilization": memory} if on_gpu else {"kv_cache_memory_bytes": CACHE_ON_CPU}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        try:
            from vllm import LLM

            return LLM(
                model=folder,
                dtype=precision.dtype,
                load_format="dummy",
                skip_tokenizer_init=True,
                generation_config="vllm",
                logprobs_mode="processed_logprobs",
                max_model_len=-1,
                enforce_eager=not on_gpu,
                enable_sleep_mode=on_gpu,
                disable_log_stats=True,
                distributed_executor_backend="external_launcher" if in_job else None,
                **size,
            )
        except Exception as error:
            if not (in_job or VllmSampler._alive):
                leave_groups()
            raise ConfigError(f"rollout.engine is vllm, which cannot run this model: {error_line(error)}") from error


def _ask(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """The result of a call of vLLM, whose errors become `EngineFailure`."""
    try:
        return function(*args, **kwargs)
    except EngineFailure:
        raise
    except Exception as error:
        raise EngineFailure(error_line(error)) from error


def _shut_down(llm: Any, in_job: bool) -> None:
    shut_down(llm, keep_group=in_job, alone=not VllmSampler._alive)
