"""The state machine on a virtual clock: commands take the seconds that a cost model gives, and nothing is computed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Protocol

from .engine_slots import EngineSlots, Rows
from .events import (
    Call,
    Closed,
    Commit,
    Ended,
    Entered,
    Event,
    Finished,
    GoOn,
    Grouped,
    Issued,
    Opened,
    Publish,
    Stage,
    Start,
    Take,
)
from .machine import Machine
from .shared_links import Parts, SharedLinks
from .trained_lags import TrainedLags


class Pace(Protocol):
    """How long things take. ``seconds`` is of the whole call; chunks divide it."""

    def seconds(self, call: Call) -> float: ...
    def rows(self, call: Call) -> Rows | None:
        """Rows of a generate that run side by side; None where it is one block of ``seconds``."""
        ...

    def publish(self, worker: str) -> float: ...
    def swap(self, pool: str, resident: str, what: str) -> float: ...
    def parts(self, call: Call) -> Parts:
        """The parts of links that a call keeps busy, where others may want them too."""
        ...

    def publish_parts(self, worker: str) -> Parts: ...


@dataclass(frozen=True, slots=True)
class Span:
    """Something that ran: ``Span("actor.generate", 3, ("rollout",), 12.0, 18.0, "actor.publish")``.

    ``id`` is that of its call, -1 for a publish, an offload or an onload. ``because`` names what it had to wait for.
    """

    title: str
    step: int
    pools: tuple[str, ...]
    start: float
    end: float
    because: str = ""
    id: int = -1
    chunk: int = 0


@dataclass
class Flown:
    """What a virtual run has left behind: spans in the order of their start commands, times of commits."""

    spans: list[Span] = field(default_factory=list[Span])
    commits: dict[int, float] = field(default_factory=dict[int, float])
    versions: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # of each generate, by chunk
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=dict[str, "list[tuple[float, float]]"])
    events: int = 0


class Deadlock(Exception):
    """Nothing runs, and the program waits: a bug of the schedule. It tells the whole story."""


@dataclass(frozen=True, slots=True)
class _Wake:
    """The rows of a pool's engine have something to tell, unless another wake was asked for since."""

    pool: str
    number: int


_Due = Event | _Wake | Callable[[], None]


class VirtualClock:
    """Drives a machine as a runtime does. The program itself takes no time; where it waits, the clock goes on.

    ``wait(done)`` moves the clock until a condition holds; ``time`` is now. The thread that runs the program does the
    calls of the pools ``home`` while it waits, and goes on with the program only between two of them. ``eager``: it
    waits for every call.
    """

    def __init__(self, machine: Machine, pace: Pace, *, home: Container[str] = (), eager: bool = False) -> None:
        self.machine, self.pace, self._home, self._eager = machine, pace, home, eager
        self._at_home: dict[tuple[int, int], float] = {}  # what the program's own thread does, and since when
        self._busy: dict[str, float] = {}  # by pool: when the last call that it was handed ends
        self.time = 0.0
        self.flown = Flown()
        self._because = "the start"
        self._due: list[tuple[float, int, _Due, str, float]] = []  # time, number, what, pool, pauses then
        self._number = 0
        self._pauses: dict[str, float] = {}  # by pool: seconds for which running requests stood still
        self._engines: dict[str, EngineSlots] = {}  # by pool
        self._wakes: dict[str, int] = {}  # by pool: the number of the wake that counts
        self._resting: dict[str, float] = {}  # pools whose rows stand still, and since when
        self._late: dict[str, list[tuple[float, int, _Due, str, float]]] = {}  # what would have happened meanwhile
        self._spans: dict[tuple[int, int], int] = {}  # call and chunk in an engine: the place of its span
        self._links = SharedLinks()
        self._through: dict[Hashable, Callable[[], None]] = {}  # what follows when something on the links is through
        self._watched = 0  # times that it was looked when the next of them is
        self._open: dict[tuple[int, int], list[Callable[[], None]]] = {}  # calls without a known end: who follows them
        self._tails: dict[str, tuple[int, int]] = {}  # by pool: the last of these that it was handed
        self._calls: dict[int, Call] = {}
        self._titles: dict[int, str] = {}
        self._lags = TrainedLags(self.flown.versions)

    # -- what the program does ----------------------------------------------------------------------------------

    def open(self, step: int) -> None:
        """Enter a step, once it may be entered."""
        self.wait(lambda: self.machine.may_open(step))
        self.tell(Opened(step))

    def issue(self, call: Call) -> None:
        """Make a call."""
        self._calls[call.id] = call
        self._lags.issue(call, self.machine.version(call.updates) if call.updates is not None else 0)
        self.tell(Issued(call))
        if self._eager:
            self.wait_for([call.id])

    def close(self, step: int) -> None:
        """Leave a step."""
        self.tell(Closed(step))

    def end(self) -> None:
        """Return from the program, and let everything come to its end."""
        self.tell(Ended())
        self.wait(lambda: self.machine.idle)

    def wait(self, done: Callable[[], bool]) -> None:
        """Let time pass until a condition holds. Raises Deadlock."""
        while not done() or any(since < self.time for since in self._at_home.values()):
            if not self._due:
                raise Deadlock(f"the program waits and nothing runs.\n{self.machine.story()}")
            self._pass()

    def wait_for(self, ids: Sequence[int]) -> None:
        """Let time pass until calls are done."""
        self.wait(lambda: not any(self.machine.pending(i) for i in ids))

    def lags(self) -> Mapping[int, int]:
        """Publishes between the version that a prompt group was sampled with and the one that it was trained on."""
        return self._lags.count()

    # -- inside ---------------------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Hand an event to the machine and do what it answers."""
        self.flown.events += 1
        for command in self.machine.handle(event):
            match command:
                case Start():
                    self._start(command)
                case Publish():
                    self._publish(command)
                case Stage():
                    self._later(0.0, Finished(command.id))
                case GoOn():
                    self._let_rows_go_on(command)
                case Take():
                    self._lags.take(command)
                case Commit():
                    self.flown.commits[command.step] = self.time

    def _pass(self) -> None:
        """Go on to the next thing that happens."""
        due = time, _, event, pool, pauses = heapq.heappop(self._due)
        if isinstance(event, _Wake) and event.number != self._wakes[event.pool]:
            return
        if pool in self._resting:
            self._late[pool].append(due)
            return
        late = self._pauses.get(pool, 0.0) - pauses
        if late > 0:
            self._number += 1
            heapq.heappush(self._due, (time + late, self._number, event, pool, pauses + late))
            return
        self.time = time
        if isinstance(event, _Wake):
            self._go_on(event.pool)
        elif isinstance(event, Finished):
            self._finish(event)
        elif callable(event):
            event()
        else:
            self.tell(event)

    def _finish(self, event: Finished) -> None:
        """A call, or a chunk of it, is done."""
        self._because = self._titles.get(event.id, self._because)
        self._at_home.pop((event.id, event.chunk), None)
        self.tell(event)

    def _later(self, seconds: float, event: _Due, pool: str = "") -> None:
        self._at(self.time + seconds, event, pool)

    def _at(self, time: float, event: _Due, pool: str = "") -> None:
        self._number += 1
        heapq.heappush(self._due, (time, self._number, event, pool, self._pauses.get(pool, 0.0)))

    def _start(self, command: Start) -> None:
        call = self._calls[command.id]
        self._titles[call.id] = call.title
        for pool in command.rests:
            self._rest(pool)
        busy = (self._busy.get(pool, 0.0) for pool in call.pools if call.queues)
        begin = max(self._swap(command, call.pools, call.step), *busy, 0.0)
        if call.serves:
            self.flown.versions.setdefault(call.id, []).append(min(command.versions.values(), default=0))
        if call.joins and self.machine.setup.streams:  # its rows come and go, whoever else is there
            self._later(begin - self.time, Entered(call.id))
        rows = self.pace.rows(call) if call.serves else None
        if rows is None:
            seconds = self.pace.seconds(call) / command.chunks
            parts: Parts = self.pace.parts(call) if seconds > 0 and not call.serves else {}
            ahead = {self._tails[p] for p in call.pools if call.queues and self._tails.get(p) in self._open}
            if parts or ahead:
                self._run_open(call, command, seconds, parts, begin, ahead)
                return
            self._busy |= dict.fromkeys(call.pools, begin + seconds)
            self._note_home(command)
            self._span(call, command, begin, begin + seconds)
            if call.groups and call.relaxed and self.machine.setup.order == "window":
                for group in range(call.groups):
                    self._later(begin + seconds - self.time, Grouped(call.id, group), call.pools[0])
            finished = Finished(call.id, command.chunk)
            self._later(begin + seconds - self.time, finished, self._engine_pool(call) if call.serves else "")
        else:
            self._run_rows(call, command, rows, begin)

    def _run_open(
        self, call: Call, command: Start, seconds: float, parts: Parts, begin: float, ahead: set[tuple[int, int]]
    ) -> None:
        """A call whose end depends on who else passes its links, or that begins after such a call of its pool."""
        key, place, waits = (call.id, command.chunk), len(self.flown.spans), set(ahead)
        self._note_home(command)
        self._span(call, command, begin, begin)  # until it is known when it begins and ends
        self._open[key] = []
        self._tails |= dict.fromkeys(call.pools, key)

        def done() -> None:
            self.flown.spans[place] = replace(self.flown.spans[place], end=self.time)
            self._busy |= dict.fromkeys(call.pools, self.time)
            following = self._open.pop(key)
            self._finish(Finished(*key))
            for begins in following:
                begins()

        def begins() -> None:
            self.flown.spans[place] = replace(self.flown.spans[place], start=self.time)
            if parts:
                self._share(key, seconds, parts, done)
            else:
                self._later(seconds, done)

        def follow(other: tuple[int, int]) -> None:
            waits.discard(other)
            if not waits:
                self._at(max(begin, self.time), begins)

        for other in ahead:
            self._open[other].append(lambda other=other: follow(other))
        if not ahead and begin > self.time:
            self._at(begin, begins)
        elif not ahead:
            begins()

    def _share(self, key: Hashable, seconds: float, parts: Parts, done: Callable[[], None]) -> None:
        """Have something take so many seconds, or longer while others pass the same links."""
        self._links.begin(key, seconds, parts, time=self.time)
        self._through[key] = done
        self._watch_links()

    def _watch_links(self) -> None:
        """Come back when the next thing on the links is through, unless others have come or gone by then."""
        self._watched += 1
        number, time = self._watched, self._links.next()

        def look() -> None:
            if number != self._watched:
                return
            through = self._links.finish(time)
            self._watch_links()
            for key in through:
                self._through.pop(key)()

        if time < inf:
            self._at(time, look)

    def _run_rows(self, call: Call, command: Start, rows: Rows, begin: float) -> None:
        """Rows enter the engine as others leave it; a call is in when its last row is."""
        pool, key = self._engine_pool(call), (call.id, command.chunk)
        engine = self._engines.setdefault(pool, EngineSlots.of(rows))
        self._note_home(command)
        place = len(self.flown.spans)
        self._span(call, command, begin, begin)  # until its last row has left
        windowed = bool(call.groups and call.relaxed and self.machine.setup.order == "window")

        def submit() -> None:
            self._go_on(pool)
            engine.submit(key, rows, command.chunks, windowed=windowed)
            self._go_on(pool)

        if rows.chunk(command.chunk, command.chunks):
            self._spans[key] = place
            self._later(begin - self.time, submit)
        else:  # fewer prompts than chunks
            self._later(begin - self.time, Finished(*key))

    def _engine_pool(self, call: Call) -> str:
        """Return the pool of the engine that a call asks; of one that holds a handle it is not its own."""
        followers = self.machine.setup.followers
        pools = [followers[worker].generate for worker in call.serves if worker in followers]
        return pools[0] if pools else call.pools[0]

    def _go_on(self, pool: str) -> None:
        """Tell what the rows of a pool's engine have come to by now, and come back when there is more to tell."""
        engine = self._engines[pool]
        told = engine.advance(self.time)
        self._wakes[pool] = self._wakes.get(pool, 0) + 1
        if (time := engine.next()) < inf:
            self._later(time - self.time, _Wake(pool, self._wakes[pool]))
        for event in told:
            if isinstance(event, Finished):
                key = (event.id, event.chunk)
                place = self._spans.pop(key)
                first = engine.first.pop(key)
                self.flown.spans[place] = replace(self.flown.spans[place], start=first, end=self.time)
                self._finish(event)
            else:
                self.tell(event)

    def _publish(self, command: Publish) -> None:
        seconds = self.pace.publish(command.worker)
        pool = command.pools[0]
        title = f"{command.worker}.publish"
        self._titles[command.id] = title
        self._note_home(command)
        running = self.machine.setup.publish != "drain"  # requests, which stand still meanwhile
        if running:
            self._hold_rows(pool, seconds, again=self.machine.setup.publish == "interrupt")
        if not seconds > 0:
            self._later(seconds, Finished(command.id))
            return
        span = Span(title, command.step, (pool,), self.time, self.time + seconds, self._because)
        place = len(self.flown.spans)
        self.flown.spans.append(span)

        def done() -> None:
            self.flown.spans[place] = replace(span, end=self.time)
            if running and self.time > span.end:  # others were on its links
                self._hold_rows(pool, self.time - span.end, again=False)
            self._finish(Finished(command.id))

        if parts := self.pace.publish_parts(command.worker):
            self._share(("publish", command.id), seconds, parts, done)
        else:
            self._later(seconds, Finished(command.id))

    def _rest(self, pool: str) -> None:
        """Have the rows that run in a pool stand still from now on."""
        if pool in self._engines:
            self._go_on(pool)
            self._wakes[pool] += 1
        self._resting[pool], self._late[pool] = self.time, []

    def _let_rows_go_on(self, command: GoOn) -> None:
        """Have rows go on that stood still, once what they need is back in memory."""
        pool, since = command.pool, self._resting.pop(command.pool)
        step = self._calls[command.id].step if command.id in self._calls else -1
        seconds = self._swap(command, (pool,), step) - since
        self._pauses[pool] = self._pauses.get(pool, 0.0) + seconds
        for due in self._late.pop(pool):
            heapq.heappush(self._due, due)
        if pool in self._engines:
            batch = self._engines[pool].batch
            batch.stall(seconds)
            if command.onload:
                batch.interrupt()
            self._go_on(pool)

    def _hold_rows(self, pool: str, seconds: float, *, again: bool) -> None:
        """Have rows that run wait for a publish; ``again``: and pay for keys and values that are computed again."""
        still = pool in self._resting  # already
        if not still:
            self._pauses[pool] = self._pauses.get(pool, 0.0) + seconds
        if pool in self._engines:
            if not still:
                self._go_on(pool)
                self._engines[pool].batch.stall(seconds)
            if again:
                self._engines[pool].batch.interrupt()
            if not still:
                self._go_on(pool)

    def _note_home(self, command: Start | Publish) -> None:
        """Note what the program's own thread begins now, or as soon as the program waits."""
        if self._home and any(pool in self._home for pool in command.pools):
            self._at_home[command.id, command.chunk if isinstance(command, Start) else 0] = self.time

    def _swap(self, command: Start | GoOn, pools: Sequence[str], step: int) -> float:
        """Seconds for what leaves and what comes, first the one, then the other; pools do it side by side."""
        begin = self.time
        for pool in pools:
            at = self.time
            for what, moves in (("offload", command.offload), ("onload", command.onload)):
                for place, resident in moves:
                    if place == pool and (seconds := self.pace.swap(pool, resident, what)) > 0:
                        title = f"{resident}.{what}"
                        self.flown.spans.append(Span(title, step, (pool,), at, at + seconds, self._because))
                        at += seconds
            begin = max(begin, at)
        for pool in {p for p, _ in (*command.offload, *command.onload)}:
            self.flown.memory.setdefault(pool, []).append((begin, self.machine.residency.bytes(pool)))
        return begin

    def _span(self, call: Call, command: Start, start: float, end: float) -> None:
        span = Span(call.title, call.step, call.pools, start, end, self._because, call.id, command.chunk)
        self.flown.spans.append(span)
