"""A policy, or a model by itself, for generation and inspection: `tokencredit.load` and `tokencredit generate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError, quoted
from tokencredit.runs.summary import count
from tokencredit.settings.data import PromptsConfig
from tokencredit.settings.fields import check_value, unknown_key
from tokencredit.settings.parts import label_of
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.settings.run_kind import ModelSource
from tokencredit.text.batch import Batch
from tokencredit.text.data.completions import tokenize_after
from tokencredit.text.data.prefixes import FIT_FILE, fitted_values
from tokencredit.text.data.prompts import PromptBatch, Prompts, load_prompts
from tokencredit.text.data.rollout import Rollout
from tokencredit.text.models.critic import critic_folder
from tokencredit.text.models.model_loading import max_prompt_length
from tokencredit.text.models.precision import weights_in
from tokencredit.text.models.run_models import load_source
from tokencredit.text.ppo_setup import build_pipeline, build_player, evaluation_tasks
from tokencredit.text.rewards.terms import build_terms
from tokencredit.text.rollout_passes import rollout_logprobs, rollout_values
from tokencredit.text.turns.environments import load_environments
from tokencredit.tools.scoring_options import SAMPLING, SamplingOptions

Asked = str | Sequence[str] | Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]] | None
"""A text to continue, a conversation, or a list of either."""


class Policy:
    """The policy of a run with its critic, or a model by itself, on the run's device and in its dtype."""

    def __init__(
        self, source: ModelSource, which: str = "policy", options: SamplingOptions | None = None, critic: bool = True
    ):
        """Load a model, of a run as `load` does, and unless `critic` is false the run's critic, if it has one."""
        options = options or SamplingOptions()
        self.config, processes = options.configure(source), Processes().alone()
        self.name, self.given = source.name, source.config.python
        self.critic_folder = (source.run or Path(source.name)) / critic_folder(which)
        played = self.config.several_turns() or bool({"tools", "environment_factory"} & set(self.given))
        self.prompted = source.scored and not played and "train_dataset" not in self.given
        """The run has prompts of its own, which its folder holds."""
        models = load_source(replace(source, config=self.config), which, processes, critic=critic)
        self.pipeline = build_pipeline(self.config, models, [], processes)
        self.model, self.tokenizer = models.policy, models.tokenizer
        context, own = max_prompt_length(self.model.lm, 0), self.config.rollout
        if not source.scored and options.max_new_tokens is None and context is not None:
            longest = min(own.max_new_tokens, max(context // 2, 1))
            self.config = replace(self.config, rollout=options.sampling(replace(own, max_new_tokens=longest)))

    def __repr__(self) -> str:
        parameters = count(weights_in(self.model.lm.parameters()))
        critic = "no critic" if self.model.critic is None else "with its critic"
        return f"<Policy {self.name}: {type(self.model.lm).__name__}, {parameters} parameters, {critic}>"

    def generate(
        self, prompt: Asked = None, n: int = 1, *, seed: int | None = None, ids: bool = False, **sampling: Any
    ) -> list[str] | list[list[int]]:
        """Sample `n` completions, without their prompts; of several prompts `n` each, in their order.

        Args:
            prompt: text to continue, a conversation, or a list of either; None takes the run's own prompts in turn.
            n: number of completions, of each prompt.
            seed: seed of the sampling; None for the run's, or 1.
            ids: return token ids, with the end-of-sequence token of a completion that has ended.
            sampling: `max_new_tokens`, `temperature`, `top_k` and the others of `SamplingConfig`; the run's by default.

        Raises:
            ConfigError: the prompt does not fit into the model's context or has no token, or a setting is refused.
        """
        check_value("n", n, int, {"at_least": 1})
        if unknown := sampling.keys() - set(SAMPLING):
            raise ConfigError(unknown_key(min(unknown), SAMPLING))
        settings = SamplingOptions(seed=seed, **sampling).sampling(self.config.rollout)
        batches = self.complete(self.prompts(prompt, n, settings.max_new_tokens), settings, seed)
        rows: list[Any] = [row for batch in batches for row in (completion_ids(batch) if ids else batch.completions)]
        return rows

    def prompts(self, prompt: Asked, n: int, max_new_tokens: int, each: bool = False) -> PromptBatch:
        """A batch of `n` rows of each prompt, or with `each` of the configured ones; else of the run's own in turn."""
        config, limit = self.config.prompts, max_prompt_length(self.model.lm, max_new_tokens)
        if prompt is None:
            if not (self.prompted or each):
                source = ", which came from Python (train_dataset)" if "train_dataset" in self.given else ""
                raise ConfigError(f"{self.name!r} does not hold prompts{source}; give a prompt")
            if each and config.shuffle is None:
                config = replace(config, shuffle=False)
            loaded = load_prompts(config, self.tokenizer, seed=self.config.seed, limit=limit)
        else:
            listed: list[Any] = list(prompt) if isinstance(prompt, list | tuple) else [prompt]
            if listed and all(isinstance(message, Mapping) for message in listed):
                listed = [listed]
            if not listed or not all(isinstance(x, str | list | tuple) for x in listed):
                raise ConfigError(
                    f"prompt is {quoted(prompt)}; it must be a text, a list of messages, or a list of either"
                )
            rows = [{"prompt": text if isinstance(text, str) else list(text)} for text in listed]
            kept = {name: getattr(config, name) for name in ("add_bos", "chat_template_kwargs")}
            role = config.role if isinstance(listed[0], str) else None
            config = PromptsConfig(**kept, role=role)
            loaded = Prompts(rows, self.tokenizer, config, name="prompt", keys="", limit=limit)
        each = each or prompt is not None
        return loaded.batch(0, n * len(loaded.kept) if each else n, n if each else 1)

    def play(self, n: int) -> list[dict[str, Any]]:
        """Play `n` episodes in the run's environment; returns records as `turns.play.PlayedBatch.record`."""
        if lost := [name for name in ("tools", "environment_factory") if name in self.given]:
            raise ConfigError(f"the run was begun in Python with {', '.join(lost)}, which its folder does not hold")
        config, settings = self.config, self.config.rollout
        environments = load_environments(config.env, config.tools)
        player = build_player(config, self.pipeline.engine, environments)
        tasks = evaluation_tasks(config).batch(0, n)
        uniforms = torch.rand(n, settings.max_new_tokens, generator=torch.Generator().manual_seed(config.seed))
        played = player.play(tasks, settings, uniforms)
        return [played.record(row, self.tokenizer) for row in range(n)]

    def complete(self, prompts: PromptBatch, settings: SamplingConfig, seed: int | None = None) -> Iterator[Batch]:
        """Sample a completion for each row of prompts, in batches of the run's size; see `generate`."""
        generator = torch.Generator().manual_seed(self.config.seed if seed is None else seed)
        uniforms = torch.rand(len(prompts.ids), settings.max_new_tokens, generator=generator)
        for rows in torch.arange(len(uniforms)).split(self.config.rollout.batch_size):
            yield self.pipeline.sample(prompts.select(rows.tolist()), settings, uniforms[rows])

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
            raise ConfigError(
                f"{self.name!r} has no trained critic here, and critic.kind is {kind}; the policy/ and best/ of a run "
                "with critic.kind: shared or separate have one"
            )
        rollout = self._read(text, prompt)
        with self.pipeline.precision.no_grad():
            values = rollout_values(self.model, rollout, None).float()
        # The critic of a run with scores of prefixes has only what their fit leaves.
        if (self.critic_folder / FIT_FILE).is_file():
            if "reward_funcs" in self.given:
                raise ConfigError(
                    "values of this run need the reward's scores of prefixes, and its reward is from Python"
                )
            terms = build_terms(self.config.reward, self.pipeline.precision.device)
            own = rollout.prompt_ids, rollout.prompt_mask
            prompts = PromptBatch([prompt], [prompt], *own, {})
            if prompt:  # in the form of the run's, such as a conversation
                prompts = replace(self.prompts(prompt, 1, 0), ids=own[0], mask=own[1])
            values = fitted_values(self.critic_folder, terms, prompts, rollout, self.tokenizer, values)
        numbers: list[float] = values[0].tolist()
        return numbers

    def tokens(self, text: str, prompt: str = "") -> list[str]:
        """Texts of the tokens that `logprobs` and `values` score."""
        return self._read(text, prompt).tokens(0, self.tokenizer)

    def _read(self, text: str, prompt: str) -> Rollout:
        """The text as a rollout of one row; the prompt is tokenized like the run's prompts."""
        check_value("text", text, str, {})
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
            truncated=torch.zeros(1, dtype=torch.bool, device=device),
        )


def completion_ids(batch: Batch) -> list[list[int]]:
    """Token ids of each completion, with the end-of-sequence token of one that has ended."""
    return batch.rollout.by_response(batch.rollout.response_ids)
