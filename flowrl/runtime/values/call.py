"""One call of a running program, and the stand-ins for its result."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

from ...batch import Batch, CallInfo
from ...errors import At
from ...graph.may_see_older_weights import Site
from ...graph.ops.op import Op
from ...graph.stand_ins.values import Value, find, is_handle
from .remote_batch import RemoteBatch


class Call:
    """An op call on its way: what to run, and later its result or its error. ``parts``: results of its chunks.

    ``arguments`` are by parameter, defaults filled in; ``values`` those that are not there yet, at any depth in them,
    and ``handles`` the names of workers among them. ``into`` renames the fields that it adds. ``index`` is its number
    in its program, and ``program`` the number of that in the run; ``place`` is where the journal has its answers, and
    ``site`` by what the trace knows it.

    ``fields`` are those of its batch, where they are known before it is run. One that only ``adds`` some to the rows
    of another call has that as its ``base``. ``reads`` are the fields that it reads of each batch, by parameter, where
    they are known by then. ``origins`` are the workers that its rows were sampled from.
    """

    __slots__ = (
        "__weakref__",
        "adds",
        "arguments",
        "at",
        "base",
        "done",
        "error",
        "fields",
        "groups",
        "handles",
        "index",
        "info",
        "into",
        "issued",
        "joins",
        "op",
        "origins",
        "outside",
        "parts",
        "place",
        "program",
        "reads",
        "result",
        "site",
        "step",
        "streams",
        "title",
        "values",
        "worker",
    )

    def __init__(
        self,
        index: int,
        op: Op,
        worker: str | None,
        arguments: Mapping[str, Any],
        into: Mapping[str, str],
        at: At | None,
        info: CallInfo,
        program: int = 0,
    ) -> None:
        self.index, self.op, self.worker, self.arguments, self.into = index, op, worker, arguments, into
        self.values: tuple[Value, ...] = tuple(find(arguments))
        self.handles = tuple(a.name for a in arguments.values() if is_handle(a))
        self.at, self.info, self.step, self.program = at, info, info.step, program
        self.place: tuple[int, float] = (program, index)
        self.title = f"{worker or op.owner}.{op.name}"
        self.site: Site = (self.title, ())
        self.issued = 0.0  # when the program made it
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.parts: list[Any] | None = None
        self.outside = False  # of the steps
        self.groups = 0  # of prompts, that finish one by one and may be exchanged for those of other steps
        self.streams = False  # its rows may leave the engine one by one, beside those of other calls
        self.joins = False  # it asks an engine row by row, beside others of the kind, and publishes come in between
        self.base: Call | None = None
        self.adds: frozenset[str] = frozenset()
        self.fields: frozenset[str] | None = None
        self.reads: Mapping[str, Collection[str]] | None = None
        self.origins: frozenset[tuple[str, int, bool]] = frozenset()  # of its rows: worker, step, whether relaxed

    @property
    def edge(self) -> str:
        """From which calls its rows come, in words: ``reward.score -> actor.update``."""
        makers = dict.fromkeys(maker(v.ref).title for v in self.values)
        return f"{', '.join(makers)} -> {self.title}" if makers else ""

    @property
    def waits(self) -> bool:
        """Whether its result is still to come."""
        return not self.done

    def said(self, kind: str) -> str:
        """Its result, of some kind, as it is printed: ``batch of reward.score``, and what it is once that is known."""
        what = kind if self.op.owner == "data" else f"{kind} of {self.title}"
        if isinstance(self.result, (Batch, RemoteBatch)):
            rows = "1 row" if len(self.result) == 1 else f"{len(self.result)} rows"
            return f"{what}: {rows} with {', '.join(self.result.columns) or 'no field'}"
        if isinstance(self.result, dict):
            return f"{what}: {', '.join(cast('dict[str, Any]', self.result))}"
        return f"{what}: {self.result}" if isinstance(self.result, (int, float)) else what

    def finish(self, result: Any, error: BaseException | None = None) -> None:
        """Set the outcome, and let go of the inputs."""
        self.result, self.error = result, error
        self.arguments, self.values = {}, ()
        self.done = True


@dataclass(frozen=True)
class Part:
    """A field of a batch, or an entry of metrics, of a call that may not be done yet."""

    of: Any  # Call or Part
    name: str

    @property
    def waits(self) -> bool:
        """Whether it is still to come."""
        return self.call.waits

    def said(self, kind: str) -> str:
        """It as it is printed: ``rewards of reward.score``, and what it is once that is known."""
        whole, found = self.call.result, None
        if isinstance(whole, dict):
            found = cast("dict[str, Any]", whole).get(self.name)
        elif isinstance(whole, Batch) and self.name in whole:
            found = whole[self.name].type
        return f"{self.name} of {self.call.title}" + (f": {found}" if found is not None else "")

    @property
    def call(self) -> Call:
        return self.of if isinstance(self.of, Call) else self.of.call


class NotKept:
    """The result of a call before the cut of a resumed run that no value of the program held at the cut."""


def maker(ref: Any) -> Call:
    """The call behind a reference."""
    return ref.call if isinstance(ref, Part) else ref


def outcome(ref: Any) -> Any:
    """The plain value behind a reference to a call that is done. Raises what its call raised."""
    if isinstance(ref, Part):
        whole = outcome(ref.of)
        if isinstance(whole, dict) and ref.name not in whole:
            from ...errors import FieldError, near

            names: list[str] = sorted(whole)  # type: ignore[type-var]
            meant = near(ref.name, names)
            raise FieldError(
                f"the metrics have no '{ref.name}'.", have=names, fix=f"Did you mean '{meant}'?" if meant else None
            )
        return whole[ref.name]
    call: Call = ref
    assert call.done, f"{call.title} is not done: it was looked at too early"
    if call.error is not None:
        raise call.error
    return call.result
