"""Settings in words: what a call or a worker is given that is not the default."""

from __future__ import annotations

from ..record import Node, WorkerInfo
from .picture import Box, wrapped


def given(thing: Node | WorkerInfo) -> str:
    """The settings of a call or a worker as a call writes them: ``n=8, temperature=0.6``."""
    return ", ".join(f"{name}={said}" for name, said in thing.settings.items())


def given_rows(box: Box) -> tuple[str, ...]:
    """The same on the rows of a box."""
    return wrapped(given(box.node)) if box.node and box.node.settings else ()
