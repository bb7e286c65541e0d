"""A small HTTP server on loopback: the files of the page, and its questions as JSON for who shows the token."""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Mapping, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import isfinite
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from ..errors import UsageError
from ..graph.draw import palette
from .answers import QUESTIONS, Answers
from .read_question import BadQuestionError

PAGE = Path(__file__).with_name("page")
PORT = 8765  # the first that is tried
TRIED = 20
TOKEN_HEADER = "X-Flowrl-Token"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class PageServer(ThreadingHTTPServer):
    """Serves the page until it is shut down; ``address`` is what a browser opens."""

    daemon_threads = True

    def __init__(self, answers: Answers, port: int, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(32)
        super().__init__(("127.0.0.1", port), partial(_Handler, answers))

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no error."""


def open_server(answers: Answers, port: int | None = None) -> PageServer:
    """A server on a port of loopback: that one, or else the first free one. Raises UsageError for one in use."""
    for tried in range(PORT, PORT + TRIED) if port is None else (port,):
        try:
            return PageServer(answers, tried)
        except OSError as error:
            why = error.strerror or str(error)
        except OverflowError:
            why = "ports go from 0 to 65535"
    if port is None:
        return PageServer(answers, 0)
    raise UsageError(f"--port {port} cannot be opened: {why}.", fix="Name another one, or leave --port out.")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "flowrl", ""
    timeout = 60  # seconds that a connection may say nothing
    server: PageServer

    def __init__(self, answers: Answers, *connection: Any) -> None:
        self._answers = answers
        super().__init__(*connection)

    def do_GET(self) -> None:
        """Answer a question, or give a file of the page."""
        parts = urlsplit(self.path)
        try:
            words = parse_qs(parts.query, max_num_fields=100)
        except ValueError:
            self._say(400, "A question has at most 100 words.")
            return
        if not self._is_for_loopback():
            self._say(403, "This page is only for the names 127.0.0.1 and localhost.")
        elif parts.path.startswith("/api/"):
            self._answer(parts.path.removeprefix("/api/"), words)
        else:
            self._file(parts.path)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of questions; a token may be in them."""

    def _is_for_loopback(self) -> bool:
        """Whether the address that the browser was given names this host: no other page can have a name for it."""
        host = (self.headers.get("Host") or "").strip().lower()
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        return name in LOOPBACK

    def _answer(self, name: str, words: Mapping[str, list[str]]) -> None:
        given = self.headers.get(TOKEN_HEADER) or (words.get("token") or [""])[0]
        if not secrets.compare_digest(given.encode(), self.server.token.encode()):
            self._say(403, "Open the address that flowrl show has printed, with its token.")
            return
        if name not in QUESTIONS:
            self._say(404, "There is no such question.")
            return
        try:
            answer = QUESTIONS[name](self._answers, words)
            text = answer if isinstance(answer, str) else as_json(answer)
        except BadQuestionError as error:
            self._say(error.status, str(error))
        except (OSError, sqlite3.Error) as error:
            self._say(503, f"The index cannot be read: {error}")
        except Exception as error:  # what a damaged record may lead to; the page shows it where the answer would be
            self._say(500, f"The server cannot answer this: {type(error).__name__}: {error}")
        else:
            kind = "text/plain" if isinstance(answer, str) else "application/json"
            self._send(200, text.encode(errors="replace"), kind)

    def _file(self, path: str) -> None:
        name = "index.html" if path == "/" else path.removeprefix("/page/")
        if path == "/page/graph.css":
            self._send(200, graph_style().encode(), "text/css")
            return
        file = PAGE / name
        if "/" in name or file.suffix not in TYPES or not file.is_file():
            self._say(404, "There is no such page.")
            return
        self._send(200, file.read_bytes(), TYPES[file.suffix])

    def _say(self, status: int, text: str) -> None:
        self._send(status, json.dumps({"error": text}).encode(), "application/json")

    def _send(self, status: int, body: bytes, type: str) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{type}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def as_json(answer: Any) -> str:
    """Return an answer as JSON, which has no infinite numbers and none that are not a number: these are texts."""
    try:
        return json.dumps(answer, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(answer), allow_nan=False)


def _finite(answer: Any) -> Any:
    if isinstance(answer, float) and not isfinite(answer):
        return str(answer)
    if isinstance(answer, Mapping):
        return {name: _finite(one) for name, one in cast("Mapping[Any, Any]", answer).items()}
    if isinstance(answer, (list, tuple)):
        return [_finite(one) for one in cast("Sequence[Any]", answer)]
    return answer


def graph_style() -> str:
    """The style of a drawn graph as a style sheet, as the page allows no style inside a drawing."""
    return palette.STYLE.removeprefix("<style>").removesuffix("</style>")
