"""A program for two processes that share a vLLM server. Arguments: its address, a model's folder, a folder for results.

The server fails at the third sync.
"""

import json
import sys
from pathlib import Path

import torch

from tokencredit.distributed.processes import Processes
from tokencredit.distributed.sharding import shard
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.rollout import RolloutConfig, SamplingConfig
from tokencredit.text.engines.requests import EngineFailure, Request
from tokencredit.text.engines.vllm.server import VllmServer
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.model_loading import load_language_model

LIMIT = 3


def completions(sampler, rank):
    """The token ids of one completion in the first process, and of two in the second."""
    found = {}
    requests = [Request([7, 8], LIMIT, 0, seed) for seed in range(rank + 1)]
    sampler.complete(requests, SamplingConfig(max_new_tokens=LIMIT), found.__setitem__)
    return [found[number].ids for number in sorted(found)]


def main(address, model, folder):
    processes = Processes(timeout=300)
    policy = ActorCritic(load_language_model(ModelConfig(name=model))[0]).requires_grad_(False)
    rollout = RolloutConfig(engine="vllm", server=address, server_timeout=20.0)
    sampler = VllmServer(policy, None, [1], rollout)
    result = {"before": sampler.longest}
    sampler.sync(policy)
    result |= {"whole": completions(sampler, processes.rank), "longest": sampler.longest}
    with torch.no_grad():
        for parameter in policy.lm.parameters():
            parameter.add_(0.5)
    shard(policy.lm, policy.lm.transformer.h)
    sampler.sync(policy)
    result |= {"sharded": completions(sampler, processes.rank), "version": sampler.version}
    try:
        sampler.sync(policy)
    except EngineFailure as failure:
        result["failure"] = str(failure)
    (folder / f"{processes.rank}.json").write_text(json.dumps(result))
    processes.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
