"""When a worker's weights are published, and which calls see which version: the rules of docs/schedule.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from .events import Call, Follower, Setup
from .node import OUTSIDE, Node


class Move(Protocol):
    """Makes the node of a stage or a publish."""

    def __call__(self, kind: str, worker: str, pool: str, step: int, version: int) -> Node: ...


@dataclass(eq=False, slots=True)
class Copies:
    """What is known of a trained worker and of the copy that generates."""

    follower: Follower
    created: int = 0  # publishes so far, those under way among them
    installed: int = 0  # the version of the generating copy
    dirty: int | None = None  # the step of the last update that is not published
    updates: list[Node] = field(default_factory=list[Node])  # not published, not finished
    readers: list[Node] = field(default_factory=list[Node])  # exact reads of the version before the next publish
    relaxed: list[Node] = field(default_factory=list[Node])  # relaxed reads that are not finished
    last: Node | None = None  # the last publish
    before: Node | None = None  # the last publish of what was updated outside of steps
    stage: Node | None = None  # the last stage
    waiting: list[Node] = field(default_factory=list[Node])  # held publishes


class PublishRules:
    """The copies of each trained worker that generates, and who waits for whom on their account.

    ``move`` makes a stage or a publish; ``ready`` is told of one that may wait for nothing more.
    """

    def __init__(self, setup: Setup, versions: Mapping[str, int], *, move: Move, ready: Callable[[Node], None]) -> None:
        self._exact = setup.staleness == 0
        self._settled = setup.settled
        self._move, self._ready = move, ready
        self.copies = {w: Copies(f, versions.get(w, 0), versions.get(w, 0)) for w, f in setup.followers.items()}
        self._last_update: dict[str, Node] = {}  # of a worker's trained copy
        self._reads: dict[str, list[Node]] = {}  # since that update

    # -- what happens in the program --------------------------------------------------------------------------------

    def opened(self) -> None:
        """A step is opened: what was updated before the first one is published."""
        for worker, copies in self.copies.items():
            if copies.dirty == OUTSIDE:
                self.publish(worker, copies, hold=False)
                copies.before = copies.last

    def closed(self, step: int) -> None:
        """A step is closed: its updates make a version."""
        for worker, copies in self.copies.items():
            if copies.dirty is not None:
                self.publish(worker, copies, hold=self._settled)
            # Those of the step before were held for the reads of this one, which are all issued by now.
            self.release(copies, [p for p in copies.waiting if p.step < step])

    def ended(self) -> None:
        """The program has returned."""
        for worker, copies in self.copies.items():
            if copies.dirty is not None:
                self.publish(worker, copies, hold=False)
            self.release(copies, list(copies.waiting))

    def resumed(self, worker: str, step: int) -> None:
        """An earlier machine held the publish of a step; it is held again where it would be."""
        self.copies[worker].dirty = step
        self.publish(worker, self.copies[worker], hold=self._settled)

    def read(self, node: Node, worker: str) -> None:
        """Have a call that reads the trained copy wait for the update before it."""
        node.wait_for(self._last_update.get(worker))
        self._reads.setdefault(worker, []).append(node)

    def see(self, node: Node, call: Call, worker: str) -> None:
        """Have a call that looks at the generating copy wait for the version that it must see."""
        copies = self.copies[worker]
        relaxed = call.relaxed and not self._exact
        if not relaxed and copies.dirty is not None:
            self.publish(worker, copies, hold=False)
        if not relaxed:
            self.release(copies, list(copies.waiting))
            node.wait_for(copies.last)
            copies.readers.append(node)
            return
        copies.relaxed.append(node)
        node.wait_for(copies.before)
        if self._settled:  # what an exact read has caused before it in the program, it sees too
            node.wait_for(copies.last if copies.last is not None and not copies.last.held else None)

    def change(self, node: Node, worker: str) -> None:
        """Have an update wait for all that must still see the weights as they are."""
        node.wait_for(self._last_update.get(worker))
        for reader in self._reads.pop(worker, ()):
            node.wait_for(reader)
        self._last_update[worker] = node
        copies = self.copies.get(worker)
        if copies is None:
            return
        copies.dirty = node.step
        copies.updates.append(node)
        if copies.follower.shared:  # the copy that generates is this one
            for reader in (*copies.readers, *copies.relaxed):
                node.wait_for(reader)
            node.wait_for(copies.last)
        else:
            node.wait_for(copies.stage)

    def publish(self, worker: str, copies: Copies, *, hold: bool) -> None:
        """Make what was updated so far the next version."""
        copies.created += 1
        follower, step = copies.follower, copies.dirty if copies.dirty is not None else OUTSIDE
        first = publish = self._move("publish", worker, follower.generate, step, copies.created)
        if not follower.shared:
            first = copies.stage = self._move("stage", worker, follower.train, step, copies.created)
            publish.wait_for(first)
        for update in copies.updates:
            first.wait_for(update)
        if first is not publish:
            self._ready(first)
        for reader in copies.readers:
            publish.wait_for(reader)
        publish.wait_for(copies.last)
        copies.last, copies.dirty = publish, None
        copies.updates, copies.readers = [], []
        publish.held = True
        copies.waiting.append(publish)
        if not hold:
            self.release(copies, list(copies.waiting))

    def release(self, copies: Copies, publishes: Iterable[Node]) -> None:
        """Let publishes go ahead, after the relaxed reads that are to see the version before."""
        for publish in publishes:
            copies.waiting.remove(publish)
            publish.held = False
            if self._settled:
                for reader in copies.relaxed:
                    publish.wait_for(reader)
            self._ready(publish)

    # -- what is done -------------------------------------------------------------------------------------------------

    def installed(self, publish: Node) -> None:
        """A publish is done."""
        self.copies[publish.worker].installed = publish.version

    def forget(self, node: Node, call: Call) -> None:
        """A call is done: nothing waits for it as a reader any more."""
        for worker in call.serves:
            copies = self.copies.get(worker)
            if copies is None:
                continue
            if node in copies.relaxed:
                copies.relaxed.remove(node)
            if node in copies.readers:
                copies.readers.remove(node)
        for worker in call.reads:
            reads = self._reads.get(worker)
            if reads and node in reads:
                reads.remove(node)
