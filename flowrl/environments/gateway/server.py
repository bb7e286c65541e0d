"""The server of the gateway: HTTP on loopback, a key for each session, and limits on what it takes."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from http import HTTPStatus
from types import ModuleType
from typing import Any

from ...errors import WorkerError
from . import anthropic_messages, chat_completions, responses
from .events import Events
from .requests import Refused, Reply, read_body
from .sessions import Piece, Session

_LARGEST = 8 << 20  # bytes of a body
_STRANGE = 64 << 10  # the same of who shows no key
_HEAD = 32 << 10  # bytes of a request line and headers
_CONNECTIONS = 4096
_READING = 30.0  # seconds that a request may take to come, once it has begun
_IDLE = 300.0  # seconds between two requests of a connection
_CLOSED = 10_000  # sessions whose end is remembered
_PROTOCOLS = {protocol.PATH: protocol for protocol in (chat_completions, responses, anthropic_messages)}
_EVENTS: Mapping[str, type[Events]] = {
    chat_completions.PATH: chat_completions.ChatEvents,
    responses.PATH: responses.ResponseEvents,
    anthropic_messages.PATH: anthropic_messages.MessageEvents,
}
_OVER = "the episode of this session is over"


class Gateway:
    """A server on 127.0.0.1, in a thread of its own. :meth:`open` gives a session; it listens at :attr:`address`."""

    def __init__(self, *, reading: float = _READING, idle: float = _IDLE, largest: int = _LARGEST) -> None:
        try:
            import h11
        except ImportError:
            raise WorkerError("The gateway needs the package h11.", fix="pip install h11.") from None
        self._h11 = h11
        self._reading, self._idle, self._largest = reading, idle, largest
        self._sessions: OrderedDict[str, Session | None] = OrderedDict()
        self._lock = threading.Lock()
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(begun,), daemon=True, name="flowrl-gateway")
        self._thread.start()
        begun.wait()

    @property
    def address(self) -> str:
        """Where it listens: ``http://127.0.0.1:41234``."""
        return f"http://127.0.0.1:{self._port}"

    def open(self) -> Session:
        """Open a session."""
        session = Session()
        with self._lock:
            self._sessions[session.token] = session
        session.at_end(lambda: self._forget(session.token))
        return session

    def close(self) -> None:
        """End all sessions, and the server."""
        with self._lock:
            sessions = [session for session in self._sessions.values() if session is not None]
        for session in sessions:
            session.close("the gateway is closed")
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _forget(self, token: str) -> None:
        with self._lock:
            self._sessions[token] = None
            self._sessions.move_to_end(token)
            closed = [name for name, session in self._sessions.items() if session is None]
            for name in closed[: max(0, len(closed) - _CLOSED)]:
                del self._sessions[name]

    def _run(self, begun: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024))
        self._port: int = server.sockets[0].getsockname()[1]
        begun.set()
        try:
            self._loop.run_forever()
        finally:
            server.close()
            for task in self._connections:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*self._connections, return_exceptions=True))
            self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "it runs as one"
        self._connections.add(task)
        try:
            if len(self._connections) <= _CONNECTIONS:
                await _Connection(self, self._h11, reader, writer).serve()
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass  # who asked has gone or says nothing, or the server ends
        finally:
            self._connections.discard(task)
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def answer(self, method: str, path: str, key: str, body: bytes) -> tuple[int, bytes | AsyncGenerator[bytes]]:
        """The status and the body of an answer, or events of a stream, which begins with its first text."""
        protocol = _PROTOCOLS.get(path)
        try:
            session = self._session(key)
            if path == "/v1/models" and method == "GET":
                return 200, _written({"object": "list", "data": [{"id": "policy", "object": "model", "created": 0}]})
            if protocol is None:
                raise Refused(404, f"there is no {path[:100]}; there are {', '.join(_PROTOCOLS)}")
            if method != "POST":
                raise Refused(405, f"{path} is asked with POST")
            asked: Mapping[str, Any] = read_body(body)
            if protocol is responses:
                asked = responses.with_whole_input(asked, session.responses)
            request = protocol.read(asked)
            pieces = session.ask_streamed(request)
            first = await (anext(pieces) if request.stream else session.ask(request))
        except Refused as refused:
            return refused.status, _written((protocol or chat_completions).refuse(refused.status, refused.why))

        def keep(reply: Reply) -> None:
            if protocol is responses and asked.get("store") is not False:
                session.keep(f"resp_{reply.id}", responses.items_behind(asked, reply))

        created = int(time.time())
        if request.stream:
            events = _EVENTS[protocol.PATH](first.id, first.prompt_tokens, request, created)
            return 200, _streamed(events, first, pieces, keep)
        assert isinstance(first, Reply), "pieces are of streams"
        keep(first)
        return 200, _written(protocol.write(first, request, created))

    def largest_body(self, key: str) -> int:
        """How many bytes are read for a key: few for one that opens nothing."""
        with self._lock:
            return self._largest if key in self._sessions else _STRANGE

    def _session(self, key: str) -> Session:
        with self._lock:
            if key not in self._sessions:
                raise Refused(401, "this key opens no session")
            session = self._sessions[key]
        if session is None:
            raise Refused(410, _OVER)
        return session


class _Connection:
    """One connection: requests one after another."""

    def __init__(
        self, gateway: Gateway, h11: ModuleType, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._gateway, self._h11, self._reader, self._writer = gateway, h11, reader, writer
        self._http: Any = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD)

    async def serve(self) -> None:
        """Answer requests until the connection ends."""
        h11 = self._h11
        while True:
            try:
                async with asyncio.timeout(self._gateway._idle):
                    request = await self._event()
                if not isinstance(request, h11.Request):
                    return
                key = _key(request.headers)
                most = self._gateway.largest_body(key)
                async with asyncio.timeout(self._gateway._reading):
                    body = await self._body(request, most)
                method, target = request.method.decode("ascii", "replace"), request.target.decode("ascii", "replace")
                if not await self._while_there(self._answer(method, target.partition("?")[0], key, body)):
                    return
            except h11.RemoteProtocolError as error:
                await self._refuse(error.error_status_hint, str(error))
            except Refused as refused:
                await self._refuse(refused.status, refused.why)
            if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                return
            self._http.start_next_cycle()

    async def _answer(self, method: str, path: str, key: str, body: bytes) -> None:
        status, answer = await self._gateway.answer(method, path, key, body)
        await self._send(status, answer)

    async def _refuse(self, status: int, why: str) -> None:
        if self._http.our_state in (self._h11.IDLE, self._h11.SEND_RESPONSE):
            await self._send(status, _written(chat_completions.refuse(status, why)))

    async def _while_there(self, job: Coroutine[Any, Any, None]) -> bool:
        """Do something to its end, unless the peer closes its side: then nobody waits for it. Whether it was done."""
        doing, gone = asyncio.ensure_future(job), asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                doing.result()
            return doing.done()
        finally:
            doing.cancel()
            gone.cancel()
            await asyncio.gather(doing, gone, return_exceptions=True)

    async def _gone(self) -> None:
        """Wait until the peer has closed; what it sends meanwhile is of its next requests."""
        kept = 0
        while kept < _HEAD:
            found = await self._reader.read(_HEAD)
            if not found:
                return
            kept += len(found)
            self._http.receive_data(found)
        await asyncio.Event().wait()  # it sends more than is read ahead

    async def _event(self) -> Any:
        while (event := self._http.next_event()) is self._h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                go_on = self._h11.InformationalResponse(status_code=100, headers=[])
                self._writer.write(self._http.send(go_on))
            self._http.receive_data(await self._reader.read(1 << 16))
        return event

    async def _body(self, request: Any, largest: int) -> bytes:
        said = dict(request.headers).get(b"content-length", b"0")
        if int(said) > largest:
            raise Refused(413, f"the body is larger than {largest} bytes")
        found = bytearray()
        while isinstance(event := await self._event(), self._h11.Data):
            found += event.data
            if len(found) > largest:
                raise Refused(413, f"the body is larger than {largest} bytes")
        return bytes(found)

    async def _send(self, status: int, answer: bytes | AsyncGenerator[bytes]) -> None:
        whole = isinstance(answer, bytes)
        headers = [
            ("content-type", "application/json" if whole else "text/event-stream"),
            ("cache-control", "no-store"),
        ]
        if isinstance(answer, bytes):
            headers.append(("content-length", str(len(answer))))
        if status == 429:
            headers.append(("retry-after", "1"))
        head = self._h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())
        self._writer.write(self._http.send(head))
        if isinstance(answer, bytes):
            await self._write(self._h11.Data(data=answer))
        else:
            async with aclosing(answer):
                async for part in answer:
                    await self._write(self._h11.Data(data=part))
        await self._write(self._h11.EndOfMessage())

    async def _write(self, event: Any) -> None:
        self._writer.write(self._http.send(event))
        async with asyncio.timeout(self._gateway._idle):  # ``wait_for`` of Python 3.11 may lose that it is cancelled
            await self._writer.drain()


async def _streamed(
    events: Events, first: Piece | Reply, pieces: AsyncGenerator[Piece | Reply], keep: Callable[[Reply], None]
) -> AsyncGenerator[bytes]:
    """The events of an answer. One that is refused in its midst says so."""
    async with aclosing(pieces):
        found = first
        try:
            while isinstance(found, Piece):
                yield events.text(found.text)
                found = await anext(pieces)
        except Refused as refused:
            yield events.fail(refused.status, refused.why)
            return
        keep(found)
        yield events.end(found)


def _key(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The key that a request shows."""
    found = {name: value.decode("latin-1") for name, value in headers if name in (b"authorization", b"x-api-key")}
    kind, _, key = found.get(b"authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else found.get(b"x-api-key", "").strip()


def _written(found: Any) -> bytes:
    return json.dumps(found).encode()
