"""Transformers' continuous batching as a sampler: requests join and leave the running batch at any step."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedTokenizerBase

from tokencredit.settings.rollout import SamplingConfig
from tokencredit.text.engines.requests import Completion, EngineFailure, OnCompletion, Progress, Request, Sampler
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.model_loading import errors_alone

PAGE = 32
"""Tokens per page of the cache."""
BATCH_TOKENS = 1024
"""Fewest tokens per step that prompts may fill."""
POLL_SECONDS = 1.0
"""Seconds between checks that the sampling thread is alive."""


@dataclass
class ContinuousSampler(Sampler):
    """A `Sampler` on the policy itself, which shares its weights: samples in their dtype, float32.

    A sharded policy must be held whole (`sharding.gathered`) during a call.
    """

    policy: ActorCritic
    tokenizer: PreTrainedTokenizerBase
    end_ids: Sequence[int]

    name = "continuous"
    shares_weights = True

    def complete(self, requests: Sequence[Request], settings: SamplingConfig, ended: OnCompletion) -> None:
        """Sample all requests, each of which ends on its own; the cache lives as long as the call."""
        if not requests:
            return
        ends = list(self.end_ids) if settings.stop_at_eos else []
        results = {str(number): Progress(request, settings, self.tokenizer) for number, request in enumerate(requests)}
        with errors_alone(), spared(), self._manager(requests, settings) as manager:
            for number, request in enumerate(requests):
                manager.add_request(
                    request.tokens,
                    str(number),
                    max_new_tokens=request.limit,
                    streaming=bool(settings.stop),
                    eos_token_id=ends or -1,
                )
            manager.start()
            while results:
                output = manager.get_result(timeout=POLL_SECONDS)
                if output is None and not manager.is_running():
                    raise EngineFailure(f"its thread has ended: {manager.background_thread_status.fatal_error}")
                if output is None or output.request_id not in results:
                    continue
                if output.error is not None:
                    raise EngineFailure(str(output.error))
                done = take(results[output.request_id], output, ends)
                if done is not None:
                    del results[output.request_id]
                    if not output.is_finished():
                        manager.cancel_request(output.request_id)
                    ended(int(output.request_id), done)

    @contextmanager
    def _manager(self, requests: Sequence[Request], settings: SamplingConfig) -> Iterator[Any]:
        lm = self.policy.lm
        attention = lm.config._attn_implementation
        mesh = vars(lm).pop("_device_mesh", None)  # of a sharded model, which Transformers refuses though it is held
        try:
            manager = manager_of(lm, requests, settings)
            try:
                yield manager
            finally:
                if manager.is_running():
                    manager.stop(hard_stop=True)
                manager.destroy()
        finally:
            lm.set_attn_implementation(attention)
            if mesh is not None:
                lm._device_mesh = mesh


def pages_of(request: Request) -> int:
    """Pages of the cache that a request needs."""
    return -(-(len(request.tokens) + request.limit) // PAGE) + 1


@errors_alone()  # it warns of min_p, which works
def manager_of(lm: Any, requests: Sequence[Request], settings: SamplingConfig, *, shares_prefixes: bool = True) -> Any:
    """A manager, not started, with a cache for these requests or, if that is too large, for as many as fit.

    With `shares_prefixes` requests use keys and values of earlier ones with the same first tokens: not if weights
    change in between.

    Raises:
        EngineFailure: the model is not supported, or memory is too small.
    """
    pages = sum(map(pages_of, requests))
    generation = GenerationConfig(
        do_sample=True,
        temperature=settings.temperature,
        top_k=settings.top_k or 0,
        top_p=1.0 if settings.top_p is None else settings.top_p,
        min_p=settings.min_p,
        max_new_tokens=settings.max_new_tokens,
        eos_token_id=-1,
    )
    for blocks in (pages, None):
        config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=blocks,
            max_batch_tokens=max(BATCH_TOKENS, len(requests)),
            max_requests_per_batch=len(requests),
            return_logprobs=True,
            allow_block_sharing=shares_prefixes,
            auto_switch_to_flash=False,
            drop_unsupported_processors=False,
        )
        try:
            manager = lm.init_continuous_batching(generation, config)
            _draw_alone(manager, requests[0].seed)
            manager.warmup()
            return manager
        except MemoryError as error:
            failure = error
        except (ValueError, NotImplementedError, AttributeError) as error:
            raise EngineFailure(f"Transformers' continuous batching does not take this model: {error}") from error
    raise EngineFailure(f"its cache does not fit into memory: {failure}")


def _draw_alone(manager: Any, seed: int) -> None:
    """Let a manager draw from a generator of its own, and leave the global one as it is."""
    # That one belongs to the trainer's thread: evaluations set it, and gradient checkpointing sets it back to where it
    # was, so that tokens would be drawn with the same numbers again.
    manager.distributed_helper.set_tp_seed = lambda *_: None
    manager.batch_processor = manager._create_batch_processor()
    generator = torch.Generator(manager.model.device).manual_seed(seed)

    def sample(scores: Tensor, output: Tensor) -> None:
        """Draw a token per row of `scores`, `[1, rows, vocabulary]`; `output` takes ids and the bits of log-probs."""
        logprobs = scores[0].float().log_softmax(-1)
        ids = torch.multinomial(logprobs.exp(), 1, generator=generator)
        output[0, : len(ids)] = ids[:, 0]
        output[1, : len(ids)] = logprobs.gather(1, ids)[:, 0].view(torch.int32)

    manager.batch_processor.model_runner._sample = sample


def take(progress: Progress, output: Any, ends: Sequence[int], before: int = 0) -> Completion | None:
    """Take over a manager's result, all tokens so far after the first `before`; returns the completion if it ended."""
    ids, known = output.generated_tokens, len(progress.ids) - before
    reason = None if not output.is_finished() else "stop" if ids[-1] in ends else "length"
    return progress.take(ids[known:], output.logprobs[known : len(ids)], reason)


@contextmanager
def spared() -> Iterator[None]:
    """Spare the objects of the process from garbage collection: a manager's end collects twice, 0.3 s each.

    Does nothing where objects are frozen already, since thawing is all or nothing.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
