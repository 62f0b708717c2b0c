"""Command lines: argparse reads the options of a command, and settings by key as flags, files and `--resume`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_origin

import yaml

from tokencredit.commands.settings_help import commented_yaml, first_sentences, help_of, rows_of, table
from tokencredit.errors import ConfigError
from tokencredit.runs.folder import setting_of
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.data import RewardTerm
from tokencredit.settings.fields import at_home, check_value, no_group, options_of, settings_of, unknown_key, wanted_of
from tokencredit.settings.foreign_names import counterpart, misspelt
from tokencredit.settings.offline import DPOConfig, RewardModelConfig, SFTConfig
from tokencredit.settings.reader import build, grouped, load_yaml, merged, read_settings, read_yaml
from tokencredit.settings.run_kind import RUN_KINDS, other_run_kind, refuse_foreign_code, run_config_file
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import MAX_SEED

Config = TypeVar("Config")

OFFLINE_DATA = ("data.dataset", "data.column", "data.template", "data.held_out", "data.batch_size", "data.micro_batch")
OFFLINE_MODEL = ("seed", "model.name", "model.lora.rank", *OFFLINE_DATA)
OFFLINE_RUN = ("data.epochs", "optim.lr", "optim.schedule", "eval.every", "run.dir", "run.iterations", "run.save_every")
FIRST_KEYS: dict[type, tuple[str, ...]] = {
    PPOConfig: (
        *("seed", "model.name", "model.lora.rank", "critic.kind", "critic.lr", "prompts.text", "prompts.dataset"),
        *("reward", "rollout.batch_size", "rollout.max_new_tokens", "rollout.temperature", "advantage.estimator"),
        *("advantage.lam", "ppo.epochs", "ppo.micro_batch_tokens", "kl.coef", "optim.lr", "eval.every", "run.dir"),
        "run.iterations",
    ),
    ControlConfig: (
        *("seed", "algorithm", "env.id", "env.number", "env.normalize_observations", "agent.hidden", "critic.kind"),
        *("critic.lr", "steps", "advantage.estimator", "advantage.gamma", "advantage.lam", "ppo.epochs"),
        *("ppo.minibatches", "ppo.clip", "ppo.entropy_coef", "optim.lr", "eval.episodes", "run.dir", "run.iterations"),
    ),
    SFTConfig: (*OFFLINE_MODEL, "data.completion", "sft.loss_on", *OFFLINE_RUN),
    RewardModelConfig: ("seed", "model.name", *OFFLINE_DATA, "data.chosen", "data.rejected", *OFFLINE_RUN),
    DPOConfig: (*OFFLINE_MODEL, "data.chosen", "data.rejected", "dpo.loss", "dpo.beta", *OFFLINE_RUN),
}
"""The keys that people change first, by configuration."""
PATHS = ("run", "runs", "model", "file", "pairs", "resume", "beside", "against", "out", "export")
"""Options that hold paths."""


class Options(argparse.Namespace):
    """Options of a command.

    Attributes:
        given: files and settings in their order: pairs of an option or key, and its text.
        settings: settings of the command's configuration, by groups.
    """

    given: list[tuple[str, str]]
    settings: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def refuse_empty(self, name: str) -> None:
        """Raise `ConfigError` if the path of an option is an empty text."""
        if self[name] == "":
            raise ConfigError(f"--{name} is empty; give a path")


class Given(argparse.Action):
    """Keeps what is given in order, since a later flag or file overrides an earlier one."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:  # noqa: ARG002
        """Append the option's name and text."""
        namespace.given = [*getattr(namespace, "given", ()), (self.dest, values)]


class Parser(argparse.ArgumentParser):
    """The parser of a command, whose options may include the keys of a configuration.

    Attributes:
        kind: class of that configuration.
        command: name of the command.
        needs: required positional arguments, in words.
    """

    def __init__(self, description: str = "", kind: Any = None, **options: Any):
        settings: dict[str, Any] = {"exit_on_error": False, "allow_abbrev": False, "description": description}
        super().__init__(**settings | options)
        self.kind, self.command = kind, ""
        self.needs: dict[str, str] = {}

    def positional(self, name: str, words: str, **options: Any) -> None:
        """Add a required positional argument, described by `words`."""
        self.needs[name] = words
        self.add_argument(name, **{"nargs": "?", "metavar": words.partition(",")[0]} | options)

    def read(self, arguments: Sequence[str]) -> Options:
        """Parse a command's arguments.

        Raises:
            ConfigError: an option or key is unknown, or its value is refused.
        """
        try:
            options, unknown = self.parse_known_args(arguments, Options(given=[], settings={}))
        except argparse.ArgumentError as error:
            name = (error.argument_name or self.prog).rpartition("/")[2]
            joint = " " if error.message.startswith("is ") else ": "  # a value of a type here, or argparse's own words
            words = error.message
            if words == "expected one argument":
                key = None if self.kind is None else settings_of(self.kind).get(name.strip("-+"))
                kinds = [] if key is None else [wanted_of(x) for x in options_of(key.hint) if x is not NoneType]
                words += f"{', ' * bool(kinds)}{' or '.join(kinds)}; a value that begins with - is {name}=VALUE"
            elif words.startswith("ignored explicit argument"):
                words = "expected no value after ="
            raise ConfigError(f"{name}{joint}{words}") from error
        if unknown:
            raise ConfigError(self._unknown(unknown[0]))
        for name in filter(options.__contains__, PATHS):
            value = options[name]
            setattr(options, name, at_home(value) if isinstance(value, str) else value and list(map(at_home, value)))
        for name, words in self.needs.items():
            if getattr(options, name) in (None, []):
                raise ConfigError(f"{self.command} needs {words}")
        if self.kind is not None:
            self._read_settings(options)
            if options.print_config:
                print(commented_yaml(build(self.kind, options.settings)), end="")
                raise SystemExit(0)
        return options

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError` instead of ending the process."""
        raise ConfigError(message)

    def format_help(self) -> str:
        """The help: a short one for the configuration of a run."""
        return self.short_help() if self.kind in FIRST_KEYS else self.help_on("all")

    def short_help(self) -> str:
        """The options of a command that trains, the keys that are changed first, and where the others are."""
        keys, rows = FIRST_KEYS[self.kind], rows_of(self.kind)
        options = {
            f"{action.option_strings[-1]} {action.metavar or ''}".strip(): action.help
            for action in self._actions
            if action.option_strings and not isinstance(action, Given | argparse._HelpAction)
        }
        places = {str(action.metavar): action.help for action in self._actions if not action.option_strings}
        options = {**places, "--config FILE": CONFIG_HELP, **options}
        options["--help GROUP"] = "Show the keys of a group, such as optim, in full; all for everything."
        first = {flag: text for key in keys for flag, text in rows.items() if flag.split()[0] == f"--{key}"}
        groups = dict.fromkeys(key.partition(".")[0] for key in settings_of(self.kind) if "." in key)
        further = [group for group in groups if not any(key.startswith(f"{group}.") for key in keys)]
        more = f"More keys of these groups{', and of ' if further else ''}{', '.join(further)}"
        usage = ["tokencredit", self.command, *(f"[{name}]" for name in places), "[--config FILE] [--KEY VALUE ...]"]
        return "\n".join(
            [
                *(f"usage: {' '.join(usage)}", "", str(self.description)),
                *("", "options:", *table(first_sentences(options)), ""),
                *("the keys that are changed first, with their defaults:", *table(first_sentences(first)), ""),
                *(f"{more}: tokencredit {self.command} --help all", ""),
            ]
        )

    def help_on(self, topic: str) -> str:
        """The help on a group of keys, one key, or `all`; raises `ConfigError` for another topic."""
        options = super().format_help()
        if self.kind is None and topic != "all":
            raise ConfigError(f"--help has no group {topic}; give all")
        if self.kind is None:
            return options
        keys = "\n".join([*table(rows_of(self.kind, None if topic == "all" else topic)), ""])
        return f"{options}\nkeys:\n{keys}" if topic == "all" else keys

    def name_choices(self) -> None:
        """Give argparse the meanings and choices of all keys, for shell completion."""
        for action in self._actions:
            if isinstance(action, Given) and (setting := settings_of(self.kind).get(action.dest)):
                action.help = help_of(setting)
                names = [name for option in options_of(setting.hint) for name in _choices(option)]
                action.choices = names or None

    def _read_settings(self, options: Options) -> None:
        """Put the settings of files, `--resume` and flags into `options.settings`, later ones over earlier ones."""
        given = options.given
        if (run := getattr(options, "resume", None)) is not None:
            given = [("config", str(self._resumed(run))), ("run.dir", run), *given]
        for key, text in given:
            if key == "config":
                new = self._read_file(at_home(text))
            else:
                name = key.removesuffix("+")
                setting = settings_of(self.kind)[name]
                value = value_of(setting.hint, key, text)
                if name != key:
                    default = [asdict(x) if isinstance(x, RewardTerm) else x for x in setting.default or []]
                    before = setting_of(options.settings, name)
                    before = default if before is None else before
                    # A value that is no list is refused, as it is without the flag.
                    more = value if isinstance(value, list) else [value]
                    value = [*before, *more] if isinstance(before, list) else before
                new = grouped(self.kind, [(name, value)])
            options.settings = merged(self.kind, options.settings, new)

    def _read_file(self, file: str) -> dict[str, Any]:
        """Settings of a file; a configuration of another command is refused."""
        if not Path(file).is_file():
            state = "does not exist" if file and not Path(file).exists() else "is not a file"
            raise ConfigError(f"--config: {file!r} {state}")
        settings = read_yaml(Path(file))
        if {"variants", "grid"} & set(settings):
            raise ConfigError(f"{file}: it is a sweep's; train its runs with: tokencredit sweep {quote(file)}")
        if "actor_rollout_ref" in settings or "ppo" in (settings.get("stage"), settings.get("rlhf_type")):
            raise ConfigError(
                f"{file}: it is another project's; make one of it with: tokencredit migrate {quote(file)}"
            )
        if run_kind := other_run_kind(settings, self.kind):
            raise ConfigError(f"{file}: it is a configuration of tokencredit {run_kind.command}")
        options = {action.dest for action in self._actions if not isinstance(action, Given)}
        if misplaced := options.intersection(settings):
            raise ConfigError(f"{file}: {min(misplaced)} is an option of the command, not a setting")
        return read_settings(self.kind, file)

    def _resumed(self, run: str) -> Path:
        """The config.yaml of the run to be resumed."""
        if not run:
            raise ConfigError("--resume is empty; give the folder of a run")
        file = run_config_file(Path(run))
        if run_kind := other_run_kind(read_yaml(file), self.kind):
            command = f"tokencredit {run_kind.command}"
            raise ConfigError(f"{run!r} is a run of {command}; resume it with: {command} --resume {quote(run)}")
        return file

    def _unknown(self, argument: str) -> str:
        """A message on an argument that no option takes."""
        if not argument.startswith("--") or argument == "--":
            key, equals, _ = argument.partition("=")
            known = {} if self.kind is None else settings_of(self.kind)
            if known and key not in known and (equals or (argument.startswith("-") and counterpart(key, known))):
                return unknown_key(key, known)
            return f"unexpected argument {argument!r}; " + (f"write --{argument}" if equals and known else "see --help")
        name = argument[2:].partition("=")[0]
        own = [option[2:] for action in self._actions for option in action.option_strings if option.startswith("--")]
        if self.kind is not None:
            known = settings_of(self.kind)
            parent = known.get(name.rpartition(".")[0])
            if parent is not None and not is_dataclass(parent.hint):
                if get_origin(parent.hint) is dict:
                    group, _, last = name.rpartition(".")
                    return f"unknown key {name}; give the whole dict, as in --{group} '{{{last}: VALUE}}'"
                wanted = wanted_of(parent.hint)
                return f"unknown key {name}: {parent.name} has no keys of its own; it must be {wanted}"
            own = [option for option in own if option.rstrip("+") not in known]
            message = unknown_key(name, list(known))
            if "did you mean" in message or not misspelt(name, own):
                return message
        near = misspelt(name, [option for option in own if option != "debug"])
        return f"unknown option --{name}; " + (f"did you mean --{near[0]}?" if near else "see --help")


CONFIG_HELP = "YAML file of the keys below; flags after it override it."


def _choices(option: Any) -> tuple[str, ...]:
    """The texts that a flag of this type may have, if they are few."""
    return ("true", "false") if option is bool else get_args(option) if get_origin(option) is Literal else ()


def value_of(hint: Any, key: str, text: str) -> Any:
    """The value of a flag: for a text the characters as they are, or None for `null` if the key may be null; else YAML.

    Raises:
        ConfigError: it is a group, and the text holds no keys.
    """
    options = options_of(hint)
    texts = [option for option in options if option is str or get_origin(option) in (Literal, Annotated)]
    if {int, float} & set(options) and text not in (choice for option in texts for choice in get_args(option)):
        texts = []  # a number beside choices, such as auto
    lists = [option for option in options if get_origin(option) is list]
    one = key.endswith("+") and list[str] in lists  # a text such as [END]
    listed = bool(lists) and re.match(r"\s*\[\s*[\"']" if texts or one else r"\s*\[", text)
    if (texts or list[str] in lists) and not listed:
        return None if NoneType in options and text == "null" else text
    try:
        value = load_yaml(text)
    except yaml.YAMLError:
        value = text
    if listed and not isinstance(value, list):
        return text
    if is_dataclass(hint) and not isinstance(value, Mapping):
        raise ConfigError(no_group(key, value, next(iter(settings_of(hint)))))  # type: ignore[arg-type]  # a class
    return text if value is None and text not in ("null", "~") else value


def checked(hint: Any, **limits: float) -> Callable[[str], Any]:
    """The type of a command's option, with the checks of a setting; limits as in `setting`."""

    def convert(text: str) -> Any:
        value = value_of(hint, "", text)
        try:
            check_value("", value, hint, limits)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error).strip()) from error
        return float(value) if hint is float else value

    return convert


POSITIVE_INT, NON_NEGATIVE_INT = checked(int, at_least=1), checked(int, at_least=0)
POSITIVE_FLOAT = checked(float, above=0)
SEED = checked(int, at_least=0, at_most=MAX_SEED)


class Command(NamedTuple):
    """A subcommand: its parser, which is made when it is needed, and what it does."""

    parser: Callable[[], Parser]
    run: Callable[[Options], None]


Argument = Callable[[Parser], object]
"""Adds an argument to a parser."""


def option(*flags: str, **settings: Any) -> Argument:
    """An argument with the settings of argparse's `add_argument`."""
    return lambda parser: parser.add_argument(*flags, **settings)


def positional(name: str, words: str, **settings: Any) -> Argument:
    """A required positional argument, as `Parser.positional` takes it."""
    return lambda parser: parser.positional(name, words, **settings)


def command(
    description: str, *arguments: Argument, runs_code: bool = True, kind: Any = None
) -> Callable[[Callable[[Options], None]], Command]:
    """Decorator of a command's function; arguments as in `make_parser`."""
    return lambda run: Command(partial(make_parser, description, arguments, runs_code, kind), run)


def make_parser(
    description: str, arguments: Iterable[Argument] = (), runs_code: bool = True, kind: Any = None
) -> Parser:
    """The parser of a command, with the options that all have; commands that only read results run no user code."""
    parser = Parser(description, kind)
    parser.add_argument("--debug", action="store_true", help="Show tracebacks of errors.")
    if runs_code:
        parser.add_argument(
            "--no-code", action="store_true", help="Refuse a configuration that would execute user code."
        )
    if kind is not None:
        parser.add_argument("--config", action=Given, metavar="FILE", help=CONFIG_HELP)
        parser.add_argument(
            "--print_config",
            action="store_true",
            help="Print all keys with their values and meanings, as a YAML file for --config.",
        )
        keys = parser.add_argument_group("keys")
        for key, setting in settings_of(kind).items():
            flags = [f"--{key}"] + [f"--{key}+"] * (get_origin(setting.hint) is list)
            for flag in flags:
                keys.add_argument(flag, dest=flag[2:], action=Given, metavar="VALUE", help=argparse.SUPPRESS)
    for add in arguments:
        add(parser)
    return parser


def config_parser(kind: type[Any], *arguments: Argument) -> Parser:
    """The parser of a command that trains."""
    run_kind = next(run_kind for run_kind in RUN_KINDS.values() if run_kind.config is kind)
    resume = option(
        "--resume",
        metavar="RUN",
        help="Folder of an interrupted run to resume, with its configuration; flags override that.",
    )
    return make_parser(f"Train {run_kind.trains}.", (resume, *arguments), kind=kind)


def to_config(options: Options, kind: type[Config]) -> Config:
    """The configuration of a command's options; raises `ConfigError` for one that is refused, as by `--no-code`."""
    config = build(kind, options.settings)
    refuse_foreign_code(config, options.no_code)  # type: ignore[arg-type]
    return config
