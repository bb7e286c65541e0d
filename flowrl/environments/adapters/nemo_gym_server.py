"""A session at a resources server of NeMo Gym: requests over HTTP, with the cookies that say whose they are."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from ..interruptible import Interruptible

_LARGEST = 16 << 20  # bytes of an answer
_AWAY = (502, 503, 504)
_MCP = {"Accept": "application/json, text/event-stream"}


class ResourcesServer:
    """A session: ``ResourcesServer("http://127.0.0.1:8001", seconds=60)``. Its requests come one after another."""

    def __init__(self, url: str, *, seconds: float | None = None) -> None:
        self._address, self._seconds = urlsplit(url), seconds
        self._cookies: dict[str, str] = {}
        self._mcp: Mapping[str, Any] | None = None
        self._request: Interruptible | None = None  # the one under way

    def interrupt(self) -> None:
        """Have the request under way, if any, raise OSError; it may be called from another thread."""
        if (request := self._request) is not None:
            request.interrupt()

    def ask(
        self, path: str, body: Any = None, *, method: str = "POST", headers: Mapping[str, str] = {}
    ) -> tuple[int, str]:
        """The status and the text of an answer. Raises OSError where there is none."""
        address = self._address
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        connection = kind(address.hostname or "", address.port, timeout=self._seconds)
        request = self._request = Interruptible(connection)
        given = {"Content-Type": "application/json", **headers}
        if self._cookies:
            given["Cookie"] = "; ".join(f"{name}={value}" for name, value in self._cookies.items())
        try:
            sent = None if body is None else json.dumps(body).encode()
            request.connect()
            connection.request(method, address.path.rstrip("/") + path, sent, given)
            response = connection.getresponse()
            found = response.read(_LARGEST + 1)
            if request.is_interrupted:  # an answer whose length was not told ends with what had come
                raise ConnectionAbortedError(f"{address.geturl()}{path}: the request was interrupted")
        except http.client.HTTPException as error:
            raise OSError(f"{address.geturl()}{path}: {type(error).__name__}: {error}") from error
        finally:
            self._request = None
            connection.close()
        if len(found) > _LARGEST:
            raise OSError(f"the answer of {address.geturl()}{path} is longer than {_LARGEST} bytes")
        for cookie in response.headers.get_all("Set-Cookie", []):
            name, _, value = cookie.split(";", 1)[0].partition("=")
            self._cookies[name.strip()] = value.strip()
        return response.status, found.decode(errors="replace")

    def answer(
        self, path: str, body: Any = None, *, method: str = "POST", headers: Mapping[str, str] = {}
    ) -> dict[str, Any]:
        """The object that is answered. Raises RuntimeError for an error of the server, OSError where it is away."""
        status, said = self.ask(path, body, method=method, headers=headers)
        where = f"{self._address.geturl()}{path}"
        if status in _AWAY:
            raise OSError(f"{where} answered with status {status}: {said[:300]}")
        try:
            found = json.loads(said) if status < 400 else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise RuntimeError(f"{where} answered with status {status}: {said[:300]}")
        return found

    def begin(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Seed the session for a row; the tools that it has over MCP, besides those of the row."""
        self._mcp = self.answer("/seed_session", row).get("mcp")
        if self._mcp is None:
            return []
        listed = self._mcp_answer("tools/list", {}).get("tools", [])
        kept = ("name", "description")
        return [
            {"type": "function", "parameters": tool.get("inputSchema", {}), **{n: tool[n] for n in kept if n in tool}}
            for tool in listed
        ]

    def call(self, name: str, arguments: Mapping[str, Any], *, over_mcp: bool) -> str:
        """What a tool gives, or says against a call."""
        if not over_mcp:
            return self.ask(f"/{quote(name, safe='')}", arguments)[1]
        found = self._mcp_answer("tools/call", {"name": name, "arguments": arguments})
        return "\n".join(part["text"] for part in found.get("content", []) if part.get("type") == "text")

    def _mcp_answer(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        assert self._mcp is not None, "the session has told where"
        asked = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        headers = {**_MCP, **self._mcp.get("headers", {})}
        found = self.answer(self._mcp.get("url_path", "/mcp"), asked, headers=headers)
        if not isinstance(found.get("result"), dict):
            raise RuntimeError(f"{method} over MCP gave no result: {json.dumps(found)[:300]}")
        return found["result"]


def offered(paths: Sequence[str], name: str) -> bool:
    """Whether a server with these paths may have a tool: a path of its name, or one that takes any name."""
    return f"/{name}" in paths or any(path.startswith("/{") for path in paths)
