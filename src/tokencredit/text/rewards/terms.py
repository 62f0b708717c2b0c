"""Rewards: terms that rate completions, and their weighted sum.

A term's function has the signature `f(prompts, completions, **columns)` and gives, for each completion, a number, None
where it does not apply, or a list of numbers, one a token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from tokencredit.core.masked import Reduce, inverse_deviation
from tokencredit.errors import ConfigError
from tokencredit.settings.data import RewardTerm
from tokencredit.settings.fields import shown
from tokencredit.text.rewards.calls import NonFiniteReward, RewardError, Term, begin
from tokencredit.text.rewards.functions import RewardFunction
from tokencredit.text.rewards.loading import load_function
from tokencredit.text.rewards.models import Classifier, RewardModel, load
from tokencredit.text.rewards.texts import Text, joined

Value = float | list[float] | None
"""What a term says of a completion."""


@dataclass(frozen=True)
class Scores:
    """What the terms say of a batch of completions."""

    totals: list[float]
    """For each completion, Σ weight · value over the terms that gave it one number; 0 where none did."""
    dense: list[list[float]] | None
    """For each completion and token, Σ weight · value over the terms that gave one number a token; None if none did."""
    terms: dict[str, list[float | None]]
    """Each term by itself, unweighted; where it gave one number a token, their sum."""
    of_texts: bool
    """A term gave one number for a whole completion."""


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
    kind, source = settings.source()
    kwargs: Mapping[str, Any] = {}
    function: RewardFunction
    if kind == "function":
        function = load_function(source, settings.kwargs)
        name, kwargs = source.rpartition(":")[2], settings.kwargs if ":" in source else {}
    elif kind == "classifier":
        function = Classifier(
            source,
            settings.label,
            settings.output,
            device,
            text=settings.text,
            batch_size=settings.batch_size,
            dtype=settings.dtype,
        )
        name = str(settings.label)
    else:
        model, tokenizer = load(source, device, settings.dtype)
        function = RewardModel(source, model, tokenizer, text=settings.text, batch_size=settings.batch_size)
        name = Path(source).name
    return Term(settings.name or name, settings.weight, function, kwargs, settings.retries, settings.timeout)


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
    if isinstance(reward_funcs, list | tuple) and not reward_funcs:
        raise ConfigError("reward_funcs is empty; give at least one reward")
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
        return _checked(given)
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
        given.to(device)  # type: ignore[arg-type]  # Transformers' annotation takes a second self
        return Term(Path(name).name, 1.0, RewardModel(name, given, tokenizer))
    if isinstance(given, type):
        raise ConfigError(f"{given.__name__} is a class; pass an instance, {given.__name__}(…)")
    if not callable(given):
        raise ConfigError(f"{given!r} is neither a function, nor the name of a reward model, nor a model")
    function = given.func if isinstance(given, functools.partial) else given
    return Term(getattr(function, "__name__", type(function).__name__), 1.0, given)


def _checked(term: Term) -> Term:
    """The term; raises `ConfigError` for a part of it that no call could use."""
    weight, retries, timeout = term.weight, term.retries, term.timeout
    parts = {
        "name": (isinstance(term.name, str), "a text"),
        "weight": (isinstance(weight, Real) and math.isfinite(weight), "a finite number"),
        "function": (callable(term.function) and not isinstance(term.function, type), "a function"),
        "kwargs": (isinstance(term.kwargs, Mapping), "a dict"),
        "retries": (type(retries) is int and retries >= 0, "a whole number, at least 0"),
        "timeout": (timeout is None or (isinstance(timeout, Real) and timeout > 0), "a number above 0, or None"),
    }
    for part, (fits, wanted) in parts.items():
        if not fits:
            raise ConfigError(f"{part} is {shown(getattr(term, part))}; it must be {wanted}")
    return term


def score(
    terms: Sequence[Term],
    prompts: Sequence[Text],
    completions: Sequence[Text],
    columns: Mapping[str, Sequence[Any]],
    lengths: Sequence[int],
) -> Scores:
    """Rate completions.

    Coroutine functions start first, run concurrently with each other, and are waited for in the terms' order. A call
    that fails is made again, `Term.retries` times.

    Args:
        terms: at least one.
        prompts: plain texts or lists of messages.
        completions: as many, of the same format.
        columns: more that functions may ask for by name, one entry a completion: the data set's columns,
            `completion_ids`, and `ref_logprobs` where there is a reference.
        lengths: sampled tokens of each completion, the end-of-sequence token included.

    Raises:
        RewardError: a function raised, took longer than its timeout, or gave something other than a number, None or a
            list of `lengths[i]` numbers for each completion, and did so or the like at each try; or no term said
            anything of any completion.
        NonFiniteReward: a number is NaN or infinite.
        MemoryError, RuntimeError: a function ran out of memory; see `processes.out_of_memory`.
        ConfigError: a function asks for a column that is not there.
    """
    offered = {**columns, "prompts": prompts, "completions": completions}
    read = functools.partial(_read, prompts=prompts, completions=completions, lengths=lengths)
    answers = [begin(term, offered, functools.partial(read, term.name)) for term in terms]
    values = {term.name: answer() for term, answer in zip(terms, answers, strict=True)}
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
    kinds = {isinstance(value, list) for column in values.values() for value in column if value is not None}
    return Scores(totals, dense if True in kinds else None, summed, of_texts=False in kinds)


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
