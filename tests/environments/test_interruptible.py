"""Requests that another thread interrupts as they begin, as their connection is closed, and in the midst of a body."""

from __future__ import annotations

import http.client
import socket
import threading

import pytest

from flowrl.environments.interruptible import Interruptible


@pytest.fixture
def served():
    """A connection to a server that answers with a head alone, after which it would close; and its other end."""
    listens = socket.create_server(("127.0.0.1", 0))
    connection = http.client.HTTPConnection("127.0.0.1", listens.getsockname()[1], timeout=10)
    yield connection, listens
    connection.close()
    listens.close()


def test_one_that_is_interrupted_before_it_is_connected_does_not_begin(served):
    connection, _ = served
    request = Interruptible(connection)
    request.interrupt()
    with pytest.raises(OSError, match="interrupted"):
        request.connect()


def test_one_is_interrupted_in_a_body_after_which_the_connection_is_closed(served):
    connection, listens = served
    request = Interruptible(connection)
    request.connect()
    other, _ = listens.accept()
    with other:
        connection.request("GET", "/")
        other.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nsome")
        answer = connection.getresponse()
        assert connection.sock is None  # http.client has forgotten it
        threading.Timer(0.05, request.interrupt).start()
        assert answer.read() == b"some"


def test_one_whose_socket_goes_away_meanwhile_is_interrupted_without_an_error():
    class Closing(http.client.HTTPConnection):
        """A connection that another thread closes as soon as somebody has looked at its socket."""

        @property
        def sock(self):
            return sockets.pop()

        @sock.setter
        def sock(self, given):
            pass

    ours, other = socket.socketpair()
    sockets = [None, ours]
    with ours, other:
        Interruptible(Closing("127.0.0.1")).interrupt()
        assert other.recv(1) == b""
