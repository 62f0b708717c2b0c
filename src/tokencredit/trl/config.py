"""PPOConfig with TRL's names and defaults, and the settings here that they stand for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, field, fields, make_dataclass
from types import MappingProxyType
from typing import Any, get_type_hints

from transformers import TrainingArguments
from yaml import YAMLError

from tokencredit.errors import ConfigError, quoted
from tokencredit.settings.fields import flat
from tokencredit.settings.fields import settings_of as keys_of
from tokencredit.settings.foreign_names import counterpart, misspelt
from tokencredit.settings.projects.translation import translate
from tokencredit.settings.projects.trl import OLD_TRL, TRL
from tokencredit.settings.reader import load_yaml
from tokencredit.settings.text import PPOConfig as Settings

BOTH = ("batch_size", "mini_batch_size", "world_size")
"""Names of both ages, which TRL computes from 0.12 on."""
NEW: dict[str, Any] = {
    **TRL.defaults,
    **{"local_rollout_forward_batch_size": 64, "num_sample_generations": 10, "whiten_rewards": False},
    **{"ds3_gather_for_generation": True, "push_to_hub": False, "output_dir": "trainer_output"},
    **{"warmup_ratio": 0.0, "evaluation_strategy": "no", "save_safetensors": True, "half_precision_backend": "auto"},
    **dict.fromkeys(("overwrite_output_dir", "group_by_length", "include_tokens_per_second"), False),
    **dict.fromkeys(("stop_token", "bf16", "logging_dir", *BOTH)),
    **dict.fromkeys(("sft_model_path", "reward_model_path"), "EleutherAI/pythia-160m"),
}
"""Names and defaults of TRL 0.12 to 1.9, and of Transformers 4; others are those of TrainingArguments."""
OLD: dict[str, Any] = {
    **OLD_TRL.defaults,
    **{"model_name": "gpt2", "steps": 20000, "compare_steps": 1, "ratio_threshold": 10.0},
    **{"query_dataset": "stanfordnlp/imdb", "reward_model": "sentiment-analysis:lvwerra/distilbert-imdb"},
    **dict.fromkeys(("use_score_scaling", "use_score_norm", "whiten_rewards", "gradient_checkpointing"), False),
    **dict.fromkeys(("optimize_device_cache", "optimize_cuda_cache"), False),
    **{"remove_unused_columns": True, "tracker_project_name": "trl"},
}
"""Names and defaults of TRL up to 0.11."""
UNSET = {
    int: "dataset_num_proc total_episodes stop_token_id num_total_batches micro_batch_size local_batch_size "
    "local_mini_batch_size world_size batch_size mini_batch_size forward_batch_size",
    float: "missing_eos_penalty max_grad_norm score_clip",
    bool: "bf16",
    str: "stop_token logging_dir model_adapter_name ref_adapter_name hub_model_id exp_name log_with task_name "
    "tracker_kwargs accelerator_kwargs project_kwargs settings",
}
"""Names of either age by the type of their values, whose default is None or computed."""
INHERITED = TrainingArguments.__dataclass_fields__
ONLY_OLD = {*OLD, "log_with", "score_clip", "forward_batch_size"} - {*NEW, *INHERITED}
"""Names of TRL up to 0.11 that later versions do not set."""
ONLY_NEW = {*NEW, "total_episodes", "missing_eos_penalty", "stop_token_id"} - {*OLD, *INHERITED, *BOTH}
"""Names of TRL from 0.12 on that are not TrainingArguments' either."""
FOR_LOGS = ("model.name", "critic.name", "reward", "prompts.dataset", "rollout.stop", "eval.every")
"""Keys that the trainer or a script decides; TRL's PPO never evaluates."""
HARMLESS = ("ppo.micro_batch_tokens", "eval.samples", "model.dtype", "run.trackers", "run.save_every")
"""Keys whose value may stay open: the same is learned."""
HONOURED = ("model_adapter_name", "ref_adapter_name")
"""Names without a counterpart that the trainer reads."""
ESSENTIAL = (
    "adam_beta1",
    "adam_beta2",
    "deepspeed",
    "lr_scheduler_kwargs",
    "optim_args",
    "use_cpu",
)
"""Names without a counterpart that change what is learned."""


def _fields() -> list[tuple[str, Any, Any]]:
    """Each name with its type and no default, so that only what a script sets is set."""
    plain: dict[str, Any] = {}
    for name, hint in get_type_hints(TrainingArguments).items():
        plain[name] = next((kind for kind in (bool, int, float) if hint in (kind, kind | None)), str)
    plain |= {name: type(value) for name, value in (OLD | NEW).items() if name not in plain}
    plain |= {name: kind for kind, names in UNSET.items() for name in names.split()}
    # A flag that is off by default needs no value after it.
    types = {name: bool if kind is bool and default_of(name) is False else kind | None for name, kind in plain.items()}
    return [(name, kind, field(default_factory=type(None))) for name, kind in types.items() if name[0] != "_"]


def default_of(name: str, *, old: bool = False) -> Any:
    """TRL's default of a name."""
    other = INHERITED.get(name)
    inherited = None if other is None or other.default is MISSING else other.default
    return (NEW | OLD if old else OLD | NEW).get(name, inherited)


def refuse_unknown(whose: str, names: Collection[str], known: Collection[str]) -> None:
    """Raise `ConfigError` for the first name that is not known, with the key here, or the name that may be meant."""
    for name in names:
        if name in known:
            continue
        keys = keys_of(Settings)
        own = [key for key in keys if key.replace(".", "_") == name.replace(".", "_")]
        if here := f"here it is {own[0]}" if own else counterpart(name, keys):
            here += "" if here.startswith("it has no") else "; keys here go into PPOConfig(settings={KEY: VALUE})"
        elif near := misspelt(name, known):
            here = f"did you mean {' or '.join(near)}?"
        else:
            taken = "TRL's names, and keys here in settings={KEY: VALUE}"
            here = f"it takes {taken if whose == 'PPOConfig' else ', '.join(known)}"
        raise ConfigError(f"{whose} has no argument {name}; {here}")


def further(config: Any) -> dict[str, Any]:
    """The settings here that a script gives by our keys; they go before those of TRL's names."""
    given = config.settings or {}
    try:
        given = load_yaml(given) if isinstance(given, str) else given
    except YAMLError:
        given = None
    if not isinstance(given, Mapping):
        raise ConfigError(f"settings is {quoted(config.settings)}; it must be a dict of keys and values, or its YAML")
    return flat(given)


class Names:
    """The behaviour of `PPOConfig`: what a script sets, and TRL's defaults for the rest."""

    _used: Mapping[str, Any] = MappingProxyType({})
    """Numbers that its trainer computed."""
    _old: bool | None = None
    """Its trainer's age; None before there is one."""

    def __new__(cls, *_: Any, **names: Any) -> Any:
        """Refuse names that TRL does not have."""
        refuse_unknown("PPOConfig", names, cls.__dataclass_fields__)  # type: ignore[attr-defined]
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Keep only what is set."""
        for item in fields(self):  # type: ignore[arg-type]
            value = vars(self)[item.name]
            if value is None or (value is False and default_of(item.name) is False):
                delattr(self, item.name)

    def __getattr__(self, name: str) -> Any:
        """TRL's default of a name that is not set."""
        if name.startswith("__") or name not in type(self).__dataclass_fields__:  # type: ignore[attr-defined]
            raise AttributeError(f"PPOConfig of tokencredit.trl has no {name}")
        return self._used[name] if name in self._used else default_of(name, old=self.old)

    @property
    def old(self) -> bool:
        """True if a trainer of TRL up to 0.11 has it, or before that, if a name of these versions alone is set."""
        return bool(vars(self).keys() & ONLY_OLD) if self._old is None else self._old

    def use(self, *, old: bool, **computed: Any) -> None:
        """Show the defaults of a trainer's version, and numbers that it computed."""
        self._old, self._used = old, computed

    def to_dict(self) -> dict[str, Any]:
        """What is set."""
        return {name: value for name, value in vars(self).items() if name[0] != "_"}


PPOConfig: Any = make_dataclass("PPOConfig", _fields(), bases=(Names,), namespace={"__module__": __name__})
"""TRL's PPOConfig of either age; a name that is not set has TRL's default."""


def settings_of(config: Any, *, old: bool, **known: Any) -> tuple[dict[str, Any], list[str]]:
    """Settings here of a configuration, and lines on what cannot be honoured; `known` are further names.

    Raises:
        ConfigError: something that changes what is learned cannot be honoured.
    """
    project, other = (OLD_TRL, ONLY_NEW) if old else (TRL, ONLY_OLD)
    set_here = config.to_dict()
    if strange := [name for name in set_here if name in other]:
        ages = ("up to 0.11", "from 0.12 on")
        raise ConfigError(
            f"{', '.join(sorted(strange))}: TRL's {ages[old]}; this trainer is that of TRL {ages[not old]}"
        )
    given = {name: value for name, value in set_here.items() if project.name_of(name)}
    made = translate(project, given | known)
    settings = {key: value for key, value in made.settings.items() if key not in FOR_LOGS}
    lines = {name: "it has no counterpart here" for name in set_here if name not in given and name != "settings"}
    lines.pop("hub_private_repo", None)  # read by push_to_hub
    if "use_cpu" in lines:
        lines["use_cpu"] = "here it is the variable ACCELERATE_USE_CPU=true"
    lines |= {key: reason for key, reason in made.undecided.items() if key in HARMLESS}
    lines |= {name: reason for name, reason in made.without.items() if name in set_here and name not in HONOURED}
    if made.settings.get("eval.every", "eval.every" in made.undecided):
        lines["eval_strategy"] = "TRL's PPO does not evaluate, and neither does this"
    if "max_steps" in set_here:
        lines["max_steps"] = "TRL's PPO does not read it, and neither does this"
    if config.whiten_rewards:
        lines["whiten_rewards"] = "the scores are divided, and the KL is subtracted after that"
    wrong = {key: reason for key, reason in made.undecided.items() if key not in (*HARMLESS, *FOR_LOGS)}
    changed = [name for name in ESSENTIAL if name in lines and set_here[name] not in ({}, "", default_of(name))]
    wrong |= {name: lines.pop(name) for name in changed}
    if wrong:
        listed = "; ".join(f"{name}: {reason}" for name, reason in wrong.items())
        raise ConfigError(f"TRL's settings that would train something else here: {listed}; leave them out")
    return settings, [f"{name}: {reason}" for name, reason in lines.items()]
