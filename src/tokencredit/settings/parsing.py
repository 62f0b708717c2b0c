"""Parse arguments and YAML files into checked configurations; jsonargparse, the parser, is kept from importing code."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tokencredit.errors import ConfigError, NotInstalled
from tokencredit.settings.code_policy import refuse_foreign_code
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.data import KINDS, RewardTerm
from tokencredit.settings.fields import no_group, refuse_unused, without_idle
from tokencredit.settings.help import FIRST_KEYS, group_help, short_help
from tokencredit.settings.offline import OfflineSettings
from tokencredit.settings.options import ScoringOptions
from tokencredit.settings.parser_errors import explain, explain_file, named, resumed_run
from tokencredit.settings.renamed_keys import renamed
from tokencredit.settings.run_file import run_config_file
from tokencredit.settings.run_kind import RUN_KINDS, RunKind, other_run_kind
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.yaml import dump_yaml, flat, load_yaml, nested, read_yaml

try:
    from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_loader, set_parsing_settings
    from jsonargparse.typing import register_type
except ImportError as missing:
    raise NotInstalled("a configuration from a dict, a file or flags", "jsonargparse[signatures,ruamel]") from missing

set_parsing_settings(
    docstring_parse_attribute_docstrings=True,
    # jsonargparse would import, and in part call, whatever a `class_path` in a configuration names. It goes that way
    # itself to the classes of lists and of what may be null.
    import_path_denylist=["*"],
    import_path_allowlist=["tokencredit.PromptsConfig", "tokencredit.settings.data"],
    instantiate_subclass_spec_in_any=False,
    add_print_completion_argument=True,
)


def value_of(text: str) -> Any:
    """The value of an argument or file; `Review:` or `{answer}`, which are mappings in YAML, stay text."""
    value = load_yaml(text)
    if isinstance(value, dict) and value and all(inner is None for inner in value.values()):
        bare = text.strip()
        if bare == f"{next(iter(value))}:" or set(bare.strip("{} ").replace(" ", "").split(",")) == set(value):
            return text
    return value


set_loader("yaml", value_of, exceptions=(yaml.YAMLError, ValueError))
register_type(
    RewardTerm,
    serializer=lambda term: dict(sorted(asdict(term).items(), key=lambda pair: pair[0] not in KINDS)),  # the kind first
    deserializer=RewardTerm.read,
    deserializer_exceptions=ConfigError,
    type_check=lambda value, _: isinstance(value, RewardTerm),
)

Config = TypeVar("Config", bound=PPOConfig | ControlConfig | OfflineSettings)

Options = TypeVar("Options", bound=ScoringOptions)

RESUME = "Folder of an interrupted run to resume, with its configuration; flags override that."
NOT_SETTINGS = ("config", "debug", "no_code", "resume")
"""Options of commands that train which are not keys of a configuration."""
OPTIONS_OF_PLAN = ("processes", "tokens", "prompt_tokens", "no_time", "out")
"""Options of `plan` which are not keys of the configuration that it reads."""


def with_resumed(arguments: Sequence[str]) -> list[str]:
    """The arguments with the run's configuration in place of `--resume RUN`; later flags override it."""
    run, trainers = resumed_run(arguments), [run_kind.command for run_kind in RUN_KINDS.values()]
    if run is None or arguments[0] not in trainers:
        return list(arguments)
    if not run:
        raise ConfigError("--resume is empty; give the folder of a run")
    file = run_config_file(Path(run))
    settings = read_yaml(file)
    if isinstance(settings, dict) and (run_kind := other_run_kind(settings, arguments[0])):
        command = f"tokencredit {run_kind.command}"
        raise ConfigError(f"{run!r} is a run of {command}; resume it with: {command} --resume {run}")
    if old := renamed(flat(settings)):
        raise ConfigError(
            f"{run!r} was written by an older version of Tokencredit ({old}); begin a new run, or resume it with the "
            "version that wrote it"
        )
    return [arguments[0], "--config", str(file), "--run.dir", run, *arguments[1:]]


@contextmanager
def plainly() -> Iterator[None]:
    """Turn any exception of jsonargparse into a one-line `ConfigError`: its exceptions have no common type."""
    try:
        yield
    except (ArgumentError, ConfigError, OSError):
        raise
    except Exception as error:
        raise ConfigError(f"not a configuration: {named(str(error))} ({type(error).__name__})") from error


class Parser(ArgumentParser):
    """jsonargparse's parser, with a check that it lacks: `model: 3` in a file, where a group of keys belongs.

    Attributes:
        kind: class of the configuration that it parses, if it does.
        command: name of the command, if it is not the one that trains by this configuration.
    """

    kind: type | None = None
    command: str | None = None

    @cached_property
    def every_key(self) -> Namespace:
        """The defaults, to see what is a group: made once, since they take a fifth of the time of a configuration."""
        return self.get_defaults(skip_validation=True)

    def format_help(self, *args: Any) -> str:
        """The help: a short one if it parses the configuration of a run."""
        if self.kind not in FIRST_KEYS:
            return self.whole_help(*args)
        trains = next(run_kind.command for run_kind in RUN_KINDS.values() if run_kind.config is self.kind)
        return short_help(
            f"tokencredit {self.command or trains}", str(self.description), FIRST_KEYS[self.kind], self._actions
        )

    def help_on(self, topic: str) -> str:
        """The help on a group of keys, one key, or `all`; raises `ConfigError` for another topic."""
        return self.whole_help() if topic == "all" else group_help(topic, self._actions)

    def whole_help(self, *args: Any) -> str:
        """The help on all options and keys."""
        return str(super().format_help(*args))

    def dump(self, namespace: Namespace, *args: Any, **kwargs: Any) -> str:
        """Settings as YAML, for `--print_config`: a run's keys alone, without the options of its command."""
        if self.kind in FIRST_KEYS:
            keys = {item.name for item in fields(self.kind)}
            settings = {key: value for key, value in vars(namespace).items() if key in keys}
            namespace = Namespace(**settings)  # type: ignore[no-untyped-call]
        return str(super().dump(namespace, *args, **kwargs))

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Namespace:
        """Parse a file; raise `ConfigError`, which names it, for a value or group that it cannot hold."""
        keys: Mapping[str, Any] = {}
        groups: Any = None
        try:
            # Before the values: one of a setting that has changed with its name would be blamed instead.
            with suppress(ConfigError):  # a file that cannot be read is named below
                groups = read_yaml(Path(path))
                keys = flat(groups)
            own = next((run_kind.command for run_kind in RUN_KINDS.values() if run_kind.config is self.kind), None)
            if own is not None and isinstance(groups, Mapping) and (run_kind := other_run_kind(groups, own)):
                raise ConfigError(f"it is a configuration of tokencredit {run_kind.command}")
            if old := renamed(keys):
                raise ConfigError(old)
            settings: Namespace = super().parse_path(path, *args, **kwargs)
            for option in (*NOT_SETTINGS, *OPTIONS_OF_PLAN):
                if settings.get(option):
                    raise ConfigError(f"{option} is an option of the command, not a setting")
            check_groups(settings, self.every_key)
        except ArgumentError as error:
            raise ConfigError(explain_file(str(error), path, self.kind)) from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not a text file in UTF-8: {error.reason} at byte {error.start}") from error
        return settings


def check_groups(settings: Namespace, defaults: Namespace, prefix: str = "") -> None:
    """Raise `ConfigError` for the first key that holds a value where `defaults` holds a group of keys."""
    for key, default in vars(defaults).items():
        if isinstance(default, Namespace) and key in settings:
            if not isinstance(settings[key], Namespace):
                raise ConfigError(no_group(f"{prefix}{key}", settings[key], next(iter(vars(default)))))
            check_groups(settings[key], default, f"{prefix}{key}.")


def new_parser(description: str) -> Parser:
    """A parser that raises on unknown arguments, and takes no abbreviations, since keys are many and alike."""
    return Parser(prog="tokencredit", exit_on_error=False, allow_abbrev=False, description=description)


def new_command(description: str, runs_code: bool = True) -> Parser:
    """The parser of a subcommand, with the options that all have; commands that only read results run no user code."""
    command = new_parser(description)
    command.add_argument("--debug", action="store_true", help="Show tracebacks of errors.")
    if runs_code:
        command.add_argument(
            "--no-code", action="store_true", help="Refuse a configuration that would execute user code."
        )
    return command


def config_parser(kind: type[Any]) -> Parser:
    """The parser of a configuration, which is also that of its subcommand."""
    if kind not in PARSERS:
        PARSERS[kind] = _new_config_parser(kind)
    return PARSERS[kind]


PARSERS: dict[type, Parser] = {}
"""Cached parsers of configurations: a sweep reads many files."""


def _new_config_parser(kind: type[Any]) -> Parser:
    run_kind = next(run_kind for run_kind in RUN_KINDS.values() if run_kind.config is kind)
    parser = new_command(f"Train {run_kind.trains}.")
    parser.add_argument("--config", action="config", help="YAML file of the keys below; flags after it override it.")
    parser.add_argument("--resume", help=RESUME)
    parser.add_class_arguments(kind)
    parser.kind = kind
    return parser


def options_parser(kind: type[Any], description: str) -> Parser:
    """The parser of a command whose options are the fields of a dataclass, as flags and in a file."""
    parser = new_command(description)
    parser.add_argument("--config", action="config", help="YAML file of the keys below; flags after it override it.")
    parser.add_class_arguments(kind)
    parser.kind = kind
    return parser


def to_options(parser: Parser, options: Namespace, kind: type[Options]) -> Options:
    """The dataclass of a parser of `options_parser`; raises `ConfigError` for a value that is refused."""
    settings = vars(parser.instantiate(options))
    return kind(**{item.name: settings[item.name] for item in fields(kind)})


def to_config(options: Namespace, kind: type[Config], no_code: bool = False, begun: Path | None = None) -> Config:
    """The checked configuration of parsed options.

    Args:
        options: the parser's result.
        kind: class of the configuration.
        no_code: refuse a configuration that would execute user code.
        begun: config.yaml of the run that is resumed. A setting in it without an effect, which an older version
            accepted, takes its default.

    Raises:
        ConfigError: a value is invalid, or user code is refused.
    """
    settings = vars(config_parser(kind).instantiate(options))
    settings = {key: value for key, value in settings.items() if key not in NOT_SETTINGS}
    if begun is not None:
        settings = without_idle(kind, settings, flat(read_yaml(begun)))
    config = kind(**settings)
    if no_code:
        refuse_foreign_code(config)
    return config


def from_yaml(kind: type[Config], path: str | Path) -> Config:
    """Read a configuration from a YAML file, as `--config` does.

    Raises:
        ConfigError: the file does not exist, or has an invalid key or value.
    """
    if not Path(path).is_file():
        raise ConfigError(f"{str(path)!r} is not a file")
    parser, arguments = config_parser(kind), ["--config", str(path)]
    try:
        with plainly():
            return to_config(parser.parse_args(arguments), kind)
    except ArgumentError as error:
        raise ConfigError(explain(str(error), arguments, parser, kind)) from error


def from_dict(kind: type[Config], settings: Mapping[str, Any], no_code: bool = False) -> Config:
    """Make a configuration from settings with dotted or nested keys; the rest takes defaults.

    Raises:
        ConfigError: a key or value is invalid, a key is given twice, or as `to_config`.
    """
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{settings!r} is not a dict of settings; read a file with from_yaml")
    parser, groups = config_parser(kind), _plain(nested(settings))
    if old := renamed(flat(groups)):
        raise ConfigError(old)
    for option in NOT_SETTINGS:
        if option in groups:
            raise ConfigError(f"{option} is an option of the command, not a setting")
    try:
        with plainly():
            check_groups(_namespace(groups), parser.every_key)
            # jsonargparse's own merging of defaults takes most of the time of a configuration.
            options = deepcopy(parser.every_key)
            options.update(parser.parse_string(dump_yaml(groups), defaults=False))
            return to_config(options, kind, no_code)
    except ArgumentError as error:
        raise ConfigError(explain(str(error), [], parser, kind)) from error


def _plain(value: Any, key: str = "") -> Any:
    """Settings as YAML types; paths, dataclasses and NumPy numbers are converted."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {name: _plain(inner, f"{key}.{name}" if key else str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{key}[{place}]") for place, inner in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ConfigError(f"{key} is {value!r}, which is not a dict, list, str, number, bool or None")


def _namespace(groups: Mapping[str, Any]) -> Namespace:
    inner = {key: _namespace(value) if isinstance(value, dict) else value for key, value in groups.items()}
    return Namespace(**inner)  # type: ignore[no-untyped-call]


def configure(run_kind: RunKind, settings: Mapping[str, Any], no_code: bool = False) -> dict[str, Any]:
    """A sweep run's whole configuration in plain dicts; raises as `from_dict`."""
    config = from_dict(run_kind.config, settings, no_code)
    refuse_unused(config, rows=())
    return asdict(config)
