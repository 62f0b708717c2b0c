"""The page for labels in a real browser, and the requests that its server refuses."""

import json
import re
import signal
import subprocess
import sys
import threading
from http.client import HTTPConnection
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from helpers.browser import complaints, requests
from helpers.commands import refused
from helpers.files import read_jsonl
from tokencredit.tools.preferences.browser import LabelServer
from tokencredit.tools.preferences.labels import Labels, Session, read_pairs, readable


@pytest.fixture
def start(pairs_file):
    """Starts servers on the pairs; all are stopped at the end."""
    started = []

    def serve(file="labels.jsonl"):
        server = LabelServer(Session(read_pairs(pairs_file, 1), Labels.open(pairs_file.parent / file)))
        thread = threading.Thread(target=server.serve)
        thread.start()
        started.append((server, thread))
        return server, thread

    yield serve
    for server, thread in started:
        server.shutdown()
        thread.join()


def labels(pairs_file):
    return [row["label"] for row in read_jsonl(pairs_file.with_name("labels.jsonl"))]


def status(browser):
    return browser.find_element(By.ID, "status").text


def wait(browser, text):
    WebDriverWait(browser, 20).until(lambda page: text in status(page))


def press(browser, key):
    browser.find_element(By.TAG_NAME, "body").send_keys(key)


def click(browser, text):
    buttons = browser.find_elements(By.TAG_NAME, "button")
    next(button for button in buttons if button.text.startswith(text)).click()


def texts(browser):
    return [browser.find_element(By.ID, name).get_property("textContent") for name in ("prompt", "a", "b")]


def test_pairs_are_labelled_by_keys_and_by_clicks(browser, start, pairs_file):
    server, thread = start()
    pairs = read_pairs(pairs_file, 1)
    browser.get(server.url)
    wait(browser, "0 of 3 labelled")
    requests(browser)
    assert texts(browser) == [readable(text) for text in (pairs[0].prompt, pairs[0].a, pairs[0].b)]
    press(browser, "a")
    wait(browser, "1 of 3 labelled: A 1, B 0, tie 0, skip 0.")
    assert labels(pairs_file) == ["A"], "before the next pair is shown"

    assert texts(browser) == [readable(text) for text in (pairs[1].prompt, pairs[1].a, pairs[1].b)], "as it stands"
    assert browser.find_elements(By.CSS_SELECTOR, "main img, main b, main script") == []
    click(browser, "Tie")
    wait(browser, "2 of 3 labelled: A 1, B 0, tie 1")
    press(browser, "u")
    wait(browser, "This pair is labelled tie; a new label replaces that.")
    assert [b.text for b in browser.find_elements(By.CSS_SELECTOR, "button.given")] == ["Tie t"]
    click(browser, "B is better")
    wait(browser, "2 of 3 labelled: A 1, B 1, tie 0")

    browser.refresh()
    wait(browser, "2 of 3 labelled")
    assert texts(browser)[0] == "system: Be brief.\nuser: Good?"
    press(browser, "s")
    wait(browser, "All pairs have a label. Stop ends the command.")
    assert not browser.find_element(By.ID, "pair").is_displayed()
    assert labels(pairs_file) == ["A", "tie", "B", "skip"]
    click(browser, "Stop")
    wait(browser, "Stopped; this page can be closed.")
    thread.join(20)
    assert not thread.is_alive()
    assert browser.title == "Labels — Tokencredit"
    assert {address.partition(server.token)[0] for address in requests(browser)} == {f"http://{server.host}/"}
    assert complaints(browser) == []


def test_the_page_says_when_a_label_is_not_saved_and_when_the_command_has_ended(browser, start, pairs_file):
    (pairs_file.parent / "gone").mkdir()
    server, thread = start("gone/labels.jsonl")
    (pairs_file.parent / "gone").rmdir()
    browser.get(server.url)
    wait(browser, "0 of 3 labelled")
    press(browser, "b")
    wait(browser, "Not saved: No such file or directory.")
    assert server.session.counts()["left"] == 3
    (pairs_file.parent / "gone").mkdir()
    press(browser, "b")
    wait(browser, "1 of 3 labelled")
    server.shutdown()
    thread.join()
    press(browser, "a")
    wait(browser, "The command has ended. Run it again: it continues where it stopped.")
    complaints(browser)


def test_a_pair_labelled_in_another_window_is_not_labelled_again(browser, start, pairs_file):
    server, _ = start()
    browser.get(server.url)
    wait(browser, "0 of 3 labelled")
    server.session.label("A")
    press(browser, "b")
    wait(browser, "The command refused this; reload the page.")
    assert labels(pairs_file) == ["A"]
    complaints(browser)


def ask(server, path, method="GET", body=None, **headers):
    """A request as another program makes it; `headers` replace or add, None removes."""
    own = {"Host": server.host}
    if method == "POST":
        own |= {"Origin": f"http://{server.host}", "Content-Type": "application/json"}
    own |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = HTTPConnection(server.host, timeout=20)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    body = None if body is None else body.encode()
    for name, value in (own | ({} if body is None else {"Content-Length": str(len(body))} | headers_of(own))).items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(body)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer.headers


def headers_of(own):
    return {name: value for name, value in own.items() if name == "Content-Length"}


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/", {}),
        ("/state", {}),
        ("/{token}", {}),
        ("/{token}x/state", {}),
        ("/{token}/../state", {}),
        ("/{token}/labels.jsonl", {}),
        ("/é/state", {}),
        ("/{token}/state", {"Host": "evil.example"}),
        ("/{token}/state", {"Host": None}),
        ("/{token}/state", {"Host": "localhost"}),
    ],
)
def test_requests_without_the_address_are_refused(path, headers, start):
    server, _ = start()
    path = path.format(token=server.token).encode().decode("latin-1")
    connection_path = path if path.isascii() else "/%C3%A9/state"
    assert ask(server, connection_path, **headers)[:2] == (403, "refused\n")


@pytest.mark.parametrize(
    ("action", "body", "headers"),
    [
        ("label", '{"pair": "KEY", "label": "A"}', {"Origin": "http://evil.example"}),
        ("label", '{"pair": "KEY", "label": "A"}', {"Origin": "null"}),
        ("label", '{"pair": "KEY", "label": "A"}', {"Origin": None}),
        ("label", '{"pair": "KEY", "label": "A"}', {"Host": "evil.example", "Origin": "http://evil.example"}),
        ("label", '{"pair": "KEY", "label": "A"}', {"Content_Type": "text/plain"}),
        ("label", '{"pair": "KEY", "label": "A"}', {"Content_Length": "1000"}),
        ("label", '{"pair": "KEY", "label": "A"}', {"Content_Length": "-1"}),
        ("label", '{"pair": "KEY", "label": "C"}', {}),
        ("label", '{"pair": "KEY", "label": ["A"]}', {}),
        ("label", '{"pair": "other", "label": "A"}', {}),
        ("label", "[" * 900, {}),
        ("label", "[]", {}),
        ("label", "\xff", {}),
        ("labels", "{}", {}),
        ("stop", "{}", {"Origin": "http://evil.example"}),
    ],
)
def test_other_sites_and_other_requests_change_nothing(action, body, headers, start, pairs_file):
    server, thread = start()
    body = body.replace("KEY", server.session.current().key)
    assert ask(server, f"/{server.token}/{action}", "POST", body, **headers)[0] == 403
    assert not pairs_file.with_name("labels.jsonl").exists()
    assert thread.is_alive()
    assert ask(server, f"/{server.token}/state")[0] == 200


def test_the_same_request_from_the_page_is_answered(start, pairs_file):
    server, _ = start()
    body = json.dumps({"pair": server.session.current().key, "label": "A"})
    code, text, _ = ask(server, f"/{server.token}/label", "POST", body)
    assert (code, json.loads(text)["counts"]["A"], labels(pairs_file)) == (200, 1, ["A"])


@pytest.mark.slow
def test_a_port_in_use_is_refused_in_one_line(start, pairs_file, capsys):
    server, _ = start()
    port = str(server.server_address[1])
    message = refused(capsys, "label", str(pairs_file), "--browser", "--port", port)
    assert message == f"--port is {port}, which cannot be used: Address already in use; give another one"


def test_answers_forbid_everything_that_the_page_does_not_need(start):
    server, _ = start()
    assert server.server_address[0] == "127.0.0.1"
    nonces = set()
    for path in ("", "state"):
        code, text, headers = ask(server, f"/{server.token}/{path}")
        policy = headers["Content-Security-Policy"]
        assert code == 200
        assert policy.startswith("default-src 'none';")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert (headers["Referrer-Policy"], headers["Cache-Control"]) == ("no-referrer", "no-store")
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in headers
        nonces |= set(re.findall(r"'nonce-([^']+)'", policy))
    for _ in range(2):
        text = ask(server, f"/{server.token}/")[1]
        nonces |= set(re.findall(r'<script nonce="([^"]+)">', text))
        assert re.findall(r"https?://", text) == []
        assert server.token not in text
    assert len(nonces) == 3, "each page has its own"


@pytest.mark.slow
def test_the_command_serves_until_ctrl_c(pairs_file, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "tokencredit", "label", str(pairs_file), "--browser"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env={"BROWSER": "true", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[3] / "src")},
    )
    url = process.stdout.readline().strip()
    host, token = re.fullmatch(r"http://(127\.0\.0\.1:\d+)/([\w-]{43})/", url).groups()
    connection = HTTPConnection(host, timeout=20)
    connection.request("GET", f"/{token}/state")
    assert json.loads(connection.getresponse().read())["total"] == 3
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.splitlines()[-1] == f"A 0, B 0, tie 0, skip 0, left 3 in {tmp_path}/labels.jsonl"
