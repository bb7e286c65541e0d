"""An engine that calls share: their rows are in one batch, leave it one by one, and publishes come in between."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import sleep
from typing import Any

from ...batch import CallInfo
from ...errors import EngineLost, FlowError, RunError
from ...graph.ops.op import Op
from ...workers.decode_passes import DecodePasses
from ...workers.model_options import Sampled
from ...workers.streaming import (
    EngineCall,
    FailedCall,
    SampledRow,
    SampleRequest,
    Streams,
    gathered,
    knows_waiting,
    on_ranks,
    tells_tokens,
)
from ...workers.user_code.rows_in_progress import Notes
from ..values.step_records import RankTime
from .run_op import heard, take_passes


class SharedEngine:
    """The rows of several calls in the batch of one engine. One thread uses it: that of the engine's pool.

    ``version`` is that of the weights which the engine has.
    """

    def __init__(self, engine: Streams, version: int) -> None:
        self.engine = engine
        self._requests: dict[int, Rows] = {}
        self._over: set[int] = set()  # those whose rows have left, and are not taken yet
        self._broken: BaseException | None = None
        self.steps = 0  # so far
        self.most: int | None = None  # it makes no more than so many
        engine.pause()
        engine.resume(version)

    def submit(self, request: SampleRequest, *, kept_cache: bool = False) -> Rows:
        """Have the rows of a request join the batch. Raises DataError for a prompt that cannot be answered.

        ``kept_cache`` says whether some of the tokens that it keeps come from keys and values that were kept through a
        publish.
        """
        assert not request.kept or hasattr(self.engine, "tokens_since"), "an engine of its kind has told what rows had"
        rows = Rows(self.engine.submit(request), request)
        rows.kept_cache = kept_cache
        if rows.are_over:
            self._over.add(rows.number)
        else:
            self._requests[rows.number] = rows
        return rows

    def step(self) -> None:
        """Go on by a token of each row, unless ``most`` steps are made.

        Raises what the engine raises, which is of no more use then.
        """
        if self.is_held:
            sleep(0.001)
            return
        self.steps += 1
        try:
            if isinstance(self._broken, EngineLost):
                raise EngineLost(self._broken.what, fix=self._broken.fix) from self._broken
            if self._broken is not None:
                raise RunError("The engine of this call has failed.") from self._broken
            ended = self.engine.step()
            if not ended and not self.engine.running():
                raise RunError(f"{type(self.engine).__name__} has lost rows of calls {sorted(self._requests)}.")
        except BaseException as error:
            self._broken = self._broken or error
            raise
        for each in ended:
            rows = self._requests.get(each.call)
            if rows is None:  # of a call that was given up: its row had ended before the engine was told
                continue
            rows.take(each)
            if rows.are_over:
                del self._requests[each.call]
                self._over.add(each.call)

    @property
    def is_held(self) -> bool:
        """Whether it waits for something to begin."""
        return self.most is not None and self.steps >= self.most

    def any_rank(self, said: bool) -> bool:
        """Return whether any of the ranks that have the engine together says so; each of them has to ask."""
        return self.engine.any_rank(said) if on_ranks(self.engine) else said

    def give_up(self, error: BaseException) -> None:
        """Note that the engine has failed: it is of no more use where it is on several ranks."""
        self._broken = self._broken or error

    def raise_failure(self) -> None:
        """Raise what the engine has failed with, if it has and is on several ranks: none of them can go on."""
        if self._broken is not None and on_ranks(self.engine):
            raise self._broken

    @property
    def has_results(self) -> bool:
        """Whether the rows of a request have left that were not taken yet: its call goes first."""
        return bool(self._over)

    def take(self, rows: Rows) -> Sampled:
        """Return the rows of a request that is over, with the version of each token. Raises its failure."""
        self._over.discard(rows.number)
        return rows.sampled()

    def tokens_since(self, known: Mapping[Rows, Mapping[int, int]]) -> dict[Rows, list[SampledRow]]:
        """Return what the rows of requests have got that is not ``known``, which are so many tokens by row: of those
        that have ended, and of those that run, unless the engine does not tell or has failed."""
        found = {rows: rows.ended_since(tokens) for rows, tokens in known.items()}
        if self._broken is None and tells_tokens(self.engine):
            of_number = {rows.number: rows for rows in known}
            for row in self.engine.tokens_since({rows.number: tokens for rows, tokens in known.items()}):
                found[of_number[row.call]].append(row)
        return found

    def has_waiting(self, rows: Rows) -> bool:
        """Return whether some of the rows wait for a place in the batch."""
        return not rows.are_over and knows_waiting(self.engine) and self.engine.waiting(rows.number)

    def publish(self, install: Callable[[], int], version: int, *, keep_cache: bool) -> int:
        """Have ``install`` write the weights of ``version`` between two tokens; return what it returns.

        Rows that run go on under the new weights, with keys and values computed again, or with those that they have.
        """
        try:
            self.pause()
            moved = install()
            self.resume(version, keep_cache=keep_cache)
        except BaseException as error:  # the rows that run would wait for ever
            self._broken = error
            raise
        return moved

    def pause(self) -> None:
        """Stop between two tokens: the weights may be written until :meth:`resume`."""
        self.engine.pause()

    def resume(self, version: int, *, keep_cache: bool) -> None:
        """Go on under the weights of ``version``, which are in place now."""
        self.engine.resume(version, keep_cache=keep_cache)
        for rows in self._requests.values():
            rows.kept_cache |= keep_cache

    def withdraw(self, rows: Rows) -> list[SampledRow]:
        """End the rows of a request: nobody waits for them any more. Returns all of them, with what they have."""
        found = [*rows.ended_since({}), *self.engine.abort(rows.number)]
        self._requests.pop(rows.number, None)
        self._over.discard(rows.number)
        return found

    def abort(self) -> None:
        """End all rows: nobody waits for them any more."""
        for number in self._requests:
            self.engine.abort(number)
        self._requests.clear()
        self._over.clear()
        self.engine.resume()


class Rows:
    """The rows of a request, as they leave the engine."""

    def __init__(self, number: int, request: SampleRequest) -> None:
        self.number, self._request = number, request
        self._ended = [replace(row, call=number) for row in request.kept if row.reason != "aborted"]
        self._error: FlowError | None = None
        self.kept_cache = False  # through a publish

    def take(self, ended: SampledRow | FailedCall) -> None:
        """Take a row that has left, or the failure of the call."""
        if isinstance(ended, FailedCall):
            self._error = ended.error
        else:
            self._ended.append(ended)

    def ended_since(self, known: Mapping[int, int]) -> list[SampledRow]:
        """Return those that have ended, with the tokens alone that are not known.

        Of one that is known to have ended one token more is known than it has.
        """
        return [row.since(known.get(row.row, 0)) for row in self._ended if len(row.ids) >= known.get(row.row, 0)]

    @property
    def are_over(self) -> bool:
        """Whether all have left."""
        return self._error is not None or len(self._ended) == self._request.rows

    def sampled(self) -> Sampled:
        """Return all of them. Raises the failure of the call."""
        if self._error is not None:
            raise self._error
        return replace(gathered(self._ended, self._request.sampling, versions=True), kept_cache=self.kept_cache)


@dataclass(frozen=True)
class KeptRows:
    """What the rows of a request have got: ``KeptRows((row,))``. A row that has not ended is as if it was aborted.

    ``kept_cache``: keys and values were kept through a publish.
    """

    rows: tuple[SampledRow, ...] = ()
    kept_cache: bool = False


NOTHING = KeptRows()


class StreamedCall:
    """A call whose rows leave the engine one by one: see :class:`flowrl.runtime.executor.SteppedCall`.

    It is begun at once, in the thread of the engine. ``kept``: what the rows of the op's first request had got from
    another engine when that was lost.
    """

    ranks: tuple[int, ...] = ()
    rank_times: tuple[RankTime, ...] = ()

    def __init__(
        self,
        op: Op,
        worker: Any,
        arguments: Mapping[str, Any],
        into: Mapping[str, str],
        info: CallInfo,
        *,
        engine: SharedEngine,
        notes: Notes,
        warn: Callable[[str], None],
        kept: KeptRows = NOTHING,
    ) -> None:
        self._op, self._worker, self._arguments, self._info = op, worker, arguments, info
        self._kept, self._requests = kept, 0
        self._engine, self._notes, self._warn = engine, notes, warn
        self._steps: Generator[EngineCall, Sampled | None, Any] = op.run_asking(worker, arguments, into, info)
        self._rows: Rows | None = None
        self.begun_with: Rows | None = None  # the rows of its first request, also when it is over
        self._result: Any = None
        self._go_on()

    @property
    def first_rows(self) -> Rows | None:
        """The rows of the op's first request, while it runs: those of a later one depend on all of these."""
        return self._rows if self._requests == 1 else None

    @property
    def has_entered(self) -> bool:
        """Whether all its rows have a place in the batch."""
        return self._rows is None or not self._engine.has_waiting(self._rows)

    def withdraw(self) -> list[SampledRow]:
        """End its rows; it is of no more use. Returns those of the op's first request, with what they have."""
        gone = [] if self._rows is None else self._engine.withdraw(self._rows)
        first = self.begun_with
        return gone if first is self._rows or first is None else first.ended_since({})

    def step(self) -> bool:
        """Go on by a token, unless the call is over; return whether it is."""
        while self._rows is not None and self._rows.are_over:
            self._go_on()
        if self._rows is None:
            return True
        if not self._engine.has_results:
            self._engine.step()
        return False

    def take_passes(self) -> Sequence[DecodePasses]:
        """Return how long passes of the engine took, those too that rows of other calls were in."""
        return take_passes(self._op, self._worker)

    def result(self) -> Any:
        """Wait for the call. Returns what the op gives; raises what it raises."""
        while not self.step():
            pass
        return self._result

    def _go_on(self) -> None:
        """Run the op up to its next request, or to its end: it is sent the rows of the last one."""
        given = self._arguments.values()
        with heard(self._op, self._worker, given, self._info, notes=self._notes, warn=self._warn):
            answer = None if self._rows is None else self._engine.take(self._rows)
            try:
                asked = self._steps.send(answer)
            except StopIteration as end:
                self._result, self._rows = end.value, None
                return
        self._requests += 1
        kept, self._kept = self._kept, NOTHING
        self._rows = self._engine.submit(replace(asked.request, kept=kept.rows), kept_cache=kept.kept_cache)
        self.begun_with = self.begun_with or self._rows
