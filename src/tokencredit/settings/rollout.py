"""Settings of sampling: of any completions, of rollouts with their engine, and of off-policy corrections."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from tokencredit.errors import ConfigError
from tokencredit.settings.fields import Group, refuse, setting

EngineName = Literal["local", "continuous", "vllm"]
VLLM_TEMPERATURES = (0.01, 2.0)
"""vLLM raises lower temperatures to the first, and refuses higher ones than the second."""


@dataclass
class SamplingConfig(Group):
    """Sampling of completions; docs/algorithms.md says what filters change."""

    max_new_tokens: int = setting(24, at_least=1)
    """Longest completion, in tokens; a longer one is truncated."""
    min_new_tokens: int = setting(0, at_least=0)
    """Shortest completion, in tokens, before it may end."""
    temperature: float = setting(1.0, above=0)
    """Sampling temperature: logits are divided by it, here and for the log-probs in training."""
    top_k: int | None = setting(None, at_least=1)
    """Top-k sampling: only the k most likely tokens; null for all. Like top_p, min_p and min_new_tokens it filters the
    sampled tokens only: log-probs remain those of the full distribution, unless off_policy.support is truncated."""
    top_p: float | None = setting(None, above=0, at_most=1)
    """Nucleus sampling: only the most likely tokens that together have this probability; null for all."""
    min_p: float | None = setting(None, above=0, at_most=1)
    """Min-p sampling: only tokens whose probability is at least this share of the largest; null for all."""
    stop: list[str] = field(default_factory=list)
    """Stop strings; the completion includes them."""
    stop_at_eos: bool = True
    """End a completion at an end-of-sequence token; false ends it at stop strings and max_new_tokens only."""

    def filters(self) -> list[str]:
        """Names of the settings that filter tokens."""
        on = {
            "top_k": self.top_k is not None,
            "top_p": self.top_p is not None and self.top_p < 1,
            "min_p": self.min_p is not None,
            "min_new_tokens": self.min_new_tokens > 0,
        }
        return [name for name, is_on in on.items() if is_on]

    def check_vllm(self, prefix: str = "") -> None:
        """Raise `ConfigError` for settings under which vLLM samples from another distribution."""
        least, most = VLLM_TEMPERATURES
        if not least <= self.temperature <= most:
            refuse(self, "temperature", f"vLLM samples at {least} to {most}; or use engine: local", prefix)
        if self.min_p is not None and self.top_p is not None and self.top_p < 1:
            reason = "vLLM applies min_p first, which changes what top_p leaves; leave one out, or use engine: local"
            refuse(self, "min_p top_p", reason, prefix)

    def check_vllm_server(self, prefix: str = "") -> None:
        """Raise `ConfigError` for settings that requests to a vLLM server cannot express."""
        if self.min_new_tokens and not self.stop_at_eos:
            reason = "a vLLM server then draws end-of-sequence tokens before that length: leave one of them out"
            refuse(self, "min_new_tokens stop_at_eos", reason, prefix)


@dataclass
class RolloutConfig(SamplingConfig):
    """Sampling of completions for training."""

    batch_size: int = setting(64, at_least=1)
    """Completions per iteration, over all processes."""
    per_prompt: int = setting(1, at_least=1)
    """Completions per prompt; must divide batch_size."""
    engine: EngineName = "local"
    """Sampling engine, also of evaluations and audits. `local` samples with the model itself, the same bits for the
    same seed. `continuous` is Transformers' continuous batching, `vllm` is vLLM in this process or on a `server`; their
    log-probs are checked at the start, those of vLLM after each update too, and their rollouts are the same in
    distribution only (docs/engines.md)."""
    engine_memory: float | None = setting(None, needs=("engine: vllm", "not server"), above=0, below=1)
    """Share of a GPU's memory for vLLM's weights, activations and KV cache; null for 0.4. On a CPU the KV cache has
    1 GiB, or VLLM_CPU_KVCACHE_SPACE."""
    server: str | None = setting(None, needs="engine: vllm")
    """Address of a vLLM server, such as http://localhost:8000; null for vLLM in this process. docs/engines.md has the
    command that starts it. Its API key is read from the environment variable VLLM_API_KEY."""
    server_folder: str | None = setting(None, needs="server")
    """Folder through which weights reach the server, which must see it under the same path; null for a temporary folder
    of this machine."""
    server_timeout: float = setting(600.0, needs="server", above=0)
    """Seconds without an answer after which a request to the server has failed, and for which a server that does not
    answer is waited for."""
    max_age: int = setting(0, needs="engine: continuous", at_least=0)
    """Most updates between the drawing of a token and its use. Above 0, so many batches are sampled ahead, while the
    policy learns and rewards and tools are waited for; rollouts then depend on timing (docs/engines.md)."""
    cache: Literal["auto", "dynamic", "static"] = setting("auto", needs="engine: local")
    """KV cache of sampling, also in evaluations and audits. `dynamic` grows with the completions. `static` is allocated
    at full size, so that a GPU replays each step as a CUDA graph. `auto` is static on a GPU if the model supports it,
    else dynamic."""

    def check_lengths(self) -> None:
        """Raise `ConfigError` for lengths or stop strings that leave nothing to sample."""
        if self.min_new_tokens > self.max_new_tokens:
            reason = f"it must be at most rollout.max_new_tokens, {self.max_new_tokens}"
            refuse(self, "min_new_tokens", reason, "rollout.")
        if "" in self.stop:
            refuse(self, "stop", "an empty text would end every completion, leave it out", "rollout.")


def check_server(address: str) -> None:
    """Raise `ConfigError` unless `rollout.server` is an http(s) address of a host, without a password."""
    if "@" in address:
        raise ConfigError(
            "rollout.server holds a user name or password, which would be written into the run's files; leave it out, "
            "and give an API key as the environment variable VLLM_API_KEY"
        )
    import httpx2

    try:
        httpx2.URL(address)
        parts = urlsplit(address)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        good = good and not (parts.query or parts.fragment or parts.path.rstrip("/").endswith("/v1"))
    except (httpx2.InvalidURL, ValueError):  # such as an IP address with a number above 255, or a port that is none
        good = False
    if not good or address.split() != [address]:
        raise ConfigError(f"rollout.server is {address!r}; it must be an address such as http://localhost:8000")


FIXED = "proximal: not interpolated"
"""The condition of weights that do not change within an update."""


@dataclass
class OffPolicyConfig(Group):
    """Corrections for tokens drawn with other log-probs than those of training: by filters such as top_p, by a pass in
    bfloat16, or by another engine."""

    proximal: Literal["recomputed", "behavior", "interpolated"] = "recomputed"
    """Policy around which the update clips: recomputed takes log-probs of a full forward pass of the trained model,
    behavior the log-probs with which the engine drew the tokens, interpolated those between them and the present
    ones, by the age of each token (A-3PO)."""
    correct: Literal["none", "clip", "mask"] = setting("none", needs="proximal: recomputed, interpolated")
    """Importance weights on the policy loss, proximal over behavior probability: none, clip brings them into
    `bounds`, mask sets those outside to 0. mask with level: geometric gives the others the weight 1."""
    level: Literal["token", "sequence", "geometric"] = setting("token", needs=("correct: not none", FIXED))
    """Weights of single tokens, of the product over a completion's tokens, or of its geometric mean."""
    bounds: list[float] = setting(lambda: [0.0, 2.0], needs="correct: not none")
    """Lower and upper bound of the weights."""
    support: Literal["full", "truncated"] = setting(
        "full", needs=("rollout.engine: local", "rollout.top_k", "proximal: behavior")
    )
    """Tokens over which the update normalises the policy: the whole vocabulary, or those that the filters left when the
    token was drawn, so that its ratio begins at 1. They are kept with it, at most rollout.top_k."""


def differs_from_training(rollout: RolloutConfig, dtype: str) -> bool:
    """True if the engine may draw tokens with other log-probs than training's, so that rollouts hold both."""
    return bool(rollout.filters()) or dtype != "float32" or rollout.engine != "local"
