"""The `tokencredit` command. Arguments are read and checked before anything heavy is imported."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Literal

from tokencredit.commands import COMMANDS
from tokencredit.commands.command_line import Parser, checked
from tokencredit.commands.jobs import BAD_ARGUMENTS, FAILED
from tokencredit.distributed.signals import INTERRUPTED, UNREAD, end_on_interrupt, leave_closed_output
from tokencredit.errors import ConfigError, ProcessLost, RunStopped, importing
from tokencredit.runs.untrusted import visible
from tokencredit.settings.foreign_names import misspelt

MEMORY_ADVICE = {
    "evaluate": "; lower --samples or --max_new_tokens",
    "pairs": "; lower --batch_size or --max_new_tokens",
    "generate": "; lower --n or --max_new_tokens",
    "plan": "; give --no-time, which times nothing",
    "audit": "; lower --completions or --continuations",
    "inspect": "; give a shorter --prompt",
    "play": "; lower --episodes",
}
"""Advice by command that runs out of memory outside a run's stages, which have their own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an encoding such as ASCII lacks signs that are printed
    if not os.environ.get("COLUMNS", "80").strip("0"):  # of 0, with which Rich prints nothing
        del os.environ["COLUMNS"]
    command = arguments[0] if arguments else ""
    try:
        if command not in COMMANDS:
            return top_level(arguments)
        parser = command_parser(command)
        if len(arguments) == 3 and arguments[1] in ("--help", "-h"):
            print(parser.help_on(arguments[2]), end="")
            return 0
        options = parser.read(arguments[1:])
        set_up_libraries()
        COMMANDS[command].run(options)
        print(end="", flush=True)
    except KeyboardInterrupt:
        return complain("interrupted", INTERRUPTED)
    except ConfigError as error:
        return fail(error, str(error), BAD_ARGUMENTS, arguments)
    except (RunStopped, ProcessLost) as error:
        return fail(error, str(error), FAILED, arguments)
    except BrokenPipeError:  # nobody reads the output any more, as after `| head`
        leave_closed_output()
        return UNREAD
    except OSError as error:
        return fail(error, describe(error), FAILED, arguments)
    except (RuntimeError, MemoryError) as error:
        from tokencredit.distributed.processes import out_of_memory

        if not out_of_memory(error):
            raise
        return fail(error, f"out of memory{MEMORY_ADVICE.get(command, '')}", FAILED, arguments)
    return 0


def top_level(arguments: Sequence[str]) -> int:
    """What the command does without a subcommand: help, version and shell completion; everything else is refused."""
    if arguments and not arguments[0].startswith("-"):
        near = misspelt(arguments[0], COMMANDS)
        advice = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {arguments[0]}; {advice}")
    if any(argument in COMMANDS for argument in arguments):
        raise ConfigError(f"{arguments[0]} belongs after the command")
    parser = Parser("PPO for language models and agents.", prog="tokencredit")
    parser.add_argument("--version", action="store_true", help="Print the version.")
    parser.add_argument(
        "--print_completion",
        metavar="SHELL",
        type=checked(Literal["bash", "zsh", "tcsh"]),
        help="Print a script that completes commands, keys and choices in this shell; needs shtab.",
    )
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    for name in COMMANDS:
        own = command_parser(name)
        if "--print_completion" in "".join(arguments):
            own.name_choices()
        commands.add_parser(name, parents=[own], help=own.description, add_help=False, exit_on_error=False)
    options = parser.read(arguments)
    if options.version:
        from tokencredit import __version__  # read from the installed package, which takes a tenth of the help's time

        print(f"tokencredit {__version__}")
        return 0
    if options.print_completion is None:
        parser.print_help()
        return BAD_ARGUMENTS
    with importing("--print_completion", "shtab"):
        import shtab
    print(shtab.complete(parser, options.print_completion))
    return 0


def command_parser(name: str) -> Parser:
    """The parser of a subcommand."""
    parser = COMMANDS[name].parser()
    parser.prog, parser.command = f"tokencredit {name}", name
    return parser


def set_up_libraries() -> None:
    """Set what the hub's library reads from the environment when loaded, unless the user has set it."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the screen has its own progress bar


def describe(error: OSError) -> str:
    """The operating system's error, with the file."""
    where = f" ({error.filename})" if error.filename else ""
    advice = "; free some space; files written before are intact" if error.errno == errno.ENOSPC else ""
    return f"{error.strerror or error}{where}{advice}"


def fail(error: Exception, message: str, code: int, arguments: Sequence[str]) -> int:
    """Report an error, with its traceback if `--debug` was given."""
    if "--debug" in arguments[1:]:
        raise error
    return complain(message, code)


def complain(message: str, code: int) -> int:
    """Print an error message, which may hold untrusted text, and return the exit code."""
    lines = [visible(line) for line in message.split("\n")]
    print("tokencredit:", "\n".join(lines), file=sys.stderr)
    return code


if __name__ == "__main__":
    end_on_interrupt()
    sys.exit(main())
