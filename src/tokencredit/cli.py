"""The `tokencredit` command. Arguments are read and checked before anything heavy is imported."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from functools import cache

from jsonargparse import ArgumentError

from tokencredit import __version__
from tokencredit.commands import COMMANDS
from tokencredit.commands.jobs import BAD_ARGUMENTS, FAILED
from tokencredit.distributed.signals import INTERRUPTED, end_on_interrupt
from tokencredit.errors import ConfigError, ProcessLost, RunStopped
from tokencredit.runs.untrusted import visible
from tokencredit.settings.parser_errors import explain, resumed_run
from tokencredit.settings.parsing import Parser, new_parser, plainly, with_resumed

MEMORY_ADVICE = {
    "evaluate": "; lower --samples or --max_new_tokens",
    "pairs": "; lower --batch_size or --max_new_tokens",
    "generate": "; lower --samples or --max_new_tokens",
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
    # By default jsonargparse prints the configuration without the help texts.
    arguments = ["--print_config=comments" if a == "--print_config" else a for a in arguments]
    parser, commands = build_parser()
    try:
        if len(arguments) == 3 and arguments[0] in commands and arguments[1] in ("--help", "-h"):
            print(commands[arguments[0]].help_on(arguments[2]), end="")
            return 0
        arguments = with_resumed(arguments)
        with plainly():
            chosen = parser.parse_args(arguments)
        if chosen.command is None:
            parser.print_help()
            return BAD_ARGUMENTS
        options = chosen[chosen.command]
        # From the arguments themselves: a configuration file could set these too.
        options.no_code, options.resume = "--no-code" in arguments, resumed_run(arguments)
        set_up_torch()
        COMMANDS[chosen.command][1](options)
    except KeyboardInterrupt:
        return complain("interrupted", INTERRUPTED)
    except ArgumentError as error:
        command = commands.get(next((a for a in arguments if a in commands), ""))
        kind = None if command is None else command.kind
        return complain(explain(str(error), arguments, command, kind), BAD_ARGUMENTS)
    except ConfigError as error:
        return fail(error, str(error), BAD_ARGUMENTS, arguments)
    except (RunStopped, ProcessLost) as error:
        return fail(error, str(error), FAILED, arguments)
    except OSError as error:
        return fail(error, describe(error), FAILED, arguments)
    except (RuntimeError, MemoryError) as error:
        from tokencredit.distributed.processes import out_of_memory

        if not out_of_memory(error):
            raise
        return fail(error, f"out of memory{MEMORY_ADVICE.get(chosen.command, '')}", FAILED, arguments)
    return 0


def set_up_torch() -> None:
    """Set what PyTorch reads from the environment when it is loaded, unless the user has set it."""
    # With huge pages, new memory costs a quarter of the time.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # OpenMP's threads wait for each other by spinning. Beside another busy process they spin through its turns too, and
    # an iteration takes 3.5 times as long; with short waits it takes 1.7 times as long (benchmarks/RESULTS.md).
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


@cache
def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the command, and those of the subcommands by name."""
    parser = new_parser("PPO for language models and agents.")
    parser.add_argument("--version", action="version", version=f"tokencredit {__version__}", help="Print the version.")
    chosen = parser.add_subcommands(dest="command", required=False)
    commands = {name: arguments() for name, (arguments, _) in COMMANDS.items()}
    for name, command in commands.items():
        chosen.add_subcommand(name, command, help=command.description)
    return parser, commands


def describe(error: OSError) -> str:
    """The operating system's error, with the file."""
    where = f" ({error.filename})" if error.filename else ""
    advice = "; free some space; files written before are intact" if error.errno == errno.ENOSPC else ""
    return f"{error.strerror or error}{where}{advice}"


def fail(error: Exception, message: str, code: int, arguments: Sequence[str]) -> int:
    """Report an error, with its traceback if `--debug` was given."""
    if "--debug" in arguments:
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
