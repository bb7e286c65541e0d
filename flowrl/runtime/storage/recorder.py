"""What a run leaves behind: run.json, metrics, timeline, traffic, trajectories and events as lines, and a curve."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...batch import Batch
from ...errors import LONGEST, At, cut
from ...graph.tracing.log_names import Names
from ...marks import values as values_of_marks
from ...placement.cost.group_correlation import correlation
from ...workers.tokens.kept_cache import has_older_cache
from ..values.process_memory import ProcessMemory
from ..values.step_records import Step, Timing
from .digest_lines import begun_line, digest_lines
from .disk import hexadecimal
from .jsonl import Lines, part_checksum
from .keep_tokenizer import keep_tokenizer
from .metric_lines import Pace, metric_lines, pace_of, publish_numbers
from .reward_curve import NAME, NO_CURVE, draw_curve
from .run_record import last_records, records_within, write_record
from .traffic import spread

STREAMS = ("metrics", "timeline", "traffic", "memory", "digests", "ledger", "trajectories", "events")
LATEST = 64  # lines of metrics of a program that are at hand; the others are in the file alone
_NOTHING: Mapping[Any, Any] = MappingProxyType({})
WHERE = ("program", "step", "key")  # of what a row of trajectories is; a column of that name is batch.NAME there
_as_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


class Recorder:
    """The files of one run folder. Lines are written when a step commits, so they can be cut back to a checkpoint."""

    def __init__(
        self,
        folder: Path,
        *,
        groups: int,
        every: int,
        record: Mapping[str, Any] | None = None,
        at_once: int = 1,
    ) -> None:
        """``record``: what run.json holds of a run that goes on; ``at_once``: how many steps may be under way. Nothing
        is written here."""
        self.folder, self.groups, self.every = folder, groups, every
        self.record: dict[str, Any] = dict(record or {})
        self._recording = threading.Lock()
        self._files = {name: Lines(folder / f"{name}.jsonl") for name in STREAMS}
        self._damaged: set[str] = set()  # files with lines that are none, until they are mended
        self.latest: dict[str, deque[dict[str, Any]]] = defaultdict(lambda: deque(maxlen=LATEST))  # by program
        self.ledgers: dict[str, dict[str, Any]] = {}  # what became of rows, by program
        self._meanings: dict[str, dict[str, tuple[str, At]]] = {}  # of what was logged, by program and name
        self._kept_tokenizer: Any = None
        self._rewarded = False  # whether rows had rewards
        self._kept: set[int] = set()  # steps whose rows are written down beside every so many
        self.tell: Callable[[str, Mapping[str, Any]], None] = lambda stream, line: None  # each line, as it is written
        self._last = time.perf_counter()
        self._paces: deque[Pace] = deque(maxlen=at_once)  # of the last steps, since the clock was started
        age = time.time() - self.record["started"] if "started" in self.record else 0.0  # of a run that is continued
        self._zero = self._last - age

    def begin(self) -> None:
        """Make the files of a new run."""
        for file in self._files.values():
            file.begin()

    def restart_clock(self) -> None:
        """Leave what came before out of the next step's seconds."""
        self._last = time.perf_counter()
        self._paces.clear()

    def commit(self, program: str, step: Step, tokenizer: Any, *, groups: int | None = None) -> list[dict[str, Any]]:
        """Write a step's lines; returns its lines of metrics. ``groups``: of whose rows; None goes by the step."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._paces.append(pace_of(step, seconds))
        lines = metric_lines(program, step, Names(self._meanings.setdefault(program, {})), self._paces)
        for line in lines:
            self.write("metrics", line)
            self.latest[program].append(line)
        self.note(program, step)
        if step.ledger is not None:
            self.ledgers[program] = step.ledger
            self.write("ledger", {"program": program, "step": step.number, **step.ledger})
        self._rewarded = self._rewarded or (step.rows is not None and "rewards" in step.rows.fields)
        count = self.sampled(step.number) if groups is None else groups
        if step.rows is not None and count:
            rows = step.recorded if step.recorded is not None else step.readable(first_groups(step.rows, count))
            self._trajectories(program, step.number, rows, tokenizer, _seen_by_key(step.seen))
            if step.marked is not None:
                marked = step.readable(first_groups(step.marked, count))
                self._trajectories(program, step.number, _failed(marked, rows), tokenizer)
        return lines

    def note(self, program: str, step: Step) -> None:
        """Write what ran in a step, what moved, and digests of what was made."""
        timeline: list[dict[str, Any]] = []
        for timing in step.timings:
            start, end = round(timing.start - self._zero, 6), round(timing.end - self._zero, 6)
            where = {"program": program, "step": step.number, "node": timing.node, "pool": timing.pool}
            said = {"start": start, "end": end, "rows": timing.rows, "tokens": timing.tokens}
            if timing.longest:
                said |= {"prompt": timing.prompt, "longest": timing.longest, "context": timing.context}
            if timing.passes:
                said["passes"] = [[p.count, p.rows, p.context, round(p.seconds, 6)] for p in timing.passes]
            if timing.published is not None:
                said |= publish_numbers(timing.published)
            timeline.append(where | said | {"call": timing.call, "piece": timing.chunk} | self._waited(timing))
        self.write_all("timeline", timeline)
        traffic = step.traffic
        moved = {name: value for name, value in vars(traffic).items() if name != "sources"}
        alike = correlation(traffic.responses, traffic.sources)
        moved |= {"prompts": spread(traffic.prompts), "responses": spread(traffic.responses)}
        moved |= {"alike": None if alike is None else round(alike, 6)}
        self.write("traffic", {"program": program, "step": step.number, **moved})
        self.write_all(
            "digests", [{"program": program, "step": step.number, **line} for line in digest_lines(step.made)]
        )
        if step.begun or step.taken:
            where = {"program": program, "step": step.number}
            self.write("digests", {**where, "begun": [*map(begun_line, step.begun)], "taken": step.taken})

    def _waited(self, timing: Timing) -> dict[str, Any]:
        """Return what is known of how a call came to begin, and of its ranks."""
        found: dict[str, Any] = {}
        for name, at in (("issued", timing.issued), ("due", timing.due)):
            if at is not None:
                found[name] = round(at - self._zero, 6)
        if timing.after is not None:
            found["after"] = [timing.after.kind, timing.after.call]
        if timing.ranks:
            found["ranks"] = [
                [t.rank, *(round(at - self._zero, 6) for at in (t.start, t.ready, t.end))] for t in timing.ranks
            ]
        return found

    def note_memory(self, program: str, step: int, memory: Mapping[str, ProcessMemory]) -> None:
        """Write how much memory the processes of the run have at the end of a step."""
        now = round(time.perf_counter() - self._zero, 6)
        processes = {name: found.to_json() for name, found in memory.items()}
        self.write("memory", {"program": program, "step": step, "time": now, "processes": processes})

    def sampled(self, step: int) -> int:
        """How many prompt groups of a step are written down as trajectories."""
        return self.groups if step % self.every == 0 or step in self._kept else 0

    def keep_rows(self, step: int) -> None:
        """Have rows of this step written down too."""
        self._kept.add(step)

    def event(self, kind: str, text: str) -> None:
        """Something that a reader of the run should know of."""
        self.write("events", {"time": time.time(), "kind": kind, "text": cut(text, 10 * LONGEST)})

    def write(self, stream: str, line: Mapping[str, Any]) -> None:
        """Append a line; NaN and infinities are written as null, as JSON has none."""
        self.write_all(stream, [line])

    def write_all(self, stream: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines, all at once."""
        if lines:
            self._files[stream].append("\n".join(map(_text, lines)))
        for line in lines:
            self.tell(stream, line)

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Yield all lines of metrics, from the file."""
        return records_within(self.folder / "metrics.jsonl", self._files["metrics"].size)

    def last(self) -> dict[str, Any]:
        """Return the last line of metrics; an empty one where nothing was logged."""
        return next(iter(last_records(self.folder / "metrics.jsonl", self._files["metrics"].size, 1)), {})

    def marks(self) -> dict[str, Sequence[Any]]:
        """How long each file is now, and the checksum of its end, for a checkpoint: ``{"metrics": (300, "9f2c01ab")}``.

        A third entry says at which byte that end begins, where it is not the whole file.
        """
        found: dict[str, Sequence[Any]] = {}
        for name, file in self._files.items():
            size, (since, crc) = file.mark()
            found[name] = (size, hexadecimal(crc), *([since] if since else []))
        return found

    def cut_back(self, marks: Mapping[str, Any]) -> list[str]:
        """Forget what was written after a checkpoint; the steps will be run again. Events stay.

        Returns what is to be said of files that are not as they were then. They are cut, and those mended, in
        :meth:`settle`. An older flowrl has marked lengths alone.
        """
        said: list[str] = []
        for name, mark in marks.items():
            if name == "events":
                continue
            length, known, *more = (mark, None) if isinstance(mark, int) else mark
            since: int = more[0] if more else 0
            file, size = self._files[name], min(length, self._files[name].size)
            if size < length:
                said.append(
                    f"{file.path.name} has {size} bytes of the {length} that it had at the checkpoint: the lines that "
                    "are lacking are lost"
                )
                self._damaged |= {name} if size else set()
            elif known is not None and hexadecimal(part_checksum(file.path, since, size)) != known:
                said.append(
                    f"{file.path.name} has other contents than it had at the checkpoint: lines that are no JSON are "
                    "left out"
                )
                self._damaged.add(name)
            file.cut(size, None if known is None or name in self._damaged or size < length else (since, int(known, 16)))
        self.latest.clear()
        for line in last_records(self.folder / "metrics.jsonl", self._files["metrics"].size, LATEST):
            self.latest[line["program"]].append(line)
        return said

    def settle(self) -> None:
        """Cut the files where they were said to be cut, and leave out what is no line of the damaged ones."""
        for name, file in self._files.items():
            file.settle()
            if name in self._damaged:
                file.keep_records()
        self._damaged.clear()

    def run_record(self, **updates: Any) -> dict[str, Any]:
        """Merge into run.json, atomically."""
        with self._recording:  # a checkpoint is noted by the thread that writes it
            self.record.update(updates)
            write_record(self.folder, self.record)
        return self.record

    def _trajectories(
        self, program: str, step: int, some: Batch, tokenizer: Any, seen: Mapping[Any, Mapping[str, Any]] = _NOTHING
    ) -> None:
        if tokenizer is not self._kept_tokenizer:
            keep_tokenizer(self.folder, tokenizer)
            self._kept_tokenizer = tokenizer
        columns = {n: some[n].to_list() for n in some.fields}
        told = columns.keys() >= {"versions", "response_mask"}
        kept = told and bool(values_of_marks(some["versions"].marks, "cache"))
        for i, key in enumerate(some.keys):
            line: dict[str, Any] = {"program": program, "step": step, "key": list(key)}
            line |= {f"batch.{n}" if n in WHERE else n: c[i] for n, c in columns.items() if _plain(c[i])}
            if tokenizer is not None:
                for name in ("prompt", "response"):
                    if f"{name}_ids" in columns and name not in line:
                        line[name] = tokenizer.decode(columns[f"{name}_ids"][i], skip_special_tokens=False)
            for name, found in seen.get(key, {}).items():
                line.setdefault(name, found)
            if kept and has_older_cache(columns["versions"][i], columns["response_mask"][i]):
                line.setdefault("cache", "kept")
            self.write("trajectories", line)

    def sync(self) -> None:
        """Have the disk hold all lines, before a checkpoint says how many there are."""
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def curve(self) -> str:
        """Draw reward over steps to reward.png. Returns what is to be said where there is none, though rows had rewards
        and no program has logged a ``reward``; else an empty text."""
        drawn = draw_curve(self.folder / "reward.png", self.metrics())
        logged = any(NAME in line for lines in self.latest.values() for line in lines)
        return NO_CURVE if drawn is None and self._rewarded and not logged else ""


def first_groups(rows: Any, count: int) -> Any:
    """All rows of the first ``count`` prompts of a batch, in its order."""
    return rows.take(sorted(i for group in rows.groups()[:count] for i in group))


def _seen_by_key(seen: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[Any, dict[str, Any]]:
    """What updates have found of the tokens of rows, by key; of several updates of a row the first."""
    found: dict[Any, dict[str, Any]] = {}
    for index in sorted(seen):
        for said in seen[index]:
            found.setdefault(tuple(said["key"]), {n: v for n, v in said.items() if n != "key"})
    return found


def _failed(marked: Batch, rows: Batch) -> Batch:
    """The rows that failed and are not among ``rows``."""
    there = set(rows.keys)
    failed = marked["failed"].to_list()
    return marked.take([i for i, key in enumerate(marked.keys) if failed[i] and key not in there])


def _text(line: Mapping[str, Any]) -> str:
    try:
        return _as_json(line)
    except ValueError:  # a number is not finite
        return _as_json(_finite(line))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}  # type: ignore[misc]
    if isinstance(value, list):
        return [_finite(v) for v in value]  # type: ignore[misc]
    return value


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bool, list, dict))
