"""Rewards that fail for a while: a service of the reward's own on this machine, and functions that stand for one."""

import asyncio
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from helpers import warm
from helpers.commands import COMMAND
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import RunConfig
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.text.rewards import calls as reward_calls
from tokencredit.text.rewards.calls import NonFiniteScore, RewardError, Term
from tokencredit.text.rewards.terms import score

COMPLETIONS = ["one", "three"]
LENGTHS = [3.0, 5.0]
ALLOWED = """--run.allow_changed '["reward[0].function"]'"""
SPENT = [
    MemoryError("too many"),
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(reward_calls, "FIRST_BACKOFF", 0.0)


@pytest.fixture
def service():
    """A reward service that does what is next in `plan` (error, hang, html), and rates when that is over."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            completions = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["completions"]
            server.asked.append(completions)
            todo = server.plan.pop(0) if server.plan else "rate"
            if todo == "hang":
                over.wait()
                return
            scores = json.dumps({"scores": [float(len(c)) for c in completions]})
            body = "<html>busy</html>" if todo == "html" else scores
            self.send_response(500 if todo == "error" else 200)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.plan, server.asked, server.calls = [], [], []
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    yield server
    over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def judge(service, **options):
    """The term of the docs, which asks this service."""
    text = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "urlopen" in block)
    names = {}
    exec(code.replace("localhost:8000", f"127.0.0.1:{service.server_port}"), names)

    def function(prompts, completions):
        service.calls.append(completions)
        return names["judge"](prompts, completions)

    return Term("judge", 1.0, function, **options)


def rate(*terms):
    return score(terms, ["Say:", "Say:"], COMPLETIONS, {}, [1, 1]).totals


class Failing:
    """A reward function that raises or gives what it is told, one thing a call, and the last of them for ever."""

    def __init__(self, *outcomes):
        self.outcomes, self.calls = outcomes, []

    def __call__(self, completions):
        outcome = self.outcomes[min(len(self.calls), len(self.outcomes) - 1)]
        self.calls.append(completions)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@pytest.mark.parametrize("plan", [["error", "error"], ["html"]])
def test_a_service_that_recovers_within_the_retries_gives_its_scores(plan, service, caplog):
    service.plan = list(plan)
    assert rate(judge(service)) == LENGTHS
    assert service.asked == [COMPLETIONS] * (len(plan) + 1)
    assert len(caplog.records) == len(plan)


@pytest.mark.parametrize("mistake", [NameError("score"), ModuleNotFoundError("x"), NotImplementedError()])
def test_what_can_never_succeed_is_tried_once(mistake):
    failing = Failing(mistake)
    with pytest.raises(RewardError) as caught:
        rate(Term("f", 1.0, failing))
    assert failing.calls[1:] in ([], [["one"]]), "again only to find the completion"
    assert "tries" not in str(caught.value)


@pytest.mark.parametrize("kind", ["plain", "async", "timed"])
@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], r"'f' returned 1 numbers for 2 completions; it must return a list with one number for each$"),
        (None, r"'f' returned None for 2 completions; it must return a list with one number for each$"),
        ("ab", r"'f' returned 'ab' for 2 completions; it must return a list"),
        (["bad", 1.0], r"'f' returned 'bad' for the text 'Say:one'; it must be a number$"),
        ([[1.0, 2.0], 2.0], r"'f' gave a list of 2 for the 1 tokens of the text 'Say:one'; it must be a number"),
    ],
)
def test_a_result_of_another_type_or_length_is_refused_at_once(result, message, kind, caplog):
    failing = Failing(result)

    async def answer(completions):
        return failing(completions)

    function, timeout = (answer if kind == "async" else failing), 30.0 if kind == "timed" else None
    with pytest.raises(RewardError, match=message) as caught:
        rate(Term("f", 1.0, function, retries=5, timeout=timeout))
    assert failing.calls == [COMPLETIONS]
    assert not caplog.messages, "no retry is spoken of"
    assert "tries" not in str(caught.value)


@pytest.mark.slow
def test_a_service_that_hangs_is_asked_again(service, caplog):
    service.plan = ["hang", "hang"]
    # Many retries, because on a busy machine an honest answer may come too late as well.
    assert rate(judge(service, timeout=0.2, retries=100)) == LENGTHS
    assert len(service.asked) >= 3
    assert "reward term 'judge' exceeded its timeout of 0.2 s; trying again in 0 s" in caplog.messages


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("error", r"'judge' raised HTTPError: .* \(the last of 3 tries\); .* raise the term's timeout or retries$"),
        ("hang", r"'judge' exceeded its timeout of 0\.2 s \(the last of 3 tries\); .*timeout or retries$"),
    ],
)
def test_a_service_that_stays_down_is_asked_for_the_whole_batch_only(kind, message, service):
    service.plan = [kind] * 99
    timeout = 0.2 if kind == "hang" else None
    with pytest.raises(RewardError, match=message):
        rate(judge(service, timeout=timeout))
    assert service.calls == [COMPLETIONS] * 3


def test_without_retries_the_first_failure_is_the_last():
    failing = Failing(ConnectionError("gone"))
    with pytest.raises(RewardError, match=r"reward term 'f' raised ConnectionError: gone at \S+; if the service is"):
        rate(Term("f", 1.0, failing, retries=0))
    assert len(failing.calls) == 1


def test_the_completion_that_fails_is_searched_after_the_last_try():
    failing = Failing(KeyError("score"))
    with pytest.raises(
        RewardError, match=r"KeyError: 'score' at \S+\.py:\d+; its prompt was 'Say:' .* 'one' \(the last of 3 tries\)$"
    ):
        rate(Term("f", 1.0, failing))
    assert failing.calls == [COMPLETIONS] * 3 + [["one"]]


def test_the_search_ends_where_a_service_is_down():
    failing = Failing(KeyError("score"), ConnectionError("gone"))
    with pytest.raises(RewardError, match=r"^reward term 'f' raised KeyError: 'score' at \S+test_calls\.py:\d+$"):
        rate(Term("f", 1.0, failing, retries=0))
    assert failing.calls == [COMPLETIONS, ["one"]]


@pytest.mark.parametrize("final", [ConfigError("set it"), *SPENT])
def test_errors_that_would_repeat_are_raised_unchanged(final):
    failing = Failing(final)
    with pytest.raises(type(final)) as caught:
        rate(Term("f", 1.0, failing, timeout=30.0))
    assert caught.value is final
    assert len(failing.calls) == 1


def test_an_out_of_memory_error_of_the_search_is_raised_unchanged():
    with pytest.raises(MemoryError, match="too many"):
        rate(Term("f", 1.0, Failing(ValueError("odd"), MemoryError("too many")), retries=0))


def test_a_score_that_is_not_finite_is_not_retried():
    failing = Failing([1.0, float("nan")])
    with pytest.raises(NonFiniteScore, match=r"reward term 'f' is nan for the text 'Say:three';"):
        rate(Term("f", 1.0, failing))
    assert len(failing.calls) == 1


def test_a_reward_out_of_memory_stops_the_run_with_the_advice_for_it(tmp_path):
    args = PPOConfig(
        rollout=RolloutConfig(batch_size=4, max_new_tokens=2), run=RunConfig(dir=str(tmp_path / "run"), iterations=1)
    )
    with pytest.raises(RunStopped, match=r"out of memory in its reward stage; lower the batch_size of the reward's te"):
        PPOTrainer(reward_funcs=[Failing(SPENT[1])], args=args).train()


def test_pauses_double_up_to_the_longest(monkeypatch, caplog):
    monkeypatch.setattr(reward_calls, "FIRST_BACKOFF", 0.001)
    monkeypatch.setattr(reward_calls, "MAX_BACKOFF", 0.003)
    failing = Failing(OSError("gone"), OSError("gone"), OSError("gone"), OSError("gone"), LENGTHS)
    assert rate(Term("f", 1.0, failing, retries=4)) == LENGTHS
    for message, pause in zip(caplog.messages, (0.001, 0.002, 0.003, 0.003), strict=True):
        assert re.fullmatch(rf"reward term 'f' raised OSError: gone at \S+\.py:\d+; trying again in {pause} s", message)


def test_control_characters_of_a_service_are_escaped(caplog):
    evil = RuntimeError("\x1b[2J\nall is well")
    with pytest.raises(RewardError, match=r"raised RuntimeError: \\x1b\[2J\\nall is well at \S+\.py:\d+; its prompt"):
        rate(Term("f", 1.0, Failing(evil), retries=1))
    (message,) = caplog.messages
    assert message.startswith(r"reward term 'f' raised RuntimeError: \x1b[2J\nall is well at /")
    assert message.endswith("; trying again in 0 s")


def test_a_coroutine_that_hangs_is_cancelled_and_called_again():
    started, cancelled = [], threading.Event()

    async def hangs_once(completions):
        started.append(completions)
        if len(started) == 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise
        return LENGTHS

    assert rate(Term("f", 1.0, hangs_once, timeout=0.2, retries=100)) == LENGTHS
    assert cancelled.wait(60)


def test_coroutines_are_tried_again_together():
    """In its second try each waits for the other's second, so that one after the other would never end."""
    tries = {"a": 0, "b": 0}

    def meeting(name):
        async def function(completions):
            tries[name] += 1
            if tries[name] == 1:
                raise ConnectionError("not yet")
            while min(tries.values()) < 2:
                await asyncio.sleep(0.001)
            return LENGTHS

        return Term(name, 1.0, function, retries=1, timeout=60)

    assert rate(meeting("a"), meeting("b")) == [6.0, 10.0]


def test_a_timeout_of_the_functions_own_is_not_the_terms():
    with pytest.raises(RewardError, match=r"raised TimeoutError: timed out at \S+\.py:\d+; if the service"):
        rate(Term("f", 1.0, Failing(TimeoutError("timed out")), timeout=30, retries=0))


def test_only_a_function_with_a_timeout_gets_a_thread_of_its_own():
    threads = []

    def function(completions):
        threads.append(threading.current_thread())
        return LENGTHS

    rate(Term("a", 1.0, function), Term("b", 1.0, function, timeout=30))
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()


def test_a_run_whose_reward_hangs_says_so_and_ends(tmp_path):
    """In a process of its own, which the function that still hangs must not keep from ending."""
    (tmp_path / "mine.py").write_text("import threading\n\n\ndef hangs(completions):\n    threading.Event().wait()\n")
    reward = f"[{{function: '{tmp_path}/mine.py:hangs', timeout: 0.2, retries: 1}}]"
    few = ["--rollout.batch_size", "4", "--rollout.max_new_tokens", "2"]
    done = warm.python(*COMMAND, "train", "--reward", reward, "--run.dir", tmp_path / "run", *few)
    assert done.returncode == 1
    again, end = [line for line in done.stderr.splitlines() if "hangs" in line]
    assert again == "reward term 'hangs' exceeded its timeout of 0.2 s; trying again in 1 s"
    assert end.startswith(
        "tokencredit: stopped in iteration 1: reward term 'hangs' exceeded its timeout of 0.2 s "
        "(the last of 2 tries); if the service is only slow"
    )
    assert end.endswith(f"mend it, then resume with: tokencredit train --resume {tmp_path}/run {ALLOWED}")
    assert "Traceback" not in done.stderr
