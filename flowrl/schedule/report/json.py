"""The simulation as JSON, the documented record of docs/simulator.md."""

from __future__ import annotations

import json

from ..simulation import Simulation


def render(simulation: Simulation) -> str:
    """A JSON object, a line per part of it and per span, so that two simulations can be compared line by line."""
    lines = [f"  {json.dumps(key)}: {_value(key, value)}" for key, value in simulation.to_json().items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _value(key: str, value: object) -> str:
    if key != "spans" or not isinstance(value, list) or not value:
        return json.dumps(value)
    spans: list[object] = value  # pyright: ignore[reportUnknownVariableType]
    return "[\n" + ",\n".join(f"    {json.dumps(span)}" for span in spans) + "\n  ]"
