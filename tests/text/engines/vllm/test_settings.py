"""Settings that go with `rollout.engine: vllm`, and the message where vLLM is not installed; vLLM is not needed."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from tokencredit.errors import ConfigError, RunStopped
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.settings.run_kind import with_engine
from tokencredit.settings.text import PPOConfig
from tokencredit.text.engines.requests import Request
from tokencredit.text.engines.vllm.sampler import VllmSampler
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.model_loading import load_language_model
from tokencredit.text.models.precision import Precision


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout.temperature": 0.005}, r"rollout\.temperature is 0\.005; vLLM samples at 0\.01 to 2"),
        ({"rollout.temperature": 2.5}, r"rollout\.temperature is 2\.5; vLLM samples at 0\.01 to 2"),
        ({"eval.temperature": 0.005}, r"eval\.temperature is 0\.005"),
        (
            {"rollout.min_p": 0.1, "rollout.top_p": 0.9},
            r"rollout\.min_p is 0\.1, and rollout\.top_p is 0\.9; vLLM applies min_p first",
        ),
        ({"rollout.cache": "dynamic"}, r"rollout\.cache .* without rollout\.engine: local"),
        ({"rollout.engine_memory": 1.5}, r"rollout\.engine_memory"),
        ({"rollout.engine_memory": 0.5, "rollout.engine": "local"}, r"rollout\.engine_memory .* rollout\.engine: vllm"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        PPOConfig.from_dict({"rollout.engine": "vllm"} | settings)


def test_settings_that_fit():
    fitting = {"rollout.min_new_tokens": 2, "kl.coef": 0.0, "rollout.top_p": 0.9, "rollout.engine_memory": 0.3}
    config = PPOConfig.from_dict({"rollout.engine": "vllm"} | fitting)
    assert with_engine(config).rollout.engine_memory is None


SERVER = "http://gpu.example:8000/vllm"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout.server": "localhost:8000"}, r"rollout\.server is 'localhost:8000'; it must be an address such as"),
        ({"rollout.server": "http://"}, "it must be an address"),
        ({"rollout.server": "http://host:port"}, "it must be an address"),
        ({"rollout.server": "http://a host"}, "it must be an address"),
        ({"rollout.server": "http://10.0.0.256:8000"}, "it must be an address"),
        ({"rollout.server": "http://host:8000/v1"}, "it must be an address"),
        ({"rollout.server": "http://host?key=1"}, "it must be an address"),
        (
            {"rollout.min_new_tokens": 2, "rollout.stop_at_eos": False},
            r"rollout\.min_new_tokens is 2, and .*stop_at_eos",
        ),
        ({"rollout.server_timeout": 0.0}, r"rollout\.server_timeout"),
    ],
)
def test_settings_that_do_not_fit_a_server_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        PPOConfig.from_dict({"rollout.engine": "vllm", "rollout.server": SERVER} | settings)


@pytest.mark.parametrize("address", ["http://me:secret@host:1", "https://secret@host", "http://me:secret@host:port"])
def test_a_password_in_the_address_is_refused_and_not_shown(address):
    with pytest.raises(ConfigError, match="environment variable VLLM_API_KEY") as info:
        PPOConfig.from_dict({"rollout.engine": "vllm", "rollout.server": address})
    assert "secret" not in str(info.value)


def test_commands_use_the_server_that_they_are_given():
    own = {"rollout.server": SERVER, "rollout.server_folder": "shared", "rollout.server_timeout": 9.0}
    config = PPOConfig.from_dict({"rollout.engine": "vllm"} | own)
    assert with_engine(config, "vllm").rollout.server is None, "the run may still train with its own"
    assert with_engine(config).rollout.server_timeout == 600
    other = with_engine(config, "vllm", "http://other:1", "folder").rollout
    assert (other.server, other.server_folder) == ("http://other:1", "folder")


def test_another_engine_samples_from_a_run_that_was_sharded():
    config = PPOConfig.from_dict({"run.shard": "full", "sharding.sampling": "layers"})
    assert with_engine(config, "continuous").run.shard == "none"


def test_on_a_gpu_it_sleeps_during_full_passes_and_wakes_what_is_needed():
    calls = []
    sampler = VllmSampler.__new__(VllmSampler)
    sampler.device, sampler._asleep = torch.device("cuda"), []
    sampler.llm = SimpleNamespace(
        sleep=lambda level: calls.append(f"sleep {level}"), wake_up=lambda tags: calls.append(f"wake {tags}")
    )
    sampler._wake("weights", "kv_cache")
    sampler.sleep()
    sampler.sleep()
    sampler._wake("weights")
    sampler._wake("weights", "kv_cache")
    assert calls == ["sleep 1", "wake ['weights']", "wake ['kv_cache']"]


def test_a_sequence_that_is_too_long_is_refused_by_its_length():
    """Not by a failure of the engine, which a resumed run would only repeat."""
    sampler = VllmSampler.__new__(VllmSampler)
    sampler.longest = 64
    with pytest.raises(RunStopped, match=r"may have 65 tokens, and rollout\.engine vllm takes 64; shorten prompts"):
        sampler.complete([Request([7, 8], 63, 0, 0)], SamplingConfig(), lambda *_: None)


def test_without_vllm_the_message_says_what_to_install(tokenizer, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else found(name))
    policy = ActorCritic(load_language_model(ModelConfig())[0])
    message = r"^the engine vllm needs vLLM, which is not installed: pip install 'tokencredit\[vllm\]'$"
    with pytest.raises(ConfigError, match=message):
        VllmSampler(policy, tokenizer, [0], Precision("float32", torch.device("cpu")))
