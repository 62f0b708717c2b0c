"""Runs, completions and audits as a notebook shows them, in HTML without scripts; `tokencredit.read_run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex, overload

from tokencredit.audit.verdict import credit_verdict
from tokencredit.errors import ConfigError, importing
from tokencredit.report import audit_view, reading
from tokencredit.report.curves import chart_of, sections
from tokencredit.report.page import views
from tokencredit.report.reading import REPORT, Run
from tokencredit.report.story import outcome, story
from tokencredit.report.templating import fill, two_digits
from tokencredit.runs.diagnosis import no_finding
from tokencredit.runs.folder import write_file
from tokencredit.runs.jsonl import ASSISTANT
from tokencredit.runs.summary import in_iterations
from tokencredit.runs.transcript import SIGN
from tokencredit.runs.untrusted import visible
from tokencredit.settings.run_kind import run_kind_of

WIDTH, HEIGHT = 300, 90
"""Size of a chart, in pixels."""
MARKED = 40
"""Most points of a curve that are marked one by one."""
SHOWN = 8
"""Most completions shown; of a longer list the last ones."""
ENDS = 300
"""Most characters shown of each end of a prompt or an observation."""
FINDINGS = 3
"""Most findings shown; the page has all of them."""
DISTANCES = ("kl", "log_ratio")
"""Charts beside that of the headline, by the names in `curves`."""


class Sample(dict[str, Any]):
    """A record of samples.jsonl; a notebook shows its credit."""

    def __init__(self, run: Run, record: Mapping[str, Any]):
        super().__init__(record)
        self.run = run

    def _repr_html_(self) -> str:
        return samples_html(self.run, [self])

    def picture(self, *files: str | Path, inches: float = 6.5) -> str:
        """Draw the completion with its credit into files that end in `.svg` or `.png`, on its iteration's scale.

        Returns:
            The characters that no installed font has, which are boxes in the picture.
        """
        with importing("a picture", "Matplotlib", "tokencredit[compare]"):  # which takes half a second
            from tokencredit.report.picture import draw

        others = [x for x in self.run.samples if x["iteration"] == self["iteration"] and x != self]
        shown = views(self.run, [self, *others])
        largest, missing = reach(shown), ""
        for file in map(Path, files):
            if file.suffix not in (".svg", ".png"):
                raise ConfigError(f"the picture is {str(file)!r}; it must end in .svg or .png")
            data, missing = draw(described(shown[0], largest), two_digits(largest), file.suffix[1:], inches)
            write_file(file, data)
        return missing


class Samples(list[Sample]):
    """Records of a run's completions; a notebook shows the credit of the last ones."""

    def __init__(self, run: Run, records: Sequence[Mapping[str, Any]]):
        super().__init__(x if isinstance(x, Sample) else Sample(run, x) for x in records)
        self.run = run

    @overload
    def __getitem__(self, place: SupportsIndex) -> Sample: ...

    @overload
    def __getitem__(self, place: slice) -> Samples: ...

    def __getitem__(self, place: SupportsIndex | slice) -> Sample | Samples:
        """A record, or records that a notebook shows too."""
        return Samples(self.run, super().__getitem__(place)) if isinstance(place, slice) else super().__getitem__(place)

    def __repr__(self) -> str:
        return f"<{len(self)} completions of {self.run.path}>"

    def _repr_html_(self) -> str:
        return samples_html(self.run, self)


class AuditRecord(dict[str, Any]):
    """The contents of audit.json; a notebook shows its verdict and tables."""

    def _repr_html_(self) -> str:
        return fill("notebook.html", trust=visible(credit_verdict(self)), audit=audit_view.view(self))


@dataclass(frozen=True, repr=False)
class NotebookRun(Run):
    """A run; a notebook shows its outcome, curves and diagnosis."""

    def __repr__(self) -> str:
        label, change, note = outcome(self)
        return f"<Run {self.path}: {label} {change} ({note}), {in_iterations(len(self.metrics))}>"

    def _repr_html_(self) -> str:
        charts = {name: chart for found in sections(self.metrics).values() for name, chart in found.items()}
        headline, page, findings = chart_of(run_kind_of(self.config).headline), self.path / REPORT, self.findings()
        return fill(
            "notebook.html",
            name=str(self.path),
            story=story(self),
            charts=[drawn(charts[name]) for name in (headline, *DISTANCES) if name in charts],
            diagnosis=True,
            findings=findings[:FINDINGS],
            more=len(findings[FINDINGS:]),
            no_finding=no_finding(self.config, len(self.scored)),
            trust=audit_view.trust(self) if self.samples or self.audit else None,
            page=str(page) if page.is_file() else "",
        )


def read_run(path: str | Path, *, samples: bool = True) -> NotebookRun:
    """Read a run's folder, as `reading.read_run` does; a notebook shows the run, its samples and its audit."""
    run = reading.read_run(path, samples=samples)
    shown = {"samples": Samples(run, run.samples), "audit": None if run.audit is None else AuditRecord(run.audit)}
    return NotebookRun(**vars(run) | shown)


def samples_html(run: Run, samples: Sequence[Mapping[str, Any]]) -> str:
    """Completions with their credit: each token is shaded by its advantage, as on the page, on one scale."""
    if not samples:
        return ""
    shown = views(run, samples[-SHOWN:])
    largest = reach(shown)
    return fill(
        "notebook.html",
        samples=[described(sample, largest) for sample in shown],
        largest=two_digits(largest),
        left_out=len(samples) - len(shown),
    )


def reach(samples: Sequence[Mapping[str, Any]]) -> float:
    """The largest size of an advantage in samples of the page."""
    return max((abs(x) for sample in samples for x in sample["numbers"]["advantage"]), default=0.0) or 1.0


def described(sample: Mapping[str, Any], largest: float) -> dict[str, Any]:
    """A sample of the page for the template: parts with a text, or with the tokens' texts, shades and numbers."""
    numbers, error = sample["numbers"], sample["error"] or 0.0
    tokens = []
    for place, text in enumerate(sample["tokens"]):
        advantage = numbers["advantage"][place]
        faint = abs(advantage) < error
        share = (0.3 if faint else 1.0) * advantage / largest
        about = [f"{name} {two_digits(x[place])}" for name, x in numbers.items() if x[place] is not None]
        tokens.append({"text": text or "∅", "share": share, "faint": faint, "about": ", ".join(about)})
    turns = sample.get("turns", [{"role": "", "start": 0, "end": len(tokens)}])
    parts = [
        {"role": turn["role"], "tokens": tokens[turn["start"] : turn["end"]]}
        if "start" in turn
        else {"role": turn["role"], "text": without_middle(turn["text"])}
        for turn in turns
    ]
    # Each turn of an episode names its speaker.
    prompt = sample["prompt"].removesuffix(f"⏎\n{ASSISTANT} {SIGN} ") if "turns" in sample else sample["prompt"]
    outcome = f"iteration {sample['iteration']}, reward {two_digits(sample['reward'])}"
    return {"about": outcome, "prompt": without_middle(prompt), "parts": parts}


def without_middle(text: str) -> str:
    """A text, without its middle if it is long."""
    return text if len(text) <= 2 * ENDS else f"{text[:ENDS]} … {text[-ENDS:]}"


def drawn(chart: Mapping[str, Any]) -> dict[str, Any]:
    """A chart of `curves` for the template: its title, its scale, and its lines as points of an SVG."""
    known = [
        (line["name"], [point for point in zip(line["x"], line["y"], strict=True) if point[1] is not None])
        for line in chart["lines"]
    ]
    x, y = ([point[axis] for _, points in known for point in points] for axis in (0, 1))
    left, low, width, height = min(x), min(y), max(x) - min(x) or 1, max(y) - min(y) or 1
    lines = [
        {"name": name, "points": [(WIDTH * (a - left) / width, HEIGHT * (1 - (b - low) / height)) for a, b in points]}
        for name, points in known
    ]
    return {
        "title": chart["title"],
        "lines": [line | {"marked": len(line["points"]) <= MARKED} for line in lines],
        "low": two_digits(low),
        "high": two_digits(max(y)),
        "ends": (left, max(x)),
        "size": (WIDTH, HEIGHT),
    }
