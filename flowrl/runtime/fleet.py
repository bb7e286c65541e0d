"""Calls on ranks, as the driver makes them: who runs which rows, and where the columns that come of it lie."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..batch import Batch, CallInfo, Column, Key
from ..errors import At, FlowError, RankLost, RunError
from ..graph.op import Op, missing_field, written_twice
from ..graph.values import is_handle
from .group import Group, present
from .lineage import Lineage, Made, needed
from .moves.plan import Moves
from .on_driver import UNKNOWN, on_driver
from .remote import DRIVER, Fetch, Remote, RemoteColumn, Source, Stored, fetch, found, rebuilt
from .task import Failed, Named, Reply, Serving, Task

Values = (Remote, RemoteColumn)
R = TypeVar("R")


class Link(Protocol):
    """How the driver reaches ranks: ``send`` begins a call, ``wait`` gives the answers by rank.

    ``wait`` raises RankLost for a rank that died or has not answered ``deadline`` seconds after its call began.
    """

    def send(self, rank: int, method: str, *args: Any) -> Any: ...
    def wait(self, begun: Mapping[int, Any], what: str, deadline: float | None = None) -> dict[int, Any]: ...


@dataclass(frozen=True)
class Asked:
    """A call as a fleet makes it: ``Asked(op, "actor.generate", CallInfo(...), index=7, program=0, piece=0)``."""

    op: Op
    title: str
    info: CallInfo
    index: int
    program: int
    piece: int = 0
    at: At | None = None
    edge: str = ""  # from whom its rows come, for a call that does not answer


@dataclass
class Traffic:
    """Bytes of columns: ``drawn`` by the driver from data and sent to ranks, ``between`` ranks, and what else the
    driver had: ``records`` for a reader of the run, and ``payload``, which stays 0."""

    drawn: int = 0
    between: int = 0
    records: int = 0
    payload: int = 0


class Fleet:
    """All ranks of a run. ``pools`` gives the ranks of each pool; ``deadline`` the seconds that a call may take."""

    def __init__(self, link: Link, pools: Mapping[str, Sequence[int]], *, deadline: float | None = None) -> None:
        self.link, self.pools, self.deadline = link, {p: tuple(r) for p, r in pools.items()}, deadline
        self.traffic = Traffic()
        self.warn: Callable[[str], None] = lambda text: None
        self.moves: deque[dict[str, Any]] = deque(maxlen=100)  # the latest publishes, for the run's record
        self.swaps: deque[dict[str, Any]] = deque(maxlen=100)  # the latest workers that made way or came back
        self._routes: dict[tuple[Any, ...], tuple[str, Moves, dict[int, int]]] = {}
        self._next = itertools.count(1)
        self._dropped: dict[int, deque[int]] = defaultdict(deque)
        self._library = 0
        self.order = threading.RLock()  # who holds it begins calls; while ranks are started again nobody else does
        self.lineage = Lineage()
        self.renew: Callable[[RankLost], Collection[int]] = _cannot
        self._renewed: dict[int, int] = {}  # by rank: how many renewals there were with its last one
        self._renewals = 0

    # -- one call ---------------------------------------------------------------------------------------------------

    def run(self, asked: Asked, group: Group | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call on the ranks of a group, or one of a library where its rows are."""
        return self.begun(asked, group, args, kwargs)()

    def begun(
        self, asked: Asked, group: Group | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[], Any]:
        """Begin a call; what is given waits for it, and begins it again if what it lost can be made again."""
        seen = self._renewals
        first: list[Callable[[], Any]] = []
        try:
            first.append(self._begun(asked, group, args, kwargs))
        except RankLost as lost:
            first.append(partial(_raised, lost))
        return lambda: self.lasting(lambda: (first.pop() if first else self._begun(asked, group, args, kwargs))(), seen)

    def lasting(self, action: Callable[[], R], seen: int | None = None) -> R:
        """Do something; again when ranks are lost meanwhile that can be renewed with all that they held.

        ``seen``: the renewals that there were when it was begun the first time.
        """
        while True:
            seen = self._renewals if seen is None else seen
            try:
                return action()
            except RankLost as lost:
                if lost.torn:
                    raise
                with self.order:
                    if self._renewals == seen or any(self._renewed.get(r, 0) <= seen for r in lost.ranks):
                        renewed = self.renew(lost)
                        self._renewals += 1
                        self._renewed |= dict.fromkeys(renewed, self._renewals)
                seen = None

    def _begun(
        self, asked: Asked, group: Group | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[], Any]:
        args, kwargs = rebuilt((args, dict(kwargs)), _remote)
        kwargs = dict(kwargs)
        if group is None and (known := on_driver(asked.op, args)) is not UNKNOWN:
            return lambda: known
        if group is None and not found((args, dict(kwargs)), Values):  # numbers alone
            return partial(asked.op.apply, None, args, kwargs, asked.info)
        into = kwargs.pop("into", None) or {}
        arguments, reads = self._bound(asked, group, args, kwargs, into)
        main = next((v for v in found(arguments, (Remote,))), None)
        with self.order:  # nothing is renewed between what a task says and its way there
            if group is not None and group.is_away:  # its generating use has no memory of its own
                self.swapped("onload", self.pool_of(group.ranks[0]), f"{group.name}.train", group.onload())
            shares = group.shares(asked.op, arguments, main) if group else {self._home(arguments): None}
            tasks = {r: self._task(asked, group, arguments, into, reads, main, r, keys) for r, keys in shares.items()}
            made = self._making(asked, group, tasks, arguments)
            seen, begun = self._renewals, self._sent(asked, group, tasks)

        def outcome() -> Any:
            try:
                replies = self._checked(asked, self._answers(asked, group, tasks, begun, seen))
                return self._outcome(asked, group, replies, made, seen, arguments, main)
            finally:  # what it has changed is known by now
                if group is not None and asked.op.updates:
                    group.changing = False

        return outcome

    def _making(
        self, asked: Asked, group: Group | None, tasks: Mapping[int, Task], arguments: Mapping[str, Any]
    ) -> Made:
        groups = [*([group] if group is not None else []), *found(dict(arguments), (Group,))]
        return Made(
            asked.title,
            asked.info.step,
            tasks,
            {g: g.stamp for g in groups},
            together=group is not None and group.post.collective,
            needs=needed(dict(arguments)),
        )

    def _sent(self, asked: Asked, group: Group | None, tasks: Mapping[int, Task]) -> dict[int, Any]:
        """Send tasks."""
        try:
            self.bring_back([(t.args, dict(t.kwargs)) for t in tasks.values()])
        except RankLost:
            for rank, task in tasks.items():
                self._dropped[rank].extend(task.frees)
            raise
        if group is not None and asked.op.updates:
            group.changing = True
        return self.begin("run", {rank: (task,) for rank, task in tasks.items()})

    def renewed_since(self, seen: int) -> bool:
        """Whether ranks were started again since there were so many renewals; waits for one that is under way."""
        with self.order:
            return self._renewals != seen

    @property
    def renewals(self) -> int:
        """How often ranks were started again within programs."""
        return self._renewals

    def _answers(
        self, asked: Asked, group: Group | None, tasks: Mapping[int, Task], begun: Mapping[int, Any], seen: int
    ) -> dict[int, Any]:
        """What the ranks say of their tasks. Raises RankLost, torn where a worker may have changed in part."""
        changes = group is not None and bool(asked.op.updates)
        try:
            answers = self.link.wait(begun, _waiting(asked, group), self.deadline)
            failed = [a for a in answers.values() if isinstance(a, Failed)]
            asks = asked.op.external  # of other ranks too, while it runs
            if any(a.before or asks for a in failed) and self.renewed_since(seen):
                raise RankLost(f"ranks that {asked.title} needed were started again meanwhile.", answers=answers)
            return answers
        except RankLost as lost:
            for rank, task in tasks.items():
                self._drop(rank, task.keep)
            begun_not = [rank for rank, a in lost.answers.items() if isinstance(a, Failed) and a.before]
            lost.torn = lost.torn or (changes and set(begun_not) != set(tasks))
            raise

    def bring_back(self, wanted: Any) -> None:
        """Have lost rows that arguments ask for made again, by the same tasks. RankLost where that cannot be."""
        for rank, id in self.lineage.missing(wanted):
            made = self.lineage.of(id)
            if made is None or not made.repeatable:
                raise RankLost(
                    f"rows that rank {rank} held are needed, and cannot be made again.", ranks=[rank], torn=True
                )
            tasks = made.again(id)
            self.bring_back([(t.args, dict(t.kwargs)) for t in tasks.values()])
            what = f"{made.title} of step {made.step}, once more"
            try:
                with present(*made.stamps):
                    begun = self.begin("run", {r: (t,) for r, t in tasks.items()})
                    answers = self.answered(begun, what)
            except RankLost:
                raise
            except Exception as error:  # such as memory that is not there beside others
                raise RankLost(f"{what} failed: {error}", ranks=[rank], torn=True) from error
            for r, reply in answers.items():
                if made.checks.get(tasks[r].keep, reply.check) != reply.check:
                    raise RankLost(f"{made.title} gave other rows when rank {r} made them again.", ranks=[r], torn=True)
            self.lineage.made_again({t.keep: r for r, t in tasks.items()})

    def lose(self, ranks: Collection[int]) -> None:
        """These ranks were started anew: all that they held is gone, and their connections with it."""
        self.lineage.lose(ranks, next(self._next))
        for rank in ranks:
            self._dropped[rank].clear()
        for ends, (name, _, numbers) in list(self._routes.items()):
            if not set(numbers).isdisjoint(ranks):
                del self._routes[ends]
                self.everywhere([r for r in numbers if r not in ranks], "disconnect", name)

    def _bound(
        self,
        asked: Asked,
        group: Group | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        into: Mapping[str, str],
    ) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Arguments by parameter, and the fields that each batch is read for; all of one that is not among them."""
        op = asked.op
        arguments = op.bind(group, args, kwargs)
        main = arguments.get(op.batch_parameter)
        have = frozenset(main.fields) if isinstance(main, Remote) else frozenset[str]()
        init = group.blueprint.arguments if group else {}
        signature = op.signature(init, arguments, have)
        if isinstance(main, Remote) and op.returns == "batch" and op.rows != "regroup":
            twice = [n for n in (into.get(n, n) for n in signature.adds) if n in have]
            if twice:
                raise written_twice(asked.title, twice, asked.at)
        for parameter, fields in signature.reads.items():
            value = arguments.get(parameter)
            lacking = next((n for n in fields if n not in value), None) if isinstance(value, Remote) else None
            if isinstance(value, Remote) and lacking is not None:
                raise missing_field(asked.title, lacking, value.fields, asked.at, ())
        reads: dict[str, Any] = {p: tuple(f) for p, f in signature.reads.items()}
        named = tuple(a for a in args[1:] if isinstance(a, str))  # a group's mean is of the field that is named
        if op.owner == "batch" and (named or op.name == "filter"):
            reads = {op.batch_parameter: named}
        return arguments, reads

    def _task(
        self,
        asked: Asked,
        group: Group | None,
        arguments: Mapping[str, Any],
        into: Mapping[str, str],
        reads: Mapping[str, Any],
        main: Remote | None,
        rank: int,
        keys: tuple[Key, ...] | None,
    ) -> Task:
        """What one rank is told: its rows of every value, and only the fields that are read."""
        policies: dict[str, Serving] = {}

        def given(item: Any, names: Any = None) -> Any:
            if isinstance(item, Group):
                if asked.op.external:  # it is called there, row by row; other ops look at its weights
                    policies[item.name] = Serving(item.name, item.keepers, item.read_version())
                return Named(item.name)
            if not isinstance(item, Values):
                return Named(item.name) if is_handle(item) else item
            mine = keys if keys is not None and main is not None and item.keys == main.keys else None
            if mine is None and main is not None and group is not None and isinstance(item, Remote):
                mine = group.share_of(item, rank, main, keys)
            wanted = fetch(item, mine, names if isinstance(item, Remote) else None)
            self.traffic.drawn += _inline(wanted)
            return wanted

        sent = {
            name: given(value, reads.get(name)) if isinstance(value, Values) else rebuilt(value, given)
            for name, value in arguments.items()
        }
        positional, named = _passed(asked.op, sent)
        keeps = group is None or (rank == group.ranks[0] if keys is None else rank in group.keepers)
        return Task(
            asked.title,
            asked.op.name if group is not None else asked.op,
            group.key if group is not None else None,
            positional,
            {**named, "into": dict(into)} if into else named,
            asked.info,
            keep=next(self._next) if keeps else 0,
            weights=(group.version, group.dirty) if group is not None else (0, False),
            journal=self._place_in_journal(asked, group, rank) if asked.op.external else None,
            frees=self._drops(rank),
            policies=policies,
        )

    @staticmethod
    def _place_in_journal(asked: Asked, group: Group | None, rank: int) -> tuple[int, int, int]:
        ranks = group.ranks if group is not None else (rank,)
        return asked.program, asked.index, asked.piece * len(ranks) + ranks.index(rank)

    def _drops(self, rank: int) -> tuple[int, ...]:
        dropped, some = self._dropped[rank], list[int]()
        while dropped:
            some.append(dropped.popleft())
        return tuple(some)

    def _home(self, arguments: Mapping[str, Any]) -> int:
        """The rank where a call of a library runs: one that has some of its rows, in turns where the driver has."""
        for value in found(dict(arguments), Values):
            sources = [value.source] if isinstance(value, RemoteColumn) else value.columns.values()
            at = next((s.rank for source in sources for s in source.stored if s.rank != DRIVER), None)
            if at is not None:
                return at
        ranks = [r for ranks in self.pools.values() for r in ranks]
        self._library += 1
        return ranks[self._library % len(ranks)]

    def _checked(self, asked: Asked, answers: Mapping[int, Any]) -> dict[int, Reply]:
        """The answers; raises the first failure, which counts the others and has both tracebacks."""
        failed = {rank: a for rank, a in sorted(answers.items()) if isinstance(a, Failed)}
        if failed:
            rank, first = min(failed.items(), key=lambda f: f[1].elsewhere)
            raise told(first, asked.title, rank, self.pool_of(rank), asked.at, len(failed) - 1)
        for reply in answers.values():
            self.traffic.between += reply.pulled
            self.traffic.payload += _payload(reply.value)
            for text in reply.warnings:
                self.warn(text)
        return dict(answers)

    def pool_of(self, rank: int) -> str:
        """The pool of a rank."""
        return next((p for p, ranks in self.pools.items() if rank in ranks), "")

    def _outcome(
        self,
        asked: Asked,
        group: Group | None,
        replies: Mapping[int, Reply],
        made: Made,
        seen: int,
        arguments: Mapping[str, Any],
        main: Remote | None,
    ) -> Any:
        first, tasks = next(iter(replies.values())), made.tasks
        for rank, reply in replies.items():
            if reply.alike:
                reply.keys = found((tasks[rank].args, dict(tasks[rank].kwargs)), (Fetch,))[0].keys
        if group is not None:
            still = {rank: r for rank, r in replies.items() if self._renewed.get(rank, 0) <= seen}  # the same process
            group.note({rank: r.weights for rank, r in still.items() if r.weights is not None})
        kept = {rank: r for rank, r in replies.items() if r.keys is not None and tasks[rank].keep}
        if not kept:
            return first.value
        stored = [self._stored(rank, tasks[rank].keep, r) for rank, r in kept.items()]
        if not asked.op.updates:
            self.lineage.note(made, kept)
        if first.column:
            values = [v for v in found(dict(arguments), Values) if len(v.keys) == sum(len(s.keys) for s in stored)]
            listed = tuple(k for s in stored for k in s.keys)
            keys = (
                values[0].keys if values and len(stored) > 1 else listed
            )  # a split call's rows are those of its batch
            return RemoteColumn(keys, Source(tuple(stored), ("value",) * len(stored)))
        columns = {n: Source(tuple(stored), (n,) * len(stored)) for n in first.kinds}
        if main is None or asked.op.rows == "regroup":
            return Remote(_in_order(stored, main), columns)
        keys = main.keys if asked.op.rows == "same" else _children(main.keys, stored)
        return main.with_sources(columns, keys)

    def _stored(self, rank: int, id: int, reply: Reply) -> Stored:
        assert reply.keys is not None, "only rows are kept"
        return Stored(rank, id, reply.keys, reply.kinds, reply.sizes, self._drop if reply.kinds else None)

    def _drop(self, rank: int, id: int) -> None:
        if id:
            self._dropped[rank].append(id)
            self.lineage.drop(id)

    # -- weights ----------------------------------------------------------------------------------------------------

    def route(self, source: Group, target: Group) -> tuple[str, Moves, dict[int, int]]:
        """How weights get from one group to another: its name on the ranks, the moves, and who has which number there.

        It is planned, and the ranks are connected, the first time.
        """
        ends = (source.key, source.ranks, target.key, target.ranks)
        if ends not in self._routes:
            ranks = sorted({*source.ranks, *target.ranks})
            numbers = {rank: n for n, rank in enumerate(ranks)}
            moves = target.plan_from(source, numbers)
            name = f"{source.title}-{target.title}.{next(self._next)}"  # who connects again has another one
            meeting = None
            if moves.total:
                meeting = self.everywhere(ranks[:1], "meeting_point")[ranks[0]]
            seconds = (self.deadline or 240.0) + 60
            told = {rank: (name, moves, n, len(ranks), meeting, seconds) for rank, n in numbers.items()}
            begun = self.begin("connect", told)
            try:
                self.answered(begun, f"connecting {source.title} with {target.title}")
            except BaseException:
                for rank in ranks:  # some may wait for one that is gone; whoever renews it may wait for them
                    self.link.send(rank, "disconnect", name)
                raise
            self._routes[ends] = (name, moves, numbers)
        return self._routes[ends]

    def part_ways(self, source: Group, target: Group) -> None:
        """Forget a route that nobody takes again."""
        name, _, numbers = self._routes.pop((source.key, source.ranks, target.key, target.ranks))
        self.everywhere(sorted(numbers), "disconnect", name)

    def forget(self) -> None:
        """The run goes back to a checkpoint: rows and connections are made again when they are needed."""
        self._routes.clear()
        self.lineage.forget()

    def moved(self, what: str, moves: Moves, answers: Mapping[int, Any]) -> None:
        """Note what a publish moved."""
        received = {rank: m.received for rank, m in answers.items() if m.received}
        peak = max((m.peak_staging for m in answers.values()), default=0)
        self.moves.append({"what": what, "received": received, "total": moves.total, "peak_staging": peak})

    def swapped(
        self, what: str, pool: str, resident: str, sizes: Mapping[int, int], forecast: float | None = None
    ) -> None:
        """Note the bytes that a worker freed or took on each rank of its pool, and those that its plan foretold."""
        if sizes:
            said = {"what": what, "pool": pool, "resident": resident, "bytes": dict(sizes)}
            self.swaps.append(said if forecast is None else {**said, "forecast": forecast})

    # -- what the driver may have of values -------------------------------------------------------------------------

    def brought(self, value: Remote | RemoteColumn, *, rows: int | None = None) -> Batch | Column:
        """Rows of a value, for a reader of the run; counted as records."""
        some = value.take(range(min(rows, len(value)))) if rows is not None and isinstance(value, Remote) else value
        got = self.lasting(lambda: self._at_home("bring", some, what="rows for a record"))
        columns = [got] if isinstance(got, Column) else got.columns.values()
        self.traffic.records += sum(_bytes(c) for c in columns)
        return got

    def written(self, value: Remote | RemoteColumn, file: Path) -> Mapping[str, Any]:
        """Have a rank write rows to a file; what is no tensor of them."""
        return self.lasting(lambda: self._at_home("write_rows", value, str(file), what="rows of a checkpoint"))

    def _at_home(self, method: str, value: Remote | RemoteColumn, *args: Any, what: str) -> Any:
        """Have a rank that has some of the rows do something with all of them."""
        rank, wanted = self._home({"value": value}), fetch(value)
        with self.order:
            self.bring_back([wanted])
            seen, begun = self._renewals, self.begin(method, {rank: (wanted, *args)})
        try:
            return self.answered(begun, what)[rank]
        except RankLost:
            raise
        except Exception as error:
            if self.renewed_since(seen):
                raise RankLost(f"{what} needed ranks that were started again meanwhile.") from error
            raise

    def everywhere(self, ranks: Sequence[int], method: str, *args: Any, what: str = "") -> dict[int, Any]:
        """The same call on several ranks; their answers. Raises what failed first."""
        return self.answered(self.begin(method, dict.fromkeys(ranks, args)), what or method.replace("_", " "))

    def begin(self, method: str, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Begin a call on several ranks. Calls in which ranks wait for each other come to all of them in one order."""
        with self.order:
            return {rank: self.link.send(rank, method, *args) for rank, args in calls.items()}

    def answered(self, begun: Mapping[int, Any], what: str) -> dict[int, Any]:
        """Wait for calls that were begun. Raises what failed first."""
        answers = self.link.wait(begun, what, self.deadline)
        failed = [(rank, a) for rank, a in sorted(answers.items()) if isinstance(a, Failed)]
        if failed:
            rank, first = failed[0]
            raise told(first, what, rank, self.pool_of(rank), None, len(failed) - 1)
        return answers


def told(failed: Failed, title: str, rank: int, pool: str, at: At | None, others: int) -> FlowError:
    """What failed on a rank, as the user meets it: with the driver's line, and the traceback there as a note."""
    where = f"rank {rank} of pool '{pool}'"
    if failed.error is not None:
        error = failed.error
        error.at = error.at or at
    else:
        error = RunError(f"{title} failed on {where}: {failed.text}", at=at)
    lines = "\n".join(f"  | {line}" for line in failed.traceback.rstrip().splitlines())
    error.add_note(f"{title} on {where}:\n{lines}")
    if others:
        error.add_note(f"({others} more rank{'s' if others > 1 else ''} of this call failed)")
    return error


def _raised(error: RankLost) -> Any:
    raise error


def _cannot(lost: RankLost) -> Collection[int]:
    raise lost


def _waiting(asked: Asked, group: Group | None) -> str:
    """A call in words: what it is, from whom its rows come, and which version of the weights it sees."""
    said = [asked.edge] if asked.edge else []
    said += [f"version {group.version}"] if group is not None and group.is_model else []
    return f"{asked.title} of step {asked.info.step}" + (f" ({', '.join(said)})" if said else "")


def _remote(item: Any) -> Any:
    """A batch that the driver has, as one whose columns come with the task."""
    if isinstance(item, Batch):
        return Remote.drawn(item)
    if isinstance(item, Column):
        batch = Batch.of(len(item), value=item)
        return RemoteColumn(batch.keys, Remote.drawn(batch).columns["value"])
    return item


def _passed(op: Op, arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by parameter as a call writes them, without ``self``."""
    bound = op.parameters.bind_partial()
    bound.arguments.update({**({"self": None} if op.is_method else {}), **arguments})
    return bound.args[1 if op.is_method else 0 :], dict(bound.kwargs)


def _children(parents: Sequence[Key], stored: Sequence[Stored]) -> tuple[Key, ...]:
    """The keys of rows that were made from others, or kept of them: as one rank has ordered them, else as those."""
    if len(stored) == 1:
        return stored[0].keys
    place = {key: i for i, key in enumerate(parents)}
    numbered: list[tuple[int, int, Key]] = []
    for s in stored:
        for i, key in enumerate(s.keys):
            parent = key
            while parent not in place:
                parent = parent[:-1]
            numbered.append((place[parent], i, key))
    return tuple(key for _, _, key in sorted(numbered, key=lambda n: n[:2]))


def _in_order(stored: Sequence[Stored], main: Remote | None) -> tuple[Key, ...]:
    """Keys of rows made anew: as they came, prompts in the order that they had."""
    keys = [k for s in stored for k in s.keys]
    if main is None or len(stored) == 1:
        return tuple(keys)
    place = {key[0]: i for i, key in reversed(list(enumerate(main.keys)))}
    return tuple(sorted(keys, key=lambda k: place.get(k[0], len(place))))


def _inline(wanted: Fetch) -> int:
    return sum(_bytes(t.batch[n]) for part in wanted.parts for t in part.takes if t.batch is not None for n in t.names)


def _bytes(column: Column) -> int:
    if isinstance(column.values, list):
        return sum(len(str(v)) for v in column.values)
    return column.values.numel() * column.values.element_size()


def _payload(value: Any) -> int:
    """Bytes of tensors in what a rank sent to the driver: there should be none."""
    if isinstance(value, Column):
        return _bytes(value)
    if isinstance(value, Batch):
        return sum(_bytes(c) for c in value.columns.values())
    if isinstance(value, dict):
        return sum(_payload(v) for v in value.values())
    return value.numel() * value.element_size() if hasattr(value, "numel") else 0
