"""The curve of rewards: reward over steps as a picture, a line for each loop of a program."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .disk import writing


def draw_curve(path: Path, history: Iterable[Mapping[str, Any]]) -> Path | None:
    """Draw the rewards of all lines of metrics; None when nothing called reward was logged. Raises DiskError."""
    lines = curves(history)
    if not lines:
        return None
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
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
    """Title, steps and rewards of each line of a reward curve: one for each loop of a program, as each counts anew."""
    found: list[tuple[str, list[int], list[float]]] = []
    by_program: dict[str, list[tuple[list[int], list[float]]]] = {}
    for line in history:
        loops, reward = by_program.setdefault(line["program"], []), line.get("reward")
        if not isinstance(reward, (int, float)) or not math.isfinite(reward):
            continue
        if not loops or line["step"] <= loops[-1][0][-1]:
            loops.append(([], []))
        loops[-1][0].append(line["step"])
        loops[-1][1].append(reward)
    for program, loops in by_program.items():
        titles = [program if len(loops) == 1 else f"{program}, loop {number}" for number in range(1, len(loops) + 1)]
        found += [(title, *loop) for title, loop in zip(titles, loops, strict=True) if len(loop[0]) > 1]
    return found


def _window(values: list[float]) -> int:
    return max(1, min(20, len(values) // 5))


def _smooth(values: list[float]) -> list[float]:
    width = _window(values)
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]
