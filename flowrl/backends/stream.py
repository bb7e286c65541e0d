"""Drives an engine whose rows leave one by one, for threads and for asyncio: whoever waits for a row makes the steps.

No thread is started: of those that wait, one at a time steps the engine, in the order in which they came, and hands the
others their rows. asyncio has one step at a time made in a thread, while its other tasks go on.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import FlowError, RunError
from ..workers.model_options import Sampled, Sampling
from ..workers.streaming import FailedCall, SampledRow, SampleRequest, Streams, gathered, tells_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import Column


class Stream:
    """All calls of an engine, in one batch.

    >>> import torch
    >>> stream = fl.testing.FakeEngine(vocab=8).stream
    >>> prompts = fl.Column.of([[3], [5]], dim="prompt", dtype="i32")
    >>> from flowrl.testing import SampleRequest, Sampling
    >>> long = stream.submit(SampleRequest(prompts, 2, torch.arange(4), Sampling(max_tokens=30)))
    >>> short = stream.submit(SampleRequest(prompts, 1, torch.arange(2), Sampling(max_tokens=3)))
    >>> [len(row.ids) <= 3 for row in short]
    [True, True]
    >>> len(list(long))
    4
    """

    def __init__(self, engine: Streams) -> None:
        self.engine = engine
        self._calls: dict[int, StreamedCall] = {}
        self._changed = threading.Condition()
        self._line: deque[object] = deque()  # those that wait for their turn with the engine; the first has it
        self._broken: BaseException | None = None
        self.is_given_up = False  # a publish has failed: its weights may be written in part
        self._under_way: asyncio.Future[None] | None = None
        self.steps = 0  # so far
        self._holder = object()  # has the turn while the weights are written
        self.follows = False  # publishes come in between, and its rows say of which version each token is
        self.kept_cache = False  # rows have gone on through a publish with the keys and values that they had

    def beside(self, engine: Streams) -> Stream:
        """Return a stream of its own for what stands for the engine of this one: it has other calls, and is given up
        where this one is."""
        made = Stream(engine)
        made.is_given_up = self.is_given_up
        return made

    def submit(self, request: SampleRequest) -> StreamedCall:
        """Begin a call. Its rows come as they end."""
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[SampleRequest]) -> list[StreamedCall]:
        """Begin several calls, between the same two tokens. Where one cannot begin, none has."""
        begun: list[StreamedCall] = []
        with self._turn():
            try:
                for request in requests:
                    number = self.engine.submit(request)
                    begun.append(StreamedCall(self, number, request.rows, request.sampling))
            except BaseException:
                for call in begun:
                    self.engine.abort(call.number)
                raise
            self._calls |= {call.number: call for call in begun}
        return begun

    def publish(self, install: Callable[[], Any], version: int, how: str = "drain") -> None:
        """Have ``install`` write the weights of ``version``; calls that come meanwhile wait.

        Rows that run are ended first (``drain``), or go on under the new weights with keys and values computed again
        (``interrupt``) or kept (``continue``). Raises RunError for what the engine does not do.
        """
        if how not in self.engine.publish_modes:
            raise RunError(
                f"{type(self.engine).__name__} does not publish with '{how}' while rows run.",
                have=self.engine.publish_modes,
                fix="Publish with one of these.",
            )
        with self._turn():
            while how == "drain" and self.engine.running():
                self._step()
            with self._of_engine():
                self.engine.pause()
                install()
                self.engine.resume(version, keep_cache=how == "continue")

    def hold(self) -> None:
        """Stop between two tokens, until :meth:`let_go`: whoever waits for a turn waits for that. One holds it, and may
        do so again. Raises RunError where it is let go, or given up, before it stands still."""
        with self._changed:
            if self._holder not in self._line:
                self._line.append(self._holder)
            self._changed.wait_for(lambda: not self.is_held or self._line[0] is self._holder)
            if not self.is_held:
                raise RunError("The rows of this engine go on: nobody waits any more for them to stand still.")

    @property
    def is_held(self) -> bool:
        """Whether somebody has it stand still."""
        return self._holder in self._line

    def let_go(self) -> None:
        """Go on; nothing where it is not held."""
        self._leave_held(given_up=False)

    def give_up(self) -> None:
        """Have whoever waits fail, until :meth:`let_go`: weights that were to come do not."""
        self._leave_held(given_up=True)

    def _leave_held(self, *, given_up: bool) -> None:
        with self._changed:
            self.is_given_up = given_up
            if self._holder in self._line:
                self._line.remove(self._holder)
                self._changed.notify_all()

    @contextmanager
    def held(self, *, also_given_up: bool = False) -> Iterator[None]:
        """Stop between two tokens inside the block: the weights may be written. Raises RunError where it is given up,
        unless ``also_given_up``."""
        with self._turn(also_given_up=also_given_up):
            yield

    # -- turns --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _turn(self, enough: Callable[[], bool] = lambda: False, *, also_given_up: bool = False) -> Iterator[bool]:
        """Wait for a turn with the engine, or until ``enough``; say whether it is one."""
        me = object()
        with self._changed:
            self._line.append(me)
            mine = False
            try:
                self._changed.wait_for(lambda: self._line[0] is me or enough())
                mine = self._line[0] is me
            finally:
                if not mine:  # also of somebody who was interrupted as they waited
                    self._line.remove(me)
                    self._changed.notify_all()
        try:
            if mine and self._broken is not None:
                raise RunError("The engine of this call has failed.") from self._broken
            if mine and self.is_given_up and not also_given_up:
                raise RunError("The weights of this engine may be written in part: a publish has failed.")
            yield mine
        finally:
            with self._changed:
                if mine:
                    self._line.popleft()
                self._changed.notify_all()

    @contextmanager
    def _of_engine(self) -> Iterator[None]:
        """What fails in here leaves an engine that is of no more use."""
        try:
            yield
        except BaseException as error:
            self._broken = error
            raise

    def _step(self) -> None:
        """Make a step, and hand out what has ended."""
        self.steps += 1
        with self._of_engine():
            ended = self.engine.step()
            if not ended and not self.engine.running():
                self._miss()
        with self._changed:
            for each in ended:
                if each.call in self._calls:
                    self._calls[each.call]._take(each)
            self._changed.notify_all()

    def _miss(self) -> None:
        """Raise RunError where rows are waited for that the engine does not have."""
        calls = list(self._calls.items())  # others hand out rows meanwhile, and forget calls that are over
        lost = [f"{number}.{row}" for number, call in calls for row in sorted(call._left)]
        if lost:
            raise RunError(f"{type(self.engine).__name__} has lost rows (call.row): {', '.join(lost[:20])}.")

    def step(self) -> None:
        """Make a step of all rows, whoever waits for them. What the engine raises leaves it of no more use."""
        with self._turn():
            self._step()

    def rows_of(self, calls: Collection[StreamedCall]) -> list[SampledRow]:
        """Return rows of some calls that have ended; where there are none a step is made, which may end none.

        Raises the error of a call that cannot go on, once its rows are handed out.
        """
        with self._turn(lambda: self.has_news(calls)) as mine:
            if mine and not self.has_news(calls):
                self._step()
        return self.take(calls)

    def has_news(self, calls: Iterable[StreamedCall]) -> bool:
        """Return whether rows of some calls have ended that were not handed out, or one of them cannot go on."""
        return any(call._has_news() for call in calls)

    def take(self, calls: Iterable[StreamedCall]) -> list[SampledRow]:
        """Hand out the rows of some calls that have ended, without a step. Raises as :meth:`rows_of`."""
        with self._changed:  # somebody else may be handing out the rows of a step
            ready = [call for call in calls if call._has_news()]
            found = [row for call in ready for row in call._take_all()]
            for call in ready:
                if not found and call._error is not None:
                    self._forget(call.number)
                    raise call._error
        return found

    def tokens_since(self, known: Mapping[StreamedCall, Mapping[int, int]]) -> list[SampledRow]:
        """Return rows of some calls that run and have more tokens than are ``known`` of them, by call and row.

        Each is as :meth:`abort_rows` would return it now, with the tokens alone that are not known. An engine that does
        not tell has none.
        """
        if not known or not tells_tokens(self.engine):
            return []
        with self._turn():
            return self.engine.tokens_since({call.number: rows for call, rows in known.items()})

    def abort_rows(self, wanted: Mapping[StreamedCall, Iterable[int] | None]) -> list[SampledRow]:
        """End some rows of each of these calls, or all of them, between the same two tokens.

        Returns them with the tokens that they have, those too that had ended and were not handed out.
        """
        if not wanted:
            return []
        with self._turn(), self._changed:
            return [row for call, rows in wanted.items() for row in call._end(None if rows is None else set(rows))]

    def leave(self, calls: Collection[StreamedCall]) -> list[SampledRow]:
        """End all rows of some calls; see :meth:`abort_rows`."""
        return self.abort_rows(dict.fromkeys(calls))

    def _advance(self, call: StreamedCall) -> None:
        """Take a turn for a call, unless it has a row meanwhile."""
        with self._turn(call._is_settled) as mine:
            if mine and not call._is_settled():
                self._step()

    async def _advance_async(self, call: StreamedCall) -> None:
        """Wait for the step that another task has made begin, or have one made."""
        step = self._under_way
        if step is None or step.done() or step.get_loop() is not asyncio.get_running_loop():
            step = self._under_way = asyncio.ensure_future(asyncio.to_thread(self._advance, call))
        await asyncio.shield(step)

    def _forget(self, number: int) -> None:
        self._calls.pop(number, None)


class StreamedCall:
    """A call whose rows come as they end: ``for row in call``, or ``async for row in call``.

    Raises the error of the call where it cannot go on; rows that ended before come first.

    >>> import torch
    >>> prompts = fl.Column.of([[3]], dim="prompt", dtype="i32")
    >>> stream = fl.testing.FakeEngine(vocab=8, stop=()).stream
    >>> call = stream.submit(fl.testing.SampleRequest(prompts, 3, torch.arange(3), fl.testing.Sampling(max_tokens=5)))
    >>> [row.reason for row in call.abort([0])]
    ['aborted']
    >>> call.sampled().ids.lengths
    tensor([0, 5, 5])
    """

    def __init__(self, stream: Stream, number: int, rows: int, sampling: Sampling) -> None:
        self.number, self.sampling = number, sampling
        self.rows: list[SampledRow] = []  # all that have left, in the order in which they did
        self._stream = stream
        self._left = set(range(rows))
        self._ready: deque[SampledRow] = deque()
        self._error: FlowError | None = None

    def __iter__(self) -> Iterator[SampledRow]:
        while self._more():
            while not self._is_settled():
                self._stream._advance(self)
            yield from self._next()

    async def __aiter__(self) -> AsyncIterator[SampledRow]:
        while self._more():
            while not self._is_settled():
                await self._stream._advance_async(self)
            for row in self._next():
                yield row

    def abort(self, rows: Iterable[int] | None = None) -> list[SampledRow]:
        """End some rows, or all; return them with the tokens that they have. The iteration does not give them."""
        with self._stream._turn(), self._stream._changed:
            return self._abort(rows)

    def _abort(self, rows: Iterable[int] | None) -> list[SampledRow]:
        ended = self._stream.engine.abort(self.number, rows)
        for row in ended:
            self._left.discard(row.row)
            self.rows.append(row)
        if not self._left:
            self._stream._forget(self.number)
        return ended

    def _end(self, rows: set[int] | None) -> list[SampledRow]:
        """End some rows, or all, those too that are ready to be handed out."""
        there = list(self._ready)
        self._ready = deque(row for row in there if rows is not None and row.row not in rows)
        ended = [*(row for row in there if rows is None or row.row in rows), *self._abort(rows)]
        if rows is None:  # also where it cannot go on, which nobody is told any more
            self._stream._forget(self.number)
        return ended

    def sampled(self) -> Sampled:
        """Wait for all rows; return them as ``generate`` does, those that were aborted too."""
        for _ in self:
            pass
        return gathered(self.rows, self.sampling)

    @property
    def is_over(self) -> bool:
        """Whether all of its rows have been handed out."""
        with self._stream._changed:  # a row that has ended is in neither place for a moment
            return not (self._ready or self._left or self._error)

    @property
    def open(self) -> int:
        """How many of its rows have not been handed out."""
        with self._stream._changed:
            return len(self._left) + len(self._ready)

    def _has_news(self) -> bool:
        return bool(self._ready or self._error)

    def _take_all(self) -> list[SampledRow]:
        """Hand out the rows that are there; a call that is over is forgotten."""
        rows = list(self._ready)
        self._ready.clear()
        if self.is_over:
            self._stream._forget(self.number)
        return rows

    def _more(self) -> bool:
        """Whether the iteration goes on; a call that is over is forgotten."""
        if not self.is_over:
            return True
        self._stream._forget(self.number)
        return False

    def _is_settled(self) -> bool:
        """Whether there is something to give, or nothing more comes."""
        with self._stream._changed:
            return bool(self._ready or self._error or not self._left)

    def _next(self) -> list[SampledRow]:
        with self._stream._changed:
            if self._ready:
                return [self._ready.popleft()]
        if self._error is not None:
            self._stream._forget(self.number)
            raise self._error
        return []

    def _take(self, ended: SampledRow | FailedCall) -> None:
        if isinstance(ended, FailedCall):
            self._error = ended.error
            return
        self._left.discard(ended.row)
        self._ready.append(ended)
        self.rows.append(ended)


_LOCK = threading.Lock()


def stream_of(engine: Streams) -> Stream:
    """Return the stream of an engine, which keeps it: there is one, as a row is handed out once."""
    with _LOCK:
        found: Stream | None = vars(engine).get("_stream")
        if found is None:
            found = vars(engine)["_stream"] = Stream(engine)
        return found


def generate_streamed(
    engine: Streams, prompts: Column, n: int, seeds: Tensor, sampling: Sampling, starts: Tensor | None = None
) -> Sampled:
    """Return whole calls of an engine whose rows leave one by one: what its ``generate`` may be."""
    return stream_of(engine).submit(SampleRequest(prompts, n, seeds, sampling, starts)).sampled()
