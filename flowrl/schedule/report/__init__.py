"""How a simulation is shown: tables, JSON, a page to explore, a trace for other tools. One module per format."""

from __future__ import annotations

from importlib import import_module

from ...errors import UsageError, near
from ..simulation import Simulation

FORMATS = ("table", "json", "html", "trace")


def render(simulation: Simulation, format: str) -> str:
    """The simulation in one of :data:`FORMATS`. Raises UsageError for another one."""
    if format not in FORMATS:
        meant = near(format, FORMATS)
        raise UsageError(
            f"there is no format '{format}' of a simulation.",
            have=", ".join(FORMATS),
            fix=f"Use --format {meant or 'table'}.",
        )
    return import_module(f".{format}", __name__).render(simulation)


__all__ = ["FORMATS", "render"]
