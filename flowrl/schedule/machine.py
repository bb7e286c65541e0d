"""When each call starts: a pure state machine. Events in, commands out; no clock, no threads, no tensors.

The rules are those of docs/schedule.md. In short: a call starts when its inputs are done and its pools are free, the
earliest in program order first; calls that see the trained weights keep their order with the updates; what sees the
generating copy waits for the versions that it must see; a step commits, in order, when its calls and its publish are
done, and step k opens when at most S steps before it are uncommitted.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .events import (
    AGAIN,
    PUBLISH,
    STAGE,
    Call,
    Closed,
    Command,
    Commit,
    Ended,
    Entered,
    Event,
    Finished,
    Freed,
    GoOn,
    Grouped,
    Groups,
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
from .node import Node, Unfinished
from .pool_residency import Residency
from .publish_rules import PublishRules

_Key = tuple[int, int, str]


class IllegalEvent(Exception):
    """An event that cannot happen in this state: a bug of whoever drives the machine. It tells the whole story."""


class Machine:
    """The schedule of one program.

    >>> from flowrl.schedule.events import Follower
    >>> machine = Machine(Setup(("train", "rollout"), {"actor": Follower("train", "rollout")}))
    >>> machine.handle(Opened(0))
    []
    >>> machine.handle(Issued(Call(0, 0, "actor.generate", ("rollout",), serves=("actor",))))
    [Start(id=0, chunk=0, chunks=1, pools=('rollout',), versions={'actor': 0}, offload=(), onload=(), rests=())]
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
        self._nodes: dict[int, Node] = {}  # whose results are not there yet
        self._started: dict[int, Node] = {}  # that run
        self._rules = PublishRules(setup, versions or {}, move=self._move, ready=self._ready_if)
        self._running: dict[str, dict[int, Node]] = {p: {} for p in setup.pools}
        self._resting: dict[str, dict[int, Node]] = {}  # by pool: those whose rows stand still, until they are to go on
        self._ready: list[tuple[int, int, int, Node]] = []
        self._instants: list[int] = []  # calls that take no time and run, with an entry for each chunk
        self._left: dict[int, int] = {}  # unfinished calls and publishes by step
        self._closed: set[int] = set()
        self._open = -1
        self._moves = 0
        self.residency = Residency(setup.memory)
        self._window = Window(setup.staleness, setup.window, setup.taken) if setup.order == "window" else None
        installed = {worker: copies.installed for worker, copies in self._rules.copies.items()}
        self._next: dict[str, deque[_Key]] = {}  # what pools that sample begin with next, where that is known
        for begun in setup.begun:
            if begun.number != AGAIN and (not begun.worker or begun.part > installed[begun.worker]):
                self._next.setdefault(begun.pool, deque()).append(begun.key)
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
            Freed: self._free,
        }
        for worker in held:
            self._left[committed] = 0
            self._closed.add(committed)
            self._rules.resumed(worker, committed)

    # -- what drives it -----------------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether timing has no part in which version a read sees."""
        return self.setup.settled

    def handle(self, event: Event) -> list[Command]:
        """Take an event in; return what is to be done now, in this order. Raises IllegalEvent."""
        self._out = []
        self._handlers[type(event)](event)
        if self._ready or self._resting:
            self._start_ready()
        return self._out

    def may_open(self, step: int) -> bool:
        """Whether the program may enter a step: at most S earlier ones are uncommitted."""
        return step - self.committed <= self.setup.staleness

    @property
    def idle(self) -> bool:
        """Whether nothing is running, and nothing waits but publishes that are held for the next step."""
        return not self._ready and not self._started and all(n.held for n in self._nodes.values())

    @property
    def running(self) -> tuple[int, ...]:
        """Calls and moves that were started and are not done."""
        return tuple(self._started)

    def pending(self, id: int) -> bool:
        """Whether the result of a call is still to come."""
        return id in self._nodes

    def version(self, worker: str) -> int:
        """Publishes of a worker so far, those under way among them: the version of what is trained next."""
        return self._rules.copies[worker].created if worker in self._rules.copies else 0

    def held(self) -> dict[str, int]:
        """Workers with a publish that waits for the next step, and its version: what a checkpoint has to keep."""
        return {w: c.waiting[0].version for w, c in self._rules.copies.items() if c.waiting}

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

    def unfinished(self) -> list[Unfinished]:
        """Everything that is not finished, the earliest first, with what each thing waits for by name."""
        on: dict[int, list[int]] = {}
        for node in self._nodes.values():
            for other in dict.fromkeys((*node.after, *node.after_chunk)):
                on.setdefault(other.id, []).append(node.id)
        found: list[Unfinished] = []
        for node in self._nodes.values():
            running = node.id in self._started
            blocked = node.held or node.left or any(node.chunks_left)
            busy = [] if running or blocked else [n for pool in node.pools for n in self._running[pool]]
            title, version = self._title(node), node.version if node.call is None else None
            found.append(
                Unfinished(
                    node.id,
                    title,
                    node.step,
                    running,
                    node.held,
                    node.pools,
                    tuple(on.get(node.id, ())),
                    tuple(dict.fromkeys(busy)),
                    version,
                )
            )
        return found

    # -- events -------------------------------------------------------------------------------------------------

    def _opened(self, event: Opened) -> None:
        if not self.may_open(event.step) or self._open >= 0:
            raise IllegalEvent(f"step {event.step} was opened too early.\n{self.story()}")
        self._open = event.step
        self._left.setdefault(event.step, 0)
        self._rules.opened()

    def _issued(self, call: Call) -> None:
        if call.id in self._nodes or (call.step >= 0 and call.step != self._open):
            raise IllegalEvent(f"call {call.id} ({call.title}) of step {call.step} was issued twice.\n{self.story()}")
        node = Node(call.id, "call", call.pools, call.step, call)
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
            self._rules.read(node, worker)
        for worker in call.serves:
            if worker in self._rules.copies:
                self._rules.see(node, call, worker)
        if call.updates is not None:
            self._rules.change(node, call.updates)
        self._ready_if(node)

    def _close(self, event: Closed) -> None:
        if event.step != self._open:
            raise IllegalEvent(f"step {event.step} was closed while {self._open} is open.\n{self.story()}")
        self._open = -1
        self._closed.add(event.step)
        self._rules.closed(event.step)
        self._commit()

    def _end(self, event: Ended) -> None:
        del event
        self._rules.ended()

    def _has_entered(self, event: Entered) -> None:
        self._started[event.id].entered = True

    def _grouped(self, event: Grouped) -> None:
        assert self._window is not None, "groups finish one by one in order: window alone"
        self._take(self._window.finished(event.id, event.group))

    def _free(self, event: Freed) -> None:
        del event
        self._next = {}
        if self._window is not None:
            self._take(self._window.free())

    def _take(self, complete: Iterable[tuple[int, Groups]]) -> None:
        for id, groups in complete:
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
                self._running[pool].pop(node.id, None)
                self._resting.get(pool, {}).pop(node.id, None)
        if node.chunks > 1:
            for other in node.after_chunk:
                other.chunks_left[event.chunk] -= 1
                self._ready_chunk(other, event.chunk)
        if node.done == node.chunks and not node.windowed:
            self._complete(node)

    def _move(self, kind: str, worker: str, pool: str, step: int, version: int) -> Node:
        self._moves += 1
        node = Node(-self._moves, kind, (pool,), step, worker=worker, version=version, chunks_left=[0])
        self._nodes[node.id] = node
        if kind == "publish" and step in self._left:
            self._left[step] += 1
        return node

    # -- waiting and starting -----------------------------------------------------------------------------------

    def _wait_for_input(self, node: Node, id: int) -> None:
        made = self._nodes.get(id)
        if made is None:
            return
        if node.chunks > 1 and made.chunks > 1:
            made.after_chunk.append(node)
            for chunk in range(node.chunks):
                node.chunks_left[chunk] += chunk not in made.done_chunks
        else:
            node.wait_for(made)

    def _ready_if(self, node: Node) -> None:
        if node.left == 0 and not node.held:
            for chunk in range(node.chunks):
                self._ready_chunk(node, chunk)

    def _ready_chunk(self, node: Node, chunk: int) -> None:
        if node.left == 0 and node.chunks_left[chunk] == 0 and not node.held:
            rank = 1 if node.call is not None else 0  # a ready publish goes before later calls
            if node.call is not None and node.call.instant:
                self._start(node, chunk)
            else:
                insort(self._ready, (rank, abs(node.id), chunk, node))

    def _start_ready(self) -> None:
        """Start what can start, in the order of an earlier run where one is given."""
        while (self._start_some() and self._next) or self._go_on():
            pass

    def _start_some(self) -> bool:
        """Start what can start, the earliest first; return whether anything was started. What waits for a pool keeps
        later ones from its other pools, and what takes no time keeps them from all."""
        claimed: set[str] = set()
        started: list[int] = []
        for place, (_, _, chunk, node) in enumerate(self._ready):
            if self._instants and node.pools and node.call is not None and node.id > min(self._instants):
                continue  # what that gives may make an earlier call ready for the pool
            if not self._has_its_turn(node, chunk):
                continue
            if all(pool not in claimed and self._is_free(pool, node) for pool in node.pools):
                started.append(place)
                self._start(node, chunk)
            else:
                claimed.update(node.pools)
                if len(claimed) == len(self._running):
                    break
        for place in reversed(started):
            del self._ready[place]
        return bool(started)

    def _has_its_turn(self, node: Node, chunk: int) -> bool:
        """Whether its pools begin with this next, where their order is that of an earlier run."""
        orders = (self._next.get(pool) for pool in node.pools) if self._next else ()
        return not any(order and order[0] != _key(node, chunk) for order in orders)

    def _is_free(self, pool: str, node: Node) -> bool:
        running = self._running[pool]
        if pool in self._resting and node.call is not None and node.call.serves:
            return False  # rows that stand still go on first
        if not running or self._may_interrupt(node, running):
            return True
        if node.call is None:  # a publish into running requests
            shared = (_shared_by(n) for n in running.values())
            return self.setup.publish != "drain" and all(node.worker in serves for serves in shared)
        if serves := _shared_by(node):
            alike = (_shared_by(n) == serves and _joins(n) == _joins(node) for n in running.values())
            return all(n.entered for n in running.values()) and all(alike)
        alike = all(n.call is not None and n.call.queues for n in (node, *running.values()))
        return alike and len(running) <= self.setup.queue and not self.setup.memory

    def _may_interrupt(self, node: Node, others: Mapping[int, Node]) -> bool:
        """Whether rows of others stand still for a call: those of later calls, and what is left of earlier ones whose
        results are there, where a publish interrupts rows too. A call that asks the engine by itself does not.
        """
        if self.setup.publish != "interrupt" or node.call is None or node.call.serves:
            return False
        resting = (_shared_by(other) and not _joins(other) for other in others.values())
        return all(resting) and all(other.finished or other.id > node.id for other in others.values())

    def _go_on(self) -> bool:
        """Have rows go on that stand still, once no call is left for which they do; return whether there were any."""
        due = [p for p, rests in self._resting.items() if not rests or not (self._running[p] or self._is_wanted(p))]
        for pool in due:
            resting = self._resting.pop(pool)
            residents = dict.fromkeys(r for node in resting.values() if node.call for r in node.call.residents)
            offload, onload = self.residency.need((pool,), tuple(residents)) if residents else ((), ())
            self._out.append(GoOn(pool, min(resting, default=-1), offload, onload))
            self._running[pool].update(resting)
        return bool(due)

    def _is_wanted(self, pool: str) -> bool:
        """Whether rows stand still for a call that is still to come: one before all those that sample in their pool.

        In the order of an earlier run they go on at once, as they make no step that they did not make there.
        """
        if self._next.get(pool):
            return False
        calls = [node.call for node in self._nodes.values() if node.call is not None and pool in node.pools]
        sampling = [call.id for call in calls if call.serves]
        others = [call.id for call in calls if not call.serves]
        return bool(others) and min(others) < min(sampling, default=min(others) + 1)

    def _start(self, node: Node, chunk: int) -> None:
        node.begun += 1
        node.entered = False
        for pool in node.pools if self._next else ():
            if order := self._next.get(pool):
                order.popleft()
        self._started[node.id] = node
        if node.call is not None and node.call.instant:
            self._instants.append(node.id)
        rests = tuple(p for p in node.pools if self._running[p] and self._may_interrupt(node, self._running[p]))
        for pool in rests:
            self._resting[pool] = {**self._resting.get(pool, {}), **self._running[pool]}
            self._running[pool].clear()
        for pool in node.pools:
            self._running[pool][node.id] = node
        call = node.call
        if call is None:
            made = Stage if node.kind == "stage" else Publish
            self._out.append(made(node.id, node.worker, node.version, node.step, node.pools))
            return
        versions = {w: self._rules.copies[w].installed for w in call.serves if w in self._rules.copies}
        offload, onload = self.residency.need(call.pools, call.residents) if call.residents else ((), ())
        self._out.append(Start(node.id, chunk, node.chunks, node.pools, versions, offload, onload, rests))

    # -- completion ---------------------------------------------------------------------------------------------

    def _complete(self, node: Node) -> None:
        """The result is there: who waited for it may go on."""
        node.finished = True
        del self._nodes[node.id]
        if node.call is not None:
            self._rules.forget(node, node.call)
        elif node.kind == "publish":
            self._rules.installed(node)
        for other in node.after:
            other.left -= 1
            self._ready_if(other)
        node.after.clear()
        if node.kind != "stage" and node.step in self._left:
            self._left[node.step] -= 1
            self._commit()

    def _commit(self) -> None:
        while self.committed in self._closed and not self._left.get(self.committed, 0):
            self._closed.discard(self.committed)
            self._left.pop(self.committed, None)
            self._out.append(Commit(self.committed))
            self.committed += 1

    def _title(self, node: Node) -> str:
        return node.call.title if node.call is not None else f"{node.worker}.{node.kind} v{node.version}"


def _key(node: Node, chunk: int) -> _Key:
    """What a start of it is called in the order of a run."""
    if node.call is not None:
        return node.id, chunk, ""
    return PUBLISH if node.kind == "publish" else STAGE, node.version, node.worker


def _shared_by(node: Node) -> tuple[str, ...]:
    """The workers whose engines a call shares with others of the kind, and with publishes."""
    return node.call.serves if node.call is not None and not node.call.whole else ()


def _joins(node: Node) -> bool:
    """Whether a call asks the engine by itself, row by row."""
    return node.call is not None and node.call.joins
