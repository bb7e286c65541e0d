"""The curve of rewards: reward over steps as a picture, a line for each loop of a program.

It is the number that the program logs as ``reward``; of a program that logs none, what is measured without being asked:
``reward/math`` of rows that have a source, ``reward/correct`` of several rewards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .disk import writing

NAME = "reward"
_Loop = tuple[list[int], list[float]]
#: Left, bottom, width, height: numbers of eight letters and their power of ten have room.
AXES = (0.15, 0.13, 0.83, 0.80)
MOST = 8  # lines of a program that logs no number of that name
#: What is said where rows had rewards, and there is nothing to draw.
NO_CURVE = (
    "no reward.png: no number called 'reward' was logged. Log one to have the curve: "
    "flow.log(step, metrics, reward=batch.rewards.mean())"
)


def draw_curve(path: Path, history: Iterable[Mapping[str, Any]]) -> Path | None:
    """Draw the rewards of all lines of metrics; None where there are no two steps with one.

    Raises DiskError.
    """
    lines = curves(history)
    if not lines:
        return None
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    axes = figure.add_axes(AXES)
    for title, xs, ys in lines:
        axes.plot(xs, ys, alpha=0.3, linewidth=1)
        axes.plot(xs, _smooth(ys), color=axes.lines[-1].get_color(), label=f"{title} (mean of {_window(ys)} steps)")
    axes.set_xlabel("step")
    axes.set_ylabel("reward")
    axes.grid(alpha=0.3)
    axes.legend()
    with writing(path):
        figure.savefig(path, dpi=120)
    return path


def curves(history: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[int], list[float]]]:
    """Title, steps and rewards of each line of a reward curve: one for each loop of a program, as each counts anew.

    >>> curves({"program": "train", "step": step, "reward/math": step / 4} for step in range(3))
    [('train, reward/math', [0, 1, 2], [0.0, 0.25, 0.5])]
    """
    found: list[tuple[str, list[int], list[float]]] = []
    by_program: dict[str, dict[str, list[_Loop]]] = {}
    for line in history:
        by_name = by_program.setdefault(line["program"], {})
        for name in [name for name in line if name == NAME or name.startswith(f"{NAME}/")]:
            if isinstance(line[name], (int, float)) and math.isfinite(line[name]):
                _add(by_name.setdefault(name, []), line["step"], line[name])
    for program, by_name in by_program.items():
        drawn = {NAME: by_name[NAME]} if NAME in by_name else dict(list(by_name.items())[:MOST])
        for name, loops in drawn.items():
            title = program if name == NAME else f"{program}, {name}"
            titles = [title if len(loops) == 1 else f"{title}, loop {number}" for number in range(1, len(loops) + 1)]
            found += [(title, *loop) for title, loop in zip(titles, loops, strict=True) if len(loop[0]) > 1]
    return found


def _add(loops: list[_Loop], step: int, reward: float) -> None:
    """Add a step to the last loop, or to a new one where steps are counted anew."""
    if not loops or step <= loops[-1][0][-1]:
        loops.append(([], []))
    loops[-1][0].append(step)
    loops[-1][1].append(reward)


def _window(values: list[float]) -> int:
    return max(1, min(20, len(values) // 5))


def _smooth(values: list[float]) -> list[float]:
    width = _window(values)
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]
