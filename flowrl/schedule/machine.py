"""When each call starts: a pure state machine. Events in, commands out; no clock, no threads, no tensors.

The rules are those of docs/schedule.md. In short: a call starts when its inputs are done and its pools are free, the
earliest in program order first; calls that see the trained weights keep their order with the updates; what sees the
generating copy waits for the versions that it must see; a step commits, in order, when its calls and its publish are
done, and step k opens when at most S steps before it are uncommitted.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .events import (
    Call,
    Closed,
    Command,
    Commit,
    Ended,
    Entered,
    Event,
    Finished,
    Follower,
    Grouped,
    Issued,
    Opened,
    Publish,
    Resumed,
    Setup,
    Stage,
    Start,
    Take,
)
from .group_window import Window
from .pool_residency import Residency

OUTSIDE = -1  # the step of what is outside of steps


class IllegalEvent(Exception):
    """An event that cannot happen in this state: a bug of whoever drives the machine. It tells the whole story."""


@dataclass(eq=False, slots=True)
class _Node:
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
    after: list[_Node] = field(default_factory=list["_Node"])  # those that wait for all of it
    after_chunk: list[_Node] = field(default_factory=list["_Node"])  # those that wait chunk by chunk
    begun: int = 0
    done: int = 0
    done_chunks: set[int] = field(default_factory=set[int])
    finished: bool = False  # its result is there
    entered: bool = False  # all its rows are in the engine
    held: bool = False
    windowed: bool = False  # its rows are complete when enough groups are taken, whoever made them


@dataclass(eq=False, slots=True)
class _Copies:
    """What is known of a trained worker and of the copy that generates."""

    follower: Follower
    created: int = 0  # publishes so far, those under way among them
    installed: int = 0  # the version of the generating copy
    dirty: int | None = None  # the step of the last update that is not published
    updates: list[_Node] = field(default_factory=list[_Node])  # not published, not finished
    readers: list[_Node] = field(default_factory=list[_Node])  # exact reads of the version before the next publish
    relaxed: list[_Node] = field(default_factory=list[_Node])  # relaxed reads that are not finished
    last: _Node | None = None  # the last publish
    before: _Node | None = None  # the last publish of what was updated outside of steps
    stage: _Node | None = None  # the last stage
    waiting: list[_Node] = field(default_factory=list[_Node])  # held publishes
    pinned: dict[int, int] = field(default_factory=dict[int, int])  # version: pinned reads that are not finished
    awaited: dict[int, list[_Node]] = field(default_factory=dict[int, "list[_Node]"])  # pinned reads of a later one


class Machine:
    """The schedule of one program.

    >>> machine = Machine(Setup(("train", "rollout"), {"actor": Follower("train", "rollout")}))
    >>> machine.handle(Opened(0))
    []
    >>> machine.handle(Issued(Call(0, 0, "actor.generate", ("rollout",), serves=("actor",))))
    [Start(id=0, chunk=0, chunks=1, pools=('rollout',), versions={'actor': 0}, offload=(), onload=())]
    """

    def __init__(
        self,
        setup: Setup,
        *,
        committed: int = 0,
        versions: Mapping[str, int] | None = None,
        held: Iterable[str] = (),
    ) -> None:
        """``committed``, ``versions`` of the generating copies, and workers with a ``held`` publish: where an earlier
        machine was when everything that it had been told of was done."""
        self.setup = setup
        self.committed = committed  # steps committed so far: the next to commit has this number
        self.exact = setup.staleness == 0
        # With fifo and drain at S=1 the version of every read is settled by the program alone, not by timing.
        self.settled = setup.staleness == 1 and setup.order == "fifo" and setup.publish == "drain"
        self._pinning = bool(setup.pins)
        self._nodes: dict[int, _Node] = {}  # whose results are not there yet
        self._started: dict[int, _Node] = {}  # that run
        self._copies = {w: _Copies(f) for w, f in setup.followers.items()}
        for worker, version in (versions or {}).items():
            if worker in self._copies:
                self._copies[worker].created = self._copies[worker].installed = version
        for version in setup.pins.values():
            for copies in self._copies.values():
                copies.pinned[version] = copies.pinned.get(version, 0) + 1
        self._running: dict[str, dict[int, _Node]] = {p: {} for p in setup.pools}
        self._ready: list[tuple[int, int, int, _Node]] = []
        self._instants: list[int] = []  # calls that take no time and run, with an entry for each chunk
        self._last_update: dict[str, _Node] = {}  # of a worker's trained copy
        self._reads: dict[str, list[_Node]] = {}  # since that update
        self._left: dict[int, int] = {}  # unfinished calls and publishes by step
        self._closed: set[int] = set()
        self._open = -1
        self._moves = 0
        self.residency = Residency(setup.memory)
        self._window = Window(setup.staleness, setup.window) if setup.order == "window" else None
        self._out: list[Command] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            Resumed: lambda e: None,
            Opened: self._opened,
            Issued: lambda e: self._issued(e.call),
            Closed: self._close,
            Entered: self._has_entered,
            Grouped: self._grouped,
            Finished: self._has_finished,
            Ended: self._end,
        }
        for worker in held:
            self._left[committed] = 0
            self._closed.add(committed)
            self._copies[worker].dirty = committed
            self._publish(worker, self._copies[worker], hold=self.settled)

    # -- what drives it -----------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Command]:
        """Take an event in; return what is to be done now, in this order. Raises IllegalEvent."""
        self._out = []
        self._handlers[type(event)](event)
        if self._ready:
            self._start_ready()
        return self._out

    def may_open(self, step: int) -> bool:
        """Whether the program may enter a step: at most S earlier ones are uncommitted."""
        return step - self.committed <= self.setup.staleness

    @property
    def idle(self) -> bool:
        """Whether nothing is running, and nothing waits but publishes that are held for the next step."""
        return not self._ready and not self._started and all(n.held for n in self._nodes.values())

    def pending(self, id: int) -> bool:
        """Whether the result of a call is still to come."""
        return id in self._nodes

    def version(self, worker: str) -> int:
        """Publishes of a worker so far, those under way among them: the version of what is trained next."""
        return self._copies[worker].created if worker in self._copies else 0

    def held(self) -> dict[str, int]:
        """Workers with a publish that waits for the next step, and its version: what a checkpoint has to keep."""
        return {w: c.waiting[0].version for w, c in self._copies.items() if c.waiting}

    def story(self) -> str:
        """Everything that is not finished, and what each thing waits for: for errors, and for people."""
        lines = [f"{self.committed} steps committed, step {self._open} open, closed {sorted(self._closed) or 'none'}"]
        for node in self._nodes.values():
            running = node.id in self._started
            said = "running" if running else "held" if node.held else f"waits for {node.left} things"
            if not running and not node.held and not node.left and not any(node.chunks_left):
                busy = [p for p in node.pools if self._running[p]]
                said = f"waits for pool {', '.join(busy)}" if busy else "ready"
            lines.append(f"  {self._title(node)} of step {node.step}: {said}")
        return "\n".join(lines)

    # -- events -------------------------------------------------------------------------------------------------

    def _opened(self, event: Opened) -> None:
        if not self.may_open(event.step) or self._open >= 0:
            raise IllegalEvent(f"step {event.step} was opened too early.\n{self.story()}")
        self._open = event.step
        self._left.setdefault(event.step, 0)
        for worker, copies in self._copies.items():
            if copies.dirty == OUTSIDE:
                self._publish(worker, copies, hold=False)
                copies.before = copies.last

    def _issued(self, call: Call) -> None:
        if call.id in self._nodes or (call.step >= 0 and call.step != self._open):
            raise IllegalEvent(f"call {call.id} ({call.title}) of step {call.step} was issued twice.\n{self.story()}")
        node = _Node(call.id, "call", call.pools, call.step, call)
        self._nodes[call.id] = node
        if call.step >= 0:
            self._left[call.step] += 1
        if call.groups and call.relaxed and self._window is not None:
            node.windowed = True
            self._window.admit(call.id, call.groups)
        node.chunks = self.setup.chunks if call.rowwise and not node.windowed else 1
        node.chunks_left = [0] * node.chunks
        for id in call.inputs:
            self._wait_for_input(node, id)
        for worker in call.reads:
            self._wait(node, self._last_update.get(worker))
            self._reads.setdefault(worker, []).append(node)
        for worker in call.serves:
            if worker in self._copies:
                self._see(node, call, worker, self._copies[worker])
        if call.updates is not None:
            self._change(node, call.updates)
        self._ready_if(node)

    def _close(self, event: Closed) -> None:
        if event.step != self._open:
            raise IllegalEvent(f"step {event.step} was closed while {self._open} is open.\n{self.story()}")
        self._open = -1
        self._closed.add(event.step)
        for worker, copies in self._copies.items():
            if copies.dirty is not None:
                self._publish(worker, copies, hold=self.settled)
            # Those of the step before were held for the reads of this one, which are all issued by now.
            self._release(copies, [p for p in copies.waiting if p.step < event.step])
        self._commit()

    def _end(self, event: Ended) -> None:
        del event
        for worker, copies in self._copies.items():
            if copies.dirty is not None:
                self._publish(worker, copies, hold=False)
            self._release(copies, list(copies.waiting))

    def _has_entered(self, event: Entered) -> None:
        self._started[event.id].entered = True

    def _grouped(self, event: Grouped) -> None:
        assert self._window is not None, "groups finish one by one in order: window alone"
        for id, groups in self._window.finished(event.id, event.group):
            self._out.append(Take(id, groups))
            self._complete(self._nodes[id])

    def _has_finished(self, event: Finished) -> None:
        node = self._started.get(event.id)
        if node is None or event.chunk in node.done_chunks:
            raise IllegalEvent(f"{event} of something that does not run.\n{self.story()}")
        node.done += 1
        node.done_chunks.add(event.chunk)
        if node.call is not None and node.call.instant:
            self._instants.remove(node.id)
        if node.begun == node.done:
            del self._started[node.id]
            for pool in node.pools:
                del self._running[pool][node.id]
        if node.chunks > 1:
            for other in node.after_chunk:
                other.chunks_left[event.chunk] -= 1
                self._ready_chunk(other, event.chunk)
        if node.done == node.chunks and not node.windowed:
            self._complete(node)

    # -- versions -----------------------------------------------------------------------------------------------

    def _see(self, node: _Node, call: Call, worker: str, copies: _Copies) -> None:
        """Have a call that looks at the generating copy wait for the version that it must see."""
        relaxed = call.relaxed and not self.exact
        if not relaxed and copies.dirty is not None:
            self._publish(worker, copies, hold=False)
        if not relaxed:
            self._release(copies, list(copies.waiting))
            self._wait(node, copies.last)
            copies.readers.append(node)
            return
        copies.relaxed.append(node)
        self._wait(node, copies.before)
        if self.settled:  # what an exact read has caused before it in the program, it sees too
            self._wait(node, copies.last if copies.last is not None and not copies.last.held else None)
        pin = self.setup.pins.get(call.id, 0)
        if pin > copies.installed:
            copies.awaited.setdefault(pin, []).append(node)
            node.left += 1

    def _change(self, node: _Node, worker: str) -> None:
        """Have an update wait for all that must still see the weights as they are."""
        self._wait(node, self._last_update.get(worker))
        for reader in self._reads.pop(worker, ()):
            self._wait(node, reader)
        self._last_update[worker] = node
        copies = self._copies.get(worker)
        if copies is None:
            return
        copies.dirty = node.step
        copies.updates.append(node)
        if copies.follower.shared:  # the copy that generates is this one
            for reader in (*copies.readers, *copies.relaxed):
                self._wait(node, reader)
            self._wait(node, copies.last)
        else:
            self._wait(node, copies.stage)

    def _publish(self, worker: str, copies: _Copies, *, hold: bool) -> None:
        """Make what was updated so far the next version."""
        copies.created += 1
        follower, step = copies.follower, copies.dirty if copies.dirty is not None else OUTSIDE
        first = publish = self._move("publish", worker, follower.generate, step, copies.created)
        if not follower.shared:
            first = copies.stage = self._move("stage", worker, follower.train, step, copies.created)
            self._wait(publish, first)
        for update in copies.updates:
            self._wait(first, update)
        if first is not publish:
            self._ready_if(first)
        for reader in copies.readers:
            self._wait(publish, reader)
        self._wait(publish, copies.last)
        copies.last, copies.dirty = publish, None
        copies.updates, copies.readers = [], []
        if step in self._left:
            self._left[step] += 1
        publish.held = True
        copies.waiting.append(publish)
        if not hold:
            self._release(copies, list(copies.waiting))

    def _release(self, copies: _Copies, publishes: Iterable[_Node]) -> None:
        """Let publishes go ahead, after the relaxed reads that are to see the version before."""
        for publish in publishes:
            if self._pinning and any(copies.pinned.get(v) for v in range(publish.version)):
                continue
            copies.waiting.remove(publish)
            publish.held = False
            if self.settled or self._pinning:
                for reader in copies.relaxed:
                    if self.setup.pins.get(reader.id, -1) < publish.version:
                        self._wait(publish, reader)
            self._ready_if(publish)

    def _move(self, kind: str, worker: str, pool: str, step: int, version: int) -> _Node:
        self._moves += 1
        node = _Node(-self._moves, kind, (pool,), step, worker=worker, version=version, chunks_left=[0])
        self._nodes[node.id] = node
        return node

    # -- waiting and starting -----------------------------------------------------------------------------------

    def _wait(self, node: _Node, other: _Node | None) -> None:
        if other is not None and not other.finished and other is not node:
            other.after.append(node)
            node.left += 1

    def _wait_for_input(self, node: _Node, id: int) -> None:
        made = self._nodes.get(id)
        if made is None:
            return
        if node.chunks > 1 and made.chunks > 1:
            made.after_chunk.append(node)
            for chunk in range(node.chunks):
                node.chunks_left[chunk] += chunk not in made.done_chunks
        else:
            self._wait(node, made)

    def _ready_if(self, node: _Node) -> None:
        if node.left == 0 and not node.held:
            for chunk in range(node.chunks):
                self._ready_chunk(node, chunk)

    def _ready_chunk(self, node: _Node, chunk: int) -> None:
        if node.left == 0 and node.chunks_left[chunk] == 0 and not node.held:
            rank = 1 if node.call is not None else 0  # a ready publish goes before later calls
            if node.call is not None and node.call.instant:
                self._start(node, chunk)
            else:
                insort(self._ready, (rank, abs(node.id), chunk, node))

    def _start_ready(self) -> None:
        """Start what can start, the earliest first. What waits for a pool keeps later ones from its other pools, and
        what takes no time keeps them from all."""
        claimed: set[str] = set()
        started: list[int] = []
        for place, (_, _, chunk, node) in enumerate(self._ready):
            if self._instants and node.pools and node.call is not None and node.id > min(self._instants):
                continue  # what that gives may make an earlier call ready for the pool
            if all(pool not in claimed and self._is_free(pool, node) for pool in node.pools):
                started.append(place)
                self._start(node, chunk)
            else:
                claimed.update(node.pools)
                if len(claimed) == len(self._running):
                    break
        for place in reversed(started):
            del self._ready[place]

    def _is_free(self, pool: str, node: _Node) -> bool:
        running = self._running[pool]
        if not running:
            return True
        if node.call is None:  # a publish into running requests
            return self.setup.publish != "drain" and all(node.worker in _serving(n) for n in running.values())
        if serves := node.call.serves:
            return all(n.entered and _serving(n) == serves for n in running.values())
        alike = all(n.call is not None and n.call.queues for n in (node, *running.values()))
        return alike and len(running) <= self.setup.queue and not self.setup.memory

    def _start(self, node: _Node, chunk: int) -> None:
        node.begun += 1
        node.entered = False
        self._started[node.id] = node
        if node.call is not None and node.call.instant:
            self._instants.append(node.id)
        for pool in node.pools:
            self._running[pool][node.id] = node
        call = node.call
        if call is None:
            made = Stage if node.kind == "stage" else Publish
            self._out.append(made(node.id, node.worker, node.version, node.step, node.pools))
            return
        versions = {w: self._copies[w].installed for w in call.serves if w in self._copies}
        offload, onload = self.residency.need(call.pools, call.residents) if call.residents else ((), ())
        self._out.append(Start(node.id, chunk, node.chunks, node.pools, versions, offload, onload))

    # -- completion ---------------------------------------------------------------------------------------------

    def _complete(self, node: _Node) -> None:
        """The result is there: who waited for it may go on."""
        node.finished = True
        del self._nodes[node.id]
        if node.call is not None:
            self._forget(node, node.call)
        elif node.kind == "publish":
            copies = self._copies[node.worker]
            copies.installed = node.version
            node.after += copies.awaited.pop(node.version, ())
        for other in node.after:
            other.left -= 1
            self._ready_if(other)
        node.after.clear()
        if node.kind != "stage" and node.step in self._left:
            self._left[node.step] -= 1
            self._commit()

    def _forget(self, node: _Node, call: Call) -> None:
        for worker in call.serves:
            copies = self._copies.get(worker)
            if copies is None:
                continue
            if node in copies.relaxed:
                copies.relaxed.remove(node)
            if self._pinning and call.id in self.setup.pins:
                copies.pinned[self.setup.pins[call.id]] -= 1
                self._release(copies, [p for p in copies.waiting])
            if node in copies.readers:
                copies.readers.remove(node)
        for worker in call.reads:
            reads = self._reads.get(worker)
            if reads and node in reads:
                reads.remove(node)

    def _commit(self) -> None:
        while self.committed in self._closed and not self._left.get(self.committed, 0):
            self._closed.discard(self.committed)
            self._left.pop(self.committed, None)
            self._out.append(Commit(self.committed))
            self.committed += 1

    def _title(self, node: _Node) -> str:
        return node.call.title if node.call is not None else f"{node.worker}.{node.kind} v{node.version}"


def _serving(node: _Node) -> tuple[str, ...]:
    return node.call.serves if node.call is not None else ()
