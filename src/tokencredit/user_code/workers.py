"""Call user code within a timeout: functions in a few daemon threads, coroutine functions on one event loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple

THREADS = 64
"""Most threads of a pool; they mostly wait, for tools and services."""
RESPONSE = 1.0
"""Seconds within which an event loop that no coroutine blocks answers."""


class TimedOut(Exception):
    """A call exceeded its timeout."""


class Call(Future[Any]):
    """A call in a thread: its result, or whatever it raises, SystemExit included."""

    def __init__(self, function: Callable[[], Any]):
        super().__init__()
        self.function = function
        self.started: float | None = None
        self.abandoned = False


class Workers:
    """Daemon threads that take calls from a queue.

    Threads start as calls need them and are then kept. Being daemons, unlike the threads of an executor, they do not
    keep the process alive.
    """

    def __init__(self, most: int = THREADS):
        """`most` is the largest number of threads that take calls; abandoned ones do not count."""
        self._most, self._threads, self._idle = most, 0, 0
        self._calls: deque[Call] = deque()
        self._changed = threading.Condition()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Call:
        """Call a function in a thread."""
        call = Call(partial(function, *args, **kwargs))
        with self._changed:
            self._calls.append(call)
            self._changed.notify()
            self._add_thread()
        return call

    def result(self, call: Call, timeout: float | None) -> Any:
        """Wait for the result of a call of `submit`, in a thread that is none of these, or raise what it raised.

        The timeout, in seconds, counts from the start of the call; the thread of a call that exceeds it is abandoned,
        and another one takes its place. Raises `TimedOut`.
        """
        rest = timeout
        # Not result(timeout): its TimeoutError would look like the function's own.
        while not wait([call], rest and min(rest, threading.TIMEOUT_MAX)).done:
            assert timeout is not None
            rest = timeout if call.started is None else max(call.started + timeout - time.monotonic(), 0)
            if rest == 0 and self._abandon(call):
                raise TimedOut(f"exceeded the timeout of {timeout:g} s")
        return call.result()

    def _add_thread(self) -> None:
        """Start a thread if more calls wait than threads do."""
        if len(self._calls) > self._idle and self._threads < self._most:
            self._threads += 1
            threading.Thread(target=self._work, name="tokencredit-worker", daemon=True).start()

    def _abandon(self, call: Call) -> bool:
        """Stop counting on a call's thread; False if the call has just ended."""
        with self._changed:
            call.abandoned = not call.done()
            if call.abandoned:
                self._threads -= 1
                self._add_thread()
            return call.abandoned

    def _work(self) -> None:
        with self._changed:
            self._idle += 1
        while True:
            call = self._take()
            result, error = None, None
            try:
                result = call.function()
            except BaseException as raised:
                error = raised
            if not self._finish(call, result, error):
                return
            del call, result, error  # an idle thread keeps nothing alive

    def _take(self) -> Call:
        """Wait for the next call, as an idle thread."""
        with self._changed:
            while True:
                while not self._calls:
                    self._changed.wait()
                call = self._calls.popleft()
                call.started = time.monotonic()
                if call.set_running_or_notify_cancel():
                    self._idle -= 1
                    return call

    def _finish(self, call: Call, result: Any, error: BaseException | None) -> bool:
        """Set a call's outcome; the thread is idle before anyone can see it. False if the thread was abandoned."""
        with self._changed:
            if call.abandoned:
                return False
            self._idle += 1
            if error is None:
                call.set_result(result)
            else:
                call.set_exception(error)
            return True


class Started(NamedTuple):
    """A coroutine on the event loop; its outcome is for `EventLoop.result`."""

    future: Future[Any]
    begun: float


class EventLoop:
    """An event loop in a daemon thread; the caller, such as a notebook, may already run one of its own.

    There is one for all coroutines, because clients keep connections bound to the loop that opened them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Started:
        """Call a coroutine function."""
        outcome = _outcome(partial(function, *args, **kwargs))
        return Started(asyncio.run_coroutine_threadsafe(outcome, self._running()), time.monotonic())

    def result(self, started: Started, timeout: float | None) -> Any:
        """Wait for a coroutine's result. If it is late, cancel it, replace a loop that it blocks, raise `TimedOut`."""
        rest = None if timeout is None else max(started.begun + timeout - time.monotonic(), 0)
        if not wait([started.future], rest and min(rest, threading.TIMEOUT_MAX)).done:
            started.future.cancel()
            loop, answered = self._running(), threading.Event()
            loop.call_soon_threadsafe(answered.set)
            if not answered.wait(RESPONSE):  # it blocks the loop: the next coroutine gets a new one
                with self._lock:
                    self._loop = None if self._loop is loop else self._loop
            raise TimedOut(f"exceeded the timeout of {timeout:g} s")
        result, error = started.future.result()
        if error is not None:
            raise error
        return result

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="tokencredit-loop", daemon=True).start()
            return self._loop


async def _outcome(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """A coroutine's result, and what it raised: sys.exit() in a task would end the whole loop."""
    try:
        return await function(), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error


LOOP = EventLoop()
"""The loop of all coroutines of user code."""


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """True for a coroutine function, and for an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def finished(value: Any, timeout: float | None) -> Any:
    """What a function returned; if that is the coroutine of another, as of a lambda or a decorated one, its result."""
    return LOOP.result(LOOP.submit(lambda: value), timeout) if inspect.isawaitable(value) else value


def begin(
    workers: Workers, timeout: float | None, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Callable[[], Any]:
    """Call a function in a thread, or a coroutine function on the loop; the returned function waits for its result.

    It raises what the call raised, or `TimedOut` if the call took longer than `timeout` seconds.
    """
    if is_coroutine_function(function):
        started = LOOP.submit(function, *args, **kwargs)
        return lambda: LOOP.result(started, timeout)
    call = workers.submit(function, *args, **kwargs)

    return lambda: finished(workers.result(call, timeout), timeout)


def call_within(
    workers: Workers, timeout: float | None, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Call a function or coroutine function and wait for its result; raises as `begin`'s function does."""
    return begin(workers, timeout, function, *args, **kwargs)()
