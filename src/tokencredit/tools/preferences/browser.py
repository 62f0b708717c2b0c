"""Labelling on a page, served on this machine alone by the standard library's HTTP server.

Other sites' pages in the same browser can send requests here. Each request therefore needs the random token of the
page's address, and this server as its Host, so that no other name can be pointed at it. Requests that change something
need the page's own Origin.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader

from tokencredit.distributed.signals import raising_interrupt
from tokencredit.errors import ConfigError
from tokencredit.tools.preferences.labels import LABELS, Session, readable

HOST = "127.0.0.1"
TIMEOUT = 30
"""Seconds that a connection may take to send its request."""


class LabelServer(ThreadingHTTPServer):
    """Serves one page and its requests on a session."""

    daemon_threads = True

    def __init__(self, session: Session, port: int = 0):
        """Listen on this port of 127.0.0.1, 0 for any free one; raises `ConfigError` if it cannot be used."""
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            raise ConfigError(f"--port is {port}, which cannot be used: {error.strerror}; give another one") from error
        self.session, self.token = session, secrets.token_urlsafe(32)
        self.lock = threading.Lock()
        self.host = f"{HOST}:{self.server_address[1]}"
        self.url = f"http://{self.host}/{self.token}/"

    def server_bind(self) -> None:
        """Bind without the reverse look-up of the host's name, which may ask the network."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def serve(self) -> None:
        """Serve until the page or Ctrl-C stops it."""
        try:
            with raising_interrupt():
                self.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            pass
        finally:
            self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that has closed its connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def state(self) -> dict[str, Any]:
        """The current pair for the page, escaped, with the counts."""
        pair, counts = self.session.current(), self.session.counts()
        state = {"counts": counts, "total": len(self.session.pairs), "given": self.session.given(), "pair": None}
        if pair is None:
            return state
        texts = {name: readable(getattr(pair, name)) for name in ("prompt", "a", "b")}
        return state | {"pair": pair.key} | texts

    def act(self, action: str, request: dict[str, Any]) -> dict[str, Any] | None:
        """Do what the page asks; returns the new state, or None if the request is not valid."""
        with self.lock:
            if action == "label":
                current = self.session.current()
                if current is None or request.get("pair") != current.key or request.get("label") not in LABELS:
                    return None  # such as the second of two quick clicks
                self.session.label(str(request["label"]))
            elif action == "back":
                self.session.back()
            elif action == "stop":
                threading.Thread(target=self.shutdown).start()  # it waits for this request
            else:
                return None
            return self.state()


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of a `LabelServer`."""

    server: LabelServer
    timeout = TIMEOUT
    server_version, sys_version = "tokencredit", ""

    def do_GET(self) -> None:
        """Send the page, or the state."""
        path = self._path()
        if path == "":
            nonce = secrets.token_urlsafe(16)
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", page(nonce), nonce)
        elif path == "state":
            with self.server.lock:
                state = self.server.state()
            self._send_json(HTTPStatus.OK, state)
        else:
            self._refuse()

    def do_POST(self) -> None:
        """Label the current pair, go back or stop; send the new state."""
        path, length = self._path(), self.headers.get("Content-Length", "")
        own = self.headers.get("Origin") == f"http://{self.server.host}"
        plain = self.headers.get("Content-Type") == "application/json"
        if path is None or not own or not plain or not re.fullmatch("[0-9]{1,3}", length):
            return self._refuse()
        try:
            request = json.loads(self.rfile.read(int(length)))
            state = self.server.act(path, request) if isinstance(request, dict) else None
        except (ValueError, RecursionError):
            state = None
        except OSError as error:  # the disk is full
            return self._send_json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": error.strerror or str(error)})
        return self._refuse() if state is None else self._send_json(HTTPStatus.OK, state)

    def _path(self) -> str | None:
        """The address after the token; None for a request without it, or from another host's name."""
        if self.headers.get("Host") != self.server.host:
            return None
        _, _, rest = self.path.partition("/")
        token, slash, path = rest.partition("/")
        known = hmac.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode())
        return path if known and slash else None

    def _send_json(self, status: HTTPStatus, value: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(value))

    def _refuse(self) -> None:
        self.close_connection = True
        self._send(HTTPStatus.FORBIDDEN, "text/plain; charset=utf-8", "refused\n")

    def _send(self, status: HTTPStatus, kind: str, text: str, nonce: str | None = None) -> None:
        body = text.encode()
        own = f" script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self';" if nonce else ""
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": f"default-src 'none';{own} img-src data:; base-uri 'none'; "
            "form-action 'none'; frame-ancestors 'none'",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Print nothing: the terminal shows the address alone."""


def page(nonce: str) -> str:
    """The page; its texts come with its requests."""
    packages = ("tokencredit.tools.preferences", "tokencredit.report")  # the styles are the report's
    pages = Environment(loader=ChoiceLoader([*map(PackageLoader, packages)]), autoescape=True)
    return pages.get_template("label.html").render(nonce=nonce)
