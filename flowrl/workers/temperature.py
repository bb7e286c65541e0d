"""At which temperature rows are read and trained: each at its own, unless the call says another one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..batch import Column
from ..errors import ModelError
from ..graph.signature import CallShape
from ..marks import UNMARKED, Marks, marks, spelled
from ..marks import values as mark_values

if TYPE_CHECKING:
    from ..batch import Batch
    from .engine import Trains


def tempered(reads: str) -> Callable[[CallShape], str]:
    """``reads=`` of an op that looks at rows at their own temperature, unless the call says another one."""

    def declared(shape: CallShape) -> str:
        own = shape.call.get("temperature") is None and "temperature" in shape.have
        return f"{reads}, temperature" if own else reads

    return declared


def at_temperature(batch: Batch, temperature: float | None) -> Batch:
    """The rows with ``temperature`` f32[] in place of their own; None leaves them as they are."""
    if temperature is None:
        return batch
    if not (math.isfinite(temperature) and temperature > 0):
        raise ModelError(f"temperature={temperature} is no temperature.", fix="Give a number above 0.")
    rest = batch.drop("temperature") if "temperature" in batch else batch
    return rest.with_columns({"temperature": Column.of([float(temperature)] * len(batch), dtype="f32")})


def adds_scaled(*names: str) -> Callable[[CallShape], Mapping[str, Marks]]:
    """``marks=`` of an op that adds log-probabilities, or computes them for itself."""
    return lambda shape: dict.fromkeys(names, _scaled(shape))


def logprobs_of(engine: Trains, batch: Batch, temperature: float | None) -> Column:
    """Log-probabilities of the response tokens of rows, f32[*response], marked with their temperature."""
    return engine.logprobs(at_temperature(batch, temperature)).marked(scaled_rows(batch, temperature))


def scaled_rows(batch: Batch, temperature: float | None) -> Marks:
    """The marks of log-probabilities of real rows, at their own temperature or at that of the call."""
    shape = CallShape({}, {"temperature": temperature}, frozenset(batch.fields))
    own = batch["temperature"].marks if "temperature" in batch else UNMARKED
    return _scaled(replace(shape, marks={"temperature": own}))


def _scaled(shape: CallShape) -> Marks:
    """The same of rows in the trace."""
    said = shape.call.get("temperature")
    if said is not None:
        return marks(scale=spelled(said))
    if "temperature" not in shape.have:
        return marks(scale="1")
    return marks(scale="row", temperature=mark_values(shape.marks.get("temperature", UNMARKED), "temperature"))
