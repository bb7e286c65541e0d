"""How settings of a call or a worker that are not the default are written in a drawing."""

from __future__ import annotations

from ..record import Node, WorkerInfo


def given(thing: Node | WorkerInfo) -> str:
    """The settings of a call or a worker as a call writes them: ``n=8, temperature=0.6``."""
    return ", ".join(f"{name}={said}" for name, said in thing.settings.items())
