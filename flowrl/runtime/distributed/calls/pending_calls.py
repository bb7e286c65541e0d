"""A call on ranks, on its way: sent, waited for, and sent again where what was lost of it can be had again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter, time
from typing import Any

from ....batch import Batch, Column
from ....errors import RankLost, WrongAnswer, cut
from ....graph.stand_ins.argument_trees import find_in, rebuild
from ....workers.decode_passes import DecodePasses
from ....workers.decode_slots import DecodeSlots
from ....workers.environment_waits import EnvironmentWaits
from ...executor import PendingCall, Ready
from ...values.call import Call
from ...values.ops_without_columns import UNKNOWN, on_driver
from ...values.remote_batch import RemoteBatch, RemoteColumn, remote_values
from ...values.row_digests import keys_to_text
from ...values.rows_to_fetch import Fetch
from ...values.step_records import RankTime
from ..protocol import Failed, RankCall, Reply
from ..rank_client import RankClient, to_error
from ..recovery import remake_rows
from ..worker_group import WorkerGroup
from .call_messages import Shares, rank_calls
from .kept_results import fill_keys, kept_of, payload_bytes, result_of, wrong_rows
from .lineage import Recipe, stored_in

SHOWN = 200  # characters of the rows that a rank was at


def start_call(client: RankClient, call: Call, group: WorkerGroup | None, arguments: Mapping[str, Any]) -> PendingCall:
    """Start a call on the ranks of a group, or one of a library where its rows are; returns what waits for it.

    What needs no rows is done at once, here.
    """
    arguments = to_remote(arguments)
    if group is None:
        if (known := on_driver(call.op, arguments)) is not UNKNOWN:
            return Ready(known)
        if next(remote_values(arguments), None) is None:  # numbers alone
            return Ready(call.op.run(None, arguments, call.into, call.info))
    return CallOnRanks(client, call, group, arguments)


@dataclass(frozen=True)
class Sent:
    """A call as it was sent: what each rank was told, how it answers, and what it takes to make its rows again."""

    rank_calls: Mapping[int, RankCall]
    answers: Mapping[int, Any]
    recipe: Recipe
    epoch: int


class CallOnRanks:
    """A call on the ranks of ``group``, sent as this is made; None: where its rows are."""

    def __init__(self, client: RankClient, call: Call, group: WorkerGroup | None, arguments: Mapping[str, Any]) -> None:
        self.client, self.call, self.group, self.arguments = client, call, group, arguments
        self.main: RemoteBatch | None = next(find_in(dict(arguments), RemoteBatch), None)
        self.rank_times: tuple[RankTime, ...] = ()
        self._passes: tuple[DecodePasses, ...] = ()
        self.slots = DecodeSlots()  # of the engines that it asks
        self.waits = EnvironmentWaits()  # of its environments
        self._shares: Shares | None = None  # who has which rows, once it was sent
        self._epoch: int | None = client.epoch
        self._first: Sent | RankLost | None
        try:
            self._first = self._send()
        except RankLost as lost:
            self._first = lost

    def result(self) -> Any:
        """Wait for the ranks, and send the call again where what it lost can be made again.

        Returns what the call gives; raises what it raised on a rank, with its line here, or RankLost.
        """
        return self.client.retry(self._attempt, self._epoch)

    def take_passes(self) -> Sequence[DecodePasses]:
        """Return how long passes of its ranks' engines took."""
        found, self._passes = self._passes, ()
        return found

    def _attempt(self) -> Any:
        first, self._first = self._first, None
        if isinstance(first, RankLost):
            raise first
        return self._receive(self._send() if first is None else first)

    def _send(self) -> Sent:
        client, call, group = self.client, self.call, self.group
        with client.order:  # nothing is restarted between what a call says and its way there
            if group is not None and group.is_away:  # its generating use has no memory of its own
                client.note_swap("onload", group.pool, f"{group.name}.train", group.onload())
            calls, self._shares = rank_calls(
                client, call, group, self.arguments, self.main, rank=self._choose_rank(), before=self._shares
            )
            recipe = self._recipe(calls)
            try:
                remake_rows(client, [dict(c.arguments) for c in calls.values()])
            except RankLost:
                for rank, rank_call in calls.items():
                    for id in rank_call.frees:
                        client.drop(rank, id)
                raise
            if group is not None and call.op.updates:
                group.changing = True
            return Sent(calls, self._tell(calls), recipe, client.epoch)

    def _choose_rank(self) -> int | None:
        """Return the rank that does the whole call; None where its ranks share it."""
        return None

    def _tell(self, calls: Mapping[int, RankCall]) -> dict[int, Any]:
        """Tell the ranks of their calls. Returns their answers to come."""
        return self.client.send("run", {rank: (rank_call,) for rank, rank_call in calls.items()})

    def _recipe(self, calls: Mapping[int, RankCall]) -> Recipe:
        group = self.group
        groups = [*([group] if group is not None else []), *find_in(dict(self.arguments), WorkerGroup)]
        return Recipe(
            self.call.title,
            self.call.info.step,
            calls,
            {g: g.stamp for g in groups},
            () if group is None else group.parts.copies,
            needs=stored_in(dict(self.arguments)),
        )

    def _receive(self, sent: Sent) -> Any:
        group, client = self.group, self.client
        try:
            answers = self._wait(sent)
            same = {rank for rank in answers if not client.restarted_after(sent.epoch, rank)}
            replies, result = self._gather(sent, answers, same)
            if not self.call.op.updates:
                client.lineage.note(sent.recipe, kept_of(sent.rank_calls, replies))
                for wait in self._begin_copies(sent, replies):
                    wait()
            return result
        finally:  # what it has changed is known by now
            if group is not None and self.call.op.updates:
                group.changing = False

    def _gather(self, sent: Sent, answers: Mapping[int, Any], same: Collection[int]) -> tuple[dict[int, Reply], Any]:
        """Return the replies, and what the call gives; raises what failed. ``same``: ranks that were not restarted."""
        replies = self._check(answers)
        fill_keys(sent.rank_calls, replies)
        self._check_rows(sent, replies)
        if self.group is not None:
            told = {rank: r.weights for rank, r in replies.items() if rank in same and r.weights is not None}
            self.group.note(told)
        moved = sent.recipe.moved
        self._note_ranks(replies, moved)
        result = result_of(self.client, self.call, sent.rank_calls, replies, self.arguments, self.main, moved)
        if self.call.op.cost == "generate" and self.main is not None:
            self.client.expected.note(self.call, self.main, replies)
        return replies, result

    def _note_ranks(self, replies: Mapping[int, Reply], moved: Mapping[int, int]) -> None:
        """Note when each rank was at its part, on the clock of the driver, its memory, and what it had of engines."""
        ahead = time() - perf_counter()
        self.slots.add(each for reply in replies.values() for each in reply.slots)
        self._passes = tuple(each for reply in replies.values() for each in reply.passes)
        for waits in (reply.waits for reply in replies.values() if reply.waits is not None):
            self.waits.add(waits)
        self.rank_times = tuple(
            RankTime(moved.get(rank, rank), *(at - ahead for at in reply.times))
            for rank, reply in replies.items()
            if reply.times is not None
        )
        memory = {moved.get(rank, rank): reply.memory for rank, reply in replies.items()}
        self.client.memory |= {rank: found for rank, found in memory.items() if found is not None}

    def _wait(self, sent: Sent) -> dict[int, Any]:
        """Return what the ranks say of their calls. Raises RankLost, inconsistent where a worker may have changed in
        part."""
        client, call = self.client, self.call
        changes = self.group is not None and bool(call.op.updates)
        try:
            answers = self._wait_for_all(sent)
            failed = [a for a in answers.values() if isinstance(a, Failed)]
            asks = call.op.external  # of other ranks too, while it runs
            if any(a.before or asks for a in failed) and client.restarted_since(sent.epoch):
                raise RankLost(f"ranks that {call.title} needed were started again meanwhile.", answers=answers)
            return answers
        except RankLost as lost:
            for rank, rank_call in sent.rank_calls.items():
                client.drop(sent.recipe.moved.get(rank, rank), rank_call.keep)
            not_begun = [rank for rank, a in lost.answers.items() if isinstance(a, Failed) and a.before]
            lost.inconsistent = lost.inconsistent or (changes and set(not_begun) != set(sent.rank_calls))
            raise

    def _wait_for_all(self, sent: Sent) -> dict[int, Any]:
        """Return what the ranks say of their calls, by the rank that each was sent to."""
        try:
            return self.client.wait_for(sent.answers, self._describe())
        except RankLost as lost:
            lost.what += _rows_of(sent, lost)
            return self._move_lost(sent, lost)

    def _move_lost(self, sent: Sent, lost: RankLost) -> dict[int, Any]:
        """Have the parts of lost ranks done once more, as they were sent: the others keep what they have done.

        Returns what :meth:`_wait_for_all` does. Raises ``lost`` where the whole call has to be made again.
        """
        group = self.group
        split = group is not None and group.spec.collective
        fallen = {rank for one in lost.ranks for rank in ((one,) if group is None else group.parts.copy_with(one))}
        there = {r: a for r, a in lost.answers.items() if r in sent.rank_calls and not (split and r in fallen)}
        parts = [rank for rank in sent.rank_calls if rank in fallen and rank not in there]
        others = [rank for rank in sent.rank_calls if rank not in fallen]
        calls = {part: replace(sent.rank_calls[part], frees=()) for part in parts}
        if not parts or not others or not self._can_move(calls.values(), fallen, lost, there):
            raise lost
        left = [rank for rank in others if rank not in there]
        answers = there | (self._do_again if split else self._do_on_others)(sent, lost, calls, others, left)
        return {rank: answers[rank] for rank in sent.rank_calls}

    def _do_on_others(
        self, sent: Sent, lost: RankLost, calls: Mapping[int, RankCall], others: Sequence[int], left: Sequence[int]
    ) -> dict[int, Any]:
        """Have other ranks of a call do the parts of lost ones, while these are started again; returns what both say,
        and what those ``left`` to wait for say of their own."""
        client, what = self.client, self._describe()
        by = {part: others[number % len(others)] for number, part in enumerate(calls)}
        with client.order:
            lost.what += "".join(f" Rank {rank} does what rank {part} was at." for part, rank in by.items())
            sent.recipe.moved.update(by)
            begun = {part: client.send("run", {by[part]: (call,)}) for part, call in calls.items()}
            client.restart_lost(lost, sent.epoch)  # the others are at it meanwhile
        answers = self._wait_for_others(sent, lost, others, left)
        return answers | {part: client.wait_for(answer, what)[by[part]] for part, answer in begun.items()}

    def _do_again(
        self, sent: Sent, lost: RankLost, calls: Mapping[int, RankCall], others: Sequence[int], left: Sequence[int]
    ) -> dict[int, Any]:
        """Have ranks that split a model do their part of a call again, once they are there; returns what they say, and
        what those ``left`` to wait for say."""
        client = self.client
        with client.order:
            client.restart_lost(lost, sent.epoch)
            begun, epoch = client.send("run", {part: (call,) for part, call in calls.items()}), client.epoch
        answers = self._wait_for_others(sent, lost, others, left)
        answers |= client.wait_for(begun, self._describe())  # of all at once: one that fails may have lost another
        with client.order:  # they may have been started again, once they had answered
            there = {call.keep: part for part, call in calls.items() if not client.restarted_after(epoch, part)}
            client.lineage.note_remade({id: part for id, part in there.items() if id})
        return answers

    def _wait_for_others(
        self, sent: Sent, lost: RankLost, others: Sequence[int], left: Sequence[int]
    ) -> dict[int, Any]:
        """Return what ranks say of their own parts, where others were lost; raises ``lost`` where they were too."""
        if any(self.client.restarted_after(sent.epoch, rank) for rank in others):
            raise lost
        return self.client.wait_for({rank: sent.answers[rank] for rank in left}, self._describe()) if left else {}

    def _can_move(
        self, parts: Iterable[RankCall], fallen: Collection[int], lost: RankLost, answers: Mapping[int, Any]
    ) -> bool:
        """Whether parts of a call can be done without the whole: the other ranks have all of the worker, and the rows
        are not lost."""
        op = self.call.op
        if self.group is None or op.updates or op.external or lost.inconsistent:
            return False
        if any(isinstance(answer, Failed) for answer in answers.values()):
            return False
        wanted = [f for part in parts for f in find_in(dict(part.arguments), Fetch)]
        return not any(take.rank in fallen for f in wanted for together in f.parts for take in together.takes)

    def _check(self, answers: Mapping[int, Any]) -> dict[int, Reply]:
        """Return the answers; raises the first failure, which counts the others and has both tracebacks."""
        client, call = self.client, self.call
        failed = {rank: a for rank, a in sorted(answers.items()) if isinstance(a, Failed)}
        if failed:
            rank, first = min(failed.items(), key=lambda f: f[1].knows_less)
            raise to_error(first, call.title, rank, client.pool_of(rank), call.at, len(failed) - 1)
        for reply in answers.values():
            client.traffic.add(between=reply.pulled, payload=payload_bytes(reply.value))
            for text in reply.warnings:
                client.warn(text)
            for failures in reply.failures:
                client.settle(failures)
        return dict(answers)

    @property
    def _copied(self) -> bool:
        """Whether another rank keeps what is made, too."""
        if self.call.joins:  # the weights that it was made with may be gone already
            return True
        models = (g for g in (self.group, *find_in(dict(self.arguments), WorkerGroup)) if g is not None)
        return self.client.copies > 1 and any(g.is_model and (g.spec.serving or g.trains) for g in models)

    def _begin_copies(self, sent: Sent, replies: Mapping[int, Reply]) -> list[Callable[[], None]]:
        """Have other ranks keep what was made too, where there are to be copies: the weights that it was made with go
        on to other versions. Returns what waits for each of them.

        A rank that is lost meanwhile has no copy, and is none: whoever needs it next finds that it is lost.
        """
        begun: list[Callable[[], None]] = []
        if not self._copied:
            return begun
        for part, reply in kept_of(sent.rank_calls, replies).items():
            rank, id = sent.recipe.moved.get(part, part), sent.rank_calls[part].keep
            team = () if self.group is None else self.group.parts.copy_with(self.client.stand_in(rank))
            other = self.client.another_rank(rank, team)
            if other is None or not reply.kinds:
                continue
            what = f"a copy of {self.call.title} of step {self.call.info.step}"
            with self._leaving_out_lost(sent):
                wait = self.client.begin_copy(id, rank, other, what)
                begun.append(partial(self._wait_for_copy, sent, wait))
        return begun

    def _wait_for_copy(self, sent: Sent, wait: Callable[[], None]) -> None:
        with self._leaving_out_lost(sent):
            wait()

    @contextmanager
    def _leaving_out_lost(self, sent: Sent) -> Generator[None]:
        """Go on without a copy where a rank is lost inside."""
        lost = f"{self.call.title} was to be copied, and ranks were started again meanwhile."
        with suppress(RankLost), self.client.blaming_restarts(sent.epoch, lost):
            yield

    def _check_rows(self, sent: Sent, replies: Mapping[int, Reply]) -> None:
        """Raise WrongAnswer where a rank has not answered the rows that it was asked for, each of them once."""
        if self.call.op.rows not in ("same", "expand"):
            return
        for rank, reply in replies.items():
            asked = sent.rank_calls[rank].arguments.get(self.call.op.batch_parameter)
            if not isinstance(asked, Fetch) or reply.keys is None or reply.column:
                continue
            wrong = wrong_rows(asked.keys, reply.keys, expand=self.call.op.rows == "expand")
            if wrong:
                rank = sent.recipe.moved.get(rank, rank)
                where = f"rank {rank} of pool '{self.client.pool_of(rank)}'"
                raise WrongAnswer(f"{self.call.title} on {where}: {wrong}.", at=self.call.at)

    def _describe(self) -> str:
        """Return the call in words: what it is, from whom its rows come, and which version of the weights it sees."""
        call, group = self.call, self.group
        more = [call.edge] if call.edge else []
        more += [f"version {group.version}"] if group is not None and group.is_model else []
        return f"{call.title} of step {call.info.step}" + (f" ({', '.join(more)})" if more else "")


def _rows_of(sent: Sent, lost: RankLost) -> str:
    """Return in words at which rows lost ranks were."""
    said: list[str] = []
    for rank in lost.ranks:
        call = sent.rank_calls.get(rank)
        rows = None if call is None or rank in lost.answers else next(find_in(dict(call.arguments), Fetch), None)
        if rows is not None and rows.keys:
            said.append(f" Rank {rank} was at the rows {cut(keys_to_text(sorted(rows.keys)), SHOWN)}.")
    return "".join(said)


def to_remote(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as ranks are told of them: rows that the driver has come with the call."""
    return rebuild(dict(arguments), _to_remote)


def _to_remote(item: Any) -> Any:
    """Return a batch that the driver has as one whose columns come with the call; other values as they are."""
    if isinstance(item, Batch):
        return RemoteBatch.drawn(item)
    if isinstance(item, Column):
        batch = Batch.of(len(item), value=item)
        return RemoteColumn(batch.keys, RemoteBatch.drawn(batch).columns["value"])
    return item
