import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from tokencredit.user_code import workers as workers_module
from tokencredit.user_code.workers import EventLoop, TimedOut, Workers, begin, call_within


@pytest.fixture
def over():
    """An event that hanging calls wait for, set when the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_results_and_exceptions_are_those_of_the_function():
    workers = Workers()
    assert workers.submit(divmod, 7, 2).result() == (3, 1)
    assert workers.submit(dict, a=1).result() == {"a": 1}
    for error in (ValueError("no"), SystemExit(3), KeyboardInterrupt(), TimeoutError("its own")):

        def fails(error=error):
            raise error

        with pytest.raises(type(error)) as raised:
            call_within(workers, 60, fails)
        assert raised.value is error
    assert workers.submit(len, "still there").result() == 11


def test_fast_calls_share_threads():
    workers = Workers(most=4)
    names = {workers.submit(lambda: threading.current_thread()).result() for _ in range(100)}
    assert len(names) == 1, "a call after another needs no second thread"
    calls = [workers.submit(threading.get_ident) for _ in range(200)]
    assert len({call.result() for call in calls}) <= 4


def test_a_hung_call_is_abandoned_and_its_thread_replaced(over):
    workers = Workers(most=1)
    ended = threading.Event()

    def hangs():
        over.wait()
        ended.set()
        return "late"

    call = workers.submit(hangs)
    waiting = workers.submit(len, "next")
    with pytest.raises(TimedOut, match=r"exceeded the timeout of 0\.05 s"):
        workers.result(call, 0.05)
    assert waiting.result(60) == 4, "the queue goes on"
    over.set()
    assert ended.wait(60)
    assert workers.submit(len, "and on").result(60) == 6
    assert not call.done(), "nobody waits for a late result"


def test_the_timeout_begins_with_the_call(over):
    workers = Workers(most=1)
    first = workers.submit(over.wait)
    second = begin(workers, 30, len, "four")
    result = []
    waiter = threading.Thread(target=lambda: result.append(second()))
    waiter.start()
    with pytest.raises(TimedOut):
        workers.result(first, 0.1)
    waiter.join(60)
    assert result == [4]


def test_a_call_that_has_not_begun_can_be_cancelled(over):
    workers = Workers(most=1)
    workers.submit(over.wait)
    called = []
    call = workers.submit(called.append, 1)
    assert call.cancel()
    over.set()
    assert workers.submit(len, "").result(60) == 0
    assert called == []


@pytest.mark.slow
def test_an_idle_thread_keeps_nothing_alive():
    class Big:
        pass

    workers, big = Workers(), Big()
    gone = weakref.ref(big)
    assert workers.submit(id, big).result() == id(big)
    del big
    for _ in range(1000):  # the thread forgets the call a moment after its result is there
        gc.collect()
        if gone() is None:
            break
        time.sleep(0.01)
    assert gone() is None


def test_coroutines_run_at_the_same_time_on_one_loop():
    async def meet(barrier, loops):
        loops.add(asyncio.get_running_loop())
        return await barrier.wait()

    async def make():
        return asyncio.Barrier(8)

    barrier, loops = call_within(Workers(), 60, make), set()
    waiting = [begin(Workers(), 60, meet, barrier, loops) for _ in range(8)]
    assert sorted(wait() for wait in waiting) == list(range(8))
    assert len(loops) == 1


def test_a_coroutine_may_raise_anything_and_the_loop_goes_on():
    async def leave(error):
        raise error

    for error in (ValueError("no"), SystemExit(3), KeyboardInterrupt(), TimeoutError("its own")):
        with pytest.raises(type(error)):
            call_within(Workers(), 60, leave, error)

    async def four():
        return 4

    assert call_within(Workers(), 60, four) == 4
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        call_within(Workers(), 60, four, wrong=1)


def test_a_late_coroutine_is_cancelled():
    cancelled = threading.Event()

    async def sleeps():
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(TimedOut):
        call_within(Workers(), 0.05, sleeps)
    assert cancelled.wait(60)


def test_the_timeout_of_a_coroutine_begins_with_it():
    async def sleeps():
        await asyncio.sleep(3600)

    loop = EventLoop()
    started = loop.submit(sleeps)
    long_ago = started._replace(begun=started.begun - 1800)
    with pytest.raises(TimedOut, match="exceeded the timeout of 1800 s"):
        loop.result(long_ago, 1800)
    assert started.future.cancelled()


def test_a_coroutine_that_blocks_its_loop_is_left_behind(over, monkeypatch):
    monkeypatch.setattr(workers_module, "RESPONSE", 0.05)
    loop = EventLoop()

    async def blocks():
        over.wait()

    async def four():
        return 4

    with pytest.raises(TimedOut):
        loop.result(loop.submit(blocks), 0.05)
    assert loop.result(loop.submit(four), 60) == 4


def test_a_function_that_returns_a_coroutine_is_awaited():
    async def four():
        return 4

    assert call_within(Workers(), 60, lambda: four()) == 4


def test_hung_threads_do_not_keep_the_process_alive():
    code = (
        "import threading, asyncio\n"
        "from tokencredit.user_code.workers import *\n"
        "async def sleeps(): await asyncio.sleep(3600)\n"
        "workers = Workers()\n"
        "for _ in range(5): workers.submit(threading.Event().wait)\n"
        "LOOP.submit(sleeps)\n"
        "print('end')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert (ended.stdout, ended.stderr) == ("end\n", "")


def test_a_call_that_ends_with_its_timeout_is_either_in_time_or_late():
    """Calls as long as their timeout: each gives its result or is late, and the pool goes on."""
    workers = Workers(most=2)
    outcomes = set()
    for _ in range(40):
        try:
            outcomes.add(call_within(workers, 0.005, time.sleep, 0.005))
        except TimedOut:
            outcomes.add("late")
    assert outcomes <= {None, "late"}
    assert call_within(workers, 60, len, "four") == 4
