"""The `tokencredit` command, also as `python -m tokencredit`."""

import sys

from tokencredit.distributed.signals import end_on_interrupt


def main() -> int:
    """Run the command; Ctrl-C ends it in one line from here on, while its modules load too."""
    end_on_interrupt()
    from tokencredit.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
