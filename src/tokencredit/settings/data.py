"""Settings of prompts, environments and tools, reward terms and scores."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from tokencredit.errors import ConfigError
from tokencredit.settings.fields import Group, check_value, hints_of, no_group, refuse, setting, unknown_key

TEXTS = ["This movie was really"]
"""Default prompts."""
CONVERSATION = re.compile(r"""\s*\[\s*\{.*?["']role["']\s*:""", re.DOTALL)
"""Beginning of a list of messages as JSON or Python writes it."""


@dataclass
class PromptsConfig(Group):
    """The prompts that the policy completes."""

    text: list[str] | str | None = setting(None, needs="not dataset")
    """Prompt, or a list of prompts that batches cycle through; null for `This movie was really`, unless a dataset is
    given."""
    dataset: str | None = None
    """Dataset of prompts: a .jsonl, .json, .csv or .parquet file, a folder from Dataset.save_to_disk, or a hub id."""
    split: str = setting("train", needs="dataset")
    """Split of the dataset."""
    column: str = setting("prompt", needs="dataset or eval.dataset or train_dataset or eval_dataset")
    """Column of prompts: texts or conversations. All other columns are passed to the reward."""
    template: str | None = setting(None, needs="dataset or eval.dataset or train_dataset or eval_dataset")
    """Jinja template that makes the prompt from the columns of a row, such as `Question: {{ instruction }}`; null takes
    the prompt from `column`."""
    role: Literal["user"] | None = None
    """user makes each plain text a user's message, for a model with a chat template; null leaves texts as they are."""
    config_name: str | None = setting(None, needs="dataset")
    """Configuration (subset) of a hub dataset; null for its default."""
    shuffle: bool | None = None
    """Order of the prompts: true for another one each time through them, false for that of the data; null shuffles a
    dataset and keeps the order of texts."""
    max_length: int | None = setting(None, at_least=1)
    """Longest prompt, in tokens; null for the model's context less max_new_tokens, which is always a limit."""
    overlong: Literal["error", "drop", "truncate"] = "error"
    """Policy for overlong prompts: raise an error, drop them, or keep the last tokens (truncate)."""
    add_bos: bool | None = None
    """Beginning-of-sequence token. true: prepend it to each prompt that lacks it. false: add no special token. null: as
    the tokenizer or chat template does."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the chat template, such as `enable_thinking: false`."""

    def texts(self) -> list[str] | str:
        """Prompts of a configuration without a dataset."""
        return TEXTS if self.text is None else self.text


@dataclass(kw_only=True)
class RewardTerm(Group):
    """Settings shared by all reward terms; a term is a `FunctionTerm`, a `ClassifierTerm` or a `RewardModelTerm`."""

    weight: float = 1.0
    """Weight of this term in the sum."""
    name: str | None = None
    """Name in metrics and messages; null for the function's name, the label, or the reward model's folder."""
    retries: int = setting(2, at_least=0)
    """Retries after a failed call (exception, timeout), with exponential backoff from 1 s to 60 s."""
    timeout: float | None = setting(None, above=0)
    """Timeout per call, in seconds; null for none. A call scores all completions of the batch. With a timeout, a
    function that is not a coroutine runs in a thread."""

    @staticmethod
    def read(settings: Any, key: str = "reward[]") -> RewardTerm:
        """The term of the mapping at `key`, whose kind is the one of `KINDS` that it has.

        Raises:
            ConfigError: it is no mapping, has none of the kinds or more than one, or a key or value is refused.
        """
        if not isinstance(settings, Mapping):
            raise ConfigError(no_group(key, settings, "function"))
        names = {kind: [item.name for item in fields(term)] for kind, term in KINDS.items()}
        owners = {name: [kind for kind in KINDS if name in names[kind]] for name in settings}
        kinds = [kind for kind in KINDS if kind in settings]
        for name in settings:
            if not owners[name]:
                known = [f"{key}.{own}" for kind in KINDS if kind in settings or not kinds for own in names[kind]]
                message = unknown_key(f"{key}.{name}", list(dict.fromkeys(known)))
                if kinds == ["function"] and "did you mean" not in message:
                    message = f"unknown key {key}.{name}; arguments of the function go into {key}.kwargs"
                raise ConfigError(message)
        if len(kinds) != 1:
            has = " and ".join(kinds) or "none"
            raise ConfigError(f"{key} needs exactly one of {', '.join(KINDS)}; it has {has}")
        for name in settings:
            if kinds[0] not in owners[name]:
                raise ConfigError(
                    f"{key}.{name} belongs to a {' or '.join(owners[name])}, and this term is a {kinds[0]}; "
                    "leave it out"
                )
        term: Any = KINDS[kinds[0]]
        for item in fields(term):
            if item.name in settings:
                hint, limits = hints_of(term)[item.name], item.metadata.get("limits", {})
                check_value(f"{key}.{item.name}", settings[item.name], hint, limits)
        made: RewardTerm = term(**settings)
        return made

    def source(self) -> tuple[str, str]:
        """The term's kind, and the value of the setting of that name."""
        kind = next(name for name, term in KINDS.items() if isinstance(self, term))
        return kind, getattr(self, kind)


@dataclass(kw_only=True)
class FunctionTerm(RewardTerm):
    """A reward term that a Python function computes."""

    function: str
    """Python function: `pkg.module:name`, `path/file.py:name`, or a built-in one (docs/rewards.md): length, count,
    regex, lexicon_sentiment, repetition, distinct, reference_fluency, similarity."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""
    prefix: bool = False
    """Score the prefixes of completions too, for the values of their states (`critic.prefix_every`): for a function of
    the text that is cheap and has no effects."""


@dataclass(kw_only=True)
class ModelTerm(RewardTerm):
    """Settings shared by terms that a model computes."""

    text: Literal["both", "completion"] = "both"
    """Input of the model: prompt and completion, or the completion alone."""
    batch_size: int = setting(64, at_least=1)
    """Texts per forward pass of the model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the model's weights and forward passes. bfloat16 halves its memory and rounds scores to about 3
    digits."""


@dataclass(kw_only=True)
class ClassifierTerm(ModelTerm):
    """A reward term from a sequence classifier."""

    classifier: str
    """Sequence classifier: hub id, folder, or `builtin:reviews`."""
    label: str | None = None
    """Label that is rewarded; required, except that null means NEGATIVE for `builtin:reviews`."""
    output: Literal["probability", "logit", "log_odds"] = "probability"
    """Output that becomes the reward: the label's probability, logit or log-odds."""

    def __post_init__(self) -> None:
        """Fill in the label of the built-in classifier."""
        super().__post_init__()
        if self.classifier == "builtin:reviews" and self.label is None:
            self.label = "NEGATIVE"


@dataclass(kw_only=True, eq=False)
class DefaultReward(ClassifierTerm):
    """The reward of a configuration that names none. It equals the same term by name, and differs in its type."""

    classifier: str = "builtin:reviews"

    def __eq__(self, other: object) -> bool:
        """True for a classifier's term with the same settings."""
        return isinstance(other, ClassifierTerm) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # mutable, as the other terms


@dataclass(kw_only=True)
class RewardModelTerm(ModelTerm):
    """A reward term from a reward model with one output, as TRL's RewardTrainer saves it."""

    reward_model: str
    """Reward model: hub id or folder."""


KINDS: dict[str, type[RewardTerm]] = {
    "function": FunctionTerm,
    "classifier": ClassifierTerm,
    "reward_model": RewardModelTerm,
}
"""Kinds of reward terms, by the setting that names their source."""


@dataclass
class ScoreConfig(Group):
    """Normalization, clipping and penalties of scores."""

    normalize: Literal["none", "batch", "running"] = "none"
    """Normalization of scores: none, or by the mean (`shift_mean`) and standard deviation of this batch (batch) or of
    all scores so far (running)."""
    shift_mean: bool = setting(True, needs="normalize: not none")
    """Subtract the mean when normalizing, so that about half of the scores become negative. false keeps it: running
    divides the scores, batch their distances from the mean."""
    clip: float | None = setting(None, above=0)
    """Clip range of scores, after `normalize`: [-clip, clip]; null for no clipping."""
    missing_eos_penalty: float = setting(0.0, at_least=0)
    """Penalty of a completion that was truncated, subtracted from its score after `normalize` and `clip`."""
    overlong: list[float] | None = None
    """Penalty of long completions, [tokens, penalty]: it rises linearly from 0 over the last `tokens` before
    rollout.max_new_tokens to `penalty` there; null for none."""


PACKAGED = ("builtin", "reasoning_gym", "gymnasium", "openenv")
"""Prefixes of `env.factory` for environments of Tokencredit and of other packages; others name user code."""
SEVERAL = "env.factory or tools or environment_factory"
"""The condition that episodes have several turns."""


@dataclass
class EnvironmentConfig(Group):
    """Environment that answers the policy's turns (docs/turns.md); without one, and without `tools`, a completion is
    one turn."""

    factory: str | None = None
    """Environment class, or function that returns an environment: `pkg.module:MyEnv` or `path/file.py:MyEnv`; one of
    Tokencredit: `builtin:grid` or `builtin:calculator`; a data set of reasoning-gym: `reasoning_gym:chain_sum`; a
    text-like environment of Gymnasium: `gymnasium:FrozenLake-v1`; or a server: `openenv:http://localhost:8000`."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory or of the data set."""
    max_turns: int = setting(8, needs=SEVERAL, at_least=1)
    """Most turns of the policy per episode; an episode that is not done by then is truncated."""
    turn_tokens: int | None = setting(None, needs=SEVERAL, at_least=1)
    """Longest turn of the policy, in tokens; null for what is left of rollout.max_new_tokens, which counts all tokens
    after the prompt, observations included."""
    observation_tokens: int = setting(512, needs=SEVERAL, at_least=1)
    """Longest observation, in tokens; a longer one is cut and says so."""
    timeout: float = setting(30.0, needs=SEVERAL, above=0)
    """Timeout of a call of an environment or tool, in seconds; the observation then says so."""

    def check(self) -> None:
        """Raise `ConfigError` for arguments of no environment."""
        if self.kwargs and self.factory is None:
            refuse(self, "kwargs", "they are arguments of env.factory; give it, or leave them out", "env.")


@dataclass
class EvaluationEnvironment(EnvironmentConfig):
    """The environment of an evaluation; null for the run's, and for its limits."""

    max_turns: int | None = setting(None, needs=SEVERAL, at_least=1)  # type: ignore[assignment]
    observation_tokens: int | None = setting(None, needs=SEVERAL, at_least=1)  # type: ignore[assignment]
    timeout: float | None = setting(None, needs=SEVERAL, above=0)  # type: ignore[assignment]

    def within(self, run: EnvironmentConfig) -> EnvironmentConfig:
        """The run's environment with what is given here in its place."""
        given = {name: x for name, x in vars(self).items() if x is not None and name != "kwargs"}
        return replace(run, **given | ({} if self.factory is None else {"kwargs": self.kwargs}))
