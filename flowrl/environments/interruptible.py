"""A request over HTTP that another thread may interrupt, however far it has come."""

from __future__ import annotations

import http.client
import socket
import threading
from contextlib import suppress


class Interruptible:
    """A connection of http.client for one request: ``Interruptible(connection).connect()``, then the request as usual.

    The connection forgets its socket as it is closed, and already with the head of an answer after which the server
    closes it: so the socket is kept here. One that does its handshake for TLS goes on until that is over.
    """

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self._line: socket.socket | None = None  # once it is there to stay
        self._changing = threading.Lock()
        self.is_interrupted = False

    def connect(self) -> None:
        """Connect. Raises OSError where it fails, or was interrupted."""
        self._connection.connect()
        with self._changing:
            self._line = self._connection.sock
            if self.is_interrupted:
                raise ConnectionAbortedError("the request was interrupted as it began")

    def interrupt(self) -> None:
        """Have whoever waits for the request wait no more."""
        with self._changing:
            self.is_interrupted = True
            line = self._line or self._connection.sock
        if line is not None:
            with suppress(OSError):  # it is closed already
                line.shutdown(socket.SHUT_RDWR)
