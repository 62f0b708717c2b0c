"""The command that starts a sweep's runs, in a process that forks them: PyTorch is imported by `helpers.warm` alone.

Each run stays a child of its sweep or job, in a session of its own, with the log's lock and with its own signals. This
file is the program of the process that forks: `python forking.py MODULE ARGUMENTS` does what `python -m` would.
"""

import atexit
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from types import SimpleNamespace

from helpers import warm
from tokencredit.tools.sweep import launch

PROGRAM = ("-c", "from helpers import forking; forking.run()")


def python(module, *arguments, **options):
    """Run a module that starts runs to its end."""
    return warm.python(*PROGRAM, module, *arguments, **options)


def start(module, *arguments):
    """Start a module that starts runs."""
    return warm.Started(*PROGRAM, module, *arguments)


def run():
    """Be that module."""
    launch.subprocess = SimpleNamespace(Popen=Fork, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    del sys.argv[0]
    sys.modules.pop(sys.argv[0], None)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


class Fork:
    """What `launch.start` needs of `subprocess.Popen`: a run's process, which does not return from here."""

    def __init__(self, command, stdin, stdout, stderr, env, start_new_session, preexec_fn=None):
        assert command[:2] == [sys.executable, "-m"], command
        assert (stdin, stderr, start_new_session) == (subprocess.DEVNULL, subprocess.STDOUT, True)
        self.returncode = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setsid()
                if preexec_fn is not None:
                    preexec_fn()
                code = self._become(command[1:], env, stdout)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)

    def _become(self, arguments, env, log):
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        atexit._clear()
        files = [os.dup(log.fileno()) for _ in range(2)]
        sys.stdout.reconfigure(write_through=True)
        try:
            warm.become({"arguments": arguments, "environment": env, "cwd": str(Path.cwd())}, files)
            code = 0
        except SystemExit as end:
            code = end.code or 0
        threading._shutdown()
        atexit._run_exitfuncs()
        return code

    def poll(self):
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self):
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)
