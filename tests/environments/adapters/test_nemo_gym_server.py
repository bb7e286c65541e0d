"""A session at a server of NeMo Gym whose request is interrupted."""

from __future__ import annotations

import http.client
import socket
import threading

import pytest

from flowrl.environments.adapters.nemo_gym_server import ResourcesServer


@pytest.fixture
def listens():
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def server(listens):
    return ResourcesServer(f"http://127.0.0.1:{listens.getsockname()[1]}", seconds=5)


def test_a_request_that_is_interrupted_as_it_connects_is_not_made(server, monkeypatch):
    connect = http.client.HTTPConnection.connect
    monkeypatch.setattr(http.client.HTTPConnection, "connect", lambda self: (server.interrupt(), connect(self)))
    with pytest.raises(OSError, match="interrupted"):
        server.ask("/step", {})


def test_a_body_that_is_interrupted_is_no_answer(listens, server):
    def answer():
        other, _ = listens.accept()
        with other:
            other.recv(1 << 16)
            other.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{")
            looked.wait()
            server.interrupt()
            over.wait(10)

    looked, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=answer)
    read = http.client.HTTPResponse.read
    thread.start()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="interrupted"):
        patch.setattr(http.client.HTTPResponse, "read", lambda self, size: (looked.set(), read(self, size))[1])
        server.ask("/step", {})
    over.set()
    thread.join()
