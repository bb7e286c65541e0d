"""What tests of programs and agents use in place of a model: an engine that samples from a table, and its clock."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..workers.model_options import Sampling
from ..workers.streaming import PrefixTokens, SampledRow, SampleRequest
from .clock import RealClock, VirtualClock

if TYPE_CHECKING:
    from ..backends.stream import Stream, StreamedCall
    from .engine import FakeEngine

__all__ = [
    "FakeEngine",
    "PrefixTokens",
    "RealClock",
    "SampleRequest",
    "SampledRow",
    "Sampling",
    "Stream",
    "StreamedCall",
    "VirtualClock",
]

#: What needs torch is imported when it is first asked for.
_LATER = {"FakeEngine": ".engine", "Stream": "..backends.stream", "StreamedCall": "..backends.stream"}

if not TYPE_CHECKING:  # a type checker would take any name to be there

    def __getattr__(name: str) -> Any:
        """Import an entry of ``_LATER``. Raises AttributeError for any other name."""
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_LATER[name], __name__), name)
