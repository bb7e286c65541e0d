"""What a schedule is told, and what it answers: the events and commands of the state machine, as records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a program, as the schedule sees it.

    ``Call(7, step=1, title="actor.generate", pools=("rollout",), serves=("actor",), relaxed=True)``. ``id`` counts in
    program order; ``step`` is -1 outside of steps. ``inputs`` are calls whose results it takes. It reads the trained
    copy of the workers ``reads`` and the generating copy of ``serves``; ``relaxed`` if the latter may be stale.
    ``rowwise``: it can be done in chunks, prompt by prompt. ``groups``: prompt groups that it generates, where they
    finish one by one and may be exchanged. ``residents``: what it needs in the memory of each of its pools.
    ``rows``: its result holds rows, and not a number made of them. ``queues``: it may be handed to a pool that is busy
    with others of the kind. ``instant``: it takes no pool and no time, and what is later waits for it. ``whole``: its
    rows do not leave the engine one by one, so that it has the engine for itself, and no publish comes in between.
    ``joins``: it asks the engine row by row, whenever it has something to ask, so that publishes come in between, and
    others of the kind are beside it.
    """

    id: int
    step: int
    title: str
    pools: tuple[str, ...] = ()
    inputs: tuple[int, ...] = ()
    reads: tuple[str, ...] = ()
    serves: tuple[str, ...] = ()
    relaxed: bool = False
    updates: str | None = None
    rowwise: bool = False
    groups: int = 0
    residents: tuple[str, ...] = ()
    rows: bool = True
    queues: bool = False
    instant: bool = False
    whole: bool = False
    joins: bool = False


#: Prompt groups, as (generate, group) pairs.
Groups = tuple[tuple[int, int], ...]


class Opened(NamedTuple):
    """The program enters a step."""

    step: int


class Resumed(NamedTuple):
    """The program goes on where an earlier machine was: what that one had left to do may start."""


class Issued(NamedTuple):
    """The program made a call."""

    call: Call


class Closed(NamedTuple):
    """The program leaves a step: no call of it will follow."""

    step: int


class Entered(NamedTuple):
    """All rows of a generate are in the engine: it has room for those of another one."""

    id: int


class Grouped(NamedTuple):
    """A prompt group of a generate is finished."""

    id: int
    group: int


class Finished(NamedTuple):
    """A call, a chunk of one, or a move is done."""

    id: int
    chunk: int = 0


class Ended(NamedTuple):
    """The program has returned."""


class Freed(NamedTuple):
    """The order of an earlier run is kept no longer: the program stops here, and issues no more."""


Event = Resumed | Opened | Issued | Closed | Entered | Grouped | Finished | Ended | Freed


class Start(NamedTuple):
    """Run a call, or one chunk of it. What ``offload`` names leaves its pool's memory before, ``onload`` comes in.

    ``versions`` are those of the generating copies that it reads. Rows that run in pools that it ``rests`` stand still
    from here on, between two tokens, until they :class:`GoOn`.
    """

    id: int
    chunk: int
    chunks: int
    pools: tuple[str, ...]
    versions: Mapping[str, int]
    offload: tuple[tuple[str, str], ...] = ()  # (pool, resident)
    onload: tuple[tuple[str, str], ...] = ()
    rests: tuple[str, ...] = ()


class Stage(NamedTuple):
    """Set the trained weights of a worker aside as a version; they may change again when this is finished."""

    id: int
    worker: str
    version: int
    step: int
    pools: tuple[str, ...]


class Publish(NamedTuple):
    """Install a staged version in the generating copy of a worker."""

    id: int
    worker: str
    version: int
    step: int
    pools: tuple[str, ...]


class Take(NamedTuple):
    """The rows of a generate are complete: these groups."""

    id: int
    groups: Groups


class GoOn(NamedTuple):
    """Have the rows that stand still in a pool go on. ``id`` is the first of their calls, -1 where they have ended.

    What ``offload`` names leaves the memory of the pool before, ``onload`` comes back.
    """

    pool: str
    id: int
    offload: tuple[tuple[str, str], ...] = ()
    onload: tuple[tuple[str, str], ...] = ()


class Commit(NamedTuple):
    """All that was issued in a step is done, and so are all steps before it."""

    step: int


Command = Start | Stage | Publish | Take | GoOn | Commit


@dataclass(frozen=True, slots=True)
class Memory:
    """What a pool can hold at once: ``Memory(80e9, {"actor.train": 70e9, "actor.generate": 35e9})``, bytes a device.

    ``capacity``: with 0 nobody of ``sizes`` stays in a turn that does not need it. ``turns``: of workers there, those
    too that never leave, what of ``sizes`` is there in their turns; of one that is not listed, itself.
    """

    capacity: float
    sizes: Mapping[str, float] = field(default_factory=dict[str, float])
    turns: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])


@dataclass(frozen=True, slots=True)
class Follower:
    """A trained worker that generates: ``Follower("train", "rollout")`` are the pools of its two copies.

    ``shared``: one copy serves both, so nothing is staged.
    """

    train: str
    generate: str
    shared: bool = False


class KeptTokens(NamedTuple):
    """How much was known of a part of a call: ``KeptTokens(7, 0, {0: 12, 1: 9})`` is 12 tokens of the first row of call
    7, and 9 of the second; of a row that is known to have ended one more than it has.

    ``part`` is the number of its chunk, or of its prompt group. ``kept_cache``: keys and values were kept through a
    publish. ``apart``: no engine had rows of the part then, as they had been answered, or could not begin.
    """

    call: int
    part: int
    tokens: Mapping[int, int]
    kept_cache: bool = False
    apart: bool = False


class Begun(NamedTuple):
    """What a pool that samples has begun with: ``Begun("rollout", 7, 0, {0: 17})`` is call 7, chunk 0, once the engine
    of rank 0 had made 17 steps since what came before; ``Begun("rollout", PUBLISH, 3, {0: 4}, worker="actor")`` the
    publish of version 3; ``Begun("rollout", AGAIN, 2, {2: 9}, kept=...)`` the rows of rank 2, after it was lost.

    ``after`` is None where no rows ran there: the program began, or went on from a checkpoint. ``ranks`` are those that
    were given the groups of the call, where these finish one by one. ``kept``: what is known of rows that begin again.
    """

    pool: str
    number: int
    part: int
    after: Mapping[int, int] | None = {}
    ranks: tuple[int, ...] = ()
    worker: str = ""
    kept: tuple[KeptTokens, ...] = ()

    @property
    def key(self) -> tuple[int, int, str]:
        """What it is, however it came about."""
        return self.number, self.part, self.worker


#: Stand for moves of weights, and for rows that a rank begins again, among the numbers of calls in a :class:`Begun`.
PUBLISH, STAGE, AGAIN = -1, -2, -3


@dataclass(frozen=True, slots=True)
class Setup:
    """What a schedule knows before the first event.

    ``Setup(("train", "rollout"), {"actor": Follower("train", "rollout")}, staleness=1)``. ``chunks``: into how many
    row-wise calls are cut. ``begun``: the order in which pools that sample begin with what they have to do, and
    ``taken`` the groups of a call, as an earlier run has recorded them. ``queue``: how many calls may be handed to a
    pool that is busy with another one, which it then runs in turn.
    """

    pools: tuple[str, ...]
    followers: Mapping[str, Follower] = field(default_factory=dict[str, Follower])
    staleness: int = 0
    order: str = "fifo"
    window: float = 0.3
    publish: str = "drain"
    chunks: int = 1
    memory: Mapping[str, Memory] = field(default_factory=dict[str, Memory])
    begun: tuple[Begun, ...] = ()
    taken: Mapping[int, Groups] = field(default_factory=dict[int, "Groups"])
    queue: int = 0

    @property
    def settled(self) -> bool:
        """Whether the program alone settles which version a relaxed read sees, and timing does not."""
        return self.staleness == 1 and self.order == "fifo" and self.publish == "drain"

    @property
    def streams(self) -> bool:
        """Whether a run has the rows of several calls in one batch of an engine, which they leave one by one.

        Else an engine has one call at a time, and its numbers depend on the version that it sees alone.
        """
        return self.staleness > 0 and not self.settled

    @property
    def sampling_pools(self) -> Mapping[str, tuple[str, ...]]:
        """The pools in which timing decides what an engine begins with next, with the workers that sample there."""
        found: dict[str, tuple[str, ...]] = {}
        for worker, follower in self.followers.items() if self.streams else ():
            found[follower.generate] = (*found.get(follower.generate, ()), worker)
        return found
