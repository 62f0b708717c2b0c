"""Reward terms and their weighted sum.

A term's function has the signature `f(prompts, completions, **columns)` and returns, for each completion, a number,
None where it does not apply, or a list with one number per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tokencredit.core.masked import Reduce, inverse_deviation
from tokencredit.distributed.processes import restored
from tokencredit.errors import ConfigError, naming, quoted
from tokencredit.settings.data import ClassifierTerm, FunctionTerm, RewardModelTerm, RewardTerm
from tokencredit.text.models.model_loading import read_tokenizer
from tokencredit.text.rewards.calls import Columns, MalformedResult, NonFiniteScore, Term, start_call, start_early
from tokencredit.text.rewards.ready_made import READY_MADE, RewardFunction
from tokencredit.text.rewards.reward_models import Classifier, RewardModel, load
from tokencredit.text.rewards.texts import Texts, joined
from tokencredit.user_code.user_objects import check_kwargs, load_object

LARGEST = 1e15
"""Largest magnitude of a score; rewards are float32 tensors, and squares of them are summed."""
Value = float | list[float] | None
"""A term's value for one completion."""
PendingCall = Callable[[], list[Value]]
"""Blocks for the values of a call that was started."""


@dataclass(frozen=True)
class Scores:
    """Scores of a batch of completions."""

    totals: list[float]
    """For each completion, Σ weight · value over terms with one number per completion; 0 if there is none."""
    dense: list[list[float]] | None
    """For each completion and token, Σ weight · value over terms with one number per token; None if there is none."""
    terms: dict[str, list[float | None]]
    """Unweighted values of each term, summed over tokens."""
    of_texts: bool
    """True if some term gave one number for a whole completion."""


def build_terms(config: Sequence[RewardTerm], device: torch.device | str) -> list[Term]:
    """Load the configured reward terms; `ConfigError` names the key of one that cannot be used."""
    return _named_terms(config, device, _build, "reward", "give it its own name")


def _named_terms(
    entries: Sequence[Any], device: torch.device | str, build: Callable[..., Term], key: str, cure: str
) -> list[Term]:
    """A term of each entry, no two of one name."""
    terms: list[Term] = []
    for number, entry in enumerate(entries):
        with naming(f"{key}[{number}]"):
            term = build(entry, device)
        if term.name in {earlier.name for earlier in terms}:
            raise ConfigError(f"{key}[{number}].name is {term.name!r}, the name of another term; {cure}")
        terms.append(term)
    return terms


def _build(settings: RewardTerm, device: torch.device | str) -> Term:
    kwargs: Mapping[str, Any] = {}
    function: RewardFunction
    match settings:
        case FunctionTerm():
            function = load_function(settings.function, settings.kwargs)
            name = settings.function.rpartition(":")[2]
            if ":" in settings.function:  # a ready-made one has its settings already
                kwargs = settings.kwargs
        case ClassifierTerm(classifier=source):
            name, model = str(settings.label), load(source, device, settings.dtype)
            reading: dict[str, Any] = {"text": settings.text, "batch_size": settings.batch_size}
            function = Classifier(source, *model, settings.label, settings.output, **reading)
        case RewardModelTerm(reward_model=source):
            name, model = Path(source).name, load(source, device, settings.dtype)
            function = RewardModel(source, *model, text=settings.text, batch_size=settings.batch_size)
    prefix = settings.prefix if isinstance(settings, FunctionTerm) else True
    return Term(settings.name or name, settings.weight, function, kwargs, settings.retries, settings.timeout, prefix)


def load_function(spec: str, kwargs: Mapping[str, Any]) -> RewardFunction:
    """The function that `spec` names: `pkg.module:name`, `path/file.py:name`, or a ready-made one with its settings."""
    location, colon, name = spec.rpartition(":")
    if not colon:
        if spec not in READY_MADE:
            raise ConfigError(
                f"function {spec!r} is none of the ready-made ones, {', '.join(READY_MADE)}; "
                "name your own as 'pkg.module:name' or 'path/file.py:name'"
            )
        check_kwargs(spec, READY_MADE[spec], kwargs)
        return READY_MADE[spec](**kwargs)
    function: Any = load_object(spec, "reward")
    if not callable(function):
        raise ConfigError(f"{name!r} of {location!r} is a {type(function).__name__}, not a function")
    check_kwargs(spec, function, kwargs, others=("prompts", "completions"))
    return function  # type: ignore[no-any-return]


def as_terms(reward_funcs: Any, device: torch.device | str = "cpu") -> list[Term]:
    """Terms of weight 1 from the argument `reward_funcs`, which takes the types of TRL's trainers.

    Args:
        reward_funcs: a reward function or its name, as in a configuration, a hub id or folder of a reward model, a
            loaded reward model (its tokenizer is found by the name it was loaded from), or a list of them. A `Term`
            keeps its own name and weight, and so does a term of a configuration, such as `FunctionTerm`.
        device: device of the models.
    """
    entries = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    if not entries:
        raise ConfigError("reward_funcs is empty; give at least one reward")
    return _named_terms(entries, device, _as_term, "reward_funcs", "give it its own name: Term(name, weight, function)")


def as_settings(reward_funcs: Any) -> list[RewardTerm] | None:
    """The argument `reward_funcs` as the setting `reward`, if it holds only names and terms of a configuration."""
    entries = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    terms = [_setting(entry) for entry in entries]
    return [term for term in terms if term is not None] if terms and None not in terms else None


def _setting(reward: Any) -> RewardTerm | None:
    """The term of a configuration that a name stands for, or is; None for another object."""
    if not isinstance(reward, str):
        return reward if isinstance(reward, RewardTerm) else None
    if reward in READY_MADE or (":" in reward and not reward.startswith("builtin:")):
        return FunctionTerm(function=reward)
    return RewardModelTerm(reward_model=reward)


def _as_term(reward: Any, device: torch.device | str) -> Term:
    if (term := _setting(reward)) is not None:
        return _checked(_build(term, device))
    if isinstance(reward, Term):
        return _checked(reward)
    if isinstance(reward, PreTrainedModel):
        name = reward.config._name_or_path
        try:
            tokenizer = read_tokenizer(name, name)
        except ConfigError as error:
            raise ConfigError(
                f"no tokenizer for the reward model {name!r}; save both to one folder and give that: {error}"
            ) from error
        reward.to(device)  # type: ignore[arg-type]  # Transformers' annotation takes a second self
        return Term(Path(name).name, 1.0, RewardModel(name, reward, tokenizer), prefix=True)
    if isinstance(reward, type):
        raise ConfigError(f"{reward.__name__} is a class; pass an instance, {reward.__name__}(…)")
    if not callable(reward):
        raise ConfigError(
            f"an object of type {type(reward).__name__} is neither a function, nor a reward model or the name of one, "
            "nor a term such as tokencredit.FunctionTerm(function='repetition', weight=-1); settings go to args="
        )
    function = reward.func if isinstance(reward, partial) else reward
    return Term(getattr(function, "__name__", type(function).__name__), 1.0, reward)


def _checked(term: Term) -> Term:
    """Check the types and ranges of a term's fields, and return it."""
    weight, retries, timeout = term.weight, term.retries, term.timeout
    fields = {
        "name": (isinstance(term.name, str), "a text"),
        "weight": (isinstance(weight, Real) and math.isfinite(weight), "a finite number"),
        "function": (callable(term.function) and not isinstance(term.function, type), "a function"),
        "kwargs": (isinstance(term.kwargs, Mapping), "a dict"),
        "prefix": (isinstance(term.prefix, bool), "True or False"),
        "retries": (type(retries) is int and retries >= 0, "a whole number, at least 0"),
        "timeout": (timeout is None or (isinstance(timeout, Real) and timeout > 0), "a number above 0, or None"),
    }
    for name, (valid, expected) in fields.items():
        if not valid:
            raise ConfigError(f"{name} is {quoted(getattr(term, name))}; it must be {expected}")
    return term


@restored()  # async terms run in threads, which restore nothing that belongs to the process
def score(
    terms: Sequence[Term],
    prompts: Texts,
    completions: Texts,
    columns: Columns,
    lengths: Sequence[int],
    *,
    finite: bool = True,
    started: Mapping[str, PendingCall] | None = None,
) -> Scores:
    """Score completions by all terms.

    Coroutine functions start first and run concurrently; results are awaited in the terms' order. Failed calls are
    retried up to `Term.retries` times.

    Args:
        terms: at least one.
        prompts: plain texts or lists of messages.
        completions: one per prompt, in the same format.
        columns: further arguments that functions may take by name, one entry per completion.
        lengths: sampled tokens of each completion, the end-of-sequence token included.
        finite: raise for numbers that are not finite or too large, instead of returning them.
        started: calls from `start_calls`.

    Raises:
        RewardError: after all retries, a function raised or exceeded its timeout.
        MalformedResult: it returned something other than a number, None or a list of `lengths[i]` numbers for each
            completion, which is no matter of retries.
        NonFiniteScore: a number or a completion's sum is NaN or beyond `LARGEST`, unless `finite` is false.
        ConfigError: a function requires a column that does not exist.
    """
    arguments, read = _call_arguments(prompts, completions, columns, lengths, finite)
    pending = started or {}
    calls = [pending.get(term.name) or start_call(term, arguments, partial(read, term.name)) for term in terms]
    for term in terms:
        term.scored += len(completions)
    values = {term.name: call() for term, call in zip(terms, calls, strict=True)}
    return _add(terms, values, lengths, finite)


def start_calls(
    terms: Sequence[Term],
    prompts: Texts,
    completions: Texts,
    columns: Columns,
    lengths: Sequence[int],
    *,
    finite: bool = True,
    reference: bool = False,
) -> dict[str, PendingCall]:
    """Start the calls that can do without the reference model, by term; arguments and errors as in `score`.

    With `reference` there will be a column `ref_logprobs`.
    """
    arguments, read = _call_arguments(prompts, completions, columns, lengths, finite)
    calls = {term.name: start_early(term, arguments, partial(read, term.name), reference) for term in terms}
    return {name: call for name, call in calls.items() if call is not None}


def _call_arguments(
    prompts: Texts, completions: Texts, columns: Columns, lengths: Sequence[int], finite: bool
) -> tuple[dict[str, Sequence[Any]], Callable[..., list[Value]]]:
    """The arguments that functions may take by name, and `_read` for these completions."""
    read = partial(_read, prompts=prompts, completions=completions, lengths=lengths, finite=finite)
    return {**columns, "prompts": prompts, "completions": completions}, read


def _add(terms: Sequence[Term], values: Mapping[str, list[Value]], lengths: Sequence[int], finite: bool) -> Scores:
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
    largest = max((abs(x) + sum(map(abs, row)) for x, row in zip(totals, dense, strict=True)), default=0.0)
    if finite and largest > LARGEST:
        raise NonFiniteScore(f"the weighted sum of the rewards reaches {largest:g}; it must lie within ±{LARGEST:g}")
    counted = [value for term in terms if term.weight for value in values[term.name] if value is not None]
    kinds = {isinstance(value, list) for value in counted}
    return Scores(totals, dense if True in kinds else None, summed, of_texts=False in kinds)


def _read(
    name: str, result: Any, prompts: Texts, completions: Texts, lengths: Sequence[int], finite: bool
) -> list[Value]:
    """Check a term's result and convert it to plain numbers."""
    if getattr(result, "ndim", 0) == 2 and result.shape[1] == 1:  # a column of scores, as models give
        result = result[:, 0]
    result = _listed(result)
    count = len(result) if isinstance(result, list | tuple) else None
    if count != len(completions):
        found = quoted(result) if count is None else f"{count} numbers"
        raise MalformedResult(
            f"reward term {name!r} returned {found} for {len(completions)} completions; it must return a list with one "
            "number for each"
        )
    values: list[Value] = []
    for value, prompt, completion, length in zip(map(_listed, result), prompts, completions, lengths, strict=True):
        text = joined(prompt, completion)
        if not isinstance(value, list | tuple):
            values.append(None if value is None else _number(name, value, text, finite))
        elif len(value) == length:
            values.append([_number(name, _listed(x), text, finite) for x in value])
        else:
            raise MalformedResult(
                f"reward term {name!r} gave a list of {len(value)} for the {length} tokens of the text {text!r}; "
                "it must be a number for the whole completion, or a list of one per token"
            )
    return values


def _listed(value: Any) -> Any:
    """Tensors and arrays as numbers and lists; anything else unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def _number(name: str, value: Any, text: str, finite: bool) -> float:
    if not isinstance(value, Real):
        raise MalformedResult(
            f"reward term {name!r} returned {quoted(value)} for the text {text!r}; it must be a number"
        )
    try:
        number = float(value)
    except OverflowError:  # of a whole number with more than 308 digits
        number = math.inf
    if finite and not abs(number) <= LARGEST:
        raise NonFiniteScore(f"reward term {name!r} is {number} for the text {text!r}; it must lie within ±{LARGEST:g}")
    return number


def term_metrics(
    terms: Mapping[str, Sequence[float | None]], reduce: Reduce, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """Mean and standard deviation of each term, and Pearson correlation of each pair, where the terms apply.

    reward/NAME = μ, reward_std/NAME = σ (of the population), reward_corr/A/B = Cov[A, B] / (σ_A σ_B) over completions
    that both apply to. Computed in two passes, the second about the means of the first. NaN where undefined: for no
    completion, and for correlations with a constant.

    Args:
        terms: `Scores.terms`; the same names in the same order on every process.
        reduce: sums a tensor over processes.
        device: device of the tensors passed to `reduce`.
    """
    rows = [[math.nan if value is None else value for value in row] for row in zip(*terms.values(), strict=True)]
    x = torch.tensor(rows, dtype=torch.float32, device=device).reshape(-1, len(terms))
    applies = ~x.isnan()
    both = (applies.unsqueeze(2) & applies.unsqueeze(1)).float()  # [completion, term, term]
    wide = x.nan_to_num().unsqueeze(2) * both  # each term where both apply
    count, total = reduce(torch.stack([both.sum(0), wide.sum(0)]))
    mean = total / count
    centred = (wide - mean.nan_to_num()) * both
    sums = torch.stack([centred.square().sum(0), (centred * centred.transpose(1, 2)).sum(0)])
    squares, products = reduce(sums) / count
    deviation = squares.sqrt()
    inverse = inverse_deviation(deviation, mean)
    deviation = deviation * (inverse > 0)  # 0 for a constant, whose mean may be rounded: the diagnosis looks for 0
    correlation = torch.where(inverse * inverse.T > 0, products * inverse * inverse.T, torch.nan).clamp(-1, 1)
    names = list(terms)
    pairs = [(a, b) for a in range(len(names)) for b in range(a)]
    return {
        **{f"reward/{name}": float(mean[i, i]) for i, name in enumerate(names)},
        **{f"reward_std/{name}": float(deviation[i, i]) for i, name in enumerate(names)},
        **{f"reward_corr/{names[b]}/{names[a]}": float(correlation[a, b]) for a, b in pairs},
    }
