"""The gateway refuses what is malformed, huge or hostile, hangs for none of it, and goes on answering others."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import threading
from http import HTTPStatus

import pytest

pytest.importorskip("h11", reason="the gateway needs the package h11")

from flowrl.environments.gateway import server, sessions
from flowrl.environments.gateway.requests import Reply
from flowrl.environments.gateway.server import Gateway
from flowrl.environments.gateway.sessions import Ended, ModelCall

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
GOOD = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}


@pytest.fixture(scope="module")
def gateway():
    made = Gateway(reading=60.0, idle=60.0, largest=200_000)
    yield made
    made.close()


@pytest.fixture(scope="module")
def session(gateway):
    """A session whose calls are answered with what was asked last."""
    opened = gateway.open()

    async def answer():
        while isinstance(call := await opened.take(), ModelCall):
            said = call.request.messages[-1]["content"]
            call.answer(Reply("1", said, (), "stop", 1, 1))

    thread = threading.Thread(target=lambda: asyncio.run(answer()), daemon=True)
    thread.start()
    yield opened
    opened.end(Ended())
    thread.join(60)
    assert not thread.is_alive()


def exchange(gateway, sent, *, more=True):
    """What comes back for these bytes, until the server closes; with ``more=False`` nothing further is sent."""
    with socket.create_connection(("127.0.0.1", gateway._port), timeout=60) as peer:
        try:
            peer.sendall(sent)
            if not more:
                peer.shutdown(socket.SHUT_WR)
            found = b""
            while part := peer.recv(65536):
                found += part
        except ConnectionError:
            pass
        return found


def post(token, path=CHAT, body=b"", *, method="POST", close=True, **headers):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Host": "x", "Content-Length": len(body), "Authorization": f"Bearer {token}"}
    given |= {"Connection": "close"} if close else {}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{n}: {v}" for n, v in given.items() if v is not None)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def status(answer):
    return int(answer.split(b" ", 2)[1]) if answer else 0


def message(**more):
    return {**GOOD, "messages": [{"role": "user", "content": "x", **more}]}


CASES = {
    # of HTTP
    "nothing": (lambda t: b"", 0),
    "no HTTP": (lambda t: b"hello\r\n\r\n", 400),
    "noise": (lambda t: bytes(range(256)) * 4 + b"\r\n\r\n", 400),
    "TLS": (lambda t: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 40 + b"\r\n\r\n", 400),
    "an old version": (lambda t: b"POST / HTTP/0.9\r\n\r\n", 401),
    "a later version": (lambda t: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 401),
    "a header that never ends": (lambda t: b"POST / HTTP/1.1\r\nX: " + b"x" * 100_000, 431),
    "very many headers": (lambda t: b"POST / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n", 431),
    "a long path": (lambda t: b"POST /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n", 431),
    "no host": (lambda t: post(t, body=GOOD, Host=None), 400),
    "two lengths": (lambda t: post(t, body=GOOD, content_length="5\r\nContent-Length: 6"), 400),
    "a length that is negative": (lambda t: post(t, body=GOOD, Content_Length="-1"), 400),
    "a length that is no number": (lambda t: post(t, body=GOOD, Content_Length="many"), 400),
    "a length that is huge": (lambda t: post(t, body=GOOD, Content_Length="9" * 18), 413),
    "a length and chunks": (lambda t: post(t, body=b"5\r\nhello\r\n0\r\n\r\n", Transfer_Encoding="chunked"), 400),
    "chunks that are none": (
        lambda t: post(t, body=b"zz\r\nhello\r\n", Content_Length=None, Transfer_Encoding="chunked"),
        400,
    ),
    "chunks without end": (
        lambda t: post(
            t,
            body=b"ffff\r\n" + b"x" * 65535 + b"\r\n" + (b"ffff\r\n" + b"x" * 65535 + b"\r\n") * 4,
            Content_Length=None,
            Transfer_Encoding="chunked",
        ),
        413,
    ),
    "an unknown encoding": (lambda t: post(t, body=GOOD, Content_Length=None, Transfer_Encoding="gzip"), 501),
    "a header with a line break": (lambda t: post(t, body=GOOD, X="a\r\n b\0c"), 400),
    # of who may ask
    "no key": (lambda t: post(t, body=GOOD, Authorization=None), 401),
    "another key": (lambda t: post("x" * 43, body=GOOD), 401),
    "an empty key": (lambda t: post("", body=GOOD), 401),
    "a key with noise": (lambda t: post("\xff\xfe", body=GOOD), 401),
    "another kind of key": (lambda t: post(t, body=GOOD, Authorization=f"Basic {t}"), 401),
    "a large body without a key": (lambda t: post("x", body=b"x" * 100_000), 413),
    # of paths
    "another path": (lambda t: post(t, "/", GOOD), 404),
    "a path that climbs": (lambda t: post(t, "/v1/../../etc/passwd", GOOD), 404),
    "an address of elsewhere": (lambda t: post(t, "http://example.com/v1/chat/completions", GOOD), 404),
    "another method": (lambda t: post(t, method="DELETE"), 405),
    "get": (lambda t: post(t, method="GET"), 405),
    # of bodies
    "no body": (lambda t: post(t), 400),
    "a body that is large": (lambda t: post(t, body={**GOOD, "x": "x" * 300_000}), 413),
    "no JSON": (lambda t: post(t, body=b"{"), 400),
    "no UTF-8": (lambda t: post(t, body=b'{"messages": "\xff"}'), 400),
    "a list": (lambda t: post(t, body=[]), 400),
    "deep": (lambda t: post(t, body=b"[" * 100_000), 400),
    "not a number": (lambda t: post(t, body=b'{"max_tokens": NaN}'), 400),
    "a number of many digits": (lambda t: post(t, body=b'{"max_tokens": ' + b"9" * 9000 + b"}"), 400),
    "no messages": (lambda t: post(t, body={}), 400),
    "messages that are none": (lambda t: post(t, body={"messages": "hello"}), 400),
    "an empty conversation": (lambda t: post(t, body={"messages": []}), 400),
    "a message that is a text": (lambda t: post(t, body={"messages": ["hello"]}), 400),
    "very many messages": (lambda t: post(t, body={"messages": [0] * 5000}), 400),
    "a message without a role": (lambda t: post(t, body={"messages": [{"content": "x"}]}), 400),
    "an unknown role": (lambda t: post(t, body=message(role="root")), 400),
    "a role that is a list": (lambda t: post(t, body=message(role=["user"])), 400),
    "a content that is a number": (lambda t: post(t, body=message(content=7)), 400),
    "a picture": (
        lambda t: post(t, body=message(content=[{"type": "image_url", "image_url": {"url": "file:///"}}])),
        400,
    ),
    "a part without text": (lambda t: post(t, body=message(content=[{"type": "text"}])), 400),
    "half of a pair": (lambda t: post(t, body=b'{"messages": [{"role": "user", "content": "\\ud800"}]}'), 400),
    "the assistant last": (lambda t: post(t, body=message(role="assistant")), 400),
    "calls that are none": (lambda t: post(t, body=message(role="assistant", tool_calls=[{"function": 3}])), 400),
    "tools that are none": (lambda t: post(t, body={**GOOD, "tools": [{}]}), 400),
    "a tool without a name": (lambda t: post(t, body={**GOOD, "tools": [{"function": {"name": 3}}]}), 400),
    "several answers": (lambda t: post(t, body={**GOOD, "n": 4}), 400),
    "no tokens": (lambda t: post(t, body={**GOOD, "max_tokens": 0}), 400),
    "tokens that are a text": (lambda t: post(t, body={**GOOD, "max_tokens": "9"}), 400),
    "tokens that are true": (lambda t: post(t, body={**GOOD, "max_tokens": True}), 400),
    "a stream that is a text": (lambda t: post(t, body={**GOOD, "stream": "yes"}), 400),
    "stops that are empty": (lambda t: post(t, body={**GOOD, "stop": [""]}), 400),
    "very many stops": (lambda t: post(t, body={**GOOD, "stop": ["x"] * 17}), 400),
    "a model that is a number": (lambda t: post(t, body={**GOOD, "model": 3}), 400),
    # of the other protocols
    "no input": (lambda t: post(t, RESPONSES, {}), 400),
    "an input of a kept response": (
        lambda t: post(t, RESPONSES, {"input": "x", "previous_response_id": "resp_1"}),
        400,
    ),
    "a kept response that is a number": (
        lambda t: post(t, RESPONSES, {"input": "x", "previous_response_id": 7}),
        400,
    ),
    "an input of a kept conversation": (lambda t: post(t, RESPONSES, {"input": "x", "conversation": "conv_1"}), 400),
    "an item of another kind": (lambda t: post(t, RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}), 400),
    "a call without an id": (lambda t: post(t, RESPONSES, {"input": [{"type": "function_call", "name": "f"}]}), 400),
    "a tool of the server": (lambda t: post(t, RESPONSES, {"input": "x", "tools": [{"type": "web_search"}]}), 400),
    "messages without max_tokens": (lambda t: post(t, MESSAGES, {"messages": GOOD["messages"]}), 400),
    "messages of a system": (lambda t: post(t, MESSAGES, message(role="system")), 400),
    "messages with a document": (lambda t: post(t, MESSAGES, message(content=[{"type": "document"}])), 400),
    "messages with a result of a number": (
        lambda t: post(t, MESSAGES, message(content=[{"type": "tool_result", "tool_use_id": 3}])),
        400,
    ),
    "messages with a call of the user": (
        lambda t: post(t, MESSAGES, message(content=[{"type": "tool_use", "name": "f", "input": {}}])),
        400,
    ),
    "messages with an input that is a list": (
        lambda t: post(
            t, MESSAGES, message(role="assistant", content=[{"type": "tool_use", "name": "f", "input": []}])
        ),
        400,
    ),
    "messages with a schema that is a text": (
        lambda t: post(t, MESSAGES, {**GOOD, "tools": [{"name": "f", "input_schema": "x"}]}),
        400,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_refused(gateway, session, name):
    sent, expected = CASES[name]
    found = exchange(gateway, sent(session.token), more=name != "nothing")
    assert status(found) == expected, found[:300]
    assert not found or HTTPStatus(expected).phrase.encode() in found.split(b"\r\n")[0], (
        "clients show it where they do not show the body"
    )
    if expected:
        assert json.JSONDecoder().raw_decode(found.split(b"\r\n\r\n", 1)[1].decode())[0]["error"]
    assert b"Traceback" not in found and session.token.encode() not in found
    assert status(exchange(gateway, post(session.token, body=GOOD))) == 200


def test_good_requests_are_answered(gateway, session):
    def body(found):
        return json.loads(found.split(b"\r\n\r\n", 1)[1])

    found = body(exchange(gateway, post(session.token, body=GOOD)))
    assert found["choices"][0]["message"]["content"] == "hello" and found["object"] == "chat.completion"
    parts = {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    found = body(exchange(gateway, post(session.token, body={"messages": [parts]})))
    assert found["choices"][0]["message"]["content"] == "a\nb"
    found = body(exchange(gateway, post(session.token, MESSAGES, {**GOOD, "system": "s"})))
    assert found["content"] == [{"type": "text", "text": "hello"}] and found["stop_reason"] == "end_turn"
    found = exchange(gateway, post(session.token, MESSAGES, GOOD, Authorization=None, x_api_key=session.token))
    assert status(found) == 200
    assert body(exchange(gateway, post(session.token, "/v1/models", method="GET")))["data"][0]["id"] == "policy"
    given = {"instructions": "s", "input": [{"role": "user", "content": [{"type": "input_text", "text": "y"}]}]}
    found = body(exchange(gateway, post(session.token, RESPONSES, given)))
    assert found["output"][0]["content"][0]["text"] == "y" and found["status"] == "completed"
    chunked = post(session.token, body=b"", Content_Length=None, Transfer_Encoding="chunked")
    sent = json.dumps(GOOD).encode()
    assert status(exchange(gateway, chunked + f"{len(sent):x}\r\n".encode() + sent + b"\r\n0\r\n\r\n")) == 200


def test_a_connection_answers_many_requests(gateway, session):
    two = post(session.token, body=GOOD, close=False) + post(session.token, body=GOOD)
    assert exchange(gateway, two).count(b"HTTP/1.1 200") == 2


def test_who_says_nothing_is_left_and_others_are_answered(gateway, session):
    silent = [socket.create_connection(("127.0.0.1", gateway._port), timeout=60) for _ in range(20)]
    for peer in silent:
        peer.sendall(b"POST / HTTP/1.1\r\nX: ")
    assert status(exchange(gateway, post(session.token, body=GOOD))) == 200
    for peer in silent:
        peer.close()


def test_a_body_that_stops_and_a_peer_that_idles_are_left():
    made = Gateway(reading=0.2, idle=0.2)
    try:
        assert exchange(made, post(made.open().token, body=GOOD, Content_Length="500")) == b""
        assert exchange(made, b"POST / HTTP/1.1\r\nX: ") == b""
    finally:
        made.close()


def test_who_leaves_while_asking_harms_nobody(gateway, session):
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", gateway._port), timeout=60) as peer:
            peer.sendall(post(session.token, body={**GOOD, "stream": True}))
    assert status(exchange(gateway, post(session.token, body=GOOD))) == 200


def test_a_session_has_so_many_calls_at_once_and_in_a_second(gateway, monkeypatch):
    opened = gateway.open()
    monkeypatch.setattr(sessions, "_AT_ONCE", 3)
    found = queue.Queue()
    threads = [
        threading.Thread(target=lambda: found.put(exchange(gateway, post(opened.token, body=GOOD)))) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    refused = [found.get(timeout=60) for _ in range(2)]  # the others wait for an answer
    opened.close("it is over")
    rest = [found.get(timeout=60) for _ in range(3)]
    assert [*map(status, refused), *map(status, rest)] == [429, 429, 410, 410, 410]
    assert all(b"retry-after: 1" in answer for answer in refused)
    assert status(exchange(gateway, post(opened.token, body=GOOD))) == 410


def test_the_rate_of_a_session_is_limited(monkeypatch):
    monkeypatch.setattr(sessions.time, "monotonic", lambda: 1000.0)
    opened = sessions.Session(_since=1000.0)
    for _ in range(200):
        opened._admit()
    with pytest.raises(server.Refused) as refused:
        opened._admit()
    assert refused.value.status == 429
    monkeypatch.setattr(sessions.time, "monotonic", lambda: 1000.1)
    opened._admit()


def test_a_gateway_that_is_closed_ends_all_that_waits():
    made = Gateway()
    opened = made.open()
    found = []
    thread = threading.Thread(target=lambda: found.append(exchange(made, post(opened.token, body=GOOD))))
    thread.start()

    async def taken():
        return await opened.take()

    assert isinstance(asyncio.run(taken()), ModelCall)
    made.close()
    thread.join(60)
    assert status(found[0]) in (0, 410) and not made._thread.is_alive()
