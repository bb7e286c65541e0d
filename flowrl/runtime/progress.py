"""What a person sees while a run goes on: a live line and table on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .records import Timing

EVERY = 10.0  # seconds between lines where there is no terminal
SHOWN = ("reward", "response_length", "tokens_per_second", "loss", "grad_norm", "kl")


class Progress:
    """Shows steps as they commit. Use as a context manager around a run."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = Console(file=sys.stderr, soft_wrap=True)
        self._live: Live | None = None
        self._program, self._steps, self._step = "", None, 0
        self._recent: deque[dict[str, Any]] = deque(maxlen=20)
        self._spent: dict[str, float] = defaultdict(float)
        self._calls: dict[str, int] = defaultdict(int)
        self._said = 0.0

    def __enter__(self) -> Progress:
        if not self.quiet and self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=4, transient=True, get_renderable=self._table)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        if self._recent and not self.quiet:
            self._say()

    def start(self, program: str, steps: int | None, done: int) -> None:
        """A program begins, or goes on after ``done`` steps."""
        if self._recent and not self.quiet:
            self._say()
        self._program, self._steps, self._step = program, steps, done
        self._recent.clear()
        self._spent.clear()
        self._calls.clear()
        self._said = time.monotonic()

    def step(self, line: Mapping[str, Any], timings: Sequence[Timing]) -> None:
        """A step has committed."""
        self._step += 1
        self._recent.append(dict(line))
        for timing in timings:
            self._spent[timing.node] += timing.end - timing.start
            self._calls[timing.node] += 1
        if self.quiet or self._live is not None:
            return
        if time.monotonic() - self._said >= EVERY:
            self._say()

    def note(self, text: str) -> None:
        """A remark above the display."""
        self.console.print(text, markup=False, highlight=False)

    def _mean(self, name: str) -> float | None:
        values = [h[name] for h in self._recent if isinstance(h.get(name), (int, float))]
        return sum(values) / len(values) if values else None

    def _headline(self) -> str:
        of = f"/{self._steps}" if self._steps else ""
        seconds = self._mean("seconds") or 0.0
        left = (
            f"  {(self._steps - self._step) * seconds:.0f} s left" if self._steps and self._step < self._steps else ""
        )
        return f"{self._program} {self._step}{of}  {seconds:.2f} s/step{left}"

    def _figures(self) -> list[tuple[str, str]]:
        named = [n for h in list(self._recent)[-1:] for n in h if n not in ("program", "step", "seconds")]
        order = [n for n in SHOWN if n in named] + [n for n in named if n not in SHOWN]
        return [(n, f"{m:.4g}") for n in order if (m := self._mean(n)) is not None]

    def _say(self) -> None:
        self._said = time.monotonic()
        figures = "  ".join(f"{n} {v}" for n, v in self._figures()[:6])
        total = sum(self._spent.values()) or 1.0
        spent = sorted(self._spent.items(), key=lambda x: -x[1])[:4]
        shares = ", ".join(f"{title} {seconds / total:.0%}" for title, seconds in spent)
        self.console.print(f"{self._headline()}  {figures}  [{shares}]", markup=False, highlight=False)
        self._recent_said()

    def _recent_said(self) -> None:
        """Lines say something new each time; the live table keeps a window."""
        if self._live is None:
            self._recent.clear()

    def _table(self) -> Group:
        figures = Table.grid(padding=(0, 2))
        for name, value in self._figures()[:12]:
            figures.add_row(Text(name, style="dim"), value)
        ops = Table.grid(padding=(0, 2))
        total = sum(self._spent.values()) or 1.0
        for title, seconds in sorted(self._spent.items(), key=lambda x: -x[1]):
            share = seconds / total
            ops.add_row(
                Text(title, style="cyan"),
                f"{1000 * seconds / self._calls[title]:.1f} ms",
                "█" * round(20 * share) or "▏",
            )
        both = Table.grid(padding=(0, 4))
        both.add_row(figures, ops)
        return Group(Text(self._headline(), style="bold"), both)
