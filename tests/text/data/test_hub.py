"""Uploading a policy, to a hub that runs here and speaks as much of the real one's language as that takes."""

import base64
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers import warm

TRAIN = ["--rollout.batch_size", "8", "--rollout.max_new_tokens", "4", "--run.iterations", "1", "--run.trackers", "[]"]


class Hub(BaseHTTPRequestHandler):
    """Keeps what is committed to it, in `server.files`; refuses whoever comes without the token."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.headers.get("Authorization") != "Bearer secret":
            return self.answer({"error": "no such token"}, 401)
        if self.path == "/api/repos/create":
            return self.answer({"url": f"{self.server.address}/org/critic"})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if self.path == "/api/models/org/critic/preupload/main":
            paths = [file["path"] for file in json.loads(body)["files"]]
            return self.answer({"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]})
        assert self.path == "/api/models/org/critic/commit/main", self.path
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        url = f"{self.server.address}/org/critic/commit/{'b' * 40}"
        return self.answer({"success": True, "commitOid": "b" * 40, "commitUrl": url, "hookOutput": ""})

    def answer(self, content, code=200):
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def uploads(tmp_path_factory):
    """The hub's files and two runs that uploaded to it, with the right token and with a wrong one.

    They train in one process of their own, where the library is told the address that it learned when it was imported.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.address = {}, f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    program = """
import contextlib, io, json, os, sys
from huggingface_hub import constants
from tokencredit.cli import main
address, folder, *options = sys.argv[1:]
constants.ENDPOINT, constants.HF_HUB_OFFLINE = address, False
results = []
for token in ("secret", "wrong"):
    os.environ["HF_TOKEN"] = token
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(["train", *options, "--run.dir", f"{folder}/{token}", "--run.push_to_hub", "org/critic"])
    results.append((code, errors.getvalue()))
print(json.dumps(results))
"""
    folder = tmp_path_factory.mktemp("uploads")
    done = warm.python("-c", program, server.address, folder, *TRAIN, NO_PROXY="127.0.0.1")
    assert done.returncode == 0, done.stderr
    server.shutdown()
    server.server_close()
    return folder, server.files, *json.loads(done.stdout.splitlines()[-1])


def test_the_policy_that_arrives_is_the_one_that_was_saved(uploads, tmp_path):
    folder, files, (code, errors), _ = uploads
    assert code == 0, errors
    saved = folder / "secret" / "policy"
    assert files == {str(file.relative_to(saved)): file.read_bytes() for file in saved.rglob("*") if file.is_file()}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    AutoModelForCausalLM.from_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tmp_path)
    assert "This movie was really" in files["README.md"].decode()


def test_a_hub_that_refuses_keeps_the_trained_policy(uploads):
    folder, _, _, (code, errors) = uploads
    assert code == 1
    assert "could not upload to run.push_to_hub 'org/critic'" in errors
    assert errors.count("\n") <= 3
    assert errors.splitlines()[-1].startswith("tokencredit: could not upload"), "one line"
    assert "Traceback" not in errors
    AutoModelForCausalLM.from_pretrained(folder / "wrong" / "policy")
