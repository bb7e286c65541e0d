"""What became of every row of a disturbed run: by its own records, and by the world's account of what it was asked.

Whatever the schedule was, each row is trained on once or is dropped by the program, no row is older than the bound of
its plan, and what the world was asked is asked again of rows alone that had to be sampled again. The run has written
down all rows that it has trained on (``trajectories_every=1``), and its program updates once in each step.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import faults
from kills_driver import EVERY, GROUP, PROMPTS, odds, text_of

from flowrl.schedule.group_window import width

ON_ITS_WAY = 1  # answers of a process that may not be in the journal yet: it gives one in twice the time that takes
AGAIN = ("renewed", "recovered", "resumed", "resized")  # events after which rows may be sampled once more
Line = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Under which a run is disturbed: ``Setting(4, "interrupt", "window", "plain")``."""

    staleness: int = 0
    publish: str = "drain"
    order: str = "fifo"
    program: str = "plain"  # or refill: groups that are alike are dropped, and others drawn; or evaluate, in each step

    @property
    def name(self) -> str:
        """As it is said: ``S=4 interrupt window plain``."""
        return f"S={self.staleness} {self.publish} {self.order} {self.program}"

    @property
    def is_settled(self) -> bool:
        """Whether the same rows are sampled whenever things happen."""
        return self.staleness < 2 and self.publish == "drain" and (self.order == "fifo" or not self.staleness)

    @property
    def bound(self) -> int:
        """Publishes between sampling and training, at most."""
        if self.order == "fifo":
            return self.staleness
        return self.staleness + math.ceil((width(PROMPTS, self.staleness, 1.0) - 1) / PROMPTS)


def read(file: Path) -> list[Line]:
    """The lines of a file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def ledger(out: Path) -> tuple[str, Line]:
    """What is wrong with the ledger of rows of a run, and how it ended."""
    lines = read(out / "ledger.jsonl")
    end = json.loads((out / "run.json").read_text())["ledger"]["kills"]
    end.pop("lengths", None)  # of the groups since the process began
    for line in [*lines, end]:
        for unit in ("rows", "prompts"):
            n = line[unit]
            if n["admitted"] != n["trained"] + sum(n["dropped"].values()) + n["live"]:
                return f"step {line.get('step', 'the last')}: {unit} {n}", end
    steps = [line["step"] for line in lines]
    twice = "" if steps == sorted(set(steps)) else f"steps {steps}"
    return twice or ("" if not end["rows"]["live"] else f"{end['rows']['live']} rows are live at the end"), end


def trained(out: Path) -> list[Line]:
    """The rows that were trained on, each with its step."""
    return read(out / "trajectories.jsonl")


def trained_twice(rows: list[Line]) -> str:
    """Rows that more than one update had."""
    again = [key for key, n in Counter(tuple(row["key"]) for row in rows).items() if n > 1]
    return f"{len(again)}, such as {again[0]}" if again else ""


def lost(out: Path, setting: Setting, steps: int) -> str:
    """Rows of which nobody can say what became of them."""
    keys, end = {tuple(row["key"]) for row in trained(out)}, ledger(out)[1]["rows"]
    if len(keys) != end["trained"]:
        return f"{len(keys)} rows were trained on, the ledger has {end['trained']}"
    if setting.program == "refill":  # which are dropped is up to their rewards; the ledger names the line
        return f"{end['admitted']} of {PROMPTS * GROUP * steps} or more" * (end["admitted"] < PROMPTS * GROUP * steps)
    missing = {(prompt, i) for prompt in range(PROMPTS * steps) for i in range(GROUP)} ^ keys
    if setting.program == "evaluate":  # prompts that are drawn aside have numbers too
        missing = set() if len(keys) == PROMPTS * GROUP * steps else missing
    return f"{len(missing)}, such as {min(missing)}" if missing else ""


def too_old(out: Path, setting: Setting) -> str:
    """Rows above the bound of age, or sampled by weights that were not there yet: by their tokens, and by the run."""
    for row in trained(out):
        seen = row["versions"]
        if seen and (
            row["step"] - seen[0] > setting.bound or seen[-1] > row["step"] or any(b < a for a, b in pairwise(seen))
        ):
            return f"row {row['key']} of step {row['step']} has versions {seen}, the bound is {setting.bound}"
    told = Counter[int]()
    for line in read(out / "traffic.jsonl"):
        told.update({int(lag): n for lag, n in line.get("lags", {}).items()})
    above = sorted(lag for lag in told if not 0 <= lag <= setting.bound)
    if above:
        return f"the run says {above[-1]}, the bound is {setting.bound}"
    groups = len({row["key"][0] for row in trained(out)})
    return "" if told.total() == groups else f"the run has the age of {told.total()} groups of {groups}"


def contents(out: Path) -> dict[tuple[int, ...], list[str]]:
    """Of each row that the world has judged, what was asked: a digest of it for each line of the journal."""
    found: dict[tuple[int, ...], list[str]] = {}
    for file in sorted(out.glob("journal*.jsonl")):
        for line in read(file):
            for key, what in zip(line["keys"], line["inputs"], strict=True) if line.get("op") == "reward.score" else ():
                found.setdefault((line["call"], *key), []).append(what)
    return found


def asked_twice(out: Path, setting: Setting) -> str:
    """What was asked of the world again without need."""
    told, given = contents(out), answers(out)
    same = [key for key, asked in told.items() if len(set(asked)) < len(asked)]
    if same:
        return f"{len(same)} rows as they were before, such as {same[0]} (call, row)"
    journalled = sum(map(len, told.values()))
    on_way = ON_ITS_WAY * len({pid for pid, _ in given})
    if len(given) - journalled > on_way:
        return f"{len(given)} answers, of which {journalled} are in the journal, and {on_way} were on their way at most"
    events = sum(event["kind"] in AGAIN for event in read(out / "events.jsonl"))
    most = max((len(asked) - 1 for asked in told.values()), default=0)
    if most > events:
        return f"a row was sampled {most} times more, after {events} losses"
    again = sum(len(asked) - 1 for asked in told.values())
    rows = events * (EVERY + 1 + setting.bound) * PROMPTS * GROUP * (3 if setting.program == "refill" else 1)
    return f"{again} rows were sampled again, which is more than were open: {rows}" if again > rows else ""


def not_given(out: Path) -> str:
    """Rewards that were trained on, and that nobody has given."""
    said = Counter(text for _, text in answers(out))
    for row in trained(out):
        response = text_of(row["response"])
        if abs(row["rewards"] - odds(response)) > 1e-4:
            return f"row {row['key']} has {row['rewards']} for {response!r}"
        if not said[f"{row['prompt']}{response}"]:
            return f"row {row['key']}, {row['prompt']}{response}"
    return ""


def answers(out: Path) -> list[tuple[int, str]]:
    """Each reward that was given, by the world's own account: the process, and the row in words."""
    lines = (faults.beside(out) / "answers.jsonl").read_text().splitlines()
    return [(pid, f"{prompt}{response}") for pid, prompt, response in map(json.loads, lines)]


def evaluated_otherwise(out: Path, setting: Setting) -> str:
    """Evaluations by other weights than those of all updates before them."""
    if setting.program != "evaluate":
        return ""
    seen = [(line["step"], line.get("at"), line.get("most")) for line in read(out / "metrics.jsonl")]
    wrong = [line for line in seen if not line[0] == line[1] == line[2]]
    return f"step {wrong[0][0]} by versions {wrong[0][1]} to {wrong[0][2]}" if wrong else ""


def account(out: Path, setting: Setting, steps: int) -> dict[str, str]:
    """What is wrong with the rows of a run that has ended, by its name; empty for what is right."""
    done = [line["step"] for line in read(out / "metrics.jsonl")]
    return {
        "the ledger does not close": ledger(out)[0],
        "steps are not all there": "" if done == list(range(steps)) else f"{done}",
        "rows lost": lost(out, setting, steps),
        "rows trained twice": trained_twice(trained(out)),
        "rows too old": too_old(out, setting),
        "asked twice": asked_twice(out, setting),
        "rewards that nobody gave": not_given(out),
        "evaluated by other weights": evaluated_otherwise(out, setting),
    }
