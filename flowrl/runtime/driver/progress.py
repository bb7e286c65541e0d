"""What a person sees while a run goes on: a live line and table on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TextIO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...schedule.report.figures import duration
from ..values.step_records import Timing

EVERY = 10.0  # seconds between lines where there is no terminal
WINDOW = 20  # steps over which seconds and tokens per second are taken: of overlapping steps one may have milliseconds
_NOT_SAID = ("step", "seconds", "tokens_per_second")  # of an evaluation
#: What is shown first, after what a program logs by keyword; by the last part of its name: ``loss`` is also
#: ``actor/loss``.
SHOWN = ("reward", "response_length", "tokens_per_second", "loss", "grad_norm", "kl")


class _Heedless:
    """A stream whose reader may go: ``tee`` that was ended, or a terminal that was closed, ends no run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # of a pipe, of a terminal, of a file that is closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Progress:
    """Shows steps as they commit. Use as a context manager around a run. A run goes on where nobody can read it."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = Console(file=cast("TextIO", _Heedless(sys.stderr)), soft_wrap=True)
        self._live: Live | None = None
        self._counting = threading.Lock()  # what steps have come to: the live display is drawn in a thread of its own
        self._program, self._steps, self._step = "", None, 0
        self._named: dict[str, None] = {}  # what the program has logged by keyword
        self._opening, self._opened = "", set[str]()
        self._recent: deque[dict[str, Any]] = deque(maxlen=WINDOW)  # since the last line that was said
        self._paced: deque[dict[str, Any]] = deque(maxlen=WINDOW)  # also those that were said
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

    def opening(self, program: str, workers: Mapping[str, str], folder: str) -> None:
        """Workers of a program are about to open: what they are, by name. Those of a program before are open."""
        new = {name: what for name, what in workers.items() if name not in self._opened}
        self._opened |= set(new)
        if not new or self.quiet:
            return
        self._opening = f"{program}: opening {', '.join(f'{name} ({what})' for name, what in new.items())}"
        if self._live is None:
            self.note(f"{self._opening}; folder {folder}")

    def start(self, program: str, steps: int | None, done: int) -> None:
        """A program begins, or goes on after ``done`` steps."""
        self._opening = ""
        if self._recent and not self.quiet:
            self._say()
        with self._counting:
            self._program, self._steps, self._step = program, steps, done
            self._recent.clear()
            self._paced.clear()
            self._named.clear()
            self._spent.clear()
            self._calls.clear()
        self._said = time.monotonic()

    def step(self, line: Mapping[str, Any], timings: Sequence[Timing], *, named: Iterable[str] = ()) -> None:
        """A step has committed. ``named``: the numbers of its line that the program has logged by keyword."""
        with self._counting:
            self._step += 1
            self._recent.append(dict(line))
            self._paced.append(dict(line))
            self._named.update(dict.fromkeys(named))
            for timing in timings:
                self._spent[timing.node] += timing.end - timing.start
                self._calls[timing.node] += 1
        if self.quiet or self._live is not None:
            return
        if time.monotonic() - self._said >= EVERY:
            self._say()

    def evaluated(self, line: Mapping[str, Any]) -> None:
        """A program was run between two steps."""
        if not self.quiet:
            numbers = {n: v for n, v in line.items() if isinstance(v, (int, float)) and n not in _NOT_SAID}
            said = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
            self.note(f"{line['program']} after {line['step']} steps, {duration(line['seconds'])}: {said}")

    def note(self, text: str) -> None:
        """A remark above the display."""
        self.console.print(text, markup=False, highlight=False)

    def _mean(self, name: str) -> float | None:
        """Over the steps that have a number of that name: an update of no rows has no ratio.

        Tokens per second are those of the last steps together, by their seconds.
        """
        if name.rpartition("/")[2] == "tokens_per_second":
            timed = [h for h in self._paced if name in h]
            seconds = sum(h["seconds"] for h in timed)
            return sum(h[name] * h["seconds"] for h in timed) / seconds if seconds else None
        values = [h[name] for h in self._recent if isinstance(h.get(name), (int, float)) and math.isfinite(h[name])]
        return sum(values) / len(values) if values else None

    def _headline(self) -> str:
        if self._opening:
            return self._opening
        of = f"/{self._steps}" if self._steps else ""
        seconds = sum(h["seconds"] for h in self._paced) / max(1, len(self._paced))
        left = ""
        if self._steps and self._step < self._steps and self._recent:
            left = f"  {duration((self._steps - self._step) * seconds, most=99.5)} left"
        return f"{self._program} {self._step}{of}  {duration(seconds)}/step{left}"

    def _figures(self) -> list[tuple[str, str]]:
        last = [n for h in list(self._recent)[-1:] for n in h if n not in ("program", "step", "seconds")]
        names = dict.fromkeys([*self._named, *last])  # those of the program also where the last step has none
        order = sorted(names, key=lambda name: (name not in self._named, _rank(name)))
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
        with self._counting:
            return self._drawn()

    def _drawn(self) -> Group:
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


def _rank(name: str) -> int:
    """Where a figure stands among those that are shown; the others keep their order, after them."""
    last = name.rpartition("/")[2]
    return SHOWN.index(last) if last in SHOWN else len(SHOWN)
