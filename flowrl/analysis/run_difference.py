"""Where two runs part: what they were asked for, then the first metric, call, field, row and token that differs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..batch import Key
from ..errors import UsageError
from ..runtime.storage.changes_since_start import NOT_THERE, different
from ..runtime.storage.digest_lines import CallDigest, read_digests
from ..runtime.storage.run_record import read_record, records_within
from ..workers.user_code.rows_in_progress import named_row

#: Entries of a line of metrics that clocks decide.
CLOCKED = (
    "seconds",
    "tokens_per_second",
    "decode_slots_used",
    "environment_seconds",
    "load_seconds",
    "proof_seconds",
)
_WHERE = ("program", "step", "key")

_Place = tuple[str, int, bool, str, int]  # program, step, outside, node, how many of that node came before there


@dataclass(frozen=True)
class MetricDifference:
    """The first line of metrics that differs: ``MetricDifference("grpo", 3, {"loss": (0.25, 0.26)})``."""

    program: str
    step: int
    values: Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True)
class RowDifference:
    """What the records hold of a row that differs: ``RowDifference((48, 0), "tokens", 12, 17, 4)``.

    ``place`` is that in the row, from 0 on; None where the field has one value for each row.
    """

    key: Key
    field: str
    place: int | None
    first: Any
    second: Any


@dataclass(frozen=True)
class CallDifference:
    """A call that gave another result: ``CallDifference("grpo", 3, "actor.generate", ("tokens",), rows=((48, 0),))``.

    ``only_first`` and ``only_second`` are rows that one of the runs alone has; with ``missing`` one has no such call.
    ``values`` are numbers that differ, ``versions`` those of the weights where they differ; ``kept`` the first
    difference in rows that both runs have written down, ``by`` the largest difference of numbers in these, by field.
    """

    program: str
    step: int
    node: str
    fields: tuple[str, ...] = ()
    rows: tuple[Key, ...] = ()
    of: int = 0
    only_first: tuple[Key, ...] = ()
    only_second: tuple[Key, ...] = ()
    missing: str = ""
    values: Mapping[str, tuple[Any, Any]] = field(default_factory=dict[str, "tuple[Any, Any]"])
    versions: tuple[Mapping[str, Sequence[int]], Mapping[str, Sequence[int]]] | None = None
    kept: RowDifference | None = None
    by: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class RunDifference:
    """All that was found of two runs. ``calls`` were compared, those in ``different`` differ, the first one first.

    ``asked`` is what they were asked for, as (what, in the first, in the second); ``done`` the steps of each by
    program, where they differ; ``weights`` the workers whose final weights differ, None where these cannot be compared.
    """

    asked: tuple[tuple[str, str, str], ...]
    metric: MetricDifference | None
    different: tuple[CallDifference, ...]
    calls: int
    steps: int
    done: Mapping[str, tuple[int, int]]
    weights: tuple[str, ...] | None

    @property
    def is_equal(self) -> bool:
        """Whether all that both runs did gave the same, bit for bit; not where they have no call in common."""
        return self.calls > 0 and self.metric is None and not self.different and not self.weights

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {"equal": self.is_equal, **asdict(self)}


def compare_runs(
    first: Path,
    second: Path,
    *,
    program: str | None = None,
    steps: tuple[int, int] | None = None,
    node: str | None = None,
) -> RunDifference:
    """Compare what the folders of two runs hold, as far as both have come.

    ``program``, ``steps`` (the first and the last) and ``node`` leave all others out. Raises UsageError for a folder
    that holds no run.
    """
    records = [_record(run) for run in (first, second)]
    digests = [_digests(run, program, steps) for run in (first, second)]
    metrics = [_metrics(run, program) if node is None else [] for run in (first, second)]
    done = _steps_done(*digests)
    both = {name: min(counts) for name, counts in done.items()}
    apart = {name: counts for name, counts in done.items() if counts[0] != counts[1]}

    def in_both(place: _Place) -> bool:
        return place[1] < both[place[0]] or (place[2] and place[1] == both[place[0]] and place[0] not in apart)

    every = dict.fromkeys([*digests[0], *digests[1]])
    places = [place for place in every if in_both(place) and node in (None, place[3])]
    pairs = [(p, digests[0].get(p), digests[1].get(p)) for p in places]
    found = [f for place, a, b in pairs if (f := _compare_calls(place, a, b)) is not None]
    found = [_with_rows(first, second, one) if number == 0 else one for number, one in enumerate(found)]
    return RunDifference(
        tuple(_asked(*records)),
        _first_metric(*metrics),
        tuple(found),
        len(pairs),
        sum(both.values()) if steps is None else steps[1] - steps[0] + 1,
        apart,
        None if apart or steps is not None or node is not None else _weights(*records),
    )


def _record(run: Path) -> Mapping[str, Any]:
    if not (run / "run.json").exists() and not (run / "checkpoints").exists():
        raise UsageError(f"{run} holds no run.", fix="Name the folder of a run.")
    return read_record(run)[0]


# -- what they were asked for ------------------------------------------------------------------------------------------


def _asked(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield what the runs were made of and is not the same: parameters, seed, workers, data, code, plan, versions."""
    a, b = _flat(first), _flat(second)
    yield from different(a, b)
    if first.get("commit") != second.get("commit"):
        yield "commit of the script", str(first.get("commit")), str(second.get("commit"))


def _flat(record: Mapping[str, Any]) -> dict[str, str]:
    """What a run was asked for, under one name each."""
    inputs = record.get("inputs", {})
    flat = {"programs": ", ".join(record.get("programs", ())), "seed": str(record.get("seed"))}
    for program, said in zip(record.get("programs", ()), record.get("parameters", ()), strict=False):
        flat |= {f"{program}: {name}": str(value) for name, value in said.items()}
    flat |= inputs.get("workers", {})
    for program, some in zip(record.get("programs", ()), inputs.get("data", ()), strict=False):
        flat |= {f"data of {program}: {name}": value for name, value in some.items()}
    flat |= {f"code of {name}": value for name, value in inputs.get("code", {}).items()}
    flat |= inputs.get("plan", {})
    return flat | inputs.get("machine", {})


def _weights(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[str, ...] | None:
    a, b = first.get("weights_digests"), second.get("weights_digests")
    return None if a is None or b is None else tuple(name for name, _, _ in different(a, b))


# -- metrics -----------------------------------------------------------------------------------------------------------


def _metrics(run: Path, program: str | None) -> list[dict[str, Any]]:
    lines = records_within(run / "metrics.jsonl")
    return [line for line in lines if program is None or line["program"] == program]


def _first_metric(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> MetricDifference | None:
    for name in dict.fromkeys(line["program"] for line in first):
        mine = [[line for line in lines if line["program"] == name] for lines in (first, second)]
        for a, b in zip(*mine, strict=False):
            shared = [n for n in dict.fromkeys([*a, *b]) if n.rpartition("/")[2] not in CLOCKED]
            values = {n: (a.get(n), b.get(n)) for n in shared if a.get(n) != b.get(n)}
            if values:
                return MetricDifference(name, a["step"], values)
    return None


# -- calls -------------------------------------------------------------------------------------------------------------


def _digests(run: Path, program: str | None, steps: tuple[int, int] | None) -> dict[_Place, CallDigest]:
    """The recorded calls of a run by their place in the program."""
    found: dict[_Place, CallDigest] = {}
    counts: dict[tuple[str, int, bool, str], int] = {}
    for made in read_digests(run):
        if program in (None, made.program) and (steps is None or steps[0] <= made.step <= steps[1]):
            node = made.program, made.step, made.outside, made.node
            counts[node] = counts.get(node, -1) + 1
            found[*node, counts[node]] = made
    return found


def _steps_done(first: Iterable[_Place], second: Iterable[_Place]) -> dict[str, tuple[int, int]]:
    """How many steps of each program have calls, in both runs."""
    done: dict[str, list[int]] = {}
    for which, places in enumerate((first, second)):
        for program, step, outside, *_ in places:
            counts = done.setdefault(program, [0, 0])
            counts[which] = max(counts[which], step + (not outside))
    return {program: (counts[0], counts[1]) for program, counts in done.items()}


def _compare_calls(place: _Place, a: CallDigest | None, b: CallDigest | None) -> CallDifference | None:
    program, step, _, node, _ = place
    if a is None or b is None:
        return CallDifference(program, step, node, missing="first" if a is None else "second")
    values = {n: (a.values.get(n), b.values.get(n)) for n in {**a.values, **b.values} if _differ(n, a.values, b.values)}
    fields = tuple(n for n in {**a.fields, **b.fields} if a.fields.get(n) != b.fields.get(n))
    if a.keys == b.keys and not values and not fields:
        return None
    mine, theirs = set(a.keys), set(b.keys)
    rows: tuple[Key, ...] = ()
    if a.keys == b.keys:
        rows = tuple(key for i, key in enumerate(a.keys) if a.row(i) != b.row(i))
    else:
        other = {key: b.row(i) for i, key in enumerate(b.keys)}
        rows = tuple(key for i, key in enumerate(a.keys) if key in other and a.row(i) != other[key])
    return CallDifference(
        program,
        step,
        node,
        fields,
        rows,
        len(mine | theirs),
        tuple(key for key in a.keys if key not in theirs),
        tuple(key for key in b.keys if key not in mine),
        values=values,
        versions=(a.versions, b.versions) if a.versions != b.versions else None,
    )


def _differ(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return name not in a or name not in b or a[name] != b[name]


# -- rows that both have written down ----------------------------------------------------------------------------------


def _with_rows(first: Path, second: Path, found: CallDifference) -> CallDifference:
    """Add what both runs have written down of the rows of a call that differ."""
    rows = [_written(run, found.program, found.step) for run in (first, second)]
    by: dict[str, float] = {}
    kept: RowDifference | None = None
    for key in found.rows:
        a, b = (some.get(key) for some in rows)
        for name in found.fields if a is not None and b is not None else ():
            assert a is not None and b is not None, "asked for in the line above"
            if name not in a or name not in b or a[name] == b[name]:
                continue
            place, *values = _first_place(a[name], b[name])
            kept = kept or RowDifference(key, name, place, *values)
            if (size := _largest(a[name], b[name])) is not None:
                by[name] = max(by.get(name, 0.0), size)
    return CallDifference(**{**{n: getattr(found, n) for n in found.__dataclass_fields__}, "kept": kept, "by": by})


def _written(run: Path, program: str, step: int) -> dict[Key, dict[str, Any]]:
    """The rows of a step that a run has written down."""
    lines = records_within(run / "trajectories.jsonl")
    return {tuple(x["key"]): x for x in lines if (x["program"], x["step"]) == (program, step)}


def _first_place(a: Any, b: Any) -> tuple[int | None, Any, Any]:
    """The first place in which two values of a row differ, and what is there."""
    if not isinstance(a, list) or not isinstance(b, list):
        return None, a, b
    pairs: list[tuple[Any, Any]] = list(zip_longest(a, b))  # type: ignore[arg-type]
    place = next(i for i, (x, y) in enumerate(pairs) if x != y)
    return place, *pairs[place]


def _largest(a: Any, b: Any) -> float | None:
    """The largest difference of two values, or lists of values, that are fractions; None of others."""
    pairs: list[tuple[Any, Any]] = list(zip(a, b, strict=False)) if isinstance(a, list) else [(a, b)]
    sizes = [abs(x - y) for x, y in pairs if isinstance(x, float) and isinstance(y, float)]
    return max(sizes) if sizes else None


# -- in words ----------------------------------------------------------------------------------------------------------


def in_words(found: RunDifference, first: str, second: str) -> str:
    """The comparison as a text."""
    lines: list[str] = []
    if found.asked:
        lines.append(f"Not asked for the same, {first} -> {second}:")
        lines += [f"  {_asked_line(*change)}" for change in found.asked]
    for program, (mine, theirs) in found.done.items():
        lines.append(f"{program} has recorded {mine} steps in {first} and {theirs} in {second}.")
    if found.metric is not None:
        metric = found.metric
        lines.append(f"First metric: {metric.program}, step {metric.step}:")
        lines += [f"  {_number_line(name, *pair)}" for name, pair in metric.values.items()]
    if found.different:
        lines += _call_lines(found.different[0])
        more = len(found.different) - 1
        lines += [f"{more} more of the {found.calls} calls that both made differ."] if more else []
    elif not found.calls:
        lines.append("No calls can be compared: the runs share no step of a program, or one has no digests.jsonl.")
    else:
        steps = f"{found.steps} step{'s' if found.steps != 1 else ''}"
        lines.append(f"Bitwise equal: all {found.calls} calls of {steps} gave the same.")
    if found.weights is not None:
        same = f"The final weights differ: {', '.join(found.weights)}." if found.weights else ""
        lines.append(same or "The final weights are equal.")
    return "\n".join(lines)


def _asked_line(what: str, before: str, now: str) -> str:
    if what.startswith("code of ") and NOT_THERE not in (before, now):
        return f"{what} is another"
    if what.startswith("code of "):
        return f"{what} is in the {'second' if before == NOT_THERE else 'first'} alone"
    return f"{what} {before} -> {now}"


def _number_line(name: str, a: Any, b: Any) -> str:
    numbers = all(isinstance(v, (int, float)) for v in (a, b))
    return f"{name} {a} -> {b}" + (f" (by {abs(b - a):.3g})" if numbers else "")


def _call_lines(found: CallDifference) -> list[str]:
    """The first call that differs, in words."""
    title = f"First call: {found.program}, step {found.step}, {found.node}"
    if found.missing:
        return [f"{title}: the {found.missing} run has no such call."]
    lines = [f"{title}:"]
    for which, keys in (("first", found.only_first), ("second", found.only_second)):
        if keys:
            lines.append(f"  rows that the {which} run alone has: {_rows_in_words(keys)}")
    if found.fields:
        lines.append(f"  {', '.join(found.fields)} of {_rows_in_words(found.rows) or 'some row'}, of {found.of} rows")
    lines += [f"  {_number_line(name, *pair)}" for name, pair in found.values.items()]
    if found.versions is not None:
        said = [", ".join(f"{n} {'/'.join(map(str, v))}" for n, v in some.items()) for some in found.versions]
        lines.append(f"  started with versions {said[0] or 'none'} -> {said[1] or 'none'}")
    if found.kept is not None:
        kept = found.kept
        where = f", place {kept.place}" if kept.place is not None else ""
        lines.append(f"  {kept.field} of row {named_row(kept.key)}{where}: {kept.first} -> {kept.second}")
    elif found.rows:
        lines.append("  no row of these is in both trajectories.jsonl; --trajectories-every 1 keeps rows of every step")
    lines += [f"  {name} by at most {size:.3g} in the rows that are written down" for name, size in found.by.items()]
    return lines


def _rows_in_words(keys: Sequence[Key], most: int = 4) -> str:
    if not keys:
        return ""
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return f"row{'s' if len(keys) > 1 else ''} {'; '.join(named_row(key) for key in keys[:most])}{more}"
