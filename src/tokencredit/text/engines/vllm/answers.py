"""Answers of a vLLM server, read and checked: it may be another program, another version or started otherwise."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from tokencredit.runs.untrusted import visible
from tokencredit.text.engines.requests import EngineFailure, Request

COMMAND = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --tokens-only --generation-config vllm --logprobs-mode processed_logprobs"
)
"""The command that starts a server."""
SHOWN = 300
"""Most characters of an answer in a message."""
MISSING = -9999.0
"""vLLM's log-prob of a token that has none."""
CERTAIN = 1e-4
"""Largest log-prob that rounding makes of the probability 1, in nats."""


def parsed(text: str | bytes) -> Any:
    """JSON of a server; raises `EngineFailure` for anything else."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EngineFailure(f"its answer is not JSON: {excerpt(text)}") from error


def choice_of(text: str | bytes) -> dict[str, Any]:
    """The only choice of an answer of /inference/v1/generate, or of a part of it."""
    answer = parsed(text)
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not (isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)):
        raise EngineFailure(f"its answer has no completion: {excerpt(text)}")
    return choices[0]


def read_choice(choice: dict[str, Any], vocabulary: int) -> tuple[list[int], list[float], str | None]:
    """New token ids, their log-probs and the reason to finish; checked, since the server may be another than expected.

    Raises:
        EngineFailure: tokens are none of the vocabulary, or do not have a log-prob each.
    """
    try:
        ids, reason = choice["token_ids"], choice.get("finish_reason")
        places = choice["logprobs"]["content"]
        logprobs = [place["logprob"] for place in places]
        named = [place["token_id"] for place in places]
    except (LookupError, TypeError) as error:
        raise EngineFailure("its answer lacks token ids or log-probs") from error
    if named != ids:
        raise EngineFailure("its log-probs are not those of its tokens")
    if not all(type(token) is int and 0 <= token < vocabulary for token in ids):
        raise EngineFailure(f"its answer has tokens outside the vocabulary of {vocabulary}")
    for logprob in logprobs:
        if not (isinstance(logprob, float | int) and math.isfinite(logprob) and MISSING < logprob <= CERTAIN):
            raise EngineFailure(f"a token has the log-prob {excerpt(str(logprob))}: start it as {COMMAND}")
    return ids, [float(logprob) for logprob in logprobs], None if reason is None else str(reason)


def check_ending(ids: Sequence[int], reason: str | None, request: Request, ends: Sequence[int]) -> None:
    """Raise `EngineFailure` if the tokens so far end, or go on, where the request does not let them.

    Args:
        ids: the tokens.
        reason: vLLM's reason to finish; None if it has not.
        request: what was asked for.
        ends: token ids that end a completion.
    """
    count, ended = len(ids), bool(ids) and ids[-1] in ends
    if count > request.limit:
        raise EngineFailure(f"it gave {count} tokens, and was asked for {request.limit} at most")
    if reason is None:
        return
    if any(token in ends for token in ids[:-1]):
        raise EngineFailure("it went on after an end token")
    if reason == "length" and count < request.limit:
        raise EngineFailure(f"it cut a completion at {count} tokens, and was asked for {request.limit}")
    if reason == "stop" and (not ended or count < request.shortest):
        raise EngineFailure(f"it ended a completion at token {ids[-1] if ids else 'none'}, which is no end there")


def choice_version(choice: dict[str, Any]) -> str | None:
    """The version of the weights that drew all tokens; all versions, if there are several; None without any."""
    spans = choice.get("weight_versions")
    if not isinstance(spans, list):
        return None
    return " and ".join(sorted({str(span.get("version")) for span in spans if isinstance(span, dict)})) or None


def excerpt(text: str | bytes) -> str:
    """The beginning of a server's answer, safe on a terminal, in a line."""
    whole = text.decode(errors="replace") if isinstance(text, bytes) else text
    return visible(" ".join(whole[: 4 * SHOWN].split()))[:SHOWN]
