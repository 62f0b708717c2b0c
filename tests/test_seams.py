"""Where the parts of a run of several processes meet."""

import json
import math

import pytest
import torch

from helpers.files import read_events, read_metrics
from helpers.runs import assert_same
from helpers.seams import run_settings
from helpers.warm import together
from tokencredit import PPOConfig, PPOTrainer
from tokencredit.runs.folder import saved
from tokencredit.runs.jsonl import read_samples

slow = pytest.mark.slow
# In the suite: distributed/test_sharding.py audits sharded models, audit/test_texts.py audits in two processes, and
# test_elastic.py and control/test_processes.py stop all processes after an error in one.
pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo"),
]


@pytest.fixture(scope="module")
def results(model_folders, tmp_path_factory):
    """Folder and results of both processes of `helpers.seams`."""
    folder = tmp_path_factory.mktemp("seams")
    done = together(2, "-m", "helpers.seams", model_folders["gpt2"], folder, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@slow
def test_all_processes_audit_a_run_of_sharded_models(results):
    for result in results[1]:
        assert len(result["audit"]) == 1
        assert math.isfinite(result["audit"][0])


@slow
def test_a_reward_of_a_continuation_that_fails_stops_all_processes(results):
    assert results[1][1]["failed"] == "the service is down"
    assert results[1][0]["failed"] == "process 1: the service is down"


@slow
def test_a_batch_without_a_score_in_one_process_is_one_with_scores(results):
    for rank, result in enumerate(results[1]):
        scores, error = result["unscored"]
        assert set(scores) == {1.0 - rank}
        assert error == "no reward term scored any completion: some returned None for all of them"


@slow
def test_an_engine_that_fails_in_one_process_stops_all_and_nothing_is_lost(results):
    folder, said = results
    for rank, reason in enumerate(("process 1: the engine is gone", "the engine is gone")):
        assert said[rank]["rollout"].startswith(f"stopped in iteration 2: {reason}; ")
    assert saved(folder / "rollout") == [1, 2]
    assert [row["iteration"] for row in read_metrics(folder / "rollout")] == [1, 2]
    assert_same(folder / "run", folder / "rollout")


@slow
def test_an_evaluation_without_its_engine_is_skipped_and_the_run_goes_on(results):
    folder, said = results
    assert [result["evaluated"] for result in said] == [3, 3]
    events = read_events(folder / "evaluated")
    assert sum("an evaluation is skipped: process 1: rollout.engine continuous" in event for event in events) == 1
    assert ["eval/reward" in row for row in read_metrics(folder / "evaluated")] == [False, True, True]


@slow
def test_rewards_and_tokens_of_a_batch_are_those_of_all_processes(results):
    assert [result["skipped"] for result in results[1]] == [[0.5, 32]] * 2, "one scored nothing, then had a NaN"


@slow
def test_a_disk_that_is_full_at_the_end_ends_all_processes(results):
    assert "I/O error: No space left on device" in results[1][0]["disk"]
    assert "process 0: I/O error: No space left on device" in results[1][1]["disk"]


@slow
def test_processes_agree_on_the_gravest_error_and_on_a_lack_of_memory(results):
    assert [result["graver"] for result in results[1]] == [
        ["RunStopped", "process 1: another run"],
        ["RunStopped", "another run"],
    ]
    assert [result["memory"].partition("Default")[0] for result in results[1]] == ["process 1: ", ""]


@slow
def test_all_processes_choose_one_folder(results):
    assert results[1][0]["chosen"] == results[1][1]["chosen"]


@slow
def test_a_folder_that_one_process_does_not_see_is_refused_at_the_start(results):
    for result in results[1]:
        assert result["unseen"].startswith("run.dir 'run' of process 0 is not there in process 1; give a folder that")


@slow
def test_samples_are_the_first_rows_of_the_batch_of_all_processes(results, model_folders, tmp_path):
    PPOTrainer(args=PPOConfig.from_dict(run_settings(model_folders["gpt2"], tmp_path / "run"))).train()
    one, two = (read_samples(folder / "run" / "samples.jsonl", {1}) for folder in (tmp_path, results[0]))
    assert len(one) == 7
    assert [sample["token_ids"] for sample in two] == [sample["token_ids"] for sample in one]
