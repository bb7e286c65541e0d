"""What a run waits for and who is to blame, told from its folder alone: of a live run, or of one that is dead."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ....errors import UsageError, shown
from ....workers.user_code.rows_in_progress import DIED, Row, at_work, lines_of
from ...storage.run_lock import began, holder_of, is_stopped
from ...storage.run_record import read_record, records_within
from ...storage.wait_record import RESTART, WaitingCall, WaitingRank, WaitRecord, read_waits


@dataclass(frozen=True)
class Wait:
    """One wait of the chain: ``Wait("rl.advantages of step 3", "reward.score of step 3", "row 17", 2, 30.0, None)``.

    ``producer`` is the call, rank, row or person that it waits for; ``version`` that of the weights that a publish
    brings, ``seconds`` how long it has taken so far, ``deadline`` how long it may take: None where nobody has said.
    """

    who: str
    producer: str
    version: int | None = None
    seconds: float | None = None
    deadline: float | None = None

    def __str__(self) -> str:
        more = [f"version {self.version}"] if self.version is not None else []
        if self.seconds is not None:
            most = f"of {self.deadline:g} s at most" if self.deadline else "without a deadline"
            more += [f"{self.seconds:.0f} s so far", most]
        return f"{self.who} waits for {self.producer}" + (f" ({', '.join(more)})" if more else "")


@dataclass(frozen=True)
class WaitStory:
    """``state`` says in words how the run is, ``waits`` whom it waits for, the last of them for who is to ``blame``.

    ``fix``: what can be done; empty where nothing is to be done. ``pools``: those that have fewer ranks than the plan
    says.
    """

    state: str
    waits: tuple[Wait, ...] = ()
    blame: str = ""
    fix: str = ""
    pools: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return asdict(self)

    def text(self) -> str:
        """All of it in words."""
        lines = [self.state, *(f"  {wait}" for wait in self.waits), *self.pools]
        if self.blame:
            lines.append(f"To blame: {self.blame}")
        word = "then" if "\n  fix  " in self.blame else "fix "  # an error that says how to mend it comes first
        return "\n".join([*lines, *([f"  {word} {self.fix}"] if self.fix else [])])


def wait_story(run: Path) -> WaitStory:
    """Tell what a run waits for. Raises UsageError for a folder that holds no run."""
    if not (run / "run.json").exists() and not (run / "checkpoints").exists():
        raise UsageError(f"{run} holds no run.", fix="Name the folder of a run.")
    record = read_record(run)[0]
    return replace(_story_of(run, record), pools=_smaller_pools(record))


def _smaller_pools(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Say of each pool how many of its ranks are there, where some are gone for good."""
    pools: Mapping[str, Mapping[str, int]] = record.get("replicas") or {}
    return tuple(f"Pool '{pool}' has {size['ranks']} of {size['planned']} ranks." for pool, size in pools.items())


def _story_of(run: Path, record: Mapping[str, Any]) -> WaitStory:
    status, waits = record.get("status"), read_waits(run)
    holder, alive = holder_of(run)
    process = f"process {holder['pid']} on {holder['host']}" if holder is not None else "its process"
    script = shown(str(record.get("script", "SCRIPT")))
    go_on = f"Go on with: {shlex.join(['flowrl', 'run', script, '--out', shown(str(run)), '--resume'])}"
    if status == "done":
        return WaitStory(f"{run} is done, and waits for nothing.")
    if status in ("failed", "interrupted"):
        last = _last_event(run, ("failed", "stopped", "lost"))
        state = f"{run} has {'failed' if status == 'failed' else 'been stopped'}."
        return WaitStory(state, _chain(run, waits), last, go_on)
    if alive == "gone":
        rows = [Row(**{**r, "key": tuple(r.get("key", ()))}) for r in _known(lines_of(run / DIED))] or at_work(run)
        where = f", while it was at {rows[-1]}" if rows else ""
        state = f"{run}: {process} is gone, and could say nothing: it was killed. {_recorded(run)}"
        return WaitStory(state, _chain(run, waits), f"{process}, which is dead{where}", go_on)
    if alive == "unknown":
        state = f"{run}: {process} cannot be seen from here, alive or not. {_recorded(run)}"
        return WaitStory(state, _chain(run, waits), *_blame(run, waits))
    if holder is not None and is_stopped(holder["pid"]):
        blame = f"{process}, which is stopped, as by SIGSTOP or a debugger"
        return WaitStory(f"{run}: {process} is stopped.", _chain(run, waits), blame, f"kill -CONT {holder['pid']}")
    if waits is None:
        return WaitStory(f"{run}: {process} is alive, and does not wait for anything long. {_recorded(run)}")
    ago = max(0.0, time.time() - waits.time)
    state = f"{run}: {process} is alive. What it waited for {ago:.0f} s ago, when nothing had happened for "
    return WaitStory(f"{state}{waits.quiet:.0f} s:", _chain(run, waits), *_blame(run, waits))


_RESTARTED = "which was lost and is started again"


# -- the chain ---------------------------------------------------------------------------------------------------------


def _chain(run: Path, waits: WaitRecord | None) -> tuple[Wait, ...]:
    """The waits from the program down to the one that waits for nobody else."""
    return () if waits is None else tuple(_waits(run, waits))


def _waits(run: Path, waits: WaitRecord) -> Iterator[Wait]:
    calls = {call.id: call for call in waits.calls}
    path = _path(calls)
    place = f"the program at {waits.driver}" if waits.driver else "the program"
    if path:
        yield Wait(place, str(path[0]), path[0].version)
    for call, after in pairwise(path):
        in_pool = ", which runs in its pool" if after.id in call.busy else ""
        yield Wait(str(call), f"{after}{in_pool}", after.version)
    end = path[-1] if path else None
    who, since = (str(end), end.since) if end is not None else (place, None)
    seconds = max(0.0, waits.time - since) if since is not None else None
    if end is not None and end.held:
        yield Wait(who, "the next step to be closed", end.version)
    rows = _rows(run, end, waits.time)
    asked = [rank for rank in waits.ranks if end is None or rank.what.startswith(f"{end.title} of step {end.step}")]
    if rows:
        row = rows[0]
        said, took = f"user code: {row.code}, {_row_only(row)}", max(0.0, waits.time - row.since)
        yield Wait(who, said, None, took, row.timeout)
    elif asked or waits.ranks:
        for rank in asked or waits.ranks:
            said = f"rank {rank.rank} of pool '{rank.pool}', process {rank.pid} on {rank.node}, {_rank_state(rank)}"
            yield Wait(who if asked else rank.what, said, None, max(0.0, waits.time - rank.since), rank.deadline)
    elif end is not None and end.running:
        pools = f" in pool {', '.join(end.pools)}" if end.pools else ""
        yield Wait(who, f"itself: it is computed{pools}", end.version, seconds)
    elif waits.opening:
        yield Wait(place, f"{waits.opening} to be opened", None, waits.quiet)
    elif not path:
        yield Wait(place, "its own code: no call is under way", None, waits.quiet)


def _path(calls: Mapping[int, WaitingCall]) -> list[WaitingCall]:
    """From the call that waits longest down to one that runs: the earliest of those that each waits for."""
    if not calls:
        return []
    wanted = {number for call in calls.values() for number in (*call.on, *call.busy)}
    firsts = [call for call in calls.values() if call.id not in wanted] or list(calls.values())
    path, seen = [min(firsts, key=_order)], set[int]()
    while path[-1].id not in seen:
        seen.add(path[-1].id)
        nexts = [calls[number] for number in (*path[-1].on, *path[-1].busy) if number in calls]
        if not nexts or path[-1].running:
            break
        path.append(min(nexts, key=_order))
    return path


def _order(call: WaitingCall) -> tuple[bool, int, int]:
    """What runs comes first, then the order of the program: of calls a publish stands after those of its step."""
    return not call.running, call.step, abs(call.id)


def _rows(run: Path, call: WaitingCall | None, now: float) -> list[Row]:
    """The rows that user code is at, the oldest first: those of a call where there are some.

    Rows whose timeout has passed come last: where it could end them, nobody waits for them any more.
    """
    rows = sorted((row for row in at_work(run) if row.key), key=lambda row: _is_late(row, now))
    mine = [row for row in rows if call is not None and (row.op, row.step) == (call.title, call.step)]
    return mine or (rows if call is None else [])


def _is_late(row: Row, now: float) -> bool:
    return row.timeout is not None and now - row.since > row.timeout


def _row_only(row: Row) -> str:
    return str(row).partition(" at ")[2].partition(f": {row.code}")[0]


def _rank_state(rank: WaitingRank) -> str:
    """How the process of a rank is, as far as it can be seen from here."""
    if rank.what == RESTART:
        return _RESTARTED
    if not rank.began or not rank.pid:
        return "which cannot be seen from here"
    if began(rank.pid) != rank.began:
        return "which is dead"
    return "which is stopped" if is_stopped(rank.pid) else "which is alive"


# -- who is to blame ---------------------------------------------------------------------------------------------------


def _blame(run: Path, waits: WaitRecord | None) -> tuple[str, str]:
    """Who keeps the run, and what can be done; empty where nobody is known."""
    if waits is None:
        return "", ""
    for rank in waits.ranks:
        state = _rank_state(rank)
        who = f"rank {rank.rank} of pool '{rank.pool}', process {rank.pid} on {rank.node}, {state}"
        if state == "which is stopped":
            return who, f"kill -CONT {rank.pid}"
        if state == _RESTARTED:
            return who, "Wait: the run goes on by itself once it is there."
        if state == "which is dead":
            return who, "The run starts it again as soon as it is told of it."
    path = _path({call.id: call for call in waits.calls})
    end = path[-1] if path else None
    if rows := _rows(run, end, waits.time):
        return f"{rows[0].code}, {_row_only(rows[0])} of {rows[0].op}", _fix_of(rows[0], waits.time)
    if end is not None and end.running:
        alive = [rank for rank in waits.ranks if rank.what.startswith(f"{end.title} of step {end.step}")]
        on = f" on rank{'s' if len(alive) > 1 else ''} {', '.join(str(r.rank) for r in alive)}" if alive else ""
        return f"{end}{on}, which is still computed", ""
    return (f"the program itself, at {waits.driver}", "") if end is None and waits.driver else ("", "")


def _fix_of(row: Row, now: float) -> str:
    """What can be done about a row of user code that takes long."""
    if row.timeout is None:
        return "Give the worker a timeout, or mend the function."
    if _is_late(row, now):
        return f"Mend the function: it goes on although its timeout of {row.timeout:g} s has passed."
    return f"Wait until its timeout of {row.timeout:g} s ends it, give the worker a shorter one, or mend the function."


# -- what else the folder says -----------------------------------------------------------------------------------------


def _last_event(run: Path, kinds: Sequence[str]) -> str:
    found = [line["text"] for line in records_within(run / "events.jsonl") if line["kind"] in kinds]
    return found[-1] if found else ""


def _recorded(run: Path) -> str:
    """The last step that was recorded."""
    last: Mapping[str, Any] | None = None
    for line in records_within(run / "metrics.jsonl"):
        last = line
    if last is None:
        return "No step was recorded."
    return f"The last step that was recorded is {last['step']} of {last['program']}."


def _known(lines: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for line in lines:
        yield {name: line[name] for name in Row.__dataclass_fields__ if name in line}
