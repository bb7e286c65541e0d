"""Of which distribution the tokens of rows are read and trained: at which temperature, of which part of the vocabulary.

A row is read at its own temperature, unless the call says another one; of the tokens that could be drawn, where the
call says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...batch import Column
from ...column.tensors import dtype_names
from ...errors import FieldError, ModelError
from ...graph.ops.signature import CallShape
from ...marks import UNMARKED, Marks, marks, spelled
from ...marks import values as mark_values
from .sampling import DTYPES, SUPPORT

if TYPE_CHECKING:
    from ...batch import Batch
    from ..model_worker import ModelWorker


def tempered(reads: str) -> Callable[[CallShape], str]:
    """``reads=`` of an op that looks at rows at their own temperature, unless the call says another one.

    With ``support=True`` it reads which tokens could be drawn; it raises FieldError where the rows do not say.
    """

    def declared(shape: CallShape) -> str:
        own = shape.call.get("temperature") is None and "temperature" in shape.have
        named = f"{reads}, temperature" if own else reads
        if shape.call.get("support") is not True:
            return named
        if "support_ids" not in shape.have:
            raise FieldError(
                "support=True reads which tokens could be drawn, and no op before it adds 'support_ids'.",
                have=shape.have,
                fix="Write support=True in generate too, or leave it out here.",
            )
        return f"{named}, {SUPPORT}"

    return declared


def at_temperature(batch: Batch, temperature: float | None) -> Batch:
    """The rows with ``temperature`` f32[] in place of their own; None leaves them as they are."""
    if temperature is None:
        return batch
    if not (math.isfinite(temperature) and temperature > 0):
        raise ModelError(f"temperature={temperature} is no temperature.", fix="Give a number above 0.")
    rest = batch.drop("temperature") if "temperature" in batch else batch
    return rest.with_columns({"temperature": Column.of([float(temperature)] * len(batch), dtype="f32")})


def adds_scaled(*names: str, by: str = "") -> Callable[[CallShape], Mapping[str, Marks]]:
    """``marks=`` of an op, called ``by``, that adds log-probabilities or computes them for itself."""
    return lambda shape: dict.fromkeys(names, _scaled(shape, by, DTYPES.get(shape.init.get("dtype", ""), "")))


def logprobs_of(worker: ModelWorker, by: str, batch: Batch, temperature: float | None) -> Column:
    """Log-probabilities of the response tokens of rows, f32[*response], marked with their kind."""
    found = worker.training_engine().logprobs(at_temperature(batch, temperature))
    return found.marked(scaled_rows(worker, by, batch, temperature))


def scaled_rows(worker: ModelWorker, by: str, batch: Batch, temperature: float | None) -> Marks:
    """The marks of log-probabilities of real rows, at their own temperature or at that of the call."""
    call = {"temperature": temperature, "support": "support_ids" in batch}
    shape = CallShape({}, call, frozenset(batch.fields), worker=worker.identity())
    known = {name: batch[name].marks for name in ("temperature", "support_ids") if name in batch}
    return _scaled(replace(shape, marks=known), by, dtype_of(worker.training_engine()))


def dtype_of(engine: Any) -> str:
    """What the products of an engine's model are computed in: ``bf16``; empty where it does not say."""
    compute = getattr(getattr(engine, "net", None), "compute", None)
    return "" if compute is None else dtype_names().get(compute, "")


def _scaled(shape: CallShape, by: str, dtype: str) -> Marks:
    """The same of rows in the trace."""
    who = marks(by=f"{shape.worker}.{by}" if shape.worker and by else "", dtype=dtype)
    if shape.call.get("support") is True:
        who |= marks(cut=mark_values(shape.marks.get("support_ids", UNMARKED), "cut"))
    said = shape.call.get("temperature")
    if said is not None:
        return who | marks(scale=spelled(said))
    if "temperature" not in shape.have:
        return who | marks(scale="1")
    own = shape.marks.get("temperature", UNMARKED)
    return who | marks(scale="row", temperature=mark_values(own, "temperature"))
