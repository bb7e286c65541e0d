"""The calls that a program has issued so far; a resumed run answers those before the point where it goes on."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Collection, Iterable
from typing import Any

from ...batch import Batch, CallInfo, Column
from ...errors import ProgramError, ResumeError
from ...graph.ops.op import Op
from ...graph.script.site import caller
from ...graph.tracing.trace_records import SourceLike
from ..storage.journal import Journal
from ..values.call import Call, NotKept
from ..values.remote_batch import RemoteBatch, RemoteColumn
from ..values.step_records import Draws, ResumePoint

_KEPT = (Batch, Column, RemoteBatch, RemoteColumn, dict, int, float, bool, list)


class IssuedCalls:
    """Calls, reads of values and draws from sources of a program, counted from its start.

    ``program`` and ``number`` are its name and its number in the run. ``draws`` are rows drawn so far. Without a
    ``journal`` nobody goes on from the middle of it.
    """

    def __init__(self, program: str, number: int, journal: Journal | None, resume: ResumePoint | None) -> None:
        self.program, self.number, self.resume = program, number, resume
        self.calls, self.reads, self.draws = 0, 0, 0
        self.known_reads: dict[int, Any] = {}  # of those before that point, as far as its checkpoint has them
        self._journal = journal
        self._digest = hashlib.sha256()  # of the titles of all calls so far, where none was jumped over
        self.course = ""  # the same, as a chain that can be gone on with
        self._live: weakref.WeakValueDictionary[int, Call] = weakref.WeakValueDictionary()
        self._sources: list[Draws] = []

    @property
    def replaying(self) -> bool:
        """Whether what is issued now lies before the point where a resumed run goes on."""
        return self.resume is not None and self.calls < self.resume.calls

    def replays_step(self, number: int) -> bool:
        """Whether a step was done before the point where a resumed run goes on."""
        return self.resume is not None and number < self.resume.steps

    def add(self, call: Call, title: str) -> None:
        """Count a call; it is done where a resumed run has its answer. Raises ResumeError for another call."""
        self.calls += 1
        self._digest.update(title.encode())
        self.course = hashlib.blake2b(f"{self.course}{title}".encode(), digest_size=16).hexdigest()
        self._live[call.index] = call
        resume = self.resume
        if resume is None or call.index >= resume.calls:
            return
        call.finish(resume.live.get(call.index, NotKept))
        if self.calls == resume.calls:
            self.draws = resume.draws
            if resume.call_digest not in (self.course, self._digest.hexdigest()):  # older records have the second
                raise self.another_course()

    def another_course(self) -> ResumeError:
        """Return the error of a program that does other things than the run that is continued."""
        return ResumeError(
            f"program '{self.program}' took another course than the run that is continued.",
            at=caller(),
            fix="Resume with the script and the parameters that the run was started with.",
        )

    def read(self) -> tuple[int, Any]:
        """Count a read of a value; return its number, and the value where a resumed run has read it, else None."""
        number = self.reads
        self.reads += 1
        if self.resume is None or number >= self.resume.reads:
            return number, None
        if number in self.known_reads:
            return number, self.known_reads[number]
        assert self._journal is not None, "a program that goes on has a journal"
        try:
            return number, self._journal.value(self.number, number)
        except KeyError:
            raise ResumeError(
                f"the {number + 1}th value that '{self.program}' has read is lost from the journal.",
                at=caller(),
                fix="Bring the files journal*.jsonl back, or start anew with --overwrite.",
            ) from None

    def note_read(self, number: int, value: Any) -> None:
        """Write down a number that the program has read, for the run to be resumed with."""
        if self._journal is not None and isinstance(value, (int, float, bool)):
            self._journal.read(self.number, number, value)

    def use(self, source: SourceLike) -> Draws:
        """Begin to draw from a source: at its start, or where the resumed run was in it."""
        cursor = source.cursor()
        draws = Draws(source, cursor)
        if self.resume is not None and len(self._sources) < len(self.resume.cursors):
            said = self.resume.cursors[len(self._sources)]
            draws.kept, draws.ended = said["draws"], said.get("ended", True)  # older records do not say
            cursor.load_state(said["state"])
        self._sources.append(draws)
        return draws

    def reached(self) -> None:
        """Check that the program has not gone beyond the point where it goes on. Raises ResumeError."""
        if self.resume is not None and self.calls > self.resume.calls:
            raise self.another_course()

    @property
    def sources(self) -> list[Draws]:
        """Return the sources in use, in the order in which the program came to use them."""
        return self._sources

    def jump(self, *, calls: int, reads: int, draws: int, course: str, made: Iterable[int]) -> None:
        """Go on as if the program had issued so many calls, and drawn so often from each of its sources."""
        self.calls, self.reads, self.draws, self.course = calls, reads, draws, course
        for source, count in zip(self._sources, made, strict=True):
            source.made = count

    def restored(self, index: int, info: CallInfo, worker: str | None, op: Op) -> Call:
        """Return a call of before, as a value that the program still holds stands for it."""
        call = self._live.get(index)
        if call is None:
            call = self._live[index] = Call(index, op, worker, {}, {}, None, info, self.number)
            call.outside = info.outside
            call.finish(self.resume.live.get(index, NotKept) if self.resume is not None else NotKept)
        return call

    def used(self, source: SourceLike) -> Draws | None:
        """Return what is drawn from a source that is in use."""
        return next((d for d in self._sources if d.source is source), None)

    def draw(self, draws: Draws, count: int | None) -> list[dict[str, Any]] | None:
        """Count a draw and return its rows, none for one that is answered; None when a source that ends has ended."""
        rows: list[dict[str, Any]] = []
        if self.replaying:
            if draws.made >= draws.kept:
                if not draws.ended:  # a loop before that point has more steps than it had
                    raise self.another_course()
                return None
        else:
            rows = draws.cursor.draw(count)
            if not rows:
                draws.ended = True
                return None
        draws.made += 1
        return rows

    def part_from_bases(self) -> None:
        """A step ends: a value that goes on into a later one stands for itself alone."""
        for call in self._live.values():
            call.base = None

    def results(self) -> list[Any]:
        """Return the results of the calls that the program still holds, or that other calls wait for."""
        return [call.result for call in list(self._live.values())]

    def snapshot(self, steps: int, held: Iterable[str]) -> tuple[dict[str, Any], dict[int, Any]]:
        """Return where the program is after so many steps, as a JSON record, and the values that it still holds."""
        live = {
            i: c.result for i, c in sorted(self._live.items()) if c.done and c.error is None and c.result is not None
        }
        record = {
            "calls": self.calls,
            "reads": self.reads,
            "steps": steps,
            "draws": self.draws,
            "course": self.course,
            "cursors": [{"state": d.cursor.state(), "draws": d.made, "ended": d.ended} for d in self._sources],
            "held": sorted(held),
        }
        return record, {i: r for i, r in live.items() if isinstance(r, _KEPT)}


def refuse_unopened(call: Call, opened: Collection[str]) -> None:
    """Raise ProgramError for a call of a worker that no path of the trace calls, so that the run has not opened it."""
    for name in (call.worker, *call.handles):
        if name is not None and name not in opened:
            raise ProgramError(
                f"{call.title}: the run has not opened worker '{name}', as no path that check followed calls it.",
                at=call.at,
                fix="Have the step or a value decide about the call, as in if step % 4 == 3, which check follows.",
            )
