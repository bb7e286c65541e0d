"""What a run leaves behind: run.json, metrics, timeline, traffic, trajectories and events as lines, and a curve."""

from __future__ import annotations

import json
import math
import platform
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import import_module, metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...batch import Batch, Column
from ...errors import LONGEST, At, cut
from ...graph.tracing.log_names import Logged, Names
from ...marks import unlike
from ...marks import values as values_of_marks
from ...placement.backends import packages
from ...placement.cost.group_correlation import correlation
from ...workers.engine import Published
from ...workers.tokens.kept_cache import has_older_cache
from ..values.call import outcome
from ..values.process_memory import ProcessMemory
from ..values.step_records import Step, Timing
from .digest_lines import begun_line, digest_lines
from .disk import hexadecimal, writing
from .jsonl import Lines, part_checksum
from .keep_tokenizer import keep_tokenizer
from .run_record import last_records, records_within, write_record
from .traffic import length_quantiles, spread

STREAMS = ("metrics", "timeline", "traffic", "memory", "digests", "ledger", "trajectories", "events")
SOURCES = 50  # whose rewards are told apart
LATEST = 64  # lines of metrics of a program that are at hand; the others are in the file alone
BESIDE_REFERENCE = ("response_mask", "rollout_logprobs", "ref_logprobs")
_NOTHING: Mapping[Any, Any] = MappingProxyType({})
WHERE = ("program", "step", "key")  # of what a row of trajectories is; a column of that name is batch.NAME there
_as_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "peft", "ray")


class Recorder:
    """The files of one run folder. Lines are written when a step commits, so they can be cut back to a checkpoint."""

    def __init__(self, folder: Path, *, groups: int, every: int, record: Mapping[str, Any] | None = None) -> None:
        """``record``: what run.json holds of a run that goes on. Nothing is written here."""
        self.folder, self.groups, self.every = folder, groups, every
        self.record: dict[str, Any] = dict(record or {})
        self._recording = threading.Lock()
        self._files = {name: Lines(folder / f"{name}.jsonl") for name in STREAMS}
        self._damaged: set[str] = set()  # files with lines that are none, until they are mended
        self.latest: dict[str, deque[dict[str, Any]]] = defaultdict(lambda: deque(maxlen=LATEST))  # by program
        self.ledgers: dict[str, dict[str, Any]] = {}  # what became of rows, by program
        self._meanings: dict[str, dict[str, tuple[str, At]]] = {}  # of what was logged, by program and name
        self._kept_tokenizer: Any = None
        self._kept: set[int] = set()  # steps whose rows are written down beside every so many
        self.tell: Callable[[str, Mapping[str, Any]], None] = lambda stream, line: None  # each line, as it is written
        self._last = time.perf_counter()
        age = time.time() - self.record["started"] if "started" in self.record else 0.0  # of a run that is continued
        self._zero = self._last - age

    def begin(self) -> None:
        """Make the files of a new run."""
        for file in self._files.values():
            file.begin()

    def restart_clock(self) -> None:
        """Leave what came before out of the next step's seconds."""
        self._last = time.perf_counter()

    def commit(self, program: str, step: Step, tokenizer: Any, *, groups: int | None = None) -> list[dict[str, Any]]:
        """Write a step's lines; returns its lines of metrics. ``groups``: of whose rows; None goes by the step."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        lines = self._numbers(program, step)
        for line in lines:
            line["seconds"] = round(seconds / len(lines), 6)
            for name, (tokens, responses) in step.sampled.items():
                if not tokens:
                    continue
                before = f"{name}/" if name else ""
                line[f"{before}response_length"] = tokens / responses
                for part, length in length_quantiles(step.lengths.get(name, ())).items():
                    line[f"{before}response_length_{part}"] = length
                if name in step.cut_off:
                    line[f"{before}response_truncated"] = step.cut_off[name] / responses
                line[f"{before}tokens_per_second"] = round(tokens / max(seconds, 1e-9), 1)
            if line is lines[-1]:
                _add_gaps(line, step.gaps)
                _add_measures(line, step.updates)
                _add_sources(line, step.sourced)
                _add_reference(line, step.beside_reference)
                line |= {"rows_skipped": step.skipped} if step.skipped else {}
                line |= {f"{node}/decode_slots_used": slots.share for node, slots in step.slots.items()}
                for node, episodes in step.episodes.items():
                    line |= {f"{node}/{name}": value for name, value in episodes.metrics().items()}
                for title, told in step.published.items():
                    line |= {f"{title}/{name}": value for name, value in _proved(told).items()}
            self.write("metrics", line)
            self.latest[program].append(line)
        self.note(program, step)
        if step.ledger is not None:
            self.ledgers[program] = step.ledger
            self.write("ledger", {"program": program, "step": step.number, **step.ledger})
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
            if timing.published is not None:
                said |= _proved(timing.published)
            timeline.append(where | said | {"call": timing.call, "piece": timing.chunk} | self._waited(timing))
        self.write_all("timeline", timeline)
        traffic = step.traffic
        moved = asdict(replace(traffic, prompts=[], responses=[], sources=[]))
        del moved["sources"]
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

    def _numbers(self, program: str, step: Step) -> list[dict[str, Any]]:
        """A line for each number of a step that was logged: between steps a program may count by itself.

        Raises ProgramError where two numbers have one name.
        """
        lines: dict[Any, dict[str, Any]] = {}
        names = Names(self._meanings.setdefault(program, {}))
        for said, values in step.logs:
            number = _number(said)
            line = lines.setdefault(number, {"program": program, "step": number})
            for item in values:
                for name, value in _flat(item).items():
                    if (error := names.add(number, name, item.of, item.at)) is not None:
                        raise error
                    line[name] = _number(value)
        return list(lines.values()) or [{"program": program, "step": step.number}]

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
            tail = file.tail()
            found[name] = (file.size, hexadecimal(tail.crc), *([tail.since] if tail.since else []))
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
        kept = "versions" in columns and bool(values_of_marks(some["versions"].marks, "cache"))
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

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def curve(self) -> Path | None:
        """Draw reward over steps to reward.png; None when nothing called reward was logged."""
        lines = curves(self.metrics())
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
        path = self.folder / "reward.png"
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


def first_groups(rows: Any, count: int) -> Any:
    """All rows of the first ``count`` prompts of a batch, in its order."""
    return rows.take(sorted(i for group in rows.groups()[:count] for i in group))


def _proved(told: Published) -> dict[str, float]:
    """What an engine has told of a publish, as files have it."""
    seconds = {"load_seconds": round(told.load, 6), "proof_seconds": round(told.proof, 6)}
    return seconds | {"probe_gap": told.gap, "probe_rows": told.rows}


def _add_gaps(line: dict[str, Any], gaps: Mapping[str, Mapping[str, float]]) -> None:
    """Add the gaps of a step's updates to its line, under their calls, where the program has not logged them."""
    logged = {value for name, value in line.items() if name.rpartition("/")[2] == "gap_mean"}
    for node, gap in gaps.items():
        if gap["gap_tokens"] and gap["gap_mean"] not in logged:
            line |= {f"{node}/{name}": value for name, value in gap.items()}


def _add_measures(line: dict[str, Any], updates: Mapping[str, Mapping[str, float]]) -> None:
    """Add what a step's updates have measured, under their calls, where the program has not logged their metrics."""
    logged = {value for name, value in line.items() if name.rpartition("/")[2] == "repetition"}
    norms = {value for name, value in line.items() if name.rpartition("/")[2] == "grad_norm"}
    for node, update in updates.items():
        if not (update["repetition"] in logged and update["grad_norm"] in norms):
            line |= {f"{node}/{name}": value for name, value in update.items()}


def _add_sources(line: dict[str, Any], rows: Any) -> None:
    """Add the mean reward of the rows of each source, as ``reward/math``, where the program has not logged it.

    So with each reward that has a name of its own: ``reward/correct``.
    """
    found: dict[str, list[float]] = {}
    if not rows:
        return
    for name in rows.fields:
        if name not in ("rewards", "source"):
            found[f"reward/{name}"] = [float(x) for x in rows[name].to_list() if isinstance(x, (int, float))]
    for source, reward in (
        zip(rows["source"].to_list(), rows["rewards"].to_list(), strict=True) if "source" in rows else ()
    ):
        found.setdefault(f"reward/{source}", []).append(reward)
    for name in [name for name, rewards in found.items() if rewards][:SOURCES]:
        line.setdefault(name, sum(found[name]) / len(found[name]))


def _add_reference(line: dict[str, Any], rows: Any) -> None:
    """Add how far the policy that sampled is from the reference, KL(policy, reference) by the estimator k3, where the
    program has logged no such number."""
    logged = {name.rpartition("/")[2] for name in line} & {"kl", "ref_kl"}
    if rows is None or logged or unlike("ref_kl", {n: rows[n].marks for n in BESIDE_REFERENCE[1:]}) is not None:
        return
    mask, sampled, reference = (rows[name].values for name in BESIDE_REFERENCE)
    if mask.any():
        from ...rl.math.kl import estimate

        line["ref_kl"] = float(estimate(sampled[mask].double(), reference[mask].double(), "k3").mean())


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


def versions() -> dict[str, str]:
    """Versions of Python and the packages that decide a result."""
    found = {"python": platform.python_version(), "flowrl": import_module("flowrl").__version__}
    for name in (*PACKAGES, *packages()):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _window(values: list[float]) -> int:
    return max(1, min(20, len(values) // 5))


def _smooth(values: list[float]) -> list[float]:
    width = _window(values)
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]


def _flat(item: Logged) -> dict[str, Any]:
    """Metrics are spread into their entries; ``critic=metrics`` gives ``critic/loss``."""
    plain = outcome(item.value.ref) if hasattr(item.value, "ref") else item.value
    if isinstance(plain, Mapping):
        entries: Mapping[str, Any] = plain  # type: ignore[assignment]
        return {item.under(name): value for name, value in entries.items()}
    return {item.name: plain}


def _number(value: Any) -> Any:
    value = outcome(value.ref) if hasattr(value, "ref") else value
    if isinstance(value, Column):
        return value.mean()
    return value.item() if hasattr(value, "item") else value


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
