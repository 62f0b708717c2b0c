"""Requests to a vLLM server, and all that can go wrong on the way; the server is one of these tests, without vLLM."""

import json
import threading
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from helpers.warm import together
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.rollout import RolloutConfig, SamplingConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import EvalConfig
from tokencredit.text.data.prompts import Prompts
from tokencredit.text.engines.request_engine import RequestEngine
from tokencredit.text.engines.requests import EngineFailure, Request
from tokencredit.text.engines.vllm.server import VllmServer
from tokencredit.text.evaluation import check_evaluation_lengths
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.model_loading import load_language_model
from tokencredit.text.models.precision import Precision

END = 1


class Handler(BaseHTTPRequestHandler):
    """Answers as vLLM 0.32 does, and draws the tokens 100, 101 and so on."""

    def handle(self):
        with suppress(ConnectionError):  # of a request that was cancelled
            super().handle()

    def do_GET(self):
        self.answer(None)

    def do_POST(self):
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null"))

    def answer(self, body):
        state, path = self.server.state, self.path.partition("?")[0]
        state.calls.append((path, body, self.headers.get("Authorization")))
        trouble = next(state.troubles, None) if path == state.troubled else None
        if callable(trouble):
            trouble = trouble()
        if trouble == "hang":
            state.over.wait()
            return
        if trouble is not None:
            status, text = trouble
            self.reply(status, text)
            return
        if path == "/inference/v1/generate":
            self.generate(body)
            return
        if path == "/update_weight_version":
            state.version = body["new_version"]
        if path == "/collective_rpc":
            files = Path(body["kwargs"]["weights_path"]).glob("*.safetensors")
            state.weights = {name: x for file in files for name, x in load_file(file).items()}
            state.mode = Path(body["kwargs"]["weights_path"]).parent.stat().st_mode & 0o777
        known = {
            "/v1/models": {"data": [{"id": "model", "max_model_len": 64}]},
            "/weight_info": {"weight_version": state.version},
            "/reset_prefix_cache": {"success": True},
            "/collective_rpc": {"results": [None]},
            "/update_weight_version": {"success": True},
            "/health": "",
        }
        self.reply(200, known[path])

    def generate(self, body):
        state, settings = self.server.state, body["sampling_params"]
        sure = settings["top_k"] == 1
        ids = list(range(100, 100 + settings["max_tokens"]))
        places = [{"token_id": i, "logprob": 0.0 if sure else -0.5} for i in ids]
        spans = [{"version": state.version, "start": 0, "end": len(ids)}]
        whole = {"token_ids": ids, "logprobs": {"content": places}, "finish_reason": "length", "weight_versions": spans}
        if not body["stream"]:
            self.reply(200, {"choices": [whole]})
            return
        self.send_response(200)
        self.end_headers()
        for i, place in zip(ids, places, strict=True):
            part = {"token_ids": [i], "logprobs": {"content": [place]}, "finish_reason": None}
            self.wfile.write(f"data: {json.dumps({'choices': [part]})}\n\n".encode())

    def reply(self, status, answer):
        text = answer if isinstance(answer, str) else json.dumps(answer)
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


def started(state, port=0):
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads, server.state = True, state
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    return server


@pytest.fixture
def state():
    """What the server knows, and has been asked; `troubles` are its answers at the path `troubled`."""
    state = SimpleNamespace(calls=[], version="default", weights={}, troubled=None, troubles=iter(()))
    state.over = threading.Event()
    yield state
    state.over.set()


@pytest.fixture
def server(state):
    server = started(state)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def policy(model_folders):
    return ActorCritic(load_language_model(ModelConfig(name=str(model_folders["gpt2"])))[0]).requires_grad_(False)


@pytest.fixture
def sampler(server, policy, tokenizer):
    return sampler_of(server, policy, tokenizer)


def sampler_of(server, policy, tokenizer, report=lambda _: None, **settings):
    address = f"http://127.0.0.1:{server.server_port}"
    rollout = RolloutConfig(engine="vllm", server=address, **{"server_timeout": 20.0} | settings)
    return VllmServer(policy, tokenizer, [END], rollout, report)


def complete(sampler, requests=1, limit=3, **settings):
    done = {}
    requests = [Request([7, 8], limit, 0, seed) for seed in range(requests)]
    sampler.complete(requests, SamplingConfig(**settings), done.__setitem__)
    return done


def paths(state):
    return [path for path, *_ in state.calls]


def test_a_sync_hands_over_all_weights_and_drops_the_cache(sampler, state, policy):
    sampler.sync(policy)
    weights = policy.lm.state_dict()
    assert state.weights.keys() == weights.keys()
    assert all(torch.equal(state.weights[name], x) for name, x in weights.items())
    assert paths(state) == [
        "/v1/models",
        "/update_weight_version",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/inference/v1/generate",
        "/update_weight_version",
    ]
    assert state.version == sampler.version
    reload = next(body for path, body, _ in state.calls if path == "/collective_rpc")
    assert not Path(reload["kwargs"]["weights_path"]).parent.exists(), "the weights are deleted"


def test_a_request_has_all_its_settings(sampler, state, policy):
    sampler.sync(policy)
    settings = {"temperature": 0.7, "top_p": 0.9, "min_new_tokens": 2}
    assert complete(sampler, **settings) == {0: ([100, 101, 102], [-0.5] * 3, True, None)}
    body = state.calls[-1][1]
    assert body["token_ids"] == [7, 8]
    assert body["sampling_params"] == {
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 0.9,
        "min_p": 0.0,
        "max_tokens": 3,
        "min_tokens": 0,
        "seed": 0,
        "stop_token_ids": [END],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


def test_requests_are_on_their_way_together_and_reported_as_they_end(sampler, state, policy):
    sampler.sync(policy)
    together = threading.Barrier(3, timeout=20)
    state.troubled = "/inference/v1/generate"
    state.troubles = repeat(lambda: (together.wait(), None)[1])
    assert sorted(complete(sampler, 3)) == [0, 1, 2]


def test_a_stop_string_ends_a_stream(sampler, state, policy, tokenizer):
    sampler.sync(policy)
    stop = tokenizer.decode([100, 101])
    assert complete(sampler, limit=9, stop=[stop]) == {0: ([100, 101], [-0.5] * 2, False, None)}
    assert paths(state)[-2:] == ["/inference/v1/generate", "/weight_info"]
    state.version = "of another run"
    with pytest.raises(EngineFailure, match="not those of the last sync"):
        complete(sampler, limit=9, stop=[stop])


def test_a_restarted_server_is_found_at_the_first_completion(sampler, state, policy):
    sampler.sync(policy)
    state.version = "default"
    with pytest.raises(EngineFailure, match="it was restarted, or another run gives it weights"):
        complete(sampler)
    sampler.sync(policy)
    assert len(complete(sampler)) == 1


def test_another_run_at_the_server_of_a_job_ends_it(sampler, state, policy):
    """One process alone cannot give its weights again."""
    sampler.sync(policy)
    sampler.syncs_in_step, state.version = True, "tokencredit-0-1"
    with pytest.raises(RunStopped, match=r"another run gives weights to the server at http://127\.0\.0\.1:"):
        complete(sampler)


def test_the_key_is_sent_and_never_shown(server, state, policy, tokenizer, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret\n")  # as of a file
    sampler = sampler_of(server, policy, tokenizer)
    sampler.sync(policy)
    assert {key for *_, key in state.calls} == {"Bearer secret"}
    state.troubled, state.troubles = "/v1/models", repeat((401, {"error": "Unauthorized"}))
    with pytest.raises(
        EngineFailure, match=r"HTTP 401: .*Unauthorized.*; give its --api-key as .* VLLM_API_KEY"
    ) as info:
        sampler.sync(policy)
    assert "secret" not in str(info.value)
    for key in ("sécret", "sec\nret"):
        monkeypatch.setenv("VLLM_API_KEY", key)
        with pytest.raises(ConfigError, match=r"^the environment variable VLLM_API_KEY has characters that no API key"):
            sampler_of(server, policy, tokenizer)


@pytest.mark.parametrize(
    ("path", "trouble", "message"),
    [
        ("/v1/models", (200, {"data": []}), "does not say how long a sequence it takes"),
        ("/v1/models", (404, "Not Found"), "HTTP 404: Not Found; start it as VLLM_SERVER_DEV_MODE=1 vllm serve"),
        (
            "/collective_rpc",
            (500, {"error": "shape\n mismatch"}),
            "HTTP 500: .*shape.*; the server must hold the run's model",
        ),
        ("/reset_prefix_cache", (200, {"success": False}), "prefix cache could not be dropped"),
        ("/update_weight_version", (200, "<html>"), "not JSON: <html>"),
        ("/v1/models", (302, ""), "HTTP 302"),
        ("/v1/models", "hang", "cannot be reached: ReadTimeout"),
    ],
)
def test_a_sync_that_fails_says_why(path, trouble, message, server, state, policy, tokenizer, tmp_path):
    seconds = 0.5 if trouble == "hang" else 20.0
    sampler = sampler_of(server, policy, tokenizer, server_timeout=seconds, server_folder=str(tmp_path))
    state.troubled, state.troubles = path, repeat(trouble)
    with pytest.raises(EngineFailure, match=message):
        sampler.sync(policy)
    assert not list(tmp_path.iterdir())


def test_a_server_with_log_probs_before_the_filters_is_refused(sampler, state, policy):
    answer = {"token_ids": [9], "logprobs": {"content": [{"token_id": 9, "logprob": -1.5}]}, "finish_reason": "length"}
    state.troubled, state.troubles = "/inference/v1/generate", repeat((200, {"choices": [answer]}))
    with pytest.raises(EngineFailure, match=r"log-prob of -1\.5 and not 0.*--logprobs-mode processed_logprobs"):
        sampler.sync(policy)


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ((500, "broken"), "HTTP 500: broken"),
        ((200, "<html>"), "not JSON"),
        ((200, ""), "not JSON"),
        ("hang", "ReadTimeout"),
    ],
)
def test_a_completion_that_fails_cancels_the_others(trouble, message, server, state, policy, tokenizer):
    sampler = sampler_of(server, policy, tokenizer, server_timeout=0.5 if trouble == "hang" else 20.0)
    sampler.sync(policy)
    state.troubled, state.troubles = "/inference/v1/generate", chain([trouble], repeat("hang"))
    with pytest.raises(EngineFailure, match=message):
        complete(sampler, 4)
    state.troubled = None
    assert len(complete(sampler, 4)) == 4


def test_errors_of_the_caller_pass_through(sampler, policy):
    sampler.sync(policy)

    def ended(index, done):
        raise KeyError(index)

    with pytest.raises(KeyError):
        sampler.complete([Request([7], 2, 0, 0)] * 3, SamplingConfig(), ended)
    assert len(complete(sampler, 3)) == 3


def test_a_sequence_that_is_too_long_is_refused_before_anything_is_sent(sampler, state, policy):
    sampler.sync(policy)
    before = len(state.calls)
    with pytest.raises(RunStopped, match=r"may have 65 tokens, and .* takes 64; .* raise --max-model-len .* to 65"):
        complete(sampler, limit=63)
    assert len(state.calls) == before


def test_a_server_that_never_answered_is_not_waited_for(server, policy, tokenizer):
    events = []
    sampler = sampler_of(server, policy, tokenizer, events.append)
    server.shutdown()
    server.server_close()
    with pytest.raises(EngineFailure, match=r"http://127\.0\.0\.1:\d+ cannot be reached: ConnectError"):
        sampler.sync(policy)
    assert events == []


def test_a_server_that_was_lost_is_waited_for(server, state, policy, tokenizer):
    events, back = [], []

    def report(line):
        events.append(line)
        back.append(started(state, server.server_port))

    sampler = sampler_of(server, policy, tokenizer, report)
    sampler.sync(policy)
    server.shutdown()
    server.server_close()
    with pytest.raises(EngineFailure, match="cannot be reached"):
        complete(sampler)
    sampler.sync(policy)
    assert len(complete(sampler)) == 1
    assert len(events) == 1
    assert events[0].startswith("rollout.server is waited for, for up to 20 s: http://127.0.0.1:")
    back[0].shutdown()
    back[0].server_close()


def test_a_server_that_stays_away_is_given_up(server, policy, tokenizer):
    events = []
    sampler = sampler_of(server, policy, tokenizer, events.append, server_timeout=0.5)
    sampler.sync(policy)
    server.shutdown()
    server.server_close()
    with pytest.raises(EngineFailure, match="cannot be reached"):
        sampler.sync(policy)
    assert len(events) == 1


def test_weights_go_through_the_folder_and_are_readable_as_it_is(server, state, policy, tokenizer, tmp_path):
    tmp_path.chmod(0o755)
    sampler = sampler_of(server, policy, tokenizer, server_folder=str(tmp_path))
    sampler.sync(policy)
    reload = next(body for path, body, _ in state.calls if path == "/collective_rpc")
    assert Path(reload["kwargs"]["weights_path"]).parent.parent == tmp_path
    assert state.mode == 0o755
    sampler_of(server, policy, tokenizer).sync(policy)
    assert state.mode == 0o700, "a temporary folder is the user's own"
    with pytest.raises(ConfigError, match=r"server_folder is .*nowhere.*, where no weights can be written"):
        sampler_of(server, policy, tokenizer, server_folder=str(tmp_path / "nowhere"))


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
def test_processes_share_a_server_and_sync_it_together(server, state, policy, model_folders, tmp_path):
    state.troubled, state.troubles = "/collective_rpc", iter([None, None, (500, "no room")])
    address = f"http://127.0.0.1:{server.server_port}"
    done = together(2, "-m", "helpers.served", address, model_folders["gpt2"], tmp_path, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for rank, result in enumerate(results):
        assert result["whole"] == result["sharded"] == [[100, 101, 102]] * (rank + 1)
        assert (result["before"], result["longest"]) == (None, 64)
        assert result["version"] == results[0]["version"]
    assert paths(state).count("/collective_rpc") == 3, "one of the processes sends the weights"
    expected = {name: x + 0.5 for name, x in policy.lm.named_parameters()}
    assert all(torch.equal(state.weights[name], x) for name, x in expected.items()), "sharded ones arrive whole"
    assert "HTTP 500: no room" in results[0]["failure"]
    assert results[1]["failure"] == f"process 0: {results[0]['failure']}"


def test_evaluations_that_do_not_fit_are_refused_before_a_run(sampler, policy, tokenizer):
    sampler.sync(policy)
    engine = RequestEngine(policy, tokenizer, [END], Precision("float32", torch.device("cpu")), sampler=sampler)
    pipeline = SimpleNamespace(engine=engine)
    prompts = Prompts(["one two three"], tokenizer)
    width = prompts.batch(0, 1).ids.shape[1]
    check_evaluation_lengths(
        PPOConfig(eval=EvalConfig(every=1, samples=2, max_new_tokens=64 - width)), pipeline, prompts
    )
    too_long = PPOConfig(eval=EvalConfig(every=1, samples=2, max_new_tokens=65 - width))
    with pytest.raises(ConfigError, match=rf"eval\.max_new_tokens is {65 - width}, .* takes 64 together"):
        check_evaluation_lengths(too_long, pipeline, prompts)
    check_evaluation_lengths(replace(too_long, eval=replace(too_long.eval, every=0)), pipeline, prompts)
