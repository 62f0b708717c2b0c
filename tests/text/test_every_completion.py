"""`run.samples: all`: every completion, with the advantages as the loss used them beside the raw ones."""

import sys

import numpy as np
import pytest

from helpers.files import read_jsonl
from tokencredit.errors import ConfigError
from tokencredit.report.reading import read_run
from tokencredit.runs.folder import SHOWN
from tokencredit.settings.text import PPOConfig
from tokencredit.text.batch import DECIMALS
from tokencredit.text.ppo_trainer import PPOTrainer

SETTINGS = {
    "rollout": {"batch_size": 12, "max_new_tokens": 12},
    "ppo": {"epochs": 2, "minibatches": 2, "mask_truncated": True},
    "run": {"iterations": 2, "samples": "all", "trackers": [], "save_every": 0},
}


def trained(folder, **settings):
    PPOTrainer(args=PPOConfig.from_dict(SETTINGS | {"run.dir": str(folder)} | settings)).train()
    return read_run(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("every") / "run")


def test_every_completion_is_kept_and_the_first_ones_are_in_samples_jsonl(run):
    samples = run.frame("samples")
    assert samples.groupby("iteration").size().tolist() == [12, 12]
    first = samples[samples["sample"] < SHOWN]
    assert first.completion.tolist() == [sample["completion"] for sample in read_jsonl(run.path / "samples.jsonl")]
    assert len(run.samples) == 2 * SHOWN, "the page reads those"
    for _, row in run.frame("metrics").iterrows():
        assert samples[samples.iteration == row.iteration].reward.mean() == pytest.approx(row.reward, abs=1e-5)


def test_the_loss_uses_whitened_advantages_and_none_of_masked_completions(run):
    tokens = run.frame("tokens").merge(run.frame("samples")[["iteration", "sample", "truncated"]])
    assert 0 < tokens.truncated.sum() < len(tokens)
    assert tokens.loss_advantages.isna().equals(tokens.truncated)
    for _, batch in tokens[~tokens.truncated].groupby("iteration"):
        raw = batch.advantages
        expected = (raw - raw.mean()) / np.sqrt(raw.var(ddof=0) + 1e-8)
        rounded = 10.0**-DECIMALS / raw.std(ddof=0)  # of the raw ones in the file, in deviations
        np.testing.assert_allclose(batch.loss_advantages, expected, rtol=1e-3, atol=1e-4 + rounded)


def test_a_missing_package_is_said_before_anything_is_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"run\.samples: all needs datasets, which is not installed"):
        PPOTrainer("no/model", args=PPOConfig.from_dict(SETTINGS))


def test_whitening_within_one_minibatch_is_that_of_the_batch(run, tmp_path):
    one = {"advantage": {"whiten": "minibatch"}, "ppo": SETTINGS["ppo"] | {"minibatches": 1}}
    tokens, expected = trained(tmp_path / "run", **one).frame("tokens"), run.frame("tokens")
    first = [frame[frame.iteration == 1].loss_advantages for frame in (tokens, expected)]
    np.testing.assert_allclose(*first, atol=1e-5)
