"""Calls of ops on ranks, as the driver makes them: who runs which rows, and where the columns that come of it lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ...batch import Batch, CallInfo, Column, Key
from ...errors import At, FlowError, RankLost
from ...graph.call_errors import misread, missing_field, written_twice
from ...graph.op import Op
from ...graph.signature import Signature
from ...graph.values import is_handle
from ..storage.disk import Checksum
from ..values.on_driver import UNKNOWN, on_driver
from ..values.remote_batch import DRIVER, Fetch, Remote, RemoteColumn, Source, Stored, bytes_of, fetch, found, rebuilt
from .client import RankClient, told
from .lineage import Made, needed
from .protocol import Failed, Named, RankCall, Reply, Serving
from .worker_group import WorkerGroup

Values = (Remote, RemoteColumn)


@dataclass(frozen=True)
class Asked:
    """A call as the driver makes it: ``Asked(op, "actor.generate", CallInfo(...), index=7, program=0, chunk=0)``."""

    op: Op
    title: str
    info: CallInfo
    index: int
    program: int
    chunk: int = 0
    at: At | None = None
    into: Mapping[str, str] = field(default_factory=dict[str, str])  # other names for the fields that it adds
    edge: str = ""  # from whom its rows come, for a call that does not answer


class Calls:
    """Makes calls on ranks."""

    def __init__(self, client: RankClient) -> None:
        self.client = client
        self._library = 0

    # -- one call ---------------------------------------------------------------------------------------------------

    def run(self, asked: Asked, group: WorkerGroup | None, arguments: Mapping[str, Any]) -> Any:
        """Run a call on the ranks of a group, or one of a library where its rows are."""
        return self.begun(asked, group, arguments)()

    def begun(self, asked: Asked, group: WorkerGroup | None, arguments: Mapping[str, Any]) -> Callable[[], Any]:
        """Begin a call; what is given waits for it, and begins it again if what it lost can be made again."""
        epoch = self.client.epoch
        first: list[Callable[[], Any]] = []
        try:
            first.append(self._begun(asked, group, arguments))
        except RankLost as lost:
            first.append(partial(_raised, lost))
        return lambda: self.client.lasting(
            lambda: (first.pop() if first else self._begun(asked, group, arguments))(), epoch
        )

    def _begun(self, asked: Asked, group: WorkerGroup | None, arguments: Mapping[str, Any]) -> Callable[[], Any]:
        arguments = rebuilt(dict(arguments), _remote)
        if group is None and (known := on_driver(asked.op, arguments)) is not UNKNOWN:
            return lambda: known
        if group is None and not found(arguments, Values):  # numbers alone
            return partial(asked.op.run, None, arguments, asked.into, asked.info)
        reads = self._reads(asked, group, arguments)
        main = next((v for v in found(arguments, (Remote,))), None)
        with self.client.order:  # nothing is renewed between what a call says and its way there
            if group is not None and group.is_away:  # its generating use has no memory of its own
                self.client.swapped(
                    "onload", self.client.pool_of(group.ranks[0]), f"{group.name}.train", group.onload()
                )
            shares = group.shares(asked.op, arguments, main) if group else {self._home(arguments): None}
            rank_calls = {
                r: self._rank_call(asked, group, arguments, reads, main, r, keys) for r, keys in shares.items()
            }
            made = self._making(asked, group, rank_calls, arguments)
            epoch, begun = self.client.epoch, self._sent(asked, group, rank_calls)

        def outcome() -> Any:
            try:
                replies = self._checked(asked, self._answers(asked, group, rank_calls, begun, epoch))
                return self._outcome(asked, group, replies, made, epoch, arguments, main)
            finally:  # what it has changed is known by now
                if group is not None and asked.op.updates:
                    group.changing = False

        return outcome

    def _making(
        self, asked: Asked, group: WorkerGroup | None, rank_calls: Mapping[int, RankCall], arguments: Mapping[str, Any]
    ) -> Made:
        groups = [*([group] if group is not None else []), *found(dict(arguments), (WorkerGroup,))]
        return Made(
            asked.title,
            asked.info.step,
            rank_calls,
            {g: g.stamp for g in groups},
            together=group is not None and group.post.collective,
            needs=needed(dict(arguments)),
        )

    def _sent(self, asked: Asked, group: WorkerGroup | None, rank_calls: Mapping[int, RankCall]) -> dict[int, Any]:
        """Send calls."""
        try:
            self.client.bring_back([dict(t.arguments) for t in rank_calls.values()])
        except RankLost:
            for rank, rank_call in rank_calls.items():
                for id in rank_call.frees:
                    self.client.drop(rank, id)
            raise
        if group is not None and asked.op.updates:
            group.changing = True
        return self.client.begin("run", {rank: (rank_call,) for rank, rank_call in rank_calls.items()})

    def _answers(
        self,
        asked: Asked,
        group: WorkerGroup | None,
        rank_calls: Mapping[int, RankCall],
        begun: Mapping[int, Any],
        epoch: int,
    ) -> dict[int, Any]:
        """What the ranks say of their calls. Raises RankLost, inconsistent where a worker may have changed in part."""
        changes = group is not None and bool(asked.op.updates)
        try:
            answers = self.client.link.wait(begun, _waiting(asked, group), self.client.deadline)
            failed = [a for a in answers.values() if isinstance(a, Failed)]
            asks = asked.op.external  # of other ranks too, while it runs
            if any(a.before or asks for a in failed) and self.client.restarted_since(epoch):
                raise RankLost(f"ranks that {asked.title} needed were started again meanwhile.", answers=answers)
            return answers
        except RankLost as lost:
            for rank, rank_call in rank_calls.items():
                self.client.drop(rank, rank_call.keep)
            begun_not = [rank for rank, a in lost.answers.items() if isinstance(a, Failed) and a.before]
            lost.inconsistent = lost.inconsistent or (changes and set(begun_not) != set(rank_calls))
            raise

    def _reads(self, asked: Asked, group: WorkerGroup | None, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The fields that each batch is read for, by parameter; all of one that is not among them."""
        op, into = asked.op, asked.into
        main = arguments.get(op.batch_parameter)
        have = frozenset(main.fields) if isinstance(main, Remote) else frozenset[str]()
        init = group.blueprint.arguments if group else {}
        signature = op.signature(init, arguments, have)
        if isinstance(main, Remote) and op.returns == "batch" and op.inherits:
            twice = [n for n in (into.get(n, n) for n in signature.adds) if n in have]
            if twice:
                raise written_twice(asked.title, twice, asked.at)
        for parameter, fields in signature.reads.items():
            value = arguments.get(parameter)
            lacking = next((n for n in fields if n not in value), None) if isinstance(value, Remote) else None
            if isinstance(value, Remote) and lacking is not None:
                raise missing_field(asked.title, lacking, value.fields, asked.at, ())
        for error in _misread(op, asked, group, arguments, signature):
            error.at = error.at or asked.at
            raise error
        reads: dict[str, Any] = {p: tuple(f) for p, f in signature.reads.items()}
        named = tuple(a for a in arguments.values() if isinstance(a, str))  # the field of a group's mean
        if op.owner == "batch" and (named or op.name == "filter"):
            reads = {op.batch_parameter: named}
        return reads

    def _rank_call(
        self,
        asked: Asked,
        group: WorkerGroup | None,
        arguments: Mapping[str, Any],
        reads: Mapping[str, Any],
        main: Remote | None,
        rank: int,
        keys: tuple[Key, ...] | None,
    ) -> RankCall:
        """What one rank is told: its rows of every value, and only the fields that are read."""
        policies: dict[str, Serving] = {}

        def given(item: Any, names: Any = None) -> Any:
            if isinstance(item, WorkerGroup):
                if asked.op.external:  # it is called there, row by row; other ops look at its weights
                    policies[item.name] = Serving(item.name, item.keepers, item.read_version())
                return Named(item.name)
            if not isinstance(item, Values):
                return Named(item.name) if is_handle(item) else item
            mine = keys if keys is not None and main is not None and item.keys == main.keys else None
            if mine is None and main is not None and group is not None and isinstance(item, Remote):
                mine = group.share_of(item, rank, main, keys)
            wanted = fetch(item, mine, names if isinstance(item, Remote) else None)
            self.client.traffic.drawn += _inline(wanted)
            return wanted

        sent = {
            name: given(value, reads.get(name)) if isinstance(value, Values) else rebuilt(value, given)
            for name, value in arguments.items()
        }
        keeps = group is None or (rank == group.ranks[0] if keys is None else rank in group.keepers)
        return RankCall(
            asked.title,
            asked.op.name if group is not None else asked.op,
            group.key if group is not None else None,
            sent,
            asked.info,
            into=dict(asked.into),
            keep=self.client.number() if keeps else 0,
            weights=(group.version, group.dirty) if group is not None else (0, False),
            journal=(asked.program, asked.index) if asked.op.external else None,
            frees=self.client.dropped(rank),
            policies=policies,
        )

    def _home(self, arguments: Mapping[str, Any]) -> int:
        """The rank where a call of a library runs: one that has some of its rows, in turns where the driver has."""
        for value in found(dict(arguments), Values):
            sources = [value.source] if isinstance(value, RemoteColumn) else value.columns.values()
            at = next((s.rank for source in sources for s in source.stored if s.rank != DRIVER), None)
            if at is not None:
                return at
        ranks = [r for ranks in self.client.pools.values() for r in ranks]
        self._library += 1
        return ranks[self._library % len(ranks)]

    def _checked(self, asked: Asked, answers: Mapping[int, Any]) -> dict[int, Reply]:
        """The answers; raises the first failure, which counts the others and has both tracebacks."""
        failed = {rank: a for rank, a in sorted(answers.items()) if isinstance(a, Failed)}
        if failed:
            rank, first = min(failed.items(), key=lambda f: f[1].elsewhere)
            raise told(first, asked.title, rank, self.client.pool_of(rank), asked.at, len(failed) - 1)
        for reply in answers.values():
            self.client.traffic.between += reply.pulled
            self.client.traffic.payload += _payload(reply.value)
            for text in reply.warnings:
                self.client.warn(text)
        return dict(answers)

    def _outcome(
        self,
        asked: Asked,
        group: WorkerGroup | None,
        replies: Mapping[int, Reply],
        made: Made,
        epoch: int,
        arguments: Mapping[str, Any],
        main: Remote | None,
    ) -> Any:
        first, rank_calls = next(iter(replies.values())), made.rank_calls
        for rank, reply in replies.items():
            if reply.alike:
                reply.keys = found(dict(rank_calls[rank].arguments), (Fetch,))[0].keys
        if group is not None:
            still = {
                rank: r for rank, r in replies.items() if not self.client.restarted_after(epoch, rank)
            }  # the same process
            group.note({rank: r.weights for rank, r in still.items() if r.weights is not None})
        kept = {rank: r for rank, r in replies.items() if r.keys is not None and rank_calls[rank].keep}
        if not kept:
            return first.value
        stored = [self._stored(rank, rank_calls[rank].keep, r) for rank, r in kept.items()]
        if not asked.op.updates:
            self.client.lineage.note(made, kept)
        if first.column:
            values = [v for v in found(dict(arguments), Values) if len(v.keys) == sum(len(s.keys) for s in stored)]
            listed = tuple(k for s in stored for k in s.keys)
            split = len(stored) > 1 and values  # its rows are those of its batch
            keys = values[0].keys if split else listed
            return RemoteColumn(keys, Source(tuple(stored), ("value",) * len(stored)))
        columns = {n: Source(tuple(stored), (n,) * len(stored)) for n in first.kinds}
        if main is None or asked.op.rows == "regroup":
            return Remote(_in_order(stored, main), columns)
        if asked.op.rows == "apart":
            return Remote(main.keys, columns)
        keys = main.keys if asked.op.rows == "same" else _children(main.keys, stored)
        return main.with_sources(columns, keys)

    def _stored(self, rank: int, id: int, reply: Reply) -> Stored:
        assert reply.keys is not None, "only rows are kept"
        drop = self.client.drop if reply.kinds else None
        return Stored(rank, id, reply.keys, reply.kinds, reply.sizes, drop, bytes=reply.bytes, oldest=reply.oldest)

    # -- what the driver may have of values -------------------------------------------------------------------------

    def brought(self, value: Remote | RemoteColumn) -> Batch | Column:
        """Rows of a value, for a reader of the run; counted as records."""
        got = self.client.lasting(lambda: self._at_home("bring", value, what="rows for a record"))
        columns = [got] if isinstance(got, Column) else got.columns.values()
        self.client.traffic.records += sum(bytes_of(c) for c in columns)
        return got

    def written(self, value: Remote | RemoteColumn, file: Path) -> tuple[Mapping[str, Any], Mapping[str, Checksum]]:
        """Have a rank write rows to a file; what is no tensor of them, and the file's checksum."""
        return self.client.lasting(lambda: self._at_home("write_rows", value, str(file), what="rows of a checkpoint"))

    def _at_home(self, method: str, value: Remote | RemoteColumn, *args: Any, what: str) -> Any:
        """Have a rank that has some of the rows do something with all of them."""
        rank, wanted = self._home({"value": value}), fetch(value)
        with self.client.order:
            self.client.bring_back([wanted])
            epoch, begun = self.client.epoch, self.client.begin(method, {rank: (wanted, *args)})
        try:
            return self.client.answered(begun, what)[rank]
        except RankLost:
            raise
        except Exception as error:
            if self.client.restarted_since(epoch):
                raise RankLost(f"{what} needed ranks that were started again meanwhile.") from error
            raise


def _misread(
    op: Op, asked: Asked, group: WorkerGroup | None, arguments: Mapping[str, Any], signature: Signature
) -> list[FlowError]:
    """What the marks of rows forbid, said before a rank begins: its fellows would wait for one that fails alone."""
    if op.reads is None:
        return []
    reads = {
        param: {name: value.columns[name].marks for name in signature.reads.get(param, ())}
        for param, value in arguments.items()
        if isinstance(value, Remote)
    }
    return misread(op, asked.title, group.name if group is not None else "", arguments, reads)


def _raised(error: RankLost) -> Any:
    raise error


def _waiting(asked: Asked, group: WorkerGroup | None) -> str:
    """A call in words: what it is, from whom its rows come, and which version of the weights it sees."""
    said = [asked.edge] if asked.edge else []
    said += [f"version {group.version}"] if group is not None and group.is_model else []
    return f"{asked.title} of step {asked.info.step}" + (f" ({', '.join(said)})" if said else "")


def _remote(item: Any) -> Any:
    """A batch that the driver has, as one whose columns come with the call."""
    if isinstance(item, Batch):
        return Remote.drawn(item)
    if isinstance(item, Column):
        batch = Batch.of(len(item), value=item)
        return RemoteColumn(batch.keys, Remote.drawn(batch).columns["value"])
    return item


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
    return sum(
        bytes_of(t.batch[n]) for part in wanted.parts for t in part.takes if t.batch is not None for n in t.names
    )


def _payload(value: Any) -> int:
    """Bytes of tensors in what a rank sent to the driver: there should be none."""
    if isinstance(value, Column):
        return bytes_of(value)
    if isinstance(value, Batch):
        return sum(bytes_of(c) for c in value.columns.values())
    if isinstance(value, dict):
        return sum(_payload(v) for v in value.values())
    return value.numel() * value.element_size() if hasattr(value, "numel") else 0
