"""Processes that start with PyTorch, Transformers and the package imported: forks of a process that did nothing else.

The imports take 5 seconds of a core, the parsers of the commands one more, and a fork a hundredth of one. So tests
start processes in this way where the start is not what they are about, and the workers of pytest-xdist are such forks
themselves. This file is the program of the process that forks, too: it has one thread, so that its forks are as safe as
new processes. For each connection it forks a process that works on one request at a time, a line of JSON each.
"""

import atexit
import contextlib
import faulthandler
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from functools import cache
from pathlib import Path

LIBRARIES = [
    "hypothesis",
    "tokencredit.cli",
    "tokencredit.text.ppo_trainer",
    "tokencredit.report.page",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "scipy.stats",
    "gymnasium",
    "matplotlib.figure",
    "peft",
    "selenium.webdriver.support.ui",
]
ADDRESS = "WARM_PROCESS"
"""Variable with the path of the socket of the process that forks, if there is one."""


class Listening:
    """The process that forks, for this process and for those that it starts, until it is closed."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory()
        os.environ[ADDRESS] = str(Path(self._folder.name) / "socket")
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        self._alive, theirs = socket.socketpair()
        with socket.socket(socket.AF_UNIX) as listener, theirs:
            listener.bind(os.environ[ADDRESS])
            listener.listen()
            files = listener.fileno(), theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, __file__, "listen", *map(str, files)],
                pass_fds=files,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"},
            )

    def close(self):
        """Wait until all are gone; those that were asked for by others end with these."""
        self._alive.close()
        self._process.wait()
        self._folder.cleanup()


class Starter:
    """Starts processes and tells how they ended."""

    def __init__(self):
        self._own = Listening() if ADDRESS not in os.environ else None
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ[ADDRESS])
        self._codes, self._owner = {}, os.getpid()
        atexit.register(self.close)

    def _ask(self, request, files=()):
        socket.send_fds(self._socket, [json.dumps(request).encode() + b"\n"], [file.fileno() for file in files])
        answer = b""
        while not answer.endswith(b"\n"):
            part = self._socket.recv(65536)
            assert part, "the process that starts others has ended"
            answer += part
        return json.loads(answer)

    def start(self, arguments, environment, cwd, *files):
        """The number of a new process that does what `python ARGUMENTS` would, with its last standard files."""
        pid = self._ask({"arguments": arguments, "environment": environment, "cwd": cwd}, files)
        self._codes.pop(pid, None)  # of an earlier process of this number
        return pid

    def code(self, pid):
        """The exit code of a process that has ended; None before."""
        if pid not in self._codes:
            self._codes |= dict(self._ask(None))
        return self._codes.get(pid)

    def close(self):
        """End; what still runs is killed."""
        if os.getpid() == self._owner:
            self._socket.close()
            if self._own is not None:
                self._own.close()


@cache
def starter():
    """The one of this process."""
    return Starter()


def python(*arguments, cwd=None, timeout=300, **variables):
    """Run a program to its end, as `helpers.commands.python` does; `variables` are of the environment."""
    return _run([variables], arguments, cwd, timeout)


def together(count, *arguments, cwd=None, timeout=300, starts=1, grace=30, **variables):
    """Run a program in several processes, as torchrun would; once one fails, the others are asked to end.

    With `starts` above 1 all are started again after a failure, with the same store; the output is that of all starts.
    What has not ended `grace` seconds after it was asked to is killed.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    job = variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(count)}
    job |= {"LOCAL_WORLD_SIZE": str(count), "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    ranks = [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    done = _run(ranks, arguments, cwd, timeout, grace)
    for _ in range(starts - 1):
        if done.returncode:
            before, done = done, _run(ranks, arguments, cwd, timeout, grace)
            done.stdout, done.stderr = before.stdout + done.stdout, before.stderr + done.stderr
    return done


class Started:
    """A process that runs on, with what tests need of `subprocess.Popen`."""

    def __init__(self, *arguments):
        self.args, self.returncode = [str(argument) for argument in arguments], None
        self._open = contextlib.ExitStack()
        self._files = [self._open.enter_context(tempfile.TemporaryFile()) for _ in range(2)]  # noqa: SIM115
        self.pid = starter().start(self.args, dict(os.environ), str(Path.cwd()), *self._files)

    def poll(self):
        if self.returncode is None:
            self.returncode = starter().code(self.pid)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            _signal([self.pid], number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def said(self):
        """Output so far."""
        size = os.fstat(self._files[0].fileno()).st_size
        return os.pread(self._files[0].fileno(), size, 0).decode()  # the process's place in the file stays

    def wait(self, timeout=300):
        """Wait for the end: the exit code."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return self.returncode

    def communicate(self, timeout=300):
        """Wait for the end: output and error output."""
        self.wait(timeout)
        with self._open:
            return _text(self._files)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wait()
        self._open.close()


def start_command(*arguments):
    """Start the command, as `helpers.commands.start_command` does."""
    return Started("-m", "tokencredit.cli", *arguments)


def _text(files):
    said = []
    for file in files:
        file.seek(0)
        said.append(file.read().decode())
    return said


def _run(processes, arguments, cwd, timeout, grace=30):
    """Run a program in processes with these variables: the output of all, and the first failure's exit code."""
    arguments = [str(argument) for argument in arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        here = str(cwd or Path.cwd())
        pids = [starter().start(arguments, os.environ | own, here, out, err) for own in processes]
        code, in_time = _end(pids, time.monotonic() + timeout, grace)
        said = _text((out, err))
    if not in_time:
        late = subprocess.TimeoutExpired(arguments, timeout, *said)
        late.add_note("\n".join(text[-5000:] for text in said))
        raise late
    return subprocess.CompletedProcess(arguments, code, *said)


def _end(pids, limit, grace):
    """Wait for processes: the code of the first that failed, and whether they ended in time."""
    code, in_time, kill_at = 0, True, None
    while True:
        codes = [starter().code(pid) for pid in pids]
        code = code or next(filter(None, codes), 0)
        left = [pid for pid, found in zip(pids, codes, strict=True) if found is None]
        if not left:
            return code, in_time
        now = time.monotonic()
        if kill_at is None and (code or now > limit):
            in_time, kill_at = bool(code), now + grace
            if not in_time:
                _signal(left, signal.SIGUSR1)  # they print where they are
                time.sleep(1)
            _signal(left, signal.SIGTERM)
        elif kill_at is not None and now > kill_at:
            _signal(left, signal.SIGKILL)
        time.sleep(0.05)


def _signal(pids, number):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def listen(listener, parent):
    """Fork a process for each connection, until the parent is gone; returns the connection in forks."""
    while parent not in select.select([listener, parent], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            parent.close()
            return connection
        connection.close()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def serve(connection):
    """Answer requests until the other side is gone; returns only in forks, with what they shall do."""
    running = set()
    while True:
        request, files = _receive(connection)
        if request is None and files is None:
            _signal(running, signal.SIGKILL)
            for pid in running:
                os.waitpid(pid, 0)
            os._exit(0)
        if request is None:
            ended = []
            for pid in sorted(running):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    ended.append((pid, os.waitstatus_to_exitcode(status)))
                    running.remove(pid)
            answer = ended
        else:
            pid = os.fork()
            if pid == 0:
                connection.close()
                return request, files
            running.add(pid)
            for file in files:
                os.close(file)
            answer = pid
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _receive(connection):
    """A request and its files; None for both at the end."""
    text, files = b"", []
    while not text.endswith(b"\n"):
        part, found, *_ = socket.recv_fds(connection, 65536, 3)
        if not part:
            return None, None
        text += part
        files += found
    return json.loads(text), files


def become(request, files):
    """Be the process that was asked for."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, file in enumerate(files, 3 - len(files)):
        os.dup2(file, number)
        os.close(file)
    faulthandler.register(signal.SIGUSR1, file=2)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    first, *rest = request["arguments"]
    if first == "-m":
        sys.path[0] = request["cwd"]
        sys.argv = ["-m", *rest[1:]]
        sys.modules.pop(rest[0], None)  # or a warning would say that it is there already
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path[0] = request["cwd"]
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    else:
        sys.path[0] = str(Path(first).parent)
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


def become_and_end(request, files):
    """Be that process, and end without freeing what is imported, which would take half a second of a core."""
    code = 0
    try:
        become(request, files)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def relay(options, *arguments):
    """Be a process for pytest-xdist: a fork that has the standard files of this one."""
    assert options == "-u"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the fork, which this process outlives
    pid = starter().start(arguments, dict(os.environ), str(Path.cwd()), sys.stdin, sys.stdout, sys.stderr)
    while starter().code(pid) is None:
        time.sleep(0.1)
    sys.exit(starter().code(pid))


if __name__ == "__main__" and sys.argv[1] == "-u":
    relay(*sys.argv[1:])
elif __name__ == "__main__":
    import gc
    import importlib

    sys.path[0] = str(Path(__file__).parents[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which end this process
    for library in LIBRARIES:
        with contextlib.suppress(ModuleNotFoundError):  # vLLM's environment has fewer
            importlib.import_module(library)
    for parser, _ in sys.modules["tokencredit.commands"].COMMANDS.values():
        parser()  # kept by the package: reading the help texts takes a second of a core
    # What the first model and the first page of a process take: a thousand regular expressions, and templates.
    sys.modules["transformers.conversion_mapping"].get_checkpoint_conversion_mapping("gpt2")
    sys.modules["tokencredit.report.templating"]._pages().get_template("page.html")
    if Path("/proc/self/task").exists():
        assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread would not be in the forks"
    gc.freeze()
    if connection := listen(*(socket.socket(fileno=int(file)) for file in sys.argv[2:])):
        become_and_end(*serve(connection))
    os._exit(0)
