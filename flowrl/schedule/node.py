"""A call, a stage or a publish on its way, and what waits for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .events import Call

OUTSIDE = -1  # the step of what is outside of steps


class Unfinished(NamedTuple):
    """What is on its way, for people: ``Unfinished(17, "reward.score", 3, running=True, held=False, ...)``.

    ``on`` are those that it waits for; ``busy`` those that run in a pool that it needs. ``version``: of a publish.
    """

    id: int
    title: str
    step: int
    running: bool
    held: bool
    pools: tuple[str, ...]
    on: tuple[int, ...]
    busy: tuple[int, ...]
    version: int | None


@dataclass(eq=False, slots=True)
class Node:
    """A call, a stage or a publish on its way. ``left`` counts what it waits for, as a whole and by chunk."""

    id: int
    kind: str  # call | stage | publish
    pools: tuple[str, ...]
    step: int
    call: Call | None = None
    worker: str = ""
    version: int = 0
    chunks: int = 1
    left: int = 0
    chunks_left: list[int] = field(default_factory=list[int])
    after: list[Node] = field(default_factory=list["Node"])  # those that wait for all of it
    after_chunk: list[Node] = field(default_factory=list["Node"])  # those that wait chunk by chunk
    begun: int = 0
    done: int = 0
    done_chunks: set[int] = field(default_factory=set[int])
    finished: bool = False  # its result is there
    entered: bool = False  # all its rows are in the engine
    held: bool = False
    windowed: bool = False  # its rows are complete when enough groups are taken, whoever made them

    def wait_for(self, other: Node | None) -> None:
        """Wait for the whole of another one, unless it is done."""
        if other is not None and not other.finished and other is not self:
            other.after.append(self)
            self.left += 1
