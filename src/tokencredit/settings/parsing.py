"""From arguments and YAML files to checked configurations; jsonargparse, which reads them, is kept from importing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tokencredit.errors import ConfigError, NotInstalled
from tokencredit.settings.code_policy import refuse_foreign_code
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.fields import refuse_idle, unknown_key, without_idle
from tokencredit.settings.moved import MOVED, renamed
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.world import World
from tokencredit.settings.yaml import dump_yaml, flat, load_yaml, nested, read_yaml

try:
    from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_loader, set_parsing_settings
except ImportError as missing:
    raise NotInstalled("a configuration from a dict, a file or flags", "jsonargparse[signatures,ruamel]") from missing

set_parsing_settings(
    docstring_parse_attribute_docstrings=True,
    # jsonargparse would import, and in part call, whatever a `class_path` in a configuration names. It goes that way
    # itself to the classes of lists and of what may be null.
    import_path_denylist=["*"],
    import_path_allowlist=["tokencredit.RewardTerm", "tokencredit.PromptsConfig", "tokencredit.settings.data"],
    instantiate_subclass_spec_in_any=False,
)


def value_of(text: str) -> Any:
    """The value of an argument or file; `Review:` or `{answer}`, which YAML takes for keys, are texts."""
    value = load_yaml(text)
    if isinstance(value, dict) and value and all(inner is None for inner in value.values()):
        bare = text.strip()
        if bare == f"{next(iter(value))}:" or set(bare.strip("{} ").replace(" ", "").split(",")) == set(value):
            return text
    return value


set_loader("yaml", value_of, exceptions=(yaml.YAMLError, ValueError))

Config = TypeVar("Config", bound=PPOConfig | ControlConfig)

RESUME = "The folder of a run that was cut short, to go on with, with its configuration; flags change that."
NOT_SETTINGS = ("config", "debug", "no_code", "resume")
"""Options of `train` and `control` that are no keys of a configuration."""


def with_resumed(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--resume RUN` as what it also stands for: the run's configuration, which flags change."""
    run = resumed_run(arguments)
    if run is None:
        return list(arguments)
    return [arguments[0], "--config", str(Path(run) / "config.yaml"), "--run.dir", run, *arguments[1:]]


def resumed_run(arguments: Sequence[str]) -> str | None:
    """The folder that `--resume` names; a configuration file cannot ask for that."""
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == "--resume" and (equals or len(arguments) > at + 1):
            return value if equals else arguments[at + 1]
    return None


@contextmanager
def plainly() -> Iterator[None]:
    """Let whatever jsonargparse raises of a value that it did not foresee be one message: it has no common type."""
    try:
        yield
    except (ArgumentError, ConfigError, OSError):
        raise
    except Exception as error:
        raise ConfigError(f"not a configuration: {named(str(error))} ({type(error).__name__})") from error


class Parser(ArgumentParser):
    """jsonargparse's parser, which would pass over a file's `model: 3`, where a group of keys belongs."""

    def parse_path(self, *args: Any, **kwargs: Any) -> Namespace:
        """Parse a file, and raise `ConfigError` for a group that is none, or an option of the command."""
        found: Namespace = super().parse_path(*args, **kwargs)
        for option in NOT_SETTINGS:
            if found.get(option):
                raise ConfigError(f"{option} is an option of the command, not a setting")
        check_groups(found, self.get_defaults(skip_validation=True))
        return found


def check_groups(found: Namespace, defaults: Namespace, prefix: str = "") -> None:
    """Raise `ConfigError` for the first key that has something other than keys where `defaults` has keys."""
    for key, default in vars(defaults).items():
        if isinstance(default, Namespace) and key in found:
            if not isinstance(found[key], Namespace):
                raise ConfigError(
                    f"{prefix}{key} is {found[key]!r}; it must hold keys, such as {next(iter(vars(default)))}"
                )
            check_groups(found[key], default, f"{prefix}{key}.")


def named(message: str) -> str:
    """A message in which jsonargparse refuses to import something, without its advice to programmers."""
    return re.sub(
        r"Importing ('[^']*') is not allowed.*?to allow it\.", r"\1 names code, and none is imported here", message
    )


def new_parser(description: str) -> ArgumentParser:
    """A parser that raises what it does not understand, and takes no abbreviations, since keys are many and alike."""
    return Parser(prog="tokencredit", exit_on_error=False, allow_abbrev=False, description=description)


def new_command(description: str, runs_code: bool = True) -> ArgumentParser:
    """The parser of a subcommand, with what all have; those that read figures and texts alone run no code of others."""
    command = new_parser(description)
    command.add_argument("--debug", action="store_true", help="Show tracebacks.")
    if runs_code:
        command.add_argument(
            "--no-code", action="store_true", help="Refuse a configuration that lets code of others run."
        )
    return command


def config_parser(kind: type[Any]) -> ArgumentParser:
    """The parser of a configuration, which is that of the subcommand that trains with it."""
    if kind not in PARSERS:
        PARSERS[kind] = _new_config_parser(kind)
    return PARSERS[kind]


PARSERS: dict[type, ArgumentParser] = {}
"""Parsers of configurations, kept because a sweep reads many files."""


def _new_config_parser(kind: type[Any]) -> ArgumentParser:
    what = "a language model with PPO" if kind is PPOConfig else "an agent in a Gymnasium environment"
    parser = new_command(f"Train {what}.")
    parser.add_argument("--config", action="config", help="A YAML file of the keys below; flags after it win.")
    parser.add_argument("--resume", help=RESUME)
    parser.add_class_arguments(kind)
    if kind is PPOConfig:
        # A tuple, because jsonargparse merges a list of the same length into the default item by item.
        parser.set_defaults({"reward": tuple(asdict(term) for term in PPOConfig().reward)})
    return parser


def to_config(options: Namespace, kind: type[Config], no_code: bool = False, begun: Path | None = None) -> Config:
    """The checked configuration that options stand for, as `config_parser` parsed them.

    Args:
        options: the parser's.
        kind: of the configuration.
        no_code: refuse one that lets code of others run.
        begun: the config.yaml of the run that it belongs to. A setting of that file without an effect, which an older
            version let pass, takes its default.

    Raises:
        ConfigError: it cannot work, or as `no_code` says.
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
    """The configuration in a YAML file, as `--config` reads it.

    Raises:
        ConfigError: there is no such file, or it has a key or value that is refused.
    """
    if not Path(path).is_file():
        raise ConfigError(f"{str(path)!r} is not a file")
    parser, arguments = config_parser(kind), ["--config", str(path)]
    try:
        with plainly():
            return to_config(parser.parse_args(arguments), kind)
    except ArgumentError as error:
        raise ConfigError(explain(str(error), arguments, parser)) from error


def from_dict(kind: type[Config], settings: Mapping[str, Any], no_code: bool = False) -> Config:
    """The configuration of some settings, with dotted or nested keys, and defaults for the rest.

    Raises:
        ConfigError: a key or value is refused, a key is given twice, or as `to_config`.
    """
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{settings!r} is no dict of settings; a file is read by from_yaml")
    parser, groups = config_parser(kind), _plain(nested(settings))
    if old := renamed(flat(groups)):
        raise ConfigError(old)
    for option in NOT_SETTINGS:
        if option in groups:
            raise ConfigError(f"{option} is an option of the command, not a setting")
    try:
        with plainly():
            check_groups(_namespace(groups), parser.get_defaults(skip_validation=True))
            return to_config(parser.parse_string(dump_yaml(groups)), kind, no_code)
    except ArgumentError as error:
        raise ConfigError(explain(str(error), [], parser)) from error


def _plain(value: Any, key: str = "") -> Any:
    """Settings as YAML holds them; paths, dataclasses and NumPy's numbers are taken too."""
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
    raise ConfigError(f"{key} is {value!r}, which is no plain value: a dict, list, str, number, bool or None")


def _namespace(groups: Mapping[str, Any]) -> Namespace:
    inner = {key: _namespace(value) if isinstance(value, dict) else value for key, value in groups.items()}
    return Namespace(**inner)  # type: ignore[no-untyped-call]


def configure(world: World, settings: Mapping[str, Any], no_code: bool = False) -> dict[str, Any]:
    """The whole configuration that some settings of a sweep stand for, in plain dicts; refused as by `from_dict`."""
    config = from_dict(world.config, settings, no_code)
    refuse_idle(config, rows=())
    return asdict(config)


def explain(message: str, arguments: Sequence[str], command: ArgumentParser | None) -> str:
    """A parser's complaint in one line: the key, its file unless it was a flag, and the key that was probably meant."""
    message = named(message)
    name, unknown = key_of(message)
    file = arguments[arguments.index("--config") + 1] if "--config" in arguments[:-1] else None
    if name and any(a.startswith(f"--{name}") for a in arguments):
        file = None
    where = f"{file}: " if file else ""
    if not unknown:
        return where + " ".join(message.replace('"<unicode string>"', str(file)).split())
    if name in MOVED:
        run = resumed_run(arguments)
        if file is None:
            return renamed([name])
        if run is None or Path(file) != Path(run) / "config.yaml":
            return where + renamed(flat(read_yaml(Path(file))))
        return (
            f"{run!r} was written by an older version of Tokencredit ({name} is now {MOVED[name]}); begin a new run, "
            "or go on with the version that wrote it"
        )
    known = command.get_defaults(skip_validation=True).keys() if command else []
    return where + unknown_key(name, [k for k in known if k != "debug"])


def key_of(message: str) -> tuple[str, bool]:
    """The key that a parser's complaint names, if any, and whether no such key exists."""
    for pattern in (
        r"(?P<known>)Parser key \"(?P<key>[^\"]+)\"",
        r"(?:Group '(?P<group>[^']+)'|Subcommand '[^']+') does not accept option '(?P<key>[^']+)'",
        r"unrecognized arguments: --(?P<key>[^\s=]+)",
        r"^Option '(?P<key>[^']+)' is not accepted",
    ):
        if found := re.search(pattern, message):
            parts = found.groupdict()
            group = f"{parts['group']}." if parts.get("group") else ""
            return group + parts["key"], "known" not in parts
    return "", False
