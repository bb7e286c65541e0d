"""What a running program is made of, as records: its sources, its steps, where it was cut, whom it tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...graph.tracing.log_names import Logged
from ...schedule.events import Begun
from ...workers.decode_passes import DecodePasses
from ...workers.decode_slots import DecodeSlots
from ...workers.engine import Published
from ...workers.environment_waits import EnvironmentWaits
from .call import Call
from .episode_counts import EpisodeCounts
from .row_digests import RowDigests


class Interrupted(Exception):
    """The user asked to stop; a checkpoint was taken."""


@dataclass
class Draws:
    """A source in use: its cursor, and how its rows become a batch."""

    source: Any
    cursor: Any
    made: int = 0  # draws so far
    kept: int = 0  # draws before the cut of a resumed run
    ended: bool = False  # it had no rows left
    of_loop: bool = False  # a loop over steps draws from it


@dataclass(frozen=True)
class RankTime:
    """When a rank was at its part of a call: ``RankTime(2, 12.01, 12.03, 12.35)``.

    It brought its rows from ``start`` to ``ready``, and was at them until ``end``.
    """

    rank: int
    start: float
    ready: float
    end: float


@dataclass(frozen=True)
class Release:
    """What let a call begin: ``Release("rows", 16)``, when call 16 was over, whose rows it reads.

    ``kind``: ``rows`` that it reads, ``weights`` that were published, its ``pool`` that was free, the ``program`` that
    made the call, or the ``order`` of calls. ``call`` is the number of that call or publish, None for the program.
    """

    kind: str
    call: int | None = None


@dataclass(frozen=True)
class Timing:
    """One executed call, chunk of one, publish, or worker that makes room, in seconds of the session's clock:
    ``Timing("actor.generate", 3, "rollout", 12.01, 12.35, rows=512, tokens=40960, call=17)``.

    ``call`` is the number of the call in its program, the same one for its chunks; below 0 where it is none. The
    program made it at ``issued``, and ``after`` let it begin, at ``due``. ``ranks``: what each rank did of it. Of a
    call that samples, ``prompt`` are the tokens of all prompts, ``longest`` those of the longest response, and
    ``context`` the tokens that each sampled one came after, summed, and ``passes`` those of its engine by then, which
    rows of other calls were in too. ``published``: what an engine told of a publish.
    """

    node: str
    step: int
    pool: str
    start: float
    end: float
    rows: int = 0
    tokens: int = 0
    call: int = -1
    chunk: int = 0
    issued: float | None = None
    due: float | None = None
    after: Release | None = None
    ranks: tuple[RankTime, ...] = ()
    prompt: int = 0
    longest: int = 0
    context: int = 0
    passes: tuple[DecodePasses, ...] = ()
    published: Published | None = None


@dataclass
class Traffic:
    """What moved in a step: ``Traffic(reads={"actor.update": {"tokens": 3152}}, weights={"actor.publish": 401184})``.

    ``calls`` of each node of the graph, ``reads`` and ``makes`` their bytes by field; ``weights``: bytes that each
    publish has moved; ``prompts`` and ``responses``: tokens of the rows that were sampled, ``sources`` the prompts that
    the responses are to; ``lags``: prompt groups that were trained on, by the publishes between their oldest token and
    the weights.
    """

    calls: dict[str, int] = field(default_factory=dict[str, int])
    reads: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    makes: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    weights: dict[str, int] = field(default_factory=dict[str, int])
    prompts: list[int] = field(default_factory=list[int])
    responses: list[int] = field(default_factory=list[int])
    sources: list[Any] = field(default_factory=list[Any])
    lags: dict[int, int] = field(default_factory=dict[int, int])


@dataclass
class Made:
    """What one call of a step made: ``Made("actor.update", values={"loss": 0.25})``.

    ``parts``: digests of its rows, of its chunks as they came. ``versions``: those of the weights that it was started
    with, by worker. ``outside``: of the steps.
    """

    node: str
    outside: bool = False
    versions: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    parts: list[RowDigests] = field(default_factory=list[RowDigests])
    values: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class Step:
    """What a step gathers until it commits.

    ``sampled``: response tokens and rows of the calls that sample, by the id of the call in the graph; under the empty
    name of those whose rows are trained on. ``lengths``: tokens of each of these rows. ``cut_off``: rows of
    these that are not finished. ``gaps``: of updates the
    gap to the engine that sampled, by the same id. ``made``: what calls made, by their number in the program.
    ``updates``: what updates of a policy measure besides. ``published``: what engines have told of publishes, by their
    title. ``seen``: what calls have found of the tokens of rows that are written down, by their number in the program.
    ``slots``: decode slots that rollouts have used, by the same id as ``gaps``. ``waits``: how long their environments
    took, and ``episodes``: how those of rollouts ended, by that id too. ``ledger``: what became of the rows so far.
    ``skipped``: rows of the data that could not be read and were left out.
    ``begun``: what pools that sample have begun with since the step before, and ``taken`` the groups that calls have
    got, as :mod:`flowrl.runtime.driver.begin_order` notes them.
    """

    number: int
    logs: list[tuple[Any, list[Logged]]] = field(default_factory=list[tuple[Any, list[Logged]]])
    timings: list[Timing] = field(default_factory=list[Timing])
    skipped: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    rows: Any = None  # a Batch, or a RemoteBatch: the last batch with responses, for the sample of trajectories
    last: int = -1  # the call that gave it
    recorded: Any = None  # that sample, once it has been brought here
    parts: dict[str, None] = field(default_factory=dict[str, None])  # rewards that were made under names of their own
    sourced: Any = None  # rewards, sources and those parts of the rows that were trained on, where they have some
    beside_reference: Any = None  # some rows that were trained on, with log-probabilities of the reference
    marked: Any = None  # the first of its batches that says which rows failed: those are left out of later ones
    sampled: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    lengths: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    cut_off: dict[str, int] = field(default_factory=dict[str, int])
    gaps: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    made: dict[int, Made] = field(default_factory=dict[int, Made])
    updates: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    published: dict[str, Published] = field(default_factory=dict[str, Published])
    seen: dict[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict[int, Sequence[Mapping[str, Any]]])
    slots: dict[str, DecodeSlots] = field(default_factory=dict[str, DecodeSlots])
    waits: dict[str, EnvironmentWaits] = field(default_factory=dict[str, EnvironmentWaits])
    episodes: dict[str, EpisodeCounts] = field(default_factory=dict[str, EpisodeCounts])
    ledger: dict[str, Any] | None = None
    begun: list[Begun] = field(default_factory=list[Begun])
    taken: dict[int, Any] = field(default_factory=dict[int, Any])
    readable: Callable[[Any], Any] = lambda value: value  # brings rows that lie on ranks here

    def named(self) -> list[str]:
        """Return the names of the numbers that the program has logged by keyword: ``flow.log(step, right=...)``."""
        return [item.name for _, values in self.logs for item in values if item.name and not item.is_metrics]


@dataclass(frozen=True)
class ResumePoint:
    """Where a resumed program goes on: everything issued before ``calls`` is answered, not run."""

    calls: int
    reads: int
    steps: int
    call_digest: str
    live: Mapping[int, Any]
    cursors: list[dict[str, Any]]
    draws: int
    ledger: Mapping[str, Any] | None = None  # None: an older flowrl kept none
    held: tuple[str, ...] = ()  # workers whose last publish was waiting for the next step
    variables: Mapping[str, Any] | None = None  # of the program, as of runtime/driver/loop_heads.py
    evaluated: Mapping[str, int] = field(default_factory=dict[str, int])  # after how many calls each was last run
    stopped: Mapping[str, int] = field(default_factory=dict[str, int])  # steps of loops that were stopped early


@dataclass(frozen=True)
class Point:
    """Where a checkpoint is taken: a JSON record of the place in the program (None: it has ended), the values that the
    program holds there, and how long the files of the run are."""

    record: dict[str, Any] | None
    live: dict[int, Any]
    marks: dict[str, Any]


@dataclass(frozen=True)
class Hooks:
    """What a session tells and asks its run: a step to record, whether to stop after it, a checkpoint to take.

    ``note`` is told what a recorded step did later. ``sampled`` says how many prompt groups of a step are written down.
    ``not_finite`` is told the rows of a call that met numbers which are not finite.
    ``take_sampled`` is handed what a call has sampled, with the number of its chunk or prompt group and the node of the
    graph, and returns the rows that the program goes on with; None where there is nothing to do with them.
    ``settle`` looks at the rows that failed in a call of so many rows, and raises where they are too many.
    ``not_kept`` is told why a checkpoint has no variables of the program.
    ``evaluations`` says which programs are to be run now that so many steps are done, or the program has ended;
    ``evaluate`` runs one of them: its name, the steps that are done, and the calls so far. ``looks`` is told that a
    loop begins, and ``enough`` says whether a loop is to end although it was asked for more steps. ``replayed``: the
    last step that a replay does again is recorded, and no later one is.
    """

    commit: Callable[[Step], None]
    note: Callable[[Step], None]
    checkpoint: Callable[[Point], None]
    marks: Callable[[], dict[str, Any]]
    due: Callable[[int], bool]
    stop: Callable[[], bool]
    sampled: Callable[[int], int]
    settle: Callable[[Call, int], None]
    not_finite: Callable[[Call, Any], None]
    take_sampled: Callable[[Call, int, str, Any], Any] | None = None
    not_kept: Callable[[str], None] = lambda text: None
    evaluations: Callable[[int, bool], Sequence[str]] = lambda done, ended: ()
    evaluate: Callable[[str, int, int], None] = lambda name, done, calls: None
    looks: Callable[[], None] = lambda: None
    enough: Callable[[int], bool] = lambda opened: False
    replayed: Callable[[], bool] = lambda: False


class StepLog:
    """The steps that are not recorded yet, and what is done between steps and after them."""

    def __init__(self) -> None:
        self.steps: dict[int, Step] = {}
        self.outside = Step(0)

    def step(self, number: int) -> Step:
        """The record of a step."""
        step = self.steps.get(number)
        return self.steps.setdefault(number, Step(number)) if step is None else step

    def of(self, call: Call) -> Step:
        """The record that a call belongs into."""
        return self.outside if call.outside else self.step(call.step)
