"""Rewards: terms that rate completions, and their weighted sum.

A term's function has the signature `f(prompts, completions, **columns)` and gives, for each completion, a number, None
where it does not apply, or a list of numbers, one a token.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from tokencredit.core.masked import Reduce, inverse_deviation
from tokencredit.runs.config import RewardTerm
from tokencredit.runs.errors import ConfigError
from tokencredit.text.reward_functions import RewardFunction
from tokencredit.text.reward_loading import load_function
from tokencredit.text.reward_models import Classifier, RewardModel, load
from tokencredit.text.reward_texts import Text, joined

Value = float | list[float] | None
"""What a term says of a completion."""


class RewardError(RuntimeError):
    """A reward that could not be had; the message names the term and, where it can, the text."""


class NonFiniteReward(RewardError):
    """A reward that is NaN or infinite."""


@dataclass
class Term:
    """A reward function with its name and weight."""

    name: str
    weight: float
    function: RewardFunction
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that it gets at every call, before any column of the same name."""


@dataclass(frozen=True)
class Scores:
    """What the terms say of a batch of completions."""

    totals: list[float]
    """For each completion, Σ weight · value over the terms that gave it one number; 0 where none did."""
    dense: list[list[float]] | None
    """For each completion and token, Σ weight · value over the terms that gave one number a token; None if none did."""
    terms: dict[str, list[float | None]]
    """Each term by itself, unweighted; where it gave one number a token, their sum."""


def build_terms(config: Sequence[RewardTerm], device: torch.device | str) -> list[Term]:
    """The reward's terms, loaded.

    Raises:
        ConfigError: a term that cannot be loaded, by its key, or two terms of one name.
    """
    terms: list[Term] = []
    for number, settings in enumerate(config):
        try:
            term = _build(settings, device)
        except ConfigError as error:
            raise ConfigError(f"reward[{number}]: {error}") from error
        if term.name in {earlier.name for earlier in terms}:
            raise ConfigError(
                f"reward[{number}].name is {term.name!r}, as another term's is; give it a name of its own"
            )
        terms.append(term)
    return terms


def _build(settings: RewardTerm, device: torch.device | str) -> Term:
    options = {"text": settings.text, "batch_size": settings.batch_size}
    kind, source = settings.source()
    kwargs: Mapping[str, Any] = {}
    if kind == "function":
        function = load_function(source, settings.kwargs)
        name, kwargs = source.rpartition(":")[2], settings.kwargs if ":" in source else {}
    elif kind == "classifier":
        function = Classifier(source, settings.label, settings.output, device, **options)
        name = str(settings.label)
    else:
        function, name = RewardModel(source, *load(source, device), **options), Path(source).name
    return Term(settings.name or name, settings.weight, function, kwargs)


def as_terms(reward_funcs: Any, device: torch.device | str = "cpu") -> list[Term]:
    """Terms of weight 1 from what Python callers have, as TRL's trainers accept it.

    Args:
        reward_funcs: a reward function, a hub id or folder of a reward model, a loaded reward model (its tokenizer is
            found by the name it was loaded from), or a list of them. A `Term` stands for itself, with its own name and
            weight.
        device: where models run.

    Raises:
        ConfigError: something else, a model that cannot be used, or two terms of one name.
    """
    terms: list[Term] = []
    for number, given in enumerate(reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]):
        try:
            term = _as_term(given, device)
        except ConfigError as error:
            raise ConfigError(f"reward_funcs[{number}]: {error}") from error
        if term.name in {earlier.name for earlier in terms}:
            raise ConfigError(
                f"reward_funcs[{number}] is named {term.name!r}, as another is; "
                "give it a name of its own: Term(name, weight, function)"
            )
        terms.append(term)
    return terms


def _as_term(given: Any, device: torch.device | str) -> Term:
    if isinstance(given, Term):
        return given
    if isinstance(given, str):
        return Term(Path(given).name, 1.0, RewardModel(given, *load(given, device)))
    if isinstance(given, PreTrainedModel):
        name = given.config._name_or_path
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"no tokenizer for the reward model {name!r}; save both to one folder and give that: {error}"
            ) from error
        return Term(Path(name).name, 1.0, RewardModel(name, given.to(device), tokenizer))
    if not callable(given):
        raise ConfigError(f"{given!r} is neither a function, nor the name of a reward model, nor a model")
    function = given.func if isinstance(given, functools.partial) else given
    return Term(getattr(function, "__name__", type(function).__name__), 1.0, given)


def score(
    terms: Sequence[Term],
    prompts: Sequence[Text],
    completions: Sequence[Text],
    columns: Mapping[str, Sequence[Any]],
    lengths: Sequence[int],
) -> Scores:
    """Rate completions.

    Coroutine functions start first, run concurrently with each other, and are waited for in the terms' order.

    Args:
        terms: at least one.
        prompts: plain texts or lists of messages.
        completions: as many, of the same format.
        columns: more that functions may ask for by name, one entry a completion: the data set's columns,
            `completion_ids`, and `ref_logprobs` where there is a reference.
        lengths: sampled tokens of each completion, the end-of-sequence token included.

    Raises:
        RewardError: a function raised, or gave something other than a number, None or a list of `lengths[i]` numbers
            for each completion; or no term said anything of any completion.
        NonFiniteReward: a number is NaN or infinite.
        ConfigError: a function asks for a column that is not there.
    """
    offered = {**columns, "prompts": prompts, "completions": completions}
    values: dict[str, list[Value]] = {}
    for term, answer in [(term, _start(term, offered)) for term in terms]:
        try:
            result = answer()
        except ConfigError:
            raise
        except Exception as error:
            raise RewardError(_blame(term, offered, error)) from error
        values[term.name] = _read(term.name, result, prompts, completions, lengths)
    if not any(value is not None for column in values.values() for value in column):
        raise RewardError(f"no reward term said anything of any completion: {', '.join(values)} gave None everywhere")
    return _add(terms, values, lengths)


def _add(terms: Sequence[Term], values: Mapping[str, list[Value]], lengths: Sequence[int]) -> Scores:
    totals = [0.0] * len(lengths)
    dense = [[0.0] * length for length in lengths]
    summed: dict[str, list[float | None]] = {}
    for term in terms:
        for row, value in enumerate(values[term.name]):
            if isinstance(value, list):
                dense[row] = [x + term.weight * y for x, y in zip(dense[row], value, strict=True)]
            elif value is not None:
                totals[row] += term.weight * value
        summed[term.name] = [sum(value) if isinstance(value, list) else value for value in values[term.name]]
    is_dense = any(isinstance(value, list) for column in values.values() for value in column)
    return Scores(totals, dense if is_dense else None, summed)


def _start(term: Term, offered: Mapping[str, Sequence[Any]]) -> Callable[[], Any]:
    """Begin a call if it is a coroutine's; returns what waits for the result, or makes the call."""
    args, kwargs = _arguments(term, offered)
    function = term.function
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return asyncio.run_coroutine_threadsafe(function(*args, **kwargs), _loop()).result
    return functools.partial(function, *args, **kwargs)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all coroutine functions, in a thread of its own.

    One loop for the whole process, because clients keep connections that belong to the loop they were opened in; a
    thread, because the caller may have a loop that runs already, as a notebook does.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rewards", daemon=True).start()
    return loop


def _arguments(term: Term, offered: Mapping[str, Sequence[Any]]) -> tuple[list[Any], dict[str, Any]]:
    """What of all that is offered a function takes: by name, or prompts and completions in the first two places."""
    parameters = inspect.signature(term.function).parameters
    named = {**offered, **term.kwargs}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        named = {name: value for name, value in named.items() if name in parameters}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [n for n, p in parameters.items() if p.default is p.empty and p.kind not in variadic and n not in named]
    if not missing:
        return [], named
    if len(missing) == 2 and missing == list(parameters)[:2]:
        rest = {name: value for name, value in named.items() if name not in ("prompts", "completions")}
        return [offered["prompts"], offered["completions"]], rest
    raise ConfigError(f"the reward {term.name!r} needs {', '.join(missing)}; there are {', '.join(sorted(offered))}")


def _blame(term: Term, offered: Mapping[str, Sequence[Any]], error: Exception) -> str:
    """Who raised, what, and on which completion: found by calling the function again on one at a time."""
    for row in range(len(offered["prompts"])):
        alone = {name: column[row : row + 1] for name, column in offered.items()}
        try:
            _start(term, alone)()
        except Exception as again:
            prompt, completion = alone["prompts"][0], alone["completions"][0]
            return (
                f"reward term {term.name!r} raised {type(again).__name__}: {again}; "
                f"its prompt was {prompt!r} and its completion {completion!r}"
            )
    return (
        f"reward term {term.name!r} raised {type(error).__name__}: {error}; "
        f"it did so on {len(offered['prompts'])} completions together, on none of them alone"
    )


def _read(
    name: str, result: Any, prompts: Sequence[Text], completions: Sequence[Text], lengths: Sequence[int]
) -> list[Value]:
    """A term's result as plain numbers, checked."""
    result = _listed(result)
    if not isinstance(result, list | tuple):
        raise RewardError(
            f"reward term {name!r} returned a {type(result).__name__}; it must be a list, one number a completion"
        )
    if len(result) != len(completions):
        raise RewardError(f"reward term {name!r} returned {len(result)} numbers for {len(completions)} completions")
    values: list[Value] = []
    for value, prompt, completion, length in zip(map(_listed, result), prompts, completions, lengths, strict=True):
        text = joined(prompt, completion)
        if value is None:
            values.append(None)
        elif isinstance(value, list | tuple):
            if len(value) != length:
                raise RewardError(
                    f"reward term {name!r} gave {len(value)} numbers for the {length} tokens of the text {text!r}"
                )
            values.append([_number(name, _listed(x), text) for x in value])
        else:
            values.append(_number(name, value, text))
    return values


def _listed(value: Any) -> Any:
    """Tensors and arrays as the numbers and lists that they hold; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _number(name: str, value: Any, text: str) -> float:
    if not isinstance(value, Real):
        raise RewardError(f"reward term {name!r} is {value!r} for the text {text!r}; it must be a number")
    if not math.isfinite(value):
        raise NonFiniteReward(f"reward term {name!r} is {value} for the text {text!r}")
    return float(value)


def term_metrics(
    terms: Mapping[str, Sequence[float | None]], reduce: Reduce, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """Mean and deviation of each term, and Pearson's correlation of each two, over the completions they apply to.

    reward/NAME = μ, reward_std/NAME = σ (of the population), reward_corr/A/B = Cov[A, B] / (σ_A σ_B) over completions
    that both apply to. In two passes, the second about the means of the first. NaN for what is not defined: the mean of
    no completion, a correlation with something constant.

    Args:
        terms: `Scores.terms`; on every process the same names in the same order.
        reduce: sums a tensor over processes.
        device: where `reduce` wants its tensors.
    """
    rows = [[math.nan if value is None else value for value in row] for row in zip(*terms.values(), strict=True)]
    x = torch.tensor(rows, dtype=torch.float32, device=device).reshape(-1, len(terms))
    applies = ~x.isnan()
    both = (applies.unsqueeze(2) & applies.unsqueeze(1)).float()  # [completion, term, term]
    wide = x.nan_to_num().unsqueeze(2) * both  # each term where the other applies too
    count, total = reduce(torch.stack([both.sum(0), wide.sum(0)]))
    mean = total / count
    apart = (wide - mean.nan_to_num()) * both
    squares, products = reduce(torch.stack([apart.square().sum(0), (apart * apart.transpose(1, 2)).sum(0)])) / count
    deviation = squares.sqrt()
    inverse = inverse_deviation(deviation, mean)
    correlation = torch.where(inverse * inverse.T > 0, products * inverse * inverse.T, torch.nan).clamp(-1, 1)
    names = list(terms)
    pairs = [(a, b) for a in range(len(names)) for b in range(a)]
    return {
        **{f"reward/{name}": float(mean[i, i]) for i, name in enumerate(names)},
        **{f"reward_std/{name}": float(deviation[i, i]) for i, name in enumerate(names)},
        **{f"reward_corr/{names[b]}/{names[a]}": float(correlation[a, b]) for a, b in pairs},
    }
