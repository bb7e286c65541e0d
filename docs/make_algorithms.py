"""Write the generated blocks of docs/choosing.md and docs/algorithms.md: ``python docs/make_algorithms.py``.

What a program costs is counted on its graph, and what was learned is read from docs/learning.json, which
``python benchmarks/learn.py`` writes. A test keeps both pages up to date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from runpy import run_path
from typing import Any

from flowrl.cli.arguments.script import load_script
from flowrl.flow import Flow
from flowrl.graph.may_see_older_weights import trained_on
from flowrl.graph.record import Graph, Node
from flowrl.graph.tracing.trace_records import Traced
from flowrl.handle import Handle

DOCS = Path(__file__).parent
ALGORITHMS = DOCS.parent / "algorithms"
LEARNING = DOCS / "learning.json"
STALE = DOCS / "stale.json"
GAMES = DOCS / "tictactoe.json"
LEARN = DOCS.parent / "benchmarks" / "learn.py"
#: In the order of the page: from given data to sampled rows to several models.
DRIVERS = ("sft", "reward_model", "dpo", "grpo", "ppo", "remax", "dapo", "gigpo", "tool_use", "tictactoe")
DRIVERS += ("safe_rlhf", "raft", "distillation", "judge", "online_dpo", "rlhf")
SIDE = ("warmup", "evaluate")  # programs that many drivers have, and that are no algorithm
HEAD = ("program", "generate", "forward", "train", "external", "models trained", "frozen", "waits", "stale rows")


def loaded(driver: str) -> Flow:
    """The flow of a driver; its folder goes first on ``sys.path``, so that it finds its tasks."""
    if str(ALGORITHMS) not in sys.path:
        sys.path.insert(0, str(ALGORITHMS))
    return load_script(str(ALGORITHMS / f"{driver}.py"))


def presets(flow: Flow) -> Iterator[tuple[str, str | None, dict[str, Any]]]:
    """``(program, preset, values)`` of what a flow trains with, the default program first."""
    names = sorted((n for n in flow.programs if n not in SIDE), key=lambda n: n != flow.default_program())
    for name in names:
        for preset, values in flow.programs[name].presets.items() or [(None, {})]:
            yield name, preset, dict(values)


# -- what a step costs -----------------------------------------------------------------------------


def costs() -> str:
    """The table of docs/choosing.md: a row for presets of a driver that cost the same."""
    lines = [HEAD, ("---",) * len(HEAD)]
    for driver in DRIVERS:
        flow = loaded(driver)
        alike: dict[tuple[str, ...], list[str]] = {}
        for program, preset, values in presets(flow):
            title = f"`{preset}`" if preset else "" if program == flow.name else f"`--program {program}`"
            alike.setdefault((program, *cells(flow, program, values)), []).append(title)
        for (_, *found), titles in alike.items():
            name = f"`{driver}`" if titles == [""] else f"`{driver}`: {', '.join(titles)}"
            lines.append((name, *found))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(flow: Flow, program: str, values: dict[str, Any]) -> list[str]:
    """What stands in the columns after the first."""
    graph, traced = flow.graph(program, **values), flow.trace(program, **values)
    served = {e.dst for e in graph.edges_of("serves")}
    trained = {n.worker for n in graph.nodes if n.cost == "train"}
    models = [h.name for h in flow.handles if h.name in flow.workers_of(traced) and has_model(h)]
    waits = any(lint.kind == "serial" for lint in flow.check(program, **values).lints)
    return [
        counted([n for n in graph.nodes if n.cost == "generate" or (n.external and n.id in served)]),
        *(counted([n for n in graph.nodes if n.cost == cost]) for cost in ("forward", "train", "external")),
        str(sum(name in trained for name in models)),
        str(sum(name not in trained for name in models)),
        "yes" if waits else "no",
        stale_rows(graph, traced),
    ]


def counted(nodes: list[Node]) -> str:
    """Calls in a step; ``1+`` where there are more under a condition."""
    always = sum(node.branch is None for node in nodes)
    return f"{always}+" if always < len(nodes) else str(always)


def has_model(handle: Handle) -> bool:
    """Whether a worker holds weights: it is given a model, or is a copy of a worker that is."""
    return "model" in handle.arguments


def stale_rows(graph: Graph, traced: Traced) -> str:
    """Whether all its losses correct for rows that are older than the weights; ``given`` where none is sampled."""
    if not trained_on(traced):
        return "given"
    losses = [c.arguments.get("loss") for trail in traced.trails for c in trail.calls if c.op.cost == "train"]
    assert losses, f"{graph.program} samples rows for an update"
    return "yes" if all(getattr(loss, "corrects_stale", True) for loss in losses) else "no"


# -- what was learned ------------------------------------------------------------------------------


def learning() -> str:
    """The table of docs/algorithms.md and its picture; a sentence where nothing was recorded yet."""
    if not LEARNING.exists():
        return "Nothing is recorded yet."
    record = json.loads(LEARNING.read_text())
    by_title: dict[str, list[dict[str, Any]]] = {}
    for run in record["runs"]:
        by_title.setdefault(run["title"], []).append(run)
    rows = [_learned(title, runs) for title, runs in by_title.items()]
    head = ("run", "seeds", "number", "first -> last", "steps", "seconds")
    table = "\n".join(f"| {' | '.join(line)} |" for line in [head, ("---",) * len(head), *rows])
    picture = "![The curve of every run, a small picture each](images/learning.png)"
    return "\n\n".join([table, *_missed(by_title), *_lacking(by_title), picture])


def _missed(by_title: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Which runs have not come to where they are held against, if any."""
    missed = [
        f"`{title}` ({run['last']:.2f}, mark {run['mark']:g}, seed {run['seed']})"
        for title, runs in by_title.items()
        for run in runs
        if not run["reached"]
    ]
    if missed:
        yield f"Not learned in this time: {', '.join(missed)}."


def _lacking(by_title: Collection[str]) -> Iterator[str]:
    """Which runs of ``make learn`` are not recorded, if any."""
    lacking = [f"`{run.title}`" for run in run_path(str(LEARN))["RUNS"] if run.title not in by_title]
    if lacking:
        yield f"Not recorded yet: {', '.join(lacking)}."


def _learned(title: str, runs: list[dict[str, Any]]) -> tuple[str, ...]:
    first = sum(r["first"] for r in runs) / len(runs)
    last = _spread(f"{r['last']:.2f}" for r in runs)
    seeds = ", ".join(str(r["seed"]) for r in runs)
    return (
        f"`{title}`",
        seeds,
        runs[0]["number"].replace("_", " "),
        f"{first:.2f} -> {last}",
        _spread(str(r["steps"]) for r in runs),
        _spread(str(r["seconds"]) for r in runs),
    )


def _spread(said: Iterable[str]) -> str:
    """One number where all are the same, else the smallest and the largest."""
    found = sorted(set(said), key=float)
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


# -- the pages -------------------------------------------------------------------------------------


def stale() -> str:
    """The table of docs/algorithms.md on rows that are older than the weights."""
    record = json.loads(STALE.read_text())
    by_loss: dict[str, list[dict[str, Any]]] = {}
    for run in record["runs"]:
        by_loss.setdefault(run["loss"], []).append(run)
    least, most = min(map(len, by_loss.values())), max(map(len, by_loss.values()))
    seeds = f"{most} seeds" if least == most else f"{least} to {most} seeds"
    falls = ", which falls to 0" if record.get("falling") else ""
    lines = [f"{seeds}, {record['steps']} steps, learning rate {record['lr']:g}{falls}.", ""]
    lines += ["| loss | reward at the end, by seed | mean | age of the rows |", "|---|---|---|---|"]
    for loss, runs in by_loss.items():
        lasts, age = [run["last"] for run in runs], sum(run["lag"] for run in runs) / len(runs)
        said = ", ".join(f"{last:.2f}" for last in lasts)
        lines.append(f"| `{loss}` | {said} | {sum(lasts) / len(lasts):.2f} | {age:.1f} |")
    return "\n".join([*lines, "", "![Reward over steps, the mean of each loss and its seeds](images/stale.png)"])


def tictactoe() -> str:
    """The table of docs/algorithms.md on greedy games before and after training; a sentence where none was recorded."""
    if not GAMES.exists():
        return "Nothing is recorded yet."
    record = json.loads(GAMES.read_text())
    lines = ["| seed | opponent | | won | drawn | lost | wrong moves |", "|---|---|---|---|---|---|---|"]
    for run in record["runs"]:
        for opponent in ("random", "optimal"):
            for when in ("before", "after"):
                shares = [100 * run[when][f"{opponent}_{name}"] for name in ("won", "drawn", "lost", "wrong")]
                cells = [str(run["seed"]), opponent, when, *(f"{share:.1f} %" for share in shares)]
                lines.append(f"| {' | '.join(cells)} |")
    took = [f"seed {r['seed']}: {r['games']:,} games in {r['steps']:,} steps, {r['seconds']} s" for r in record["runs"]]
    said = "1,000 greedy games each, half of them on each side; before is after the warm-up. "
    said += f"{'; '.join(took)}, one core."
    return "\n".join([*lines, "", said, "", "![Lost games over games played](images/tictactoe.png)"])


BLOCKS = {
    "choosing.md": {"costs": costs},
    "algorithms.md": {"learning": learning, "stale": stale, "tictactoe": tictactoe},
}


def page(name: str, text: str) -> str:
    """The page with fresh blocks between their markers."""
    return run_path(str(DOCS / "fill_blocks.py"))["fill"](text, BLOCKS[name], "docs/make_algorithms.py")


if __name__ == "__main__":
    for name in BLOCKS:
        (DOCS / name).write_text(page(name, (DOCS / name).read_text()))
