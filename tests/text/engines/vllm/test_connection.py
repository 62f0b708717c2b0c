"""Answers of a vLLM server that are refused; vLLM is not needed."""

import json

import pytest

from tokencredit.text.engines.requests import EngineFailure, Request
from tokencredit.text.engines.vllm.connection import check_ending, choice_of, choice_version, excerpt, read_choice


def choice(ids=(5, 6), logprobs=None, named=None, **other):
    logprobs = [-0.5] * len(ids) if logprobs is None else logprobs
    content = [{"token_id": i, "logprob": x} for i, x in zip(named or ids, logprobs, strict=True)]
    return {"token_ids": list(ids), "logprobs": {"content": content}, "finish_reason": "stop"} | other


def test_a_good_answer_is_read():
    answer = json.dumps({"choices": [choice()]})
    assert read_choice(choice_of(answer), 10) == ([5, 6], [-0.5, -0.5], "stop")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (choice(ids=[5, 10]), "outside the vocabulary of 10"),
        (choice(ids=[5, -1]), "outside the vocabulary of 10"),
        (choice(ids=[5, True]), "outside the vocabulary of 10"),
        (choice(named=[5, 7]), "not those of its tokens"),
        (choice(ids=[5, 6, 7], named=[5, 6, 7]) | {"token_ids": [5, 6]}, "not those of its tokens"),
        (choice(logprobs=[-0.5, 0.1]), "log-prob 0.1"),
        (choice(logprobs=[-0.5, -9999.0]), "log-prob -9999"),
        (choice(logprobs=[-0.5, float("nan")]), "log-prob nan"),
        (choice(logprobs=[-0.5, "\x1b[31mhigh"]), r"log-prob \\x1b\[31mhigh"),
        (choice() | {"logprobs": None}, "lacks token ids or log-probs"),
        ({"token_ids": [5]}, "lacks token ids or log-probs"),
    ],
)
def test_tokens_without_a_log_prob_each_are_refused(answer, message):
    with pytest.raises(EngineFailure, match=message):
        read_choice(choice_of(json.dumps({"choices": [answer]})), 10)


@pytest.mark.parametrize(
    "answer", ["<html>", "[" * 100_000, "{}", '{"choices": []}', '{"choices": [1]}', "[1]", b"\xff"]
)
def test_anything_but_a_completion_is_refused(answer):
    with pytest.raises(EngineFailure, match="its answer"):
        choice_of(answer)


@pytest.mark.parametrize(
    ("ids", "reason", "message"),
    [
        ([5, 6, 7, 8], None, "gave 4 tokens, and was asked for 3 at most"),
        ([1, 5, 6], "length", "went on after an end token"),
        ([5, 6], "length", "cut a completion at 2 tokens, and was asked for 3"),
        ([5, 6], "stop", "at token 6, which is no end there"),
        ([1], "stop", "at token 1, which is no end there"),
        ([], "stop", "at token none"),
    ],
)
def test_a_completion_that_ends_where_it_must_not_is_refused(ids, reason, message):
    with pytest.raises(EngineFailure, match=message):
        check_ending(ids, reason, Request([4], limit=3, shortest=2, seed=0), ends=[1])


def test_a_completion_ends_at_an_end_token_or_the_limit():
    request = Request([4], limit=3, shortest=2, seed=0)
    check_ending([5, 1], "stop", request, ends=[1])
    check_ending([5, 6, 7], "length", request, ends=[1])
    check_ending([1, 5, 1], "length", request, ends=[])
    check_ending([5], None, request, ends=[1])


def test_the_versions_of_all_tokens_are_read():
    spans = [{"version": "b", "start": 0, "end": 1}, {"version": "a", "start": 1, "end": 2}]
    assert choice_version({"weight_versions": spans[:1]}) == "b"
    assert choice_version({"weight_versions": spans}) == "a and b"
    assert choice_version({"weight_versions": None}) is None
    assert choice_version({"weight_versions": []}) is None


def test_an_answer_is_shown_in_a_short_safe_line():
    assert excerpt(b"one\ntwo \x1b[0m") == r"one two \x1b[0m"
    assert len(excerpt("x" * 10_000)) == 300
