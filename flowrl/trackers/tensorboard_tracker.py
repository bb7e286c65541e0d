"""TensorBoard: event files below ``tensorboard/`` in the run folder, one folder for each program."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from .tracker import Level, TrackedRun, table


class TensorBoard:
    """Writes event files with ``torch.utils.tensorboard``; ``tensorboard --logdir runs`` shows them."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._open, self._folder = SummaryWriter, run.folder / "tensorboard"
        self._writers: dict[str, SummaryWriter] = {}
        self._last: dict[str, int] = {}
        self._resumed = run.resumed
        self._events: SummaryWriter | None = None
        if not run.resumed:
            about = self._open(str(self._folder))
            about.add_text("configuration", _fenced(json.dumps(run.configuration, indent=1, default=str)))
            about.add_text("plan", _fenced(run.plan_text()))
            for program, picture in run.pictures().items():
                about.add_image(f"graph/{program}", _pixels(picture), dataformats="HWC")
            about.close()

    def log(self, program: str, step: int, numbers: Mapping[str, float]) -> None:
        """Add a point to each curve. What was written of steps that are done again is not shown any more."""
        writer = self._writers.get(program)
        if writer is not None and step <= self._last[program]:
            writer.close()
            writer, self._resumed = None, True
        if writer is None:
            purge = step if self._resumed else None
            writer = self._writers[program] = self._open(str(self._folder / program), purge_step=purge)
        self._last[program] = step
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    def samples(self, program: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if (writer := self._writers.get(program)) is not None:
            writer.add_text("samples", _markdown(*table(rows)), step)

    def event(self, kind: str, text: str, level: Level) -> None:
        """Add a text at the step that was logged last, below the run and not below a program."""
        if self._events is None:
            self._events = self._open(str(self._folder))
        self._events.add_text(f"{level}/{kind.replace(' ', '_')}", _fenced(text), max(self._last.values(), default=0))

    def close(self, status: str) -> None:
        for writer in (*self._writers.values(), *([self._events] if self._events else [])):
            writer.close()


def _pixels(picture: bytes) -> Any:
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(BytesIO(picture)).convert("RGB"))


def _fenced(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _markdown(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in which texts of models stand as text."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(_cell(entry) for entry in line) + " |" for line in lines)


def _cell(entry: Any) -> str:
    text = f"{entry:.4g}" if isinstance(entry, float) else str(entry)
    return html.escape(text).replace("|", "&#124;").replace("\n", " ⏎ ").replace("\r", " ")
