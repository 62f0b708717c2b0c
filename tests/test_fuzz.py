"""Whatever bytes stand in a file that is read: a right result or one message, no other exception, no end of waiting.

`make fuzz` tries thirty times as many, and others each time.
"""

import io
import json
import shutil
import signal
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.episodes import episode
from helpers.files import sign
from helpers.proofs import proofs
from tokencredit.audit.verdict import CRITIC
from tokencredit.cli import main
from tokencredit.control.control_trainer import ControlTrainer
from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError
from tokencredit.provenance.parts import column_names
from tokencredit.report.page import write_report
from tokencredit.report.reading import REPORT, read_run
from tokencredit.runs.diagnosis import diagnose
from tokencredit.runs.jsonl import TRUTH
from tokencredit.runs.loop import load
from tokencredit.runs.resuming import for_trainer, newest
from tokencredit.settings.control import AgentRunConfig, AgentUpdateConfig, ControlConfig, EpisodesConfig
from tokencredit.text.data.datasets import column_values, read_dataset
from tokencredit.text.data.prompts import Prompts
from tokencredit.tools.preferences.labels import Labels, Pair, export, read_pairs, readable
from tokencredit.tools.sweep.sweep_file import read_sweep

pytestmark = pytest.mark.slow

FUZZ = settings(max_examples=settings.default.max_examples // 2, suppress_health_check=list(HealthCheck))
SLOW = settings(FUZZ, max_examples=FUZZ.max_examples // 4)
"""For the command, whose parser takes a tenth of a second to build, and for the page."""
LONGEST = 20
"""Seconds that one input may take, on a machine that does other things too."""
LONGEST_MESSAGE = 20_000


@contextmanager
def answered():
    """Take a refusal for an answer, but no waiting."""

    def late(*_):
        raise AssertionError(f"more than {LONGEST} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST)
    try:
        yield
    except ConfigError as error:
        if len(str(error)) > LONGEST_MESSAGE:
            pytest.fail("a message is for reading")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


WORDS = ["iteration", "prompt", "reward", "kl", "env", "model", "name", "ppo", "clip", "optim", "advantage", "gamma"]
WORDS += ["weight", "warmup", "stopped_by", "tokens", "content", "role", "text", "class_path", "init_args", "seed"]
numbers = st.one_of(
    st.integers(), st.floats(), st.sampled_from([0, 1, -1, 10**400, 2**63, 1e308, -1e308, 1e-320, True, False])
)
scalars = st.one_of(numbers, st.none(), st.text(max_size=12), st.sampled_from(WORDS), st.just("\ud800\x1b[0m"))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(WORDS), st.text(max_size=6)), inner, max_size=4),
    ),
    max_leaves=12,
)
hostile = st.sampled_from(
    [
        b"",
        b"\x00",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"[" * 20_000,
        b'{"a":' * 20_000,
        b"- " * 20_000,
        b"1" * 5000,
        b"a: &a [*a]",
        b"!!python/object/apply:os.system ['true']",
        b'"\\ud800"',
        b"a: &a [1,1,1,1,1,1,1,1,1]\n"
        + b"".join(b"%c: &%c [%s]\n" % (c + 1, c + 1, b",".join([b"*%c" % c] * 9)) for c in b"abcdefghi"),
    ]
)


@st.composite
def changed(draw, real):
    """A real file, damaged: bytes flipped, a piece cut out, put in, or doubled, its end missing."""
    data = bytearray(real)
    for _ in range(draw(st.integers(1, 4))):
        at, to = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
        kind = draw(st.sampled_from(["flip", "cut", "put", "double", "end"]))
        if kind == "flip" and data:
            data[at % len(data)] ^= draw(st.integers(1, 255))
        elif kind == "cut":
            del data[at : min(to, at + 40)]
        elif kind == "put":
            data[at:at] = draw(st.one_of(st.binary(max_size=8), hostile.filter(lambda x: len(x) < 50)))
        elif kind == "double":
            data[at:at] = data[at : min(to, at + 200)]
        elif kind == "end":
            del data[at:]
    return bytes(data)


def swapped(real):
    """A real record with one of its values, at any depth, exchanged."""

    @st.composite
    def build(draw):
        record = json.loads(json.dumps(real))
        place = record
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            if not keys:
                return record
            key = draw(st.sampled_from(list(keys)))
            if not isinstance(place[key], dict | list) or draw(st.booleans()):
                place[key] = draw(values)
                return record
            place = place[key]

    return build()


def as_json(strategy):
    return strategy.map(lambda value: json.dumps(value).encode())


def as_yaml(strategy):
    return strategy.map(lambda value: yaml.dump(value, allow_unicode=True).encode(errors="surrogatepass"))


def damaged(real, records):
    """Bytes of every kind, for a place where `real` stands, of which `records` are the values."""
    return st.one_of(st.binary(max_size=200), hostile, changed(real), *records)


TEXT_CONFIG = {
    "seed": 1,
    "model": {"name": "m", "lora": {"rank": 0}},
    "critic": {"kind": "shared", "clip": None},
    "prompts": {"text": ["a"], "chat_template_kwargs": {"a": 1}},
    "env": {"factory": "gymnasium:FrozenLake-v1"},
    "tools": ["tools.py:look"],
    "reward": [{"function": "length", "kwargs": {"unit": "words"}, "weight": 1.0}],
    "advantage": {"gamma": 1.0, "whiten": True},
    "rollout": {"batch_size": 4, "stop_at_eos": True},
    "ppo": {"clip": 0.2, "epochs": 1, "minibatches": 1},
    "optim": {"warmup": 2, "max_grad_norm": 1.0, "lr": 1e-4},
    "eval": {"text": "a"},
    "run": {"trackers": ["tensorboard"], "dir": None},
}
CONTROL_CONFIG = {"env": {"id": "CartPole-v1", "kwargs": {}}, "agent": {"hidden": [64, 64]}, "steps": 128}
METRICS = [
    {"iteration": i, "reward": 0.1 * i, "reward_std": 0.2, "kl": 0.1 * i, "length": 9.0, "entropy": 1.0}
    | {"clip_fraction": 0.1, "first_ratio_error": 0.0, "value_loss": 0.1, "explained_variance": 0.5, "grad_norm": 3.0}
    | {"reward_std/length": 0.1, "reward_std/b": 0.2, "seconds": 1.0, "advantage_mean": 0.0, "distinct": 1.0}
    for i in range(1, 25)
]
SAMPLES = [
    {"iteration": i, "prompt": "a", "completion": " b c", "reward": 1.0, "truncated": False, "tokens": [" b", " c"]}
    | {"logprobs": [-1.0, -1.0], "values": [0.1, 0.2], "rewards": [0.0, 1.0], "advantages": [0.5, -0.5]}
    | {"ref_logprobs": [-1.5, -1.0], "new_logprobs": [-0.5, -2.0]}
    for i in (1, 2, 24)
]
EPISODE = episode(("assistant", ["a"], 0.5, ["cut"]), ("tool", [" b"]), ("assistant", [" c"], 1.0), after="d")
CHOICES = {"model.dtype": "bfloat16"}
FIGURE = {"value": 0.3, "low": 0.2, "high": None}
AUDIT = {
    "iteration": 24,
    "settings": {"completions": 2, "continuations": 4, "states": None},
    "continuations": 4.0,
    "credit": {
        "tokens": 2,
        "significant": 1,
        "noise": FIGURE,
        "shown": "a",
        "estimators": {"a": dict.fromkeys(("correlation", "sign_agreement", "gain"), FIGURE)},
    },
    "critic": dict.fromkeys(CRITIC, FIGURE)
    | {"states": 2, "reliability": [{"predicted": 0.1, "true": 0.2, "low": 0.0, "high": None, "states": 2}]},
    "metrics": {"audit/noise": 0.1, "audit/correlation": 0.3, "audit/trust": 0.09},
    "samples": [SAMPLES[0] | {name: [0.1, None] for name in TRUTH}],
}
SUMMARY = {"reward_first": 0.1, "reward_last": 1.0, "iterations": 24, "seconds": 1.0, "stopped_by": "iterations"}


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def with_line(records):
    """Lines of which one is exchanged."""
    changes = st.one_of(swapped(records[0]), st.dictionaries(st.sampled_from(WORDS), values), values)
    return st.builds(
        lambda at, record: lines([*records[:at], record, *records[at + 1 :]]),
        st.integers(0, len(records) - 1),
        changes,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def config_bytes(config):
    return damaged(
        yaml.safe_dump(config).encode(), [as_yaml(swapped(config)), as_yaml(values), as_json(swapped(config))]
    )


@pytest.mark.parametrize(("command", "config"), [("train", TEXT_CONFIG), ("control", CONTROL_CONFIG)])
def test_damaged_configurations_are_refused_by_the_command(command, config, folder):
    """Into a folder that is in use, so that a configuration that could be run is refused at last too."""
    file = folder / f"{command}.yaml"

    @SLOW
    @given(config_bytes(config))
    def fuzz(data):
        file.write_bytes(data)
        with answered(), pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stderr", err := io.StringIO())
            assert main([command, "--config", str(file), "--run.dir", str(folder)]) == 2
            assert err.getvalue().startswith("tokencredit: ")
            assert len(err.getvalue()) < LONGEST_MESSAGE

    fuzz()


SWEEP = {"kind": "text", "dir": "out", "seeds": [1, 2], "base": {"ppo": {"clip": 0.1}, "kl.coef": 1}}


@pytest.mark.parametrize("kinds", [{"grid": {"optim.lr": [0.1, 1]}}, {"variants": {"a": {}, "b": {"seed": None}}}])
def test_damaged_sweep_files_are_read_or_refused(kinds, folder):
    file, sweep = folder / "sweep.yaml", SWEEP | kinds

    @SLOW
    @given(config_bytes(sweep))
    def fuzz(data):
        file.write_bytes(data)
        with answered():
            assert all(run.folder.parts[-1] == f"seed-{run.seed}" for run in read_sweep(file))

    fuzz()


OF_AGENT = {"iteration": 1, "greedy": True, "terminated": False, "return": 2.5, "length": 3, "actions": [1, [0.5, 2]]}
OF_AGENT |= {"rewards": [1, 1.5], "values": [0.5, None], "advantages": [2.0, -1]}
OF_AGENT |= {"frames": [{"step": 0, "png": "iVBORw0KGgoAAA=="}]}
FILES = {
    "config.yaml": (yaml.safe_dump(TEXT_CONFIG).encode(), [as_yaml(swapped(TEXT_CONFIG)), as_yaml(values)]),
    "choices.json": (
        json.dumps(CHOICES).encode(),
        [as_json(swapped(CHOICES)), as_json(values)],
    ),
    "metrics.jsonl": (lines(METRICS), [with_line(METRICS), st.lists(as_json(values), max_size=3).map(b"\n".join)]),
    "samples.jsonl": (
        lines(SAMPLES),
        [with_line(SAMPLES), with_line([EPISODE, *SAMPLES]), st.lists(as_json(values), max_size=3).map(b"\n".join)],
    ),
    "summary.json": (json.dumps(SUMMARY).encode(), [as_json(swapped(SUMMARY)), as_json(values)]),
    "audit.json": (json.dumps(AUDIT).encode(), [as_json(swapped(AUDIT)), as_json(values)]),
    "episode.json": (json.dumps(OF_AGENT).encode(), [as_json(swapped(OF_AGENT)), as_json(values)]),
}


@pytest.fixture
def run(tmp_path):
    for name, (data, _) in FILES.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def assert_whole(page):
    """The page is whole, with data that a browser can read."""
    assert page.rstrip().endswith("</html>")
    data = page.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    json.loads(data, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_of_a_run_leave_a_whole_page(name, run):
    """Each page is whole: what stood there before, or a page with data that a browser can read."""

    @SLOW
    @given(damaged(*FILES[name]))
    def fuzz(data):
        (run / name).write_bytes(data)
        (run / REPORT).write_text("before")
        with answered():
            write_report(run)
            found = read_run(run)
            for finding in diagnose(found.metrics, found.config):
                assert finding.line().encode(errors="surrogatepass")
        page = (run / REPORT).read_text(encoding="utf-8")
        assert sorted(p.name for p in run.iterdir()) == sorted([*FILES, REPORT])
        if page != "before":
            assert_whole(page)

    fuzz()


@pytest.fixture(scope="module")
def cut_short(tmp_path_factory):
    """An agent's run with two checkpoints, and its configuration."""
    run = AgentRunConfig(
        dir=str(tmp_path_factory.mktemp("checkpoints") / "run"), iterations=2, save_every=1, trackers=[]
    )
    args = ControlConfig(run=run, steps=8, ppo=AgentUpdateConfig(minibatches=1), eval=EpisodesConfig(episodes=0))
    ControlTrainer(args).train()
    return replace(args, run=replace(run, iterations=3))


TENSORS = "tensors/shard-00001-model-00001-of-00001.safetensors"
CHECKPOINT = ("manifest.json", "state.json", "process-0.json", TENSORS)
FOUND = ("manifest.json", TENSORS)


@pytest.mark.parametrize(
    ("signed", "name"),
    [
        # A damaged file does not fit its manifest, whichever it is.
        *(pytest.param(False, name, marks=() if name in FOUND else pytest.mark.proof) for name in CHECKPOINT),
        *((True, name) for name in CHECKPOINT),
    ],
)
def test_damaged_checkpoints_are_read_or_refused(name, signed, cut_short, tmp_path):
    """Where the manifest fits whatever stands there, the damaged checkpoint is read, or refused by name."""
    whole = Path(cut_short.run.dir)
    real = (whole / "checkpoints" / "000002" / name).read_bytes()
    records = [as_json(swapped(json.loads(real))), as_json(values)] if name.endswith("json") else []
    trainer = ControlTrainer(cut_short)

    @(SLOW if signed else FUZZ)
    @given(damaged(real, records))
    def fuzz(data):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(whole, tmp_path / "run")
        folder = tmp_path / "run" / "checkpoints" / "000002"
        (folder / name).write_bytes(data)
        if signed and name != "manifest.json":
            sign(folder)
        with answered():
            done, state, complaints = newest(tmp_path / "run", Processes())
            assert done == (1 if complaints else 2)
            load(trainer, for_trainer(state), set())

    fuzz()


ROWS = [{"prompt": "one, two", "answer": 1}, {"prompt": 'line\n"two"', "answer": 2}]
TALKS = [{"prompt": [{"role": "user", "content": "hello"}], "answer": None}]


def saved(rows, kind, folder):
    """A file of rows as people have them, and random values in its place."""
    if kind == "jsonl":
        return lines(rows), [with_line(rows), as_json(values)]
    if kind == "json":
        return json.dumps(rows).encode(), [as_json(st.lists(st.one_of(swapped(rows[0]), values), max_size=3))]
    if kind == "csv":
        return b'prompt,answer\na,1\n"b, ""c""\nd",2\n', [st.text(',"\n\r ab\x00\u2028').map(str.encode)]
    Dataset.from_list(rows).to_parquet(folder / "real.parquet")
    return (folder / "real.parquet").read_bytes(), []


def look(name, tokenizer):
    """Read all of a data set as a run does: the columns, every prompt, a batch; each prompt has a token."""
    rows = read_dataset(str(name))
    for column in column_names(rows):
        for _ in column_values(rows, column):
            pass
    batch = Prompts(rows, tokenizer, name="rows", limit=50).batch(0, 2)
    assert len(batch.texts) == 2
    assert batch.mask.any(1).all()


@pytest.mark.parametrize("rows", [ROWS, TALKS])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", *proofs("json", "csv")])
def test_damaged_prompts_are_read_or_refused(kind, rows, folder, tokenizer, monkeypatch):
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    file = folder / f"rows.{kind}"
    real, records = saved(rows, kind, folder)

    @FUZZ
    @given(damaged(real, records))
    def fuzz(data):
        file.write_bytes(data)
        with answered():
            look(file, tokenizer)

    fuzz()


@pytest.mark.parametrize("part", ["*.arrow", "state.json", "dataset_info.json"])
def test_damaged_saved_data_sets_are_read_or_refused(part, folder, tokenizer):
    place = folder / "saved"
    shutil.rmtree(place, ignore_errors=True)
    Dataset.from_list(ROWS).save_to_disk(place)
    file = next(place.glob(part))
    real = file.read_bytes()
    records = [as_json(swapped(json.loads(real))), as_json(values)] if part.endswith("json") else []

    @FUZZ
    @given(damaged(real, records))
    def fuzz(data):
        file.unlink()  # what was read before may still be mapped into memory
        file.write_bytes(data)
        with answered():
            look(place, tokenizer)

    fuzz()


ANSWERS = [{"role": "assistant", "content": text} for text in "ab"]
PREFERENCE = {"prompt": TALKS[0]["prompt"], "chosen": [ANSWERS[0]], "rejected": [ANSWERS[1]], "reward_chosen": 1.0}
LABEL = {"pair": "0123456789abcdef", "label": "A", "prompt": "p", "a": [ANSWERS[0]], "b": "b"}


@pytest.mark.parametrize("real", [PREFERENCE, LABEL], ids=["pairs", "labels"])
def test_damaged_pairs_and_labels_are_read_or_refused(real, folder):
    """A refused file of labels is left as it was; one that is read only loses a line without an end."""
    rows = st.lists(swapped(real), min_size=1, max_size=3).map(lines)
    file = folder / "rows.jsonl"

    @FUZZ
    @given(damaged(lines([real, real]), [rows]))
    def fuzz(data):
        file.write_bytes(data)
        with answered():
            for pair in read_pairs(file, 1):
                assert all(readable(text).replace("\n", "").isprintable() for text in (pair.prompt, pair.a, pair.b))
        with answered():
            try:
                labels = Labels.open(file)
            except ConfigError:
                assert file.read_bytes() == data
                raise
            begun = data[: data.rfind(b"\n") + 1]
            assert file.read_bytes() in (begun, data + b"\n"), "the last line is removed, or a whole label"
            export(labels, [Pair(key, "", "", "") for key in labels.rows], folder / "preferences.jsonl")

    fuzz()
