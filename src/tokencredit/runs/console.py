"""Screen output of a run: a line per iteration, on a terminal with a progress bar, elsewhere with the time left."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from io import StringIO
from typing import IO, Any, cast

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tokencredit.audit.verdict import (
    NOISY,
    audited_rows,
    credit_verdict,
    critic_caution,
    figure_text,
    noisy,
    share,
    text_parts,
    too_noisy,
)
from tokencredit.distributed.signals import NO_READER, leave_closed_output
from tokencredit.runs.diagnosis import Finding
from tokencredit.runs.summary import OPEN_END, SHAPED, UNSHAPED, Summary, averaged, duration, figure, in_iterations
from tokencredit.runs.transcript import Line, acted, conversation, transcript
from tokencredit.runs.untrusted import visible, visible_lines

SIDE_BY_SIDE = 4
"""Most completions shown before and after; of episodes half as many."""
CELL = 100
"""Width of a notebook's output, in characters."""
MESSAGE = 200
"""Most characters shown of a user's message, or of an observation."""
SHOWN_METRICS = {
    "train/average_return": ("return", "average of the last 100 training episodes"),
    "eval/average_return": ("evaluated", "average return of an evaluation's episodes"),
    "reward": ("reward", "mean score of the completions"),
    "eval/reward": ("evaluated", "mean score of an evaluation's completions"),
    "kl": ("KL", "distance to the reference model, in nats per completion"),
    "log_ratio": (
        "log-ratio",
        "to the reference model, in nats per completion; of filtered or older samples, so no KL",
    ),
    "entropy": ("entropy", "of the policy, in nats per token; 0 is always the same token"),
    "length": ("length", "tokens per completion"),
    "env/turns": ("turns", "the policy's turns per episode"),
    "perplexity": ("perplexity", "e to the mean negative log-prob per token; 1 is perfect"),
    "token_accuracy": ("token accuracy", "share of tokens that the model finds most likely"),
    "accuracy": ("accuracy", "share of pairs whose chosen completion gets the higher score"),
    "margin": ("margin", "score of the chosen completion minus that of the rejected one"),
    "eval/loss": ("held-out loss", "the loss on rows that are not trained on"),
    "eval/accuracy": ("held-out accuracy", "the accuracy on rows that are not trained on"),
    "clip_fraction": ("clipped", "share of the update's tokens or steps that the loss clips or masks"),
}
"""Metrics of an iteration's line, by key: label and meaning."""


class Bar(Progress):
    """A progress bar, in a notebook with the iteration's numbers in a line below it."""

    def get_renderables(self) -> Iterator[RenderableType]:
        """The lines on the screen."""
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            if numbers := task.fields["numbers"]:
                yield Text(numbers)


class Encodable:
    """A text stream that takes characters which its encoding lacks, as escapes: `→` in cp1252."""

    def __init__(self, stream: IO[str]):
        self.stream = stream

    def write(self, text: str) -> int:
        """Write a text."""
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        return self.stream.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Output(Console):
    """A console on which a run's text never fails: in any encoding, and when nobody reads it, as after `| head`."""

    @property  # type: ignore[misc]  # of the parent too, with a setter that is not used
    def file(self) -> IO[str]:
        """The stream; nothing is seen of what is written after user code has closed it."""
        stream = super().file
        return cast(IO[str], Encodable(StringIO() if stream.closed else stream))

    def on_broken_pipe(self) -> None:
        """Print nothing more."""
        self.quiet = True
        leave_closed_output(NO_READER)


class Cell(StringIO):
    """One output of a notebook's cell, for all that a run prints in it, with text below that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.cell: int | None = None
        """Number of the cell that the output belongs to."""
        self.below: dict[str, str] = {}
        """Texts below, by what they are."""
        self.output: Any = None
        """The handle that IPython gives of the output."""

    def write(self, text: str) -> int:
        """Add a text to the output of the cell that runs, after which a new one begins in another."""
        self._begin()
        written = super().write(text)
        self._show()
        return written

    def place(self, **texts: str) -> None:
        """Replace texts below."""
        self._begin()
        self.below |= texts
        self._show()

    def settle(self, name: str) -> None:
        """Let what follows stand below a text that is below; drop the other texts there."""
        text, self.below = self.below.get(name, ""), {}
        self.write(text)

    def _begin(self) -> None:
        from IPython import get_ipython

        if self.cell != (number := get_ipython().execution_count):
            self.seek(0)
            self.truncate()
            self.cell, self.output = number, None

    def _show(self) -> None:
        from IPython.display import display

        text = self.getvalue() + "".join(self.below.values())
        shown = {"text/plain": text, "text/html": f'<pre style="white-space:pre-wrap">{escape(text)}</pre>'}
        if self.output is None:
            self.output = display(shown, raw=True, display_id=True)
        else:
            self.output.update(shown, raw=True)


class Screen:
    """Progress and samples of one run; use as `with Screen(...)` around the training loop."""

    def __init__(self, iterations: int, *, console: Console | None = None, enabled: bool = True):
        """Prepare the screen of a run; `enabled=False` silences it."""
        options: dict[str, Any] = {"quiet": not enabled, "highlight": False}
        self.console = console or Output(**options)
        self.cell = Cell() if self.console.is_jupyter and enabled else None
        """Where a notebook shows the run; None elsewhere."""
        if self.cell is not None:  # Rich would make an output of every line
            self.console = Output(**options, file=self.cell, width=CELL, force_jupyter=False, force_terminal=False)
        self.iterations = iterations
        self.progress = Bar(
            TextColumn("training"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
            speed_estimate_period=math.inf,  # two iterations may take longer than Rich's 30 seconds
        )
        self.explained: set[str] = set()
        """Metrics and columns whose meaning has been shown."""
        self.task = self.progress.add_task("training", total=iterations if iterations < OPEN_END else None, numbers="")

    def __enter__(self) -> Screen:
        self.progress.start()
        self._place_progress()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        if self.cell is not None:
            self.cell.settle("progress")

    def _place_progress(self) -> None:
        """Show the progress in a notebook."""
        if self.cell is not None:
            self.cell.place(progress=self._rendered(self.progress.get_renderable()))

    def _rendered(self, content: RenderableType) -> str:
        """What the console would print."""
        with self.console.capture() as capture:
            self.console.print(content)
        return capture.get()

    def say(self, text: str) -> None:
        """Print one line of untrusted text."""
        self.console.print(Text(visible(text)), soft_wrap=True)

    def pairs(self, rows: Iterable[tuple[str, str]], indent: str = "") -> None:
        """Print aligned lines of a label, blank where it repeats, and untrusted text."""
        before, listed = "", list(rows)
        width = max((len(label) for label, _ in listed), default=0)
        for label, text in listed:
            self.say(f"{indent}{'' if label == before else label:<{width}}  {text}")
            before = label

    def iteration(self, metrics: Mapping[str, float]) -> None:
        """Show an iteration's main metrics, each with its meaning the first time."""
        shown = {key: label for key, (label, _) in SHOWN_METRICS.items() if key in metrics}
        if new := [SHOWN_METRICS[key] for key in shown if key not in self.explained]:
            self.say("in an iteration's line:")
            self.pairs(new, indent="  ")
            self.explained |= shown.keys()
        texts = {key: f"{label} {figure(metrics[key])}" for key, label in shown.items()}
        numbers = "  ".join(texts.values())
        self.progress.update(self.task, completed=metrics["iteration"], numbers=numbers if self.cell else "")
        self._place_progress()
        if self.cell is None:
            of = f"/{self.iterations}" if self.iterations < OPEN_END else ""
            left = None if self.console.is_terminal else self.progress.tasks[0].time_remaining
            self.say(f"iteration {metrics['iteration']}{of}  {numbers}{f'  left {duration(left)}' if left else ''}")
        elif evaluated := [text for key, text in texts.items() if key.startswith("eval/")]:
            self.say(f"iteration {metrics['iteration']}  {'  '.join(evaluated)}")  # the progress is soon replaced
        if any(name.startswith("audit/") for name in metrics):
            self.audited(metrics)

    def samples(self, iteration: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Show completions: reward, mean log-probability under the reference, text; their meaning the first time."""
        reference = any(map(_reference, samples))
        if "samples" not in self.explained:
            columns = {"reward": "the completion's score"}
            if reference:
                columns["reference"] = "mean log-prob per token under the reference model, near 0 if likely"
            self.say("in a table of samples:")
            self.pairs(columns.items(), indent="  ")
            self.explained.add("samples")
        if not (self.console.is_terminal or self.cell is not None):
            for sample in samples:
                under = f"  reference {_reference(sample)}" if reference else ""
                shown = str(_continued(sample)).replace("\n", "\n    ")
                self.console.print(Text(f"  reward {sample['reward']:.3f}{under}  {shown}"), soft_wrap=True)
            return
        table = Table(title=f"samples of iteration {iteration}", title_justify="left")
        table.add_column("reward", justify="right")
        if reference:
            table.add_column("reference", justify="right")
        table.add_column("text", overflow="fold")
        for sample in samples:
            mean = [_reference(sample)] if reference else []
            table.add_row(f"{sample['reward']:.3f}", *mean, _continued(sample))
        if self.cell is not None:
            self.cell.place(samples=self._rendered(table))
        else:
            self.console.print(table)

    def finish(self, summary: Summary, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> None:
        """Show the outcome, with samples of the first and the last iteration."""
        if before and after:
            table = Table(title="completions, each after its reward", title_justify="left", show_lines=True)
            for word, samples in (("before", before), ("after", after)):
                table.add_column(f"{word} (iteration {samples[0]['iteration']})", ratio=1, overflow="fold")
            # Not strict: a resumed run may keep fewer samples than before.
            count = SIDE_BY_SIDE // 2 if "turns" in before[0] else SIDE_BY_SIDE
            for pair in list(zip(before, after, strict=False))[:count]:
                cells = (Text.assemble((f"{x['reward']:.2f} ", "bold"), _continued(x)) for x in pair)
                table.add_row(*cells)
            self.console.print(table)
        if summary.iterations:
            kl = "" if summary.kl_last is None else f"   KL {figure(summary.kl_last)} nats per sequence"
            name, unshaped = summary.run_kind.outcome, ""
            change = f"{figure(summary.first)} → {figure(summary.last)}"
            if summary.shaped is not None:
                name, unshaped = SHAPED, f"; {UNSHAPED}: {change}"
                change = " → ".join(map(figure, summary.shaped))
            rise = f" ({summary.rise})" if summary.rise else ""
            self.say(
                f"{name.replace('_', ' ')} {change}{rise}{unshaped}{kl} "
                f"({averaged(summary.iterations, summary.since)})   "
                f"{in_iterations(summary.iterations)} in {duration(summary.seconds)} "
                f"({figure(summary.per_second)} {summary.run_kind.unit} per second)"
            )
        if summary.attained is not None:
            self.say(summary.attained)
        if summary.stopped_by != "iterations":
            self.say(f"stopped by: {summary.stopped_by}")

    def audited(self, metrics: Mapping[str, float]) -> None:
        """Show an audit's metrics in one line."""
        self.say(_audited(metrics))

    def audit(self, audit: Mapping[str, Any], advice: str = "") -> None:
        """Show an audit: each estimator's correlation with the true advantages, less the run's own, and the critic.

        `advice` is that of `audit.verdict.remedy`.
        """
        credit, critic = audit["credit"], audit["critic"]
        title = f"credit against true values, iteration {audit['iteration']}, with 95 % intervals"
        table, noise = Table(title=title, title_justify="left"), noisy(credit)
        table.add_column("estimator", overflow="fold")
        table.add_column("correlation", justify="right", no_wrap=True)
        table.add_column("minus this run's", justify="right", no_wrap=True)
        table.add_column(f"sign agreement (n = {credit['significant']})", justify="right")
        for label, figures in credit["estimators"].items():
            signs = figures["sign_agreement"]["value"]
            agreement = "not known" if signs is None else f"{signs:.0%}"
            shown = label == credit["shown"]
            gain = "" if shown else figure_text(figures["gain"], noisy=noise)
            correlation = figure_text(figures["correlation"], noisy=noise)
            table.add_row(label, correlation, gain, agreement, style="bold" if shown else None)
        self.console.print(table)
        if critic is not None:
            explained, interval = text_parts(critic["explained_variance"])
            error, constant = (text_parts(critic[name])[0] for name in ("rmse", "constant_rmse"))
            self.say(
                f"the critic's explained variance of the true values: {explained} (95 % interval "
                f"{interval or 'not known'}); RMSE {error}, best constant {constant}"
            )
            if caution := critic_caution(critic):
                self.say(caution)
        self.say(f"{credit_verdict(audit)} {advice}".rstrip())
        spent = f", {audit['calls']:,} reward calls and {audit['tokens']:,} tokens" if "calls" in audit else ""
        self.say(f"measured in {duration(audit['seconds'])}{spent}; this run's estimator is {credit['shown']}")
        if credit["tokens"] < audited_rows(audit["settings"]):  # without a time limit each has at least one
            self.say("a limit was too low to measure the credit: raise --seconds, --calls or --tokens")

    def findings(self, findings: Sequence[Finding]) -> None:
        """Show the findings on a run, most important first."""
        for finding in findings:
            self.console.print(Text(visible(finding.title), style="bold yellow"), soft_wrap=True)
            self.say(f"  {finding.evidence}")
            self.say(f"  {finding.meaning}")
            self.say(f"  What to change: {finding.advice}.")
            self.say(f"  More: {finding.section}")


def _audited(metrics: Mapping[str, float]) -> str:
    """An audit's metrics in one line."""
    correlation, low, high = (metrics.get(f"audit/correlation{end}") for end in ("", "_low", "_high"))
    explained, noise = metrics.get("audit/explained_variance"), metrics.get("audit/noise", 0.0)
    if correlation is None:
        line = f"audit: {too_noisy(noise)}" if NOISY < noise < 1 else "audit: the share of real credit is unknown"
    else:
        real = share({"value": correlation, "high": high}).lower()
        line = f"audit: {real} of the credit is real (correlation {correlation:.2f}, "
        line += f"95 % interval {low:.2f} to {high:.2f})"
    if explained is None:
        return line
    if metrics.get("audit/value_noise", 0.0) > NOISY:
        return f"{line}, too noisy to judge the critic"
    return f"{line}, the critic explains {explained:.2f} of the true values' variance"


def _reference(sample: Mapping[str, Any]) -> str:
    """Mean log-probability per acted token under the reference; empty without one."""
    logprobs = acted(sample).get("ref_logprobs")
    return f"{sum(logprobs) / len(logprobs):.2f}" if logprobs else ""


def _continued(sample: Mapping[str, Any]) -> Text:
    """A completion after its prompt; in a conversation, and in an episode, with a line per speaker."""
    if "turns" in sample:
        return spoken(transcript(sample, MESSAGE))
    start = conversation(sample, MESSAGE)
    shown = visible_lines(start) if "messages" in sample else visible(start)
    return Text(shown, style="dim") + Text(visible(sample["completion"]), style="not dim")


def spoken(lines: Iterable[Line]) -> Text:
    """A transcript, dim where the policy did not write."""
    return Text("\n").join(Text(line.text, style="not dim" if line.acted else "dim") for line in lines)
