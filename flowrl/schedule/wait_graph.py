"""Whether a program under a plan can wait for itself: every wait that any order of events allows, as one graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from .events import Call, Closed, Ended, Event, Issued, Opened, Setup
from .machine import Machine
from .node import Node


@dataclass(frozen=True)
class Waits:
    """The waits of some steps: ``Waits(steps=3, calls=21, moves=4, waits=97)``.

    ``moves`` are stages and publishes. ``cycle``: of things that wait for each other, each for the next one and the
    last for the first; empty where there is none, which proves that no order of events ends in a deadlock.
    """

    steps: int
    calls: int
    moves: int
    waits: int
    cycle: tuple[str, ...] = ()

    def text(self) -> str:
        """What is proved, in a line; or the cycle, a wait in each line."""
        if self.cycle:
            return "\n  waits for ".join((*self.cycle, self.cycle[0]))
        of = f"{self.calls} calls and {self.moves} moves of weights in {self.steps} steps"
        return f"no deadlock: the {self.waits} waits of {of} have no cycle, in whatever order things end"


class _Unbounded(Machine):
    """A machine whose steps open at once: what they wait for is an edge of the graph."""

    def may_open(self, step: int) -> bool:
        return step >= 0

    @property
    def nodes(self) -> Mapping[int, Node]:
        """All that was issued, as nothing ends."""
        return self._nodes


@dataclass
class WaitRecorder:
    """Collects the waits of a program that is run against it as against a clock, where nothing ever ends.

    So each call, publish and step has all the waits that it can have in any run: whatever ends takes some away, and
    adds none. Pools add none either: a call takes all its pools at once, and waits for nothing once it has them.

    With ``order: window`` a call that samples is two things: that its groups have ended, and that groups were taken for
    it. It is given groups after the calls before it, and any that have ended within the window will do: the oldest that
    nobody has is always within it, and is of this call or of one before. So it waits for no more than that the groups
    of all these have ended.
    """

    setup: Setup
    machine: _Unbounded = field(init=False)
    waits: dict[str, dict[str, None]] = field(default_factory=dict[str, "dict[str, None]"])
    _calls: dict[int, Call] = field(default_factory=dict[int, Call])
    _moves: dict[int, str] = field(default_factory=dict[int, str])
    _at: str = "the start of the program"
    _steps: int = 0

    def __post_init__(self) -> None:
        self.machine = _Unbounded(self.setup)

    # -- what the program does --------------------------------------------------------------------------------------

    def open(self, step: int) -> None:
        """Enter a step, once enough of those before it have committed."""
        needed = range(self._commits_before(step))
        self._go(f"the opening of step {step}", [f"the commit of step {n}" for n in needed[-1:]], Opened(step))
        self._steps += 1

    def issue(self, call: Call) -> None:
        """Make a call."""
        self._calls[call.id] = call
        title = self._title(call.id)
        self._go(f"the program's call of {title}", [], Issued(call))
        self._wait(title, [self._at])

    def wait_for(self, ids: Iterable[int]) -> None:
        """Have the program wait for the results of calls."""
        titles = [self._title(id) for id in ids]
        self._go(f"the program, which reads the result of {' and '.join(titles)},", titles)

    def close(self, step: int) -> None:
        """Leave a step."""
        self._go(f"the end of step {step} in the program", [], Closed(step))

    def end(self) -> None:
        """Return from the program."""
        self._go("the end of the program", [], Ended())

    def found(self) -> Waits:
        """The waits, once the program has returned."""
        nodes = self.machine.nodes.values()
        for node in nodes:
            for other in dict.fromkeys((*node.after, *node.after_chunk)):
                self._wait(self._title(other.id), [self._title(node.id)])
        self._take_groups()
        for step in range(self._steps):
            mine = [self._title(n.id) for n in nodes if n.step == step and n.kind != "stage"]
            before = [f"the commit of step {step - 1}"] if step else []
            self._wait(f"the commit of step {step}", [*before, f"the end of step {step} in the program", *mine])
        for node in nodes:
            if node.held:  # nothing in the program lets it go
                self._wait(self._title(node.id), [self._title(node.id)])
        moves = sum(node.call is None for node in nodes)
        count = sum(map(len, self.waits.values()))
        return Waits(self._steps, len(self._calls), moves, count, cycle_in(self.waits))

    # -- inside -----------------------------------------------------------------------------------------------------

    def _take_groups(self) -> None:
        """Have calls whose groups may be exchanged wait for those before them, and for the groups of all of these."""
        sampled: list[str] = []
        before: list[str] = []
        for id in sorted(node.id for node in self.machine.nodes.values() if node.windowed):
            title = self._title(id)
            sampled.append(self.groups_of(id))
            self._wait(sampled[-1], self.waits[title])
            self._wait(title, [*before, *sampled])
            before = [title]

    def groups_of(self, id: int) -> str:
        """What is waited for until all prompt groups of a call have ended, whoever takes them."""
        return f"the end of all groups of {self._title(id)}"

    def _commits_before(self, step: int) -> int:
        """How many steps have to be committed for this one to open."""
        machine = Machine(self.setup)
        while not machine.may_open(step) and machine.committed <= step:
            machine.committed += 1
        return machine.committed

    def _go(self, what: str, waits: Iterable[str], event: Event | None = None) -> None:
        """The program comes to something, after what it did before."""
        if what in self.waits:  # the same value is read again
            what = f"{what} again after {self._at}"
        self._wait(what, [self._at, *waits])
        self._at = what
        if event is None:
            return
        held = {node.id for node in self.machine.nodes.values() if node.held}
        self.machine.handle(event)
        for id in held:
            if not self.machine.nodes[id].held:
                self._wait(self._title(id), [what])

    def _wait(self, what: str, waits: Iterable[str]) -> None:
        self.waits.setdefault(what, {}).update(dict.fromkeys(waits))

    def _title(self, id: int) -> str:
        node = self.machine.nodes.get(id)
        if node is not None and node.call is None:
            return f"{node.worker}.{node.kind} of version {node.version}"
        call = self._calls[id]
        where = f" of step {call.step}" if call.step >= 0 else ""
        return f"{call.title} (call {id}{where})"


def cycle_in(waits: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """Things that wait for each other in a circle, each for the next one; empty where there are none.

    >>> cycle_in({"a": ["b"], "b": ["c"], "c": ["b"]})
    ('b', 'c')
    >>> cycle_in({"a": ["b"], "b": []})
    ()
    """
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return tuple(reversed(found[1:]))
    return ()
