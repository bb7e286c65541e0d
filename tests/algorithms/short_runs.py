"""The names of all drivers, and parameters with which a run of each is short."""

from __future__ import annotations

from pathlib import Path

ALGORITHMS = Path(__file__).parents[2] / "algorithms"


FEW = {
    "steps": 3,
    "prompts_per_step": 8,
    "group_size": 4,
    "groups": 4,
    "samples": 4,
    "pairs": 6,
    "rows": 8,
    "games": 2,
    "episodes": 4,
}


DRIVERS = sorted(path.stem for path in ALGORITHMS.glob("*.py"))


def parameters(flow, preset, **more):
    program = flow.find_program(None)
    values = program.preset(preset) if preset else {}
    return {**values, **{n: v for n, v in {**FEW, **more}.items() if n in program.parameters}}
