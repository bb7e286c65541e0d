"""An answer as the events of a stream: pieces of its text as they come, then what is left of it, and its end."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from .requests import Reply, Request


class Events(ABC):
    """The events of one answer in a protocol. ``id`` and ``prompt_tokens`` are those of its reply.

    :meth:`text` is given pieces, which the content of the reply begins with; then :meth:`end` is given the reply, or
    :meth:`fail` why there is none.
    """

    def __init__(self, id: str, prompt_tokens: int, request: Request, created: int) -> None:
        self.id, self.prompt_tokens, self.request, self.created = id, prompt_tokens, request, created
        self.sent = ""  # of the text
        self.has_begun = False

    def text(self, piece: str) -> bytes:
        """A piece of the text."""
        self.sent += piece
        return b"".join([*self._first(), *self.piece(piece)])

    def end(self, reply: Reply) -> bytes:
        """What is left of an answer, and its end."""
        rest = reply.content[len(self.sent) :]
        return b"".join([*self._first(), *self.finish(reply, rest)])

    @abstractmethod
    def fail(self, status: int, why: str) -> bytes:
        """Why the answer does not come to its end."""

    @abstractmethod
    def begin(self) -> Iterator[bytes]:
        """The events before any text."""

    @abstractmethod
    def piece(self, text: str) -> Iterator[bytes]:
        """The events of a piece of text."""

    @abstractmethod
    def finish(self, reply: Reply, rest: str) -> Iterator[bytes]:
        """The events of the rest of the text, which may be empty, and of all behind it."""

    def _first(self) -> Iterator[bytes]:
        if not self.has_begun:
            self.has_begun = True
            yield from self.begin()


def named_event(kind: str, found: Mapping[str, Any]) -> bytes:
    """An event with its type beside its data and in it."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **found})}\n\n".encode()
