"""Comparison of a run that was cut short with one that was not."""

from safetensors.numpy import load_file

from helpers.files import read_jsonl, without_times


def metrics(folder, name="metrics.jsonl"):
    """Metrics of each iteration, or batch of a pretraining, without those that depend on the clock."""
    return without_times(read_jsonl(folder / name))


def assert_same(one, other):
    """Two runs have the same metrics, each iteration once, samples, pretraining and final weights."""
    left, right = metrics(one), metrics(other)
    assert [row["iteration"] for row in right] == list(range(1, len(right) + 1))
    assert left == right
    assert (one / "pretrain.jsonl").exists() == (other / "pretrain.jsonl").exists()
    if (one / "pretrain.jsonl").exists():
        assert metrics(one, "pretrain.jsonl") == metrics(other, "pretrain.jsonl")
    assert (one / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()
    for file in [file for part in ("policy", "critic") for file in (one / part).glob("*.safetensors")]:
        expected, found = load_file(file), load_file(other / file.relative_to(one))
        assert expected.keys() == found.keys()
        assert all((expected[name] == found[name]).all() for name in expected), file.name
