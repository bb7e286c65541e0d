"""Where a program asks a loop for its next step: its variables are kept there, and a resumed program goes on with them.

``for step, batch in flow.steps(...)`` in the program's own body has nothing on the way between two steps but variables.
So a checkpoint has these, and what they and the values at module level hold; a resumed run goes through the program up
to the loop, gives it the variables, and has it ask for the step that comes. Where that would leave something out, as of
an open file, nothing is kept, and a resumed run goes through all steps that are done. The run says what it was.
"""

from __future__ import annotations

import ast
import ctypes
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

from ...batch import CallInfo
from ...errors import At, shown
from ...graph.ops.op import Op
from ...graph.script.length_parameters import definition
from ...graph.script.named_in_code import codes
from ...graph.script.site import place, user_frame
from ...graph.stand_ins.scalars import ScalarValue
from ...graph.stand_ins.values import BatchValue, FieldValue, MetricsValue, Value
from ...workers.base import Worker
from ..storage.checkpoints.changed_values import ChangedValues, Kept
from ..values.call import Call, Part
from ..values.plain_values import CannotKeep
from .issued_calls import IssuedCalls

MOST = 64  # loops of a program: of more, nothing is kept
_VALUES = {kind.__name__: kind for kind in (BatchValue, FieldValue, MetricsValue, ScalarValue)}


@dataclass(frozen=True)
class Counts:
    """How far a program is: calls, reads and draws of rows so far, the digest of its calls, and steps opened."""

    calls: int
    reads: int
    draws: int
    course: str
    opened: int


class LoopHeads:
    """The loops over steps of a program, in the order in which it comes to them.

    ``same`` is a digest of all that the variables depend on: they are put back where it is that of the run before.
    ``lengths`` are parameters that nothing but the loops' ends depends on: they are as they are asked for now.
    """

    def __init__(
        self, fn: Callable[..., Any], session: Any, issued: IssuedCalls, *, same: str, lengths: frozenset[str]
    ) -> None:
        self._fn, self._session, self._issued, self._lengths = fn, session, issued, lengths
        self.why = ""  # nothing is kept
        self._line: At | None = None  # of the loop that has come last
        self._same = same
        self._begun: list[dict[str, Any]] = []  # of each loop how far the program was before it, and after it
        self._reads: list[tuple[int, Any]] = []  # of values, outside of loops
        self._at: tuple[ChangedValues, frozenset[str]] | None = None  # the values at the loop's beginning, and names
        self._before: list[dict[str, Any]] = []
        said = issued.resume.variables if issued.resume is not None else None
        if said is not None and said["same"] == same:
            self._before = said["loops"]
            issued.known_reads.update({number: value for number, value in said["reads"]})

    def begin(self, opened: int, steps: int | None) -> tuple[int, Counts, bool] | None:
        """Note that a loop of so many ``steps`` begins; in a resumed run its variables are put back.

        Gives the steps that it has done, how far the program was then, and whether the loop had ended; None where it
        begins at its first step.
        """
        number, frame = len(self._begun), user_frame()
        self._line = place(frame) if frame is not None else None
        before = self._before[number] if number < len(self._before) else None
        entry = [self._issued.calls, self._issued.reads, self._issued.course, opened]
        if before is not None and before["entry"] != entry:
            raise self._issued.another_course()
        if number and "end" not in self._begun[-1]:
            self._give_up("the program leaves a loop before its end")
        elif number == MOST:
            self._give_up(f"the program has more than {MOST} loops")
        self._begun.append({"entry": entry})
        self._at = None
        if not self.why:
            self._look_around()
        if before is None:
            return None
        said = before["end"] if "end" in before else before["head"]
        fits = steps == said["asked"] if "end" in before else steps is None or said["step"] <= steps
        if self._at is None or not fits or not self._put_back(said):
            self._before, self._issued.known_reads = [], {}  # all steps are gone through
            return None
        if "end" in before:
            self._begun[-1]["end"] = said
        return said["step"], Counts(*said["counts"]), "end" in before

    def end(self, step: int, opened: int, steps: int | None) -> None:
        """Note that a loop of so many ``steps`` has come to its end."""
        if (said := self._now(step, opened)) is not None:
            self._begun[-1]["end"] = {**said, "asked": steps}

    def note_read(self, number: int, value: Any) -> None:
        """Note a value that was read outside of loops: a resumed run reads it again."""
        if isinstance(value, (int, float, bool)):
            self._reads.append((number, value))

    def record(self, step: int, opened: int) -> dict[str, Any] | None:
        """Return the variables, for a checkpoint after so many steps of this loop; None where they cannot be kept."""
        head = self._now(step, opened)
        if head is None:
            return None
        *past, this = self._begun
        return {"same": self._same, "loops": [*past, {"entry": this["entry"], "head": head}], "reads": self._reads}

    def in_words(self) -> str | None:
        """Return why nothing is kept, with the line of the loop; None where something is."""
        if not self.why or self._line is None:
            return None
        where, name = f"{shown(self._line.file)}:{self._line.line}", self._fn.__name__
        return (
            f"{where}: no checkpoint can hold the variables of '{name}' here: {self.why}. "
            "A resume is exact all the same, and goes through all steps that are done"
        )

    # -- inside ---------------------------------------------------------------------------------------------------

    def _give_up(self, why: str) -> None:
        self.why, self._at = self.why or why, None

    def _look_around(self) -> None:
        """Note the values that the loop begins with."""
        frame = user_frame()
        if frame is None or frame.f_code is not self._fn.__code__:
            return self._give_up("the loop is not in the program's own body")
        if not _is_plain_loop(self._fn, frame.f_lineno):
            return self._give_up("the loop is inside of another one, or its steps go through another function")
        names = _names(frame)
        there = {name: value for name, value in names.items() if not isinstance(value, Value)}
        try:
            changed = ChangedValues(self._fn, there, used=_used(self._fn))
        except CannotKeep as why:
            return self._give_up(str(why))
        self._at = changed, frozenset(names)
        return None

    def _now(self, step: int, opened: int) -> dict[str, Any] | None:
        """Return the variables as they are, as a record; None where there is one that none can hold."""
        frame = user_frame()
        if self._at is None or frame is None or frame.f_code is not self._fn.__code__:
            return None
        changed, at_first = self._at
        names = {n: v for n, v in _names(frame).items() if n not in self._lengths}
        issued = self._issued
        try:
            if gone := sorted(at_first - names.keys() - self._lengths):
                raise CannotKeep(f"{gone[0]} is deleted in the loop")
            record = changed.record(names, self._kept_value)
            sources = [[changed.label(d.source), d.made, d.of_loop] for d in issued.sources]
            if any(label is None and not of_loop for label, _, of_loop in sources):
                raise CannotKeep("a source is made in the loop")
        except CannotKeep as why:
            self.why = str(why)
            return None
        counts = [issued.calls, issued.reads, issued.draws, issued.course, opened]
        return {"step": step, "counts": counts, "variables": json.dumps({**record, "sources": sources})}

    def _put_back(self, said: Mapping[str, Any]) -> bool:
        """Give the program the variables of then; False where it has begun its loop with others than then."""
        frame = user_frame()
        assert frame is not None and self._at is not None, "a loop has begun"
        changed, _ = self._at
        record = json.loads(said["variables"])
        if not changed.fits(record):
            return False
        counts, issued = Counts(*said["counts"]), self._issued
        there = len(issued.sources)
        for label, _, of_loop in record["sources"][there:]:
            if of_loop or label is None:
                return False
            issued.use(changed.labelled(label))
        made = [count for _, count, _ in record["sources"]]
        issued.jump(calls=counts.calls, reads=counts.reads, draws=counts.draws, course=counts.course, made=made)
        names = changed.put_back(record, self._value_of)
        _set_names(frame, names)
        return True

    def _kept_value(self, value: Any, kept: Kept) -> Any:
        """A stand-in as JSON, or what ``kept`` makes of another value. Raises CannotKeep."""
        if not isinstance(value, Value):
            return kept(value)
        if value.session is not self._session or type(value).__name__ not in _VALUES:
            raise CannotKeep(f"a {type(value).__name__} of another program")
        return {"$": "value", "kind": type(value).__name__, "ref": _ref(value.ref)}

    def _value_of(self, said: Mapping[str, Any]) -> Value:
        return _VALUES[said["kind"]](self._session, self._ref_of(said["ref"]))

    def _ref_of(self, said: Mapping[str, Any]) -> Call | Part:
        if "of" in said:
            return Part(self._ref_of(said["of"]), said["name"])
        op = Op(name=said["op"], owner=said["owner"], fn=lambda: None, reads=None, adds="", returns="raw")
        call = self._issued.restored(said["call"], CallInfo(**said["info"]), said["worker"], op)
        call.fields = None if said["fields"] is None else frozenset(said["fields"])
        call.origins = frozenset((worker, step, relaxed) for worker, step, relaxed in said["origins"])
        return call


def _ref(ref: Any) -> dict[str, Any]:
    """What a value stands for, as JSON. Raises CannotKeep."""
    if isinstance(ref, Part):
        return {"of": _ref(ref.of), "name": ref.name}
    call: Call = ref
    if call.error is not None or call.base is not None:
        raise CannotKeep(f"a value of {call.title}")
    return {
        "call": call.index,
        "worker": call.worker,
        "owner": call.op.owner,
        "op": call.op.name,
        "info": {name: value for name, value in asdict(call.info).items() if name != "recorded"},  # it is not run again
        "fields": None if call.fields is None else sorted(call.fields),
        "origins": sorted(call.origins),
    }


def _names(frame: FrameType) -> dict[str, Any]:
    """The variables of a function that runs, without those of functions around it. Nothing holds them afterwards."""
    own = {*frame.f_code.co_varnames, *frame.f_code.co_cellvars}
    seen = frame.f_locals
    names = {name: value for name, value in seen.items() if name in own}
    if isinstance(seen, dict):  # before Python 3.13 a copy, which the frame goes on to hold
        seen.clear()
    return names


def _set_names(frame: FrameType, names: Mapping[str, Any]) -> None:
    """Set variables of a function that runs."""
    seen = frame.f_locals
    for name, value in names.items():
        seen[name] = value
    if isinstance(seen, dict):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        seen.clear()


def _is_plain_loop(fn: Callable[..., Any], line: int) -> bool:
    """Whether the one loop in this line is ``for ... in X.steps(...)``, with nothing around it that keeps a place."""
    node = definition(fn)
    if node is None:
        return False
    line -= fn.__code__.co_firstlineno - 1
    at = [loop for loop in _loops(node.body) if loop.lineno <= line <= (loop.iter.end_lineno or loop.lineno)]
    if len(at) != 1:
        return False
    asked = at[0].iter
    return isinstance(asked, ast.Call) and isinstance(asked.func, ast.Attribute) and asked.func.attr == "steps"


def _loops(body: list[ast.stmt]) -> Iterator[ast.For]:
    """Loops that are in no other ``for``, ``with`` or function."""
    for statement in body:
        if isinstance(statement, ast.For):
            yield statement
            yield from _loops(statement.orelse)
        elif isinstance(statement, (ast.If, ast.While, ast.Try)):
            yield from _loops([*statement.body, *statement.orelse])


def _used(fn: Callable[..., Any]) -> frozenset[str]:
    """The names in a program's code, and in that of the functions and classes that it names."""
    names, waiting, seen = set[str](), [fn.__code__], set[int]()
    inside = getattr(fn, "__globals__", {})
    while waiting:
        for code in codes(waiting.pop()):
            if id(code) in seen:
                continue
            seen.add(id(code))
            names.update(code.co_names, code.co_freevars)
            for name in code.co_names:
                waiting.extend(_codes_of(inside.get(name)))
    return frozenset(names)


def _codes_of(value: Any) -> list[CodeType]:
    if isinstance(value, FunctionType):
        return [value.__code__]
    if isinstance(value, type) and not issubclass(value, Worker):
        return [f.__code__ for f in vars(value).values() if isinstance(f, FunctionType)]
    return []


assert sys.implementation.name == "cpython", "the variables of a function that runs are set as CPython has them"
