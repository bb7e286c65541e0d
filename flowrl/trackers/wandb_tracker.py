"""Weights & Biases: an offline run below ``wandb/`` in the run folder, unless WANDB_MODE says otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from .tracker import Level, TrackedRun, table

_TITLE = 63  # characters of an alert


class WandB:
    """Writes an offline run, for ``wandb sync``. ``WANDB_MODE=online`` sends it while it goes on."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb
        from PIL import Image

        mode = os.environ.get("WANDB_MODE") or "offline"
        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or run.project,
            name=run.name,
            id=run.id,
            dir=str(run.folder),
            mode=mode,  # pyright: ignore[reportArgumentType]
            resume="allow",
            reinit="create_new",
            config={**run.configuration, "plan": dict(run.plan)},
            settings=wandb.Settings(console="off", save_code=False, disable_git=True, silent=True),
        )
        self._programs: set[str] = set()
        if not run.resumed:
            pictures = {f"graph/{n}": Image.open(BytesIO(png)) for n, png in run.pictures().items()}
            self._run.log({name: wandb.Image(picture) for name, picture in pictures.items()})

    def log(self, program: str, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a program under its name, over its own steps."""
        self._know(program)
        self._run.log({**{f"{program}/{name}": x for name, x in numbers.items()}, f"{program}/step": step})

    def samples(self, program: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._know(program)
        names, entries = table(rows)
        texts = [[x if isinstance(x, (int, float)) else str(x) for x in row] for row in entries]
        shown = self._wandb.Table(columns=names, data=texts, allow_mixed_types=True)
        self._run.log({f"{program}/samples": shown, f"{program}/step": step})

    def event(self, kind: str, text: str, level: Level) -> None:
        """Send an alert; whom W&B tells of it, its users say in its settings.

        It has the beginning of the text in its title, as W&B leaves out a second alert of one title within a minute.
        """
        levels = {"alarm": self._wandb.AlertLevel.ERROR, "warning": self._wandb.AlertLevel.WARN}
        title = f"{kind}: {(text.splitlines() or [''])[0]}"[:_TITLE]
        self._run.alert(title=title, text=text, level=levels.get(level, self._wandb.AlertLevel.INFO))

    def close(self, status: str) -> None:
        self._run.finish(exit_code=int(status == "failed"))

    def _know(self, program: str) -> None:
        if program not in self._programs:
            self._programs.add(program)
            self._run.define_metric(f"{program}/*", step_metric=f"{program}/step")
