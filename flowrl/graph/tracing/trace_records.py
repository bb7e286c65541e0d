"""What a trace knows of the values and calls of a program: records and symbols."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ...errors import At, FlowError
from ...marks import UNMARKED, Marks
from ..ops.field_types import FieldType
from ..ops.op import Op
from ..ops.signature import Signature
from .follow_branches import Path

Rows = tuple[Any, ...]  # a term that is equal for two batches exactly when their rows have the same keys


def rows_each(rows: Rows) -> int | None:
    """How many rows each prompt has at most; None where the term does not say.

    >>> rows_each(("filter", ("expand", ("draw", 1), 8), 3)), rows_each(("concat", ("draw", 1), ("draw", 2)))
    (8, None)
    """
    if rows[0] == "draw":
        return 1
    if rows[0] == "filter":
        return rows_each(rows[1])
    if rows[0] == "expand" and isinstance(rows[2], int):
        before = rows_each(rows[1])
        return None if before is None else before * rows[2]
    return None


class SourceLike(Protocol):
    """A data source, as a trace and a run need it: the trace looks at its schema alone."""

    def schema(self) -> Mapping[str, FieldType]: ...
    def cursor(self) -> Any: ...
    def to_batch(self, rows: list[dict[str, Any]], first_uid: int, tokenizer: Any) -> Any: ...


class HandleLike(Protocol):
    """A worker as the flow declares it. ``arguments`` are those of its constructor by name, defaults filled in."""

    @property
    def name(self) -> str: ...
    @property
    def cls(self) -> type[Any]: ...
    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def kwargs(self) -> Mapping[str, Any]: ...
    @property
    def arguments(self) -> Mapping[str, Any]: ...
    @property
    def at(self) -> Any: ...
    @property
    def model_at(self) -> Any:
        """What named its model: the line of the driver, or ``--model``."""


@dataclass(frozen=True)
class Use:
    """Something that a call reads: ``Use(3, "costs", made="rewards")``, what call 3 made as ``rewards``.

    ``name`` is that of the field for its reader, or of a number. ``call`` is None for what comes from the data, by the
    draw of that number.
    """

    call: int | None
    name: str
    made: str = ""
    draw: int = 0


@dataclass(frozen=True)
class TNumber:
    """A traced number: the calls it comes from, how it is written, a key equal for equal numbers, if it is whole."""

    calls: frozenset[int]
    text: str
    key: str
    label: str = "value"
    whole: bool = False
    step: tuple[int, int] | None = None  # the loop whose step it is, and how many after the first

    def said(self, kind: str) -> str:
        """It as it is printed: ``number rewards.mean()``."""
        return f"{kind} {self.text}"


@dataclass(frozen=True)
class Draw:
    """Rows taken from a source of data: ``Draw(1, ("variable", ...), "prompts", ...)``; ``key`` tells sources apart.

    ``lines`` lead to it from the program's own down. ``source`` is what they are drawn from.
    """

    number: int
    key: tuple[object, ...]
    name: str
    describes: str
    schema: Mapping[str, FieldType]
    at: At
    loop: int
    iteration: int
    lines: tuple[object, ...] = ()
    source: Any = field(default=None, compare=False, repr=False)
    count: TNumber | None = None  # how many, where the program computes it


@dataclass(frozen=True)
class TField:
    """A field of a traced batch: its type, the call that made it for these rows (None: the data), and where it began.

    ``made``: its name where it was made. ``text``: how arithmetic that has no name is written. ``sources``: where that
    call made rows anew, the same field as it was before. ``marks``: where it comes from (:mod:`flowrl.marks`).
    """

    type: FieldType
    call: int | None
    name: str = ""
    rows: Rows = ()
    origin: tuple[Any, ...] = ()
    sources: tuple[TField, ...] = ()
    made: str = ""
    text: str = ""
    marks: Marks = UNMARKED

    def said(self, kind: str) -> str:
        """It as it is printed: ``field rewards: f32[]``."""
        return f"{kind} {self.name or self.text}: {self.type}"


@dataclass(frozen=True)
class TBatch:
    """A traced batch: fields by name, the term of its rows, and the call that made those rows."""

    fields: Mapping[str, TField]
    rows: Rows
    rows_call: int | None = None

    def said(self, kind: str) -> str:
        """It as it is printed: ``batch with prompt, rewards``."""
        return f"{kind} with {', '.join(self.fields) or 'no field'}"


@dataclass(frozen=True)
class TMetrics:
    """What an update will report."""

    call: int
    title: str

    def said(self, kind: str) -> str:
        """It as it is printed: ``metrics of actor.update``."""
        return f"{kind} of {self.title}"


LONGEST = 500  # characters of an operand, and of a key as it is


def together(numbers: Sequence[TNumber], text: str, key: str, whole: bool = False) -> TNumber:
    """Return what is computed of some numbers. It keeps the label of what it comes from where that is one.

    A long key becomes a digest: that of ``x = x * x`` would have twice the length each time.
    """
    key = key if len(key) <= LONGEST else "key_" + hashlib.sha256(key.encode()).hexdigest()
    calls = frozenset[int]().union(*(n.calls for n in numbers))
    labels = {n.label for n in numbers if n.calls}
    return TNumber(calls, text, key, labels.pop() if len(labels) == 1 else "value", whole)


@dataclass
class TCall:
    """One recorded call. ``uses``: what it reads, of other calls and of the data; ``place`` tells calls apart.

    ``text``: how arithmetic is written. ``others``: who else than its worker has sampled the rows that it trains on.
    """

    index: int
    op: Op
    worker: str
    at: At
    place: tuple[Any, ...]
    loop: int  # 0 outside of flow.steps, else the number of the loop
    iteration: int
    signature: Signature
    updates: str | None
    uses: tuple[Use, ...] = ()
    serves: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    text: str = ""
    others: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.worker}.{self.op.name}"

    @property
    def lines(self) -> tuple[tuple[str, int], ...]:
        """The lines that lead to it from the program's own, each once: the file and the number of each."""
        return tuple(dict.fromkeys((file, line) for file, line, _ in self.place[3:-1]))

    @property
    def makers(self) -> frozenset[int]:
        """The calls that it reads from."""
        return frozenset(use.call for use in self.uses if use.call is not None)


@dataclass(frozen=True)
class Adder:
    """A call to offer where a field is missing: ``Adder("batch = rl.gae(batch)", adds, reads)``."""

    text: str
    adds: frozenset[str]
    reads: frozenset[str] = frozenset()
    new: bool = False  # it asks for a worker that the flow does not have


@dataclass(frozen=True)
class Lint:
    """A remark that stops nothing: ``Lint("serial", "float(...) waits for actor.update", At(...))``."""

    kind: str
    what: str
    at: At

    def report(self) -> str:
        return f"lint {self.kind}: {self.what}\n  at   {self.at}"

    def to_json(self) -> dict[str, Any]:
        return {"lint": self.kind, "what": self.what, "file": self.at.file, "line": self.at.line, "text": self.at.text}


Finding = TypeVar("Finding", FlowError, Lint, FlowError | Lint)


def each_once(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings in their order, of those with one report the first."""
    found: dict[str, Finding] = {}
    for finding in findings:
        found.setdefault(finding.report(), finding)
    return list(found.values())


@dataclass(frozen=True)
class Reading:
    """A read of token ids whose tokenizer may be another one, which only the loaded ones can tell.

    ``reader`` and ``maker`` are what loads them: a handle, or what the program said; ``own`` and ``other`` their names.
    ``instead`` is the call that reads the text of the rows, where there is one. ``named``: both are names or folders.
    """

    title: str
    column: str
    reader: Any = field(compare=False)
    maker: Any = field(compare=False)
    own: str
    other: str
    at: At
    instead: str = ""
    named: bool = False


@dataclass
class Trail:
    """What one path recorded."""

    calls: list[TCall] = field(default_factory=list[TCall])
    path: Path = field(default_factory=Path)
    logged: set[Use] = field(default_factory=set[Use])
    endless: dict[At, bool] = field(default_factory=dict[At, bool])  # loops without an end; whether they are left
    began: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])  # loop and iteration
    draws: dict[int, Draw] = field(default_factory=dict[int, Draw])
    readings: list[Reading] = field(default_factory=list[Reading])


@dataclass
class Traced:
    """All paths of a program, and what was found on the way."""

    program: str
    trails: list[Trail]
    errors: list[FlowError]
    lints: list[Lint]
    capped: bool = False
    whole: bool = True  # every path came to its end
    longer: Trail | None = None  # the first path with three iterations: what grows from step to step shows there
