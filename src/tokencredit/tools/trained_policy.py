"""A trained policy for generation and inspection: `tokencredit.load` and `tokencredit generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError, quoted
from tokencredit.settings.data import PromptsConfig
from tokencredit.settings.parts import label_of
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.settings.run_kind import read_source
from tokencredit.settings.text import PPOConfig
from tokencredit.text.data.completions import tokenize_after
from tokencredit.text.data.prefixes import FIT_FILE, fitted_values
from tokencredit.text.data.prompts import PromptBatch, load_prompts
from tokencredit.text.data.rollout import Rollout
from tokencredit.text.models.critic import critic_folder
from tokencredit.text.models.model_loading import max_prompt_length
from tokencredit.text.models.run_models import load_run_models
from tokencredit.text.ppo_setup import build_pipeline, build_player, evaluation_tasks
from tokencredit.text.rewards.terms import build_terms
from tokencredit.text.rollout_passes import rollout_logprobs, rollout_values
from tokencredit.text.turns.environments import load_environments

Prompt = str | Sequence[str] | Sequence[Mapping[str, Any]] | None
"""Text to continue, several of them, or a conversation."""


class Policy:
    """The policy of a run, on the run's device and in its dtype, with its critic."""

    def __init__(self, run: Path, config: PPOConfig, which: str = "policy", critic: bool = True):
        """Load the policy of a run's folder, as `load` does, and unless `critic` is false its critic, if it has one."""
        self.config, processes = config, Processes().alone()
        self.critic = run / critic_folder(which)
        self.given = config.python
        from_data = (run / "config.yaml").is_file() and not read_source(str(run)).scored
        played = config.several_turns() or bool({"tools", "environment_factory"} & set(self.given))
        self.prompted = not from_data and not played and "train_dataset" not in self.given
        """The run has prompts of its own, which its folder holds."""
        models = load_run_models(run, config, which, processes, critic=critic)
        self.pipeline = build_pipeline(config, models, [], processes)
        self.model, self.tokenizer = models.policy, models.tokenizer

    def generate(
        self,
        prompt: Prompt = None,
        n: int = 1,
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        seed: int = 1,
    ) -> list[str]:
        """Sample `n` completions, without their prompts; of several prompts `n` each, in their order.

        Args:
            prompt: text to continue, a conversation, or a list of texts; None takes the run's own prompts in turn.
            n: number of completions, of each prompt.
            max_new_tokens: longest completion; None for the run's.
            temperature: divides the logits; None for the run's.
            seed: seed of the sampling.

        Raises:
            ConfigError: the prompt does not fit into the model's context or has no token, or a number is out of range.
        """
        longest = self.config.rollout.max_new_tokens if max_new_tokens is None else max_new_tokens
        for name, value in (("n", n), ("max_new_tokens", longest)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if temperature is not None and temperature <= 0:
            raise ConfigError(f"temperature is {temperature}; it must be above 0")
        return self.complete(self.prompts(prompt, n, longest), longest, temperature, seed)

    def prompts(self, prompt: Prompt, n: int, max_new_tokens: int, chat: bool = False) -> PromptBatch:
        """A batch of `n` rows with a prompt, or with the run's own prompts in turn; `n` of each of several texts.

        With `chat` the prompt is a user message, rendered by the tokenizer's chat template.
        """
        config, rows = self.config.prompts, None
        if prompt is None and not self.prompted:
            source = ", which came from Python (train_dataset)" if "train_dataset" in self.given else " to complete"
            raise ConfigError(f"the run's folder does not hold prompts{source}; give a prompt")
        if isinstance(prompt, str) and chat:
            prompt = [{"role": "user", "content": prompt}]
        listed: list[Any] = [] if prompt is None else list(prompt) if isinstance(prompt, list | tuple) else [prompt]
        if listed and all(isinstance(message, Mapping) for message in listed):
            config = replace(config, column="prompt", template=None)
            rows, listed = [{"prompt": listed}], listed[:1]
        elif all(isinstance(text, str) for text in listed) and (listed or prompt is None):
            config = PromptsConfig(text=listed, add_bos=config.add_bos) if listed else config
        else:
            raise ConfigError(f"prompt is {quoted(prompt)}; it must be a text, a list of texts, or a list of messages")
        limit = max_prompt_length(self.model.lm, max_new_tokens)
        seed = self.config.seed
        loaded = load_prompts(config, self.tokenizer, seed=seed, limit=limit, dataset=rows, dataset_name="--prompt")
        return loaded.batch(0, n * max(1, len(listed)), n if listed else 1)

    def play(
        self, n: int, max_new_tokens: int, temperature: float | None = None, seed: int = 1
    ) -> list[dict[str, Any]]:
        """Play `n` episodes in the run's environment; returns records as `turns.play.PlayedBatch.record`."""
        if lost := [name for name in ("tools", "environment_factory") if name in self.given]:
            raise ConfigError(f"the run was begun in Python with {', '.join(lost)}, which its folder does not hold")
        config = self.config
        environments = load_environments(config.env, config.tools)
        player = build_player(config, self.pipeline.engine, environments)
        tasks = evaluation_tasks(replace(config, seed=seed)).batch(0, n)
        settings = self._sampling(max_new_tokens, temperature)
        uniforms = torch.rand(n, max_new_tokens, generator=torch.Generator().manual_seed(seed))
        played = player.play(tasks, settings, uniforms)
        return [played.record(row, self.tokenizer) for row in range(n)]

    def complete(
        self, prompts: PromptBatch, max_new_tokens: int, temperature: float | None = None, seed: int = 1
    ) -> list[str]:
        """Sample a completion for each row of prompts; see `generate`."""
        settings = self._sampling(max_new_tokens, temperature)
        uniforms = torch.rand(len(prompts.ids), max_new_tokens, generator=torch.Generator().manual_seed(seed))
        return self.pipeline.sample(prompts, settings, uniforms).completions

    def _sampling(self, max_new_tokens: int, temperature: float | None) -> SamplingConfig:
        """The run's sampling settings with another length and temperature."""
        own = self.config.rollout
        return replace(
            own,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min(own.min_new_tokens, max_new_tokens),
            temperature=own.temperature if temperature is None else temperature,
        )

    def logprobs(self, text: str, prompt: str = "") -> list[float]:
        """Log-prob of each token of a text after a prompt, at the run's temperature, in nats.

        Without a prompt, the first token is left out unless the tokenizer prepends a special token.
        """
        rollout, temperature = self._read(text, prompt), self.config.rollout.temperature
        with self.pipeline.precision.no_grad():
            logprobs: list[float] = rollout_logprobs(self.model, rollout, temperature, None)[0].float().tolist()
        return logprobs

    def values(self, text: str, prompt: str = "") -> list[float]:
        """The value of the state before each token that `logprobs` scores."""
        if self.model.critic is None:
            kind = label_of(self.config.critic.kind)
            raise ConfigError(f"critic.kind of this run is {kind}, which has no values of texts outside the run")
        rollout = self._read(text, prompt)
        with self.pipeline.precision.no_grad():
            values = rollout_values(self.model, rollout, None).float()
        # The critic of a run with scores of prefixes has only what their fit leaves.
        if (self.critic / FIT_FILE).is_file():
            if "reward_funcs" in self.given:
                raise ConfigError(
                    "values of this run need the reward's scores of prefixes, and its reward is from Python"
                )
            terms = build_terms(self.config.reward, self.pipeline.precision.device)
            prompts = PromptBatch([prompt], [prompt], rollout.prompt_ids, rollout.prompt_mask, {})
            values += fitted_values(self.critic, terms, prompts, rollout, self.tokenizer)
        numbers: list[float] = values[0].tolist()
        return numbers

    def tokens(self, text: str, prompt: str = "") -> list[str]:
        """Texts of the tokens that `logprobs` and `values` score."""
        return self._read(text, prompt).tokens(0, self.tokenizer)

    def _read(self, text: str, prompt: str) -> Rollout:
        """The text as a rollout of one row; the prompt is tokenized like the run's prompts."""
        if prompt:
            before = self.prompts(prompt, 1, 0).ids[0].tolist()
        elif self.config.prompts.add_bos:
            before = [self.tokenizer.bos_token_id]
        else:
            before = self.tokenizer("", add_special_tokens=self.config.prompts.add_bos is None)["input_ids"]
        ids = before + tokenize_after(self.tokenizer, text, prompt, before)
        start = len(before) or 1
        if len(ids) <= start:
            raise ConfigError(f"{text!r} has no token to score" + ("" if before else "; give a prompt before it"))
        context = max_prompt_length(self.model.lm, 0)
        if context is not None and len(ids) > context:
            raise ConfigError(f"prompt and text have {len(ids)} tokens; the model's context has {context}")
        device = self.pipeline.precision.device
        tensor = torch.tensor([ids], device=device)
        mask, numbers = torch.ones_like(tensor, dtype=torch.bool), torch.zeros(1, len(ids) - start, device=device)
        return Rollout(
            prompt_ids=tensor[:, :start],
            prompt_mask=mask[:, :start],
            response_ids=tensor[:, start:],
            mask=mask[:, start:],
            logprobs=numbers,
            values=None,
            truncated=torch.zeros(1, dtype=torch.bool, device=device),
        )
