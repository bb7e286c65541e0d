"""What is said to a server of SGLang over HTTP, and what it answers."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from ...errors import ModelError, RunError

#: The hosts that a plan may name: keys and weights do not leave this one.
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SHOWN = 400  # characters of an answer that an error shows


class Refused(RunError):
    """A server that has answered, with a status that is no success."""


class Client:
    """``Client("http://127.0.0.1:30000", key="...", patience=120.0)``: every answer has to begin within ``patience``.

    Raises ModelError for an address of another host.
    """

    def __init__(self, url: str, key: str, patience: float) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname not in LOOPBACK or not parts.port or parts.path not in ("", "/"):
            raise ModelError(
                f"url: '{url}' is no server of this host.", fix="Write url: http://127.0.0.1:30000, with its port."
            )
        self.url, self.patience = url, patience
        self._host, self._port = parts.hostname, parts.port
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def ask(self, path: str, said: Any = None, *, seconds: float | None = None) -> Any:
        """Return what a server answers: JSON, or text. Without ``said`` it is asked by GET.

        Raises Refused where it does not do it, OSError where it is gone, and TimeoutError, an OSError too, where it
        has not answered in time.
        """
        connection = http.client.HTTPConnection(self._host, self._port, timeout=seconds or self.patience)
        try:
            answer = self._request(connection, path, said)
            text = answer.read().decode(errors="replace")
        except http.client.HTTPException as error:
            raise ConnectionError(f"the connection ended ({type(error).__name__})") from error
        finally:
            connection.close()
        return _read(text)

    def stream(self, path: str, said: Any) -> Stream:
        """Begin an answer that comes in parts; see :meth:`ask` for what is raised."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=None)
        try:
            connection.connect()
            line = connection.sock
            return Stream(line, self._request(connection, path, said))
        except http.client.HTTPException as error:
            connection.close()
            raise ConnectionError(f"the connection ended ({type(error).__name__})") from error
        except BaseException:
            connection.close()
            raise

    def _request(self, connection: http.client.HTTPConnection, path: str, said: Any) -> http.client.HTTPResponse:
        body = None if said is None else json.dumps(said)
        connection.request("GET" if said is None else "POST", path, body, self._headers)
        answer = connection.getresponse()
        if answer.status != 200:
            text = answer.read().decode(errors="replace")
            raise Refused(f"SGLang refuses {path} with status {answer.status}: {told(_read(text))}")
        return answer


class Stream:
    """The parts of an answer, as they come: JSON, until the server has said that it is the end."""

    def __init__(self, line: socket.socket, answer: http.client.HTTPResponse) -> None:
        self._line, self._answer = line, answer

    def __iter__(self) -> Iterator[Any]:
        try:
            for line in self._answer:
                kind, _, text = line.decode(errors="replace").strip().partition("data: ")
                if text == "[DONE]":
                    return
                if not kind and text:
                    yield _read(text)
        except (http.client.HTTPException, ValueError) as error:
            raise ConnectionError(f"the connection ended ({type(error).__name__})") from error
        raise ConnectionError("the connection ended before the answer")

    def close(self) -> None:
        """Have who waits for a part wait no more."""
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def told(answer: Any) -> str:
    """Return what an answer says of an error, in short."""
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        answer = error.get("message", error) if isinstance(error, dict) else error
    return str(answer).strip()[:_SHOWN] or "no word"
