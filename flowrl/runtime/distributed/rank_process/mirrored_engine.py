"""The engine of a policy that ranks split, as environments ask it: the first rank has each call made on all of them."""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

from ....errors import EngineLost, FlowError, RunError, cut
from ....workers.model_options import Sampled
from ....workers.streaming import FailedCall, SampledRow, SampleRequest, Streams, drawn_apart
from ..protocol import Failed
from .rank_weights import Key

if TYPE_CHECKING:
    from .peers import Begun, Peers

T = TypeVar("T")

#: Seconds that the others have, and the engine here, once one has failed: it may say best what is wrong.
GRACE = 5.0
#: Seconds after which who waits for the engine here looks whether another rank has failed.
LOOK = 0.5
#: What is asked of the engine here alone, as nothing is computed.
_LOOKS = frozenset({"running", "tokens_since", "most_rows", "waiting"})


class TeamCalls:
    """Calls that the ranks which split the engine of a policy make together, in the order in which this one does.

    This one is the first of them, ``others`` are the others. ``turn`` is held for each call, by all policies of this
    rank: ranks that split several engines have one order of all their calls. After a call that has not come to the same
    on each of them no other one is made.
    """

    def __init__(self, name: str, key: Key, others: Sequence[int], peers: Peers, turn: threading.Lock) -> None:
        self.name, self.others = name, tuple(others)
        self._key, self._peers, self._turn = key, peers, turn
        self._own = ThreadPoolExecutor(1, "flowrl-split-engine")  # what is done here; this thread looks after all
        self._own.submit(int).result()  # it is there before others are told
        self._failed: FlowError | None = None
        self._gone = False  # the process of another rank is

    def make(self, what: str, here: Callable[[], T], asked: Sequence[tuple[Any, ...]]) -> tuple[T, list[Any]]:
        """Make a call on all of them: do it ``here``, and have each other do it with what it is ``asked``.

        Returns what it gives here, and the answers of the others. Where all have failed, raises what failed here; else
        what tells most of it, with its rank, and no other call is made.
        """
        with self._turn:
            self._raise_failure()
            calls = zip(self.others, asked, strict=True)
            begun = {rank: self._peers.call(rank, "mirror", self._key, what, *words) for rank, words in calls}
            mine = self._own.submit(here)
            answers = self._wait(mine, begun)
            failed = {rank: error for rank, error in answers.items() if isinstance(error, Exception)}
            if not failed and mine.done() and mine.exception() is None:
                return mine.result(), [answers[rank] for rank in self.others]
            own = mine.exception() if mine.done() else None
            lost = self._gone or any(isinstance(error, EngineLost) for error in (own, *failed.values()))
            if own is not None and len(failed) == len(self.others) and not lost:
                for error in failed.values():
                    if not str(error).endswith(str(own)):
                        own.add_note(str(error))
                raise own
            self._failed = _worst(own, failed)
            raise self._failed

    def compare(self, here: int, there: Iterable[int]) -> None:
        """Raise RunError where another rank has drawn other tokens than this one."""
        if any(each != here for each in there):
            self._failed = drawn_apart(self.name)
            raise self._failed

    def _wait(self, mine: Future[Any], begun: dict[int, Begun]) -> dict[int, Any]:
        """Return the answers of the others, and errors; once somebody has failed those that come in a short time."""
        answers: dict[int, Any] = {}
        ends = math.inf
        while len(answers) < len(begun) or not mine.done():
            if not mine.done():
                wait([mine], LOOK)
            left = [rank for rank in begun if rank not in answers]
            if left:
                ready = self._peers.ready([begun[rank] for rank in left], LOOK if mine.done() else 0.0)
                answers |= {left[place]: self._answer(left[place], begun[left[place]]) for place in ready}
            if (mine.done() and mine.exception()) or any(isinstance(each, Exception) for each in answers.values()):
                ends = min(ends, monotonic() + GRACE)
            if monotonic() >= ends:
                break
        return answers

    def _answer(self, rank: int, begun: Begun) -> Any:
        """Return what another rank answers, or what has failed there, which names it."""
        try:
            answer = begun()
        except Exception as error:
            self._gone = True
            what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return RunError(f"{self.name} on rank {rank}, which has the engine too, is gone: {cut(what)}")
        if not isinstance(answer, Failed):
            return answer
        error = answer.raised(rank)
        if not isinstance(error, EngineLost):
            error.what = f"{self.name} on rank {rank}: {error.what}"
        return error

    def _raise_failure(self) -> None:
        if isinstance(self._failed, EngineLost):
            error = EngineLost(self._failed.what, fix=self._failed.fix)
            error.rank = self._failed.rank
            raise error from self._failed
        if self._failed is not None:
            raise RunError("The engine of this call has failed.") from self._failed


def _worst(own: BaseException | None, failed: dict[int, Exception]) -> FlowError:
    """Return what tells most of what has failed: whose process is gone, then what failed on another rank alone."""
    found = [error for error in (own, *failed.values()) if error is not None]
    found.sort(key=lambda error: (not isinstance(error, EngineLost), error is own and bool(failed)))
    error = found[0]
    return error if isinstance(error, FlowError) else RunError(cut(f"{type(error).__name__}: {error}"))


class MirroredEngine:
    """The engine of a policy that ranks split, for a stream of the first one: see
    :class:`flowrl.workers.streaming.Streams`.

    Steps are made of rows that run, and nothing is sent where there are none. The others drop rows as they leave, and
    answer with a checksum of them.
    """

    def __init__(self, engine: Streams, team: TeamCalls) -> None:
        self._engine, self._team = engine, team
        self.publish_modes: Sequence[str] = engine.publish_modes
        self._numbers: dict[int, list[int]] = {}  # of each call: as what the others know it

    def __getattr__(self, name: str) -> Any:
        if name in _LOOKS:
            return getattr(self._engine, name)
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def submit(self, request: SampleRequest) -> int:
        """Begin a call on all ranks."""
        asked = [(request,)] * len(self._team.others)
        number, numbers = self._team.make("submit", lambda: self._engine.submit(request), asked)
        self._numbers[number] = numbers
        return number

    def step(self) -> list[SampledRow | FailedCall]:
        """Go on by a token of each row, on all ranks; return what has ended."""
        if not self._engine.running():
            return []
        found, sums = self._team.make("step", self._engine.step, [()] * len(self._team.others))
        self._team.compare(rows_sum(found), sums)
        self._forget_over(bool(found))
        return found

    def abort(self, call: int, rows: Iterable[int] | None = None) -> list[SampledRow]:
        """End rows of a call on all ranks; return them with the tokens that they have."""
        running = [row for number, row in self._engine.running() if number == call]
        wanted = running if rows is None else sorted(set(rows).intersection(running))
        if not wanted:
            return []
        asked = [(number, wanted) for number in self._numbers[call]]
        found, sums = self._team.make("abort", lambda: self._engine.abort(call, wanted), asked)
        self._team.compare(rows_sum(found), sums)
        self._forget_over(True)
        return found

    def _forget_over(self, some_left: bool) -> None:
        if some_left:
            open = {call for call, _ in self._engine.running()}
            self._numbers = {call: numbers for call, numbers in self._numbers.items() if call in open}


def do_as_first(worker: Any, what: str, asked: Sequence[Any]) -> int:
    """Make a call with the worker of a rank beside the first one of its team. Returns what the call comes to: the
    number of one that has begun, or a checksum of what was drawn."""
    if what == "respond":
        return sampled_sum(worker.respond(*asked))
    found = getattr(worker.engine, what)(*asked)
    return found if what == "submit" else rows_sum(found)


def rows_sum(rows: Iterable[SampledRow | FailedCall]) -> int:
    """Return a checksum of rows that have left, whatever a rank calls their calls and in whichever order they are."""
    tokens = sorted((row.row, *row.ids) if isinstance(row, SampledRow) else (-1,) for row in rows)
    return crc32(array("q", (number for row in tokens for number in (len(row), *row))))


def sampled_sum(sampled: Sampled) -> int:
    """Return a checksum of the tokens of a whole call."""
    return crc32(array("q", [*sampled.ids.lengths.tolist(), *sampled.ids.values.tolist()]))
