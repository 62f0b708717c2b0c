"""Scores of the prefixes of completions by the reward terms, and the running fit of values to them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tokencredit.core.masked import Reduce
from tokencredit.core.prefix_baseline import fit_prefixes, prefix_moments
from tokencredit.errors import ConfigError
from tokencredit.runs.jsonl import read_object
from tokencredit.runs.untrusted import visible
from tokencredit.settings.text import PPOConfig
from tokencredit.text.data.detokenizer import Detokenizer
from tokencredit.text.data.prompts import PromptBatch, Prompts
from tokencredit.text.data.rollout import Rollout, unpadded
from tokencredit.text.data.tasks import Tasks
from tokencredit.text.models.precision import weights_in
from tokencredit.text.rewards.calls import RewardError, Term, check_columns
from tokencredit.text.rewards.reward_models import Reader
from tokencredit.text.rewards.terms import score
from tokencredit.user_code.parts import read_by_parts

FIT_FILE = "prefix_fit.json"
"""File of the fit in a critic's folder."""
SHARE = 0.25
"""What scoring prefixes may cost, as a share of `policy_passes`."""
SHOWN = 64
"""Prompts whose mean length stands for all."""
FOLDS = 8
"""Parts of a batch; each gets its values from the others and from earlier batches, never from its own returns."""
FORGET = 0.6
"""Factor on the weight of earlier batches, at each new one: the policy moves."""
CLEARLY = 0.95
"""An end of prefixes is kept if it leaves at most this part of the squared error; by chance it is 0.97 to 1.03."""
CANDIDATES = tuple(product((4.0, 32.0), (3.0, 30.0, 300.0)))
"""Widths and priors to choose from, by their errors on earlier batches; the first one is the first batch's."""


def scoring(terms: Sequence[Term]) -> list[Term]:
    """The terms whose scores of prefixes make values."""
    return [term for term in terms if term.prefix and term.weight]


def choose_spacing(
    args: PPOConfig, terms: Sequence[Term], lm: PreTrainedModel, rows: Prompts | Tasks, before: int | None = None
) -> PPOConfig:
    """The configuration with a number for `critic.prefix_every: auto`, unless nothing reads the scores.

    So many prefixes that the models of the terms compute at most `SHARE` of what the policy does. A model that reads
    all prefixes in one pass, and functions, count as nothing. A resumed run keeps its number, `before`.

    Raises:
        ConfigError: a setting asks for scores that no term can give, or that nothing reads.
    """
    every, found = args.critic.prefix_every, scoring(terms)
    named = "prefix_scores" in read_by_parts(args)
    of_texts = isinstance(rows, Prompts) and not args.advantage.bootstrap
    readable = of_texts and (args.critic.ours or named) and every != 0
    if asked := [term.name for term in found if not (readable or isinstance(term.function, Reader))]:
        raise ConfigError(
            f"the reward {asked[0]!r} has prefix: true, which has no effect with critic.kind: none, with "
            "critic.prefix_every: 0, with advantage.bootstrap, or in episodes of several turns; leave it out"
        )
    if not (args.critic.ours or named):
        return args
    if every == "auto" and before is not None:
        every = before
    if every == "auto":
        every = 0
        if isinstance(rows, Prompts) and of_texts and found:
            every = Reading.of(args, found, lm, rows).spacing()
    if every and isinstance(rows, Tasks):
        raise ConfigError(f"critic.prefix_every is {every}, and prefixes of several turns are not scored; leave it out")
    if every and not found:
        cure = "leave it out" if every == args.critic.prefix_every else "begin a new run: it cannot change any more"
        raise ConfigError(
            f"critic.prefix_every is {every}, and no reward term scores prefixes; set prefix: true for a function of "
            f"the text that is cheap and has no effects, or {cure}"
        )
    if named and not every:
        raise ConfigError(
            "advantage.estimator or critic.kind reads prefix_scores, and no prefix is scored: give a classifier, a "
            "reward model or a function with prefix: true, of single turns, without critic.prefix_every: 0"
        )
    known = ["prompts", "completions", "completion_ids", "completion_mask", *rows.other_columns]
    for term in found if every else ():
        try:
            check_columns([term], known)
        except ConfigError as error:
            raise ConfigError(
                f"the reward {term.name!r} has prefix: true, and needs more than a prefix has, {', '.join(known)}"
            ) from error
    same = every == args.critic.prefix_every
    return args if same else replace(args, critic=replace(args.critic, prefix_every=every))


def origin_of_values(args: PPOConfig, terms: Sequence[Term], lm: PreTrainedModel, prompts: Prompts, every: int) -> str:
    """What a run's values are made of, and what would make them truer; `terms` are those of `scoring`."""
    if every:
        each = "each prefix" if every == 1 else f"one prefix in {every}"
        share = Reading.of(args, terms, lm, prompts).share(every)
        most = -(-args.rollout.max_new_tokens // every)
        cost = f"{share:.2g} of the policy's passes" if share else f"at most {most:,} per completion"
        return f"returns fitted to the reward's score of {each} ({cost}), and the critic for the rest"
    if args.advantage.bootstrap:
        return "the critic's alone"
    how = "critic.prefix_every: 1" if terms else "prefix: true, for a cheap function that can score unfinished texts"
    return f"the critic's alone; the reward's scores of prefixes may make them truer ({how})"


class Reading(NamedTuple):
    """Work of reading the prefixes of a completion, in tokens times the weights that each meets."""

    apart: float
    """Of all prefixes by models that read each one by itself: the prompt and, on average, half of the completion."""
    together: float
    """By causal models that read them in one pass."""
    policy: float
    """Of the policy's passes."""

    @classmethod
    def of(cls, args: PPOConfig, terms: Sequence[Term], lm: PreTrainedModel, rows: Prompts) -> Reading:
        """The work for the longest completions of the first prompts, by the models of these terms."""
        prompts = rows.batch(0, min(args.rollout.batch_size, SHOWN))
        readers: list[Any] = [term.function for term in terms if isinstance(term.function, Reader)]
        models = [(work(reader.model), reader.limit if reader.shares else 0) for reader in readers]
        prompt = float(prompts.mask.sum(1).float().mean())
        return cls.estimate(models, work(lm) * policy_passes(args), prompt, args.rollout.max_new_tokens)

    @classmethod
    def estimate(cls, models: Sequence[tuple[int, int | None]], policy: int, prompt: float, new: int) -> Reading:
        """The work for a completion of `new` tokens.

        Args:
            models: of each its weights, and the longest text that it reads in one pass with its prefixes, None for any.
            policy: the policy's weights, times its passes.
            prompt: tokens of the prompt.
            new: tokens of the completion.
        """
        together = sum(weights for weights, limit in models if limit is None or prompt + new <= limit)
        apart = sum(weights for weights, _ in models) - together
        return cls(new * (prompt + new / 2) * apart, (prompt + new) * together, (prompt + new) * policy)

    def spacing(self) -> int:
        """The smallest spacing at which models that read prefixes by themselves cost at most `SHARE`."""
        return max(1, math.ceil(self.apart / (SHARE * self.policy)))

    def share(self, every: int) -> float:
        """The cost of every `every`-th prefix, as a share of the policy's passes."""
        return (self.apart / every + self.together) / self.policy


def policy_passes(args: PPOConfig) -> int:
    """Passes of the policy per iteration, in forward passes: sampling, those of the KL, and three per epoch."""
    return 1 + args.kl.passes + 3 * args.ppo.epochs


def work(model: PreTrainedModel) -> int:
    """Weights that a token meets in a pass: all but the rows of other tokens in the embedding."""
    embedding, projection = model.get_input_embeddings().get_parameter("weight"), model.get_output_embeddings()
    tied = projection is not None and projection.weight is embedding
    return weights_in(model.parameters()) - (0 if tied else int(embedding.numel()))


class Ended(NamedTuple):
    """Scores of prefixes with a token after them, at which a text may end."""

    end: list[int]
    scores: Tensor


def usual_end(rollout: Rollout, tokenizer: PreTrainedTokenizerBase, reduce: Reduce) -> list[int]:
    """The token with a text at which most completions that ended by themselves do; empty if none did."""
    # Special tokens have no text, also those that have no role such as EOS, nor have ids that only the model knows.
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    silent = torch.tensor(sorted(special | set(tokenizer.all_special_ids)), dtype=torch.long)
    counts = torch.zeros(len(tokenizer), dtype=torch.float64)
    finished = ~rollout.truncated
    for ids, mask in zip(rollout.response_ids[finished].cpu(), rollout.mask[finished].cpu(), strict=True):
        written = ids[mask & (ids < len(counts)) & ~torch.isin(ids, silent)]
        counts[written[-1:]] += 1
    counts = reduce(counts.to(rollout.mask.device))
    return [int(counts.argmax())] if counts.any() else []


def prefix_scores(
    terms: Sequence[Term],
    prompts: PromptBatch,
    rollout: Rollout,
    tokenizer: PreTrainedTokenizerBase,
    every: int,
    end: Sequence[int] = (),
) -> Tensor:
    """Score of the text before each token, `[batch, time]`: the weighted sum of the terms with `prefix`.

    Every `every`-th prefix is scored, and the tokens up to the next one have its score; equal prefixes are scored once.
    The tokens of `end` follow each prefix that does not end with them. Raises as `score`.
    """
    starts, responses = list(map(tuple, unpadded(prompts.ids, prompts.mask))), rollout.by_response(rollout.response_ids)
    contents = prompts.contents()  # with the columns, which a function may read
    # The row and the length of each distinct prefix; one is known by the number of the one before it, and what follows.
    known: dict[tuple[object, ...], int] = {}
    distinct: list[tuple[int, int]] = []
    numbers = torch.zeros(rollout.mask.shape, dtype=torch.long)
    for row, (prompt, ids) in enumerate(zip(starts, responses, strict=True)):
        number = -1
        for start in range(0, len(ids), every):
            following = ids[start - every : start] if start else (contents[row], *prompt)
            number = known.setdefault((number, *following), len(distinct))
            if number == len(distinct):
                distinct.append((row, start))
            numbers[row, start : start + every] = number
    # Their texts, and what a function may take by name: the columns of the data set, and the token ids.
    detokenizers = {prompt: Detokenizer(tokenizer, prompt) for prompt in dict.fromkeys(starts)}
    ids = [responses[row][:start] for row, start in distinct]
    ids = [prefix if prefix[len(prefix) - len(end) :] == list(end) else [*prefix, *end] for prefix in ids]
    texts = [detokenizers[starts[row]].text(prefix) for (row, _), prefix in zip(distinct, ids, strict=True)]
    chosen = prompts.select([row for row, _ in distinct])
    columns = {**chosen.columns, "completion_ids": ids, "completion_mask": [[1] * len(prefix) for prefix in ids]}
    found, lengths = scoring(terms), [len(prefix) for prefix in ids]
    scores = score(found, chosen.questions(), chosen.answers(texts), columns, lengths)
    if scores.dense is not None:
        names = " and ".join(repr(term.name) for term in found)
        raise RewardError(f"reward term {names} scores prefixes, and gave a number per token; leave out prefix: true")
    return torch.tensor(scores.totals)[numbers].to(rollout.mask.device)


class PrefixFit:
    """Values V(sₜ) = αₜ + βₜ · S(prefixₜ) + cₜ · u(sₜ), fitted to the returns of the last batches.

    The critic's output u learns what the fit leaves of the returns, and cₜ is its share in the values. A completion's
    values come from other completions alone, so they are a baseline: the policy gradient stays unbiased.

    A reward model that learned from whole texts may read a prefix's last words only once the text has ended. So the
    fit tries a token at which texts end after each prefix, and keeps it if that tells the returns better.

    Attributes:
        end: the token after each prefix whose score is fitted, empty for none; None before one was tried.
        weight: weight of a new batch's completions; below 1 in an audit, whose batch is larger than the run's.
    """

    def __init__(self, time: int) -> None:
        """Start without data, for completions of at most `time` tokens; processes must have the same."""
        self.moments = torch.zeros(10, time, dtype=torch.float64, device="cpu")
        self.errors = torch.zeros(len(CANDIDATES), dtype=torch.float64, device="cpu")
        self.end: list[int] | None = None
        self.weight = 1.0

    def values(
        self, scores: Tensor, critic: Tensor | None, returns: Tensor, mask: Tensor, first: int, reduce: Reduce
    ) -> tuple[Tensor, Tensor]:
        """Fitted values of a batch, which is then part of the fit.

        Args:
            scores: [batch, time], score of the prefix before each token.
            critic: [batch, time], outputs of a critic that has not learned from this batch; None without one.
            returns: [batch, time], sampled returns.
            mask: bool [batch, time], true at the states to fit.
            first: number of this process's first row in the whole batch, which decides the folds.
            reduce: sums a tensor over processes.

        Returns:
            α + β · S, which leaves the rest to the critic, and the values, `[batch, time]` each.
        """
        device, time, mask = scores.device, scores.shape[1], mask.cpu()
        critic = torch.zeros_like(scores) if critic is None else critic
        scores, returns, critic = (x.double().cpu() for x in (scores, returns, critic))
        fold = (first + torch.arange(len(mask), device="cpu")) % FOLDS
        parts = [fold == k for k in range(FOLDS)]
        own = torch.stack([prefix_moments(scores[part], returns[part], mask[part], critic[part]) for part in parts])
        own = self.weight * self._sum(resized(own, self.moments.shape[1]), device, reduce)
        total = FORGET * self.moments + own.sum(0)
        # Values of each fold by each candidate, and their squared errors.
        fits = torch.stack([torch.stack(fit_prefixes(total - own, *candidate)) for candidate in CANDIDATES])
        at = torch.arange(time, device="cpu").clamp(max=fits.shape[-1] - 1)  # adopted completions may be longer
        alpha, beta, share = (x[:, fold] for x in fits[..., at].unbind(1))  # [candidate, batch, time] each
        fitted = alpha + beta * scores
        values = fitted + share * critic
        squares = torch.where(mask, (values - returns).square(), 0.0).sum((1, 2))
        best = int(self.errors.argmin())
        self.moments, self.errors = total, FORGET * self.errors + self._sum(squares, device, reduce)
        return fitted[best].to(device, torch.float32), values[best].to(device, torch.float32)

    def try_end(self, ended: Ended, scores: Tensor, *batch: Any) -> None:
        """Keep the end of prefixes if it tells this batch's returns clearly better; other arguments as in `values`."""
        fits = [PrefixFit(self.moments.shape[1]) for _ in range(2)]
        for fit, x in zip(fits, (ended.scores, scores), strict=True):
            fit.weight = self.weight
            fit.values(x, *batch)
        self.end = []
        if fits[0].errors.min() < CLEARLY * fits[1].errors.min():
            self.end, self.moments, self.errors = ended.end, fits[0].moments, fits[0].errors

    def coefficients(self) -> tuple[Tensor, Tensor, Tensor]:
        """α, β and c `[time]` of the best candidate, fitted to all that was seen."""
        return fit_prefixes(self.moments, *CANDIDATES[int(self.errors.argmin())])

    @property
    def share(self) -> float:
        """Share of the critic's outputs in the values, the mean over the states that were seen."""
        n = self.moments[0]
        return float((n * self.coefficients()[2]).sum() / n.sum().clamp(min=1.0))

    @staticmethod
    def _sum(x: Tensor, device: torch.device, reduce: Reduce) -> Tensor:
        return reduce(x.to(device)).cpu()

    def state_dict(self) -> dict[str, Any]:
        """The state, for `load_state_dict`."""
        reached = self.moments[:, : int(self.moments.any(0).sum())]  # later positions had no completions
        sums = {"moments": reached, "errors": self.errors}
        return {name: x.tolist() for name, x in sums.items()} | {"end": self.end}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        sums = (torch.tensor(state[name], dtype=torch.float64, device="cpu") for name in ("moments", "errors"))
        moments, self.errors = sums
        self.moments, self.end = resized(moments, self.moments.shape[1]), state["end"]


def end_event(fit: PrefixFit, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """A line for the record that says what follows prefixes, by the name "end"; empty if nothing does."""
    if not fit.end:
        return {}
    end = visible(str(tokenizer.decode(fit.end)))
    return {"end": f"prefixes are scored with {end!r} after them, as completions end: so they tell more of the returns"}


def save_fit(folder: Path, fit: PrefixFit, every: int) -> None:
    """Write what gives values to scores of prefixes into a critic's folder."""
    named = zip(("alpha", "beta", "share"), fit.coefficients(), strict=True)
    fitted = {"every": every, "end": fit.end or []} | {name: x.tolist() for name, x in named}
    (folder / FIT_FILE).write_text(json.dumps(fitted), encoding="utf-8")


def fitted_values(
    folder: Path, terms: Sequence[Term], prompts: PromptBatch, rollout: Rollout, tokenizer: Any, critic: Tensor
) -> Tensor:
    """Values `[batch, time]` of any texts by the fit in a critic's folder and the critic's outputs.

    Past the fit's end they have its last α and β.
    """
    fit = read_object(folder / FIT_FILE, (folder / FIT_FILE).read_bytes())
    scores = prefix_scores(terms, prompts, rollout, tokenizer, fit["every"], fit["end"])
    at = torch.arange(scores.shape[1]).clamp(max=len(fit["alpha"]) - 1)
    alpha, beta, share = (torch.tensor(fit[name])[at].to(scores.device) for name in ("alpha", "beta", "share"))
    return (alpha + beta * scores + share * critic) * rollout.mask


def resized(moments: Tensor, time: int) -> Tensor:
    """Moments `[…, time]` of more positions, or fewer."""
    return torch.nn.functional.pad(moments, (0, time - moments.shape[-1]))
