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

    def do_GET(self):
        assert self.path == "/api/whoami-v2", self.path
        if self.headers.get("Authorization") == "Bearer wrong":
            return self.answer({"error": "no such token"}, 401)
        scope = {"entity": {"name": "me"}, "permissions": ["repo.write"]}
        role = {"secret": "write", "reader": "read"}.get(self.headers["Authorization"].split()[-1], "fineGrained")
        token = {"role": role, "fineGrained": {"scoped": [scope]}}
        return self.answer({"name": "me", "orgs": [{"name": "org"}], "auth": {"accessToken": token}})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.headers.get("Authorization") != "Bearer secret":
            return self.answer({"error": "no such token"}, 401)
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body).get("visibility"))
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
    server.files, server.created, server.address = {}, [], f"http://127.0.0.1:{server.server_port}"
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
from pathlib import Path
from tokencredit.errors import ConfigError
from tokencredit.text.data.hub import check_push, upload
os.environ["HF_TOKEN"] = "secret"
upload(Path(folder, "secret", "policy"), "org/critic", private=True)
told = []
for token, name in (("reader", "me/critic"), ("secret", "other/critic"), ("fine", "org/critic"), ("fine", "me/critic"),
                    ("secret", "a/b/c")):
    os.environ["HF_TOKEN"] = token
    try:
        told.append(check_push(name))
    except ConfigError as error:
        told.append(str(error))
results.append(told)
print(json.dumps(results))
"""
    folder = tmp_path_factory.mktemp("uploads")
    done = warm.python("-c", program, server.address, folder, *TRAIN, NO_PROXY="127.0.0.1")
    assert done.returncode == 0, done.stderr
    assert server.created == [None, "private"]
    server.shutdown()
    server.server_close()
    return folder, server.files, *json.loads(done.stdout.splitlines()[-1])


def test_the_policy_that_arrives_is_the_one_that_was_saved(uploads, tmp_path):
    folder, files, (code, errors), *_ = uploads
    assert code == 0, errors
    saved = folder / "secret" / "policy"
    assert files == {str(file.relative_to(saved)): file.read_bytes() for file in saved.rglob("*") if file.is_file()}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    AutoModelForCausalLM.from_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tmp_path)
    assert "This movie was really" in files["README.md"].decode()


def test_a_hub_that_refuses_the_login_is_found_before_training(uploads):
    folder, _, _, (code, errors), _ = uploads
    assert code == 2
    assert "run.push_to_hub is 'org/critic', and the hub refuses the login: " in errors.splitlines()[-1]
    assert "Traceback" not in errors
    assert not (folder / "wrong").exists()


def test_access_is_checked_by_login_name_and_token(uploads):
    *_, (reads, other, not_there, there, no_name) = uploads
    assert reads == "run.push_to_hub is 'me/critic', and me's token may not write there; give one with write access"
    assert "other is neither me nor one of its organizations" in other
    assert "me's token may not write there" in not_there
    assert there == "me"
    assert "it must be a name such as me/policy" in no_name
