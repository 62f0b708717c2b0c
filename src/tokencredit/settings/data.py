"""Settings of what goes in and what is rewarded: prompts, reward terms, scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tokencredit.errors import ConfigError
from tokencredit.settings.fields import setting

TEXTS = ["This movie was really"]
"""The prompts of a configuration that names none."""


@dataclass
class PromptsConfig:
    """What the policy continues."""

    text: list[str] | str | None = setting(None, needs="not dataset")
    """One prompt, or a list that batches go through in turn; null for `This movie was really`, unless there is a
    dataset."""
    dataset: str | None = None
    """A .jsonl, .json, .csv or .parquet file, a folder that Dataset.save_to_disk wrote, or a hub id."""
    split: str = setting("train", needs="dataset")
    """Its split."""
    column: str = setting("prompt", needs="dataset or train_dataset or eval_dataset")
    """Its column of prompts: texts or conversations. All other columns go to the reward."""
    config_name: str | None = setting(None, needs="dataset")
    """Its subset, on the hub."""
    shuffle: bool | None = None
    """A new order in each pass, from the seed; null shuffles a dataset and takes texts in turn."""
    max_length: int | None = setting(None, at_least=1)
    """The most tokens of a prompt; null for what max_new_tokens leaves of the model's context, which always holds."""
    overlong: Literal["error", "drop", "truncate"] = "error"
    """What happens to a longer one: refused, left out, or cut down to its end."""
    add_bos: bool | None = None
    """Put a beginning-of-sequence token before each prompt; null leaves that to the tokenizer or chat template."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Handed to the chat template of conversations, such as `enable_thinking: false`."""

    def texts(self) -> list[str] | str:
        """The prompts where there is no dataset."""
        return TEXTS if self.text is None else self.text


@dataclass
class RewardTerm:
    """One term of the reward: exactly one of function, classifier and reward_model, and what belongs to it."""

    function: str | None = None
    """A Python function: `pkg.module:name`, `path/file.py:name`, or a ready-made one (docs/rewards.md): length, count,
    regex, lexicon_sentiment, repetition, distinct, reference_fluency, similarity."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Settings that the function is given by name."""
    classifier: str | None = None
    """A sequence classifier: hub id, folder, or `builtin:reviews`."""
    label: str | None = setting(None, needs="classifier")
    """The classifier's label that is rewarded; null is NEGATIVE for `builtin:reviews`, and refused for any other."""
    output: Literal["probability", "logit", "log_odds"] = setting("probability", needs="classifier")
    """What of that label is the reward."""
    reward_model: str | None = None
    """A model with one output, as TRL's RewardTrainer saves it: hub id or folder."""
    text: Literal["both", "completion"] = setting("both", needs="classifier or reward_model")
    """What a classifier or reward model reads: prompt and completion, or the completion alone."""
    batch_size: int = setting(64, needs="classifier or reward_model", at_least=1)
    """Texts that it reads at once."""
    dtype: Literal["float32", "bfloat16"] = setting("float32", needs="classifier or reward_model")
    """Dtype of its weights and passes. bfloat16 takes half the memory and rounds the score to about 3 digits."""
    weight: float = 1.0
    """Factor of this term in the sum."""
    name: str | None = None
    """Its name in metrics and messages; by default that of the function, the label, or the reward model's folder."""
    retries: int = setting(2, at_least=0)
    """How often a call that failed is made again, after 1, 2, 4 and so on to 60 seconds: one that raised, gave no list
    of numbers or ran into the timeout. Of any kind of term, though meant for functions that ask a service."""
    timeout: float | None = setting(None, above=0)
    """Seconds that a call, of all completions of the batch, may take; null for as long as it likes. With a timeout, a
    function that is no coroutine runs in a thread."""

    def __post_init__(self) -> None:
        """Fill in the label of the built-in classifier."""
        if self.classifier == "builtin:reviews" and self.label is None:
            self.label = "NEGATIVE"

    def source(self) -> tuple[str, str]:
        """Where the term comes from: `function`, `classifier` or `reward_model`, and its value.

        Raises:
            ConfigError: none of them is given, or more than one.
        """
        sources = {"function": self.function, "classifier": self.classifier, "reward_model": self.reward_model}
        given = [(kind, value) for kind, value in sources.items() if value is not None]
        if len(given) != 1:
            has = " and ".join(kind for kind, _ in given) or "none"
            raise ConfigError(f"needs exactly one of {', '.join(sources)}; it has {has}")
        return given[0]


@dataclass
class ScoreConfig:
    """What happens to a completion's score before it becomes reward."""

    normalize: Literal["none", "batch", "running"] = "none"
    """Divide scores by their deviation: this batch's, or that of all scores so far."""
    shift_mean: bool = setting(True, needs="normalize: not none")
    """Whether normalising also takes off their mean, so that about half of the scores become negative."""
    clip: float | None = setting(None, above=0)
    """Scores are held within ± this; null leaves them."""
    missing_eos_penalty: float = setting(0.0, at_least=0)
    """Taken off where a completion was cut off before it ended."""
    overlong_penalty: float = setting(0.0, at_least=0)
    """Penalty of a completion of rollout.max_new_tokens, to which it rises linearly over the last overlong_tokens."""
    overlong_tokens: int | None = setting(None, at_least=1)
    """Tokens before rollout.max_new_tokens over which overlong_penalty rises from 0."""
