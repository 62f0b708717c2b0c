"""Errors a user can fix: the message says all, so no traceback is shown."""

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

PAGES = {
    "algorithms": "The mathematics of PPO, function by function",
    "audit": "The audit: is the credit true?",
    "compare": "Comparing runs",
    "control": "Agents in Gymnasium environments",
    "engines": "Sampling engines",
    "from-trl": "Coming from TRL",
    "names": "Names of CleanRL, the Berkeley homework and papers",
    "prompts": "Prompts",
    "python": "Python",
    "report": "The report and the diagnosis",
    "resuming": "Stopping, resuming and errors",
    "rewards": "Rewards",
    "scaling": "Several processes, GPUs and machines",
    "serving": "Use the result",
    "sweeps": "Sweeps",
    "training": "Training a language model",
    "turns": "Several turns: tools, games, environments",
    "your-own": "Your own estimator, critic or loss",
}
"""Titles of the pages of documentation that messages and help name, by their files in docs/."""


def pages_by_title(text: str) -> str:
    """The text with pages by their titles in place of their files, which an installed package lacks."""

    def title(match: re.Match[str]) -> str:
        section = f', under "{match[2].replace("-", " ")}"' if match[2] else ""
        return f'docs page "{PAGES[match[1]]}"{section}'

    return re.sub(rf"(?<![^\s(])docs/({'|'.join(PAGES)})\.md(?:#([\w-]+))?", title, text)


class ConfigError(ValueError):
    """An invalid setting; the message names the key or file, its value and what it may be."""

    stopped_by = "an invalid setting"

    def __init__(self, message: object = ""):
        super().__init__(pages_by_title(str(message)))


class NotInstalled(ConfigError):
    """A missing package; the message says what needs it and how to install it."""

    def __init__(self, user: str, name: str, package: str | None = None):
        """`package` is what pip installs, such as an extra of ours, if not `name`."""
        quoted_package = shlex.quote(package or name)  # for shells that read brackets
        super().__init__(f"{user} needs {name}, which is not installed: pip install {quoted_package}")


@contextmanager
def importing(user: str, name: str, package: str | None = None) -> Iterator[None]:
    """A context in which a package that cannot be imported is a `NotInstalled`, with these arguments."""
    try:
        yield
    except ImportError as error:
        raise NotInstalled(user, name, package) from error


class RunStopped(RuntimeError):
    """A run that could not continue; the message says where and why, `stopped_by` briefly for the summary."""

    stopped_by = "an error"
    parts = ""  # a pattern of the user's parts, by argument or key, that have to be mended


class EngineLost(RunStopped):
    """A sampling engine that failed, or cannot be reached; the start of another process may cure it."""

    stopped_by = "a sampling engine that failed"


class OutOfMemory(RunStopped):
    """A run that ran out of memory."""

    stopped_by = "a lack of memory"


class TooManyBadSteps(RunStopped):
    """A run with too many consecutive non-finite losses, gradients or rewards, or with nothing else."""

    stopped_by = "numbers that are not finite"


class ProcessLost(RuntimeError):
    """Another process of the job hung, ended or cannot be reached; the job ends, or its launcher restarts it."""


class RunComplete(ConfigError):
    """A run to be resumed that has done all its iterations."""


@contextmanager
def naming(key: str) -> Iterator[None]:
    """A context in which the message of a `ConfigError` begins with the key of the setting that it is about."""
    try:
        yield
    except ConfigError as error:
        if not str(error).startswith(key):
            error.args = (f"{key}: {error}",)
        raise


def quoted(value: object) -> str:
    """The value for a message: one line, cut if long."""
    return cut(" ".join(repr(value).split()), 100)


def cut(text: str, length: int) -> str:
    """A text of at most `length` characters, the last of which is … if it was longer."""
    return text if len(text) <= length else f"{text[: length - 1]}…"
