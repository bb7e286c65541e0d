"""Run folders as a run leaves them, small or strange, for the tests of the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowrl.graph.record import Edge, Graph, Node, WorkerInfo
from flowrl.runtime.storage.run_record import write_record

HOSTILE = "</script><img src=x onerror=\"document.title='pwned'\">\u202etxt.exe\u0000\u001b[31m\ud800"

LABEL = '"><img src=x onerror=alert(1)>\u202e\u0000'  # one that is short enough to be filtered by


def lines(folder: Path, name: str, *records: Any) -> None:
    """Append records to a file of the run."""
    with (folder / f"{name}.jsonl").open("a", errors="backslashreplace") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def row(step: int, uid: int, place: int, **more: Any) -> dict[str, Any]:
    """A row of four prompt and three response tokens."""
    line = {"program": "grpo", "step": step, "key": [uid, place], "prompt": f"{uid}+1=", "answer": str(uid + 1)}
    line |= {"prompt_ids": [5, 6, 7, 8], "response_ids": [1, 2, 3], "tokens": [5, 6, 7, 8, 1, 2, 3]}
    line |= {
        "response_mask": [True, True, False],
        "rollout_logprobs": [-0.5, -1.0, -2.0],
        "versions": [step] * 3,
        "entropies": [0.5, 1.5, 0.0],
    }
    return {**line, "rewards": float(place % 2), "advantages": [0.5, 0.5, 0.5], "response": f"says {place}", **more}


def run_folder(folder: Path, *, steps: int = 3, status: str = "done", labels: bool = False, **more: Any) -> Path:
    """A run of some steps of four rows each, of two prompts; ``labels``: each row says how it ended, and its source."""
    folder.mkdir(parents=True, exist_ok=True)
    write_record(folder, {"script": "grpo.py", "programs": ["grpo"], "status": status, "started": 1.7e9, **more})
    for step in range(steps):
        metrics = {"reward": step / 10, "entropy": 1.0 - step / 100, "seconds": 2.0}
        lines(folder, "metrics", {"program": "grpo", "step": step, **metrics})
        for call, (node, pool) in enumerate((("actor.generate", "main"), ("reward.score", "cpu"))):
            times = {"start": 2.0 * step + call, "end": 2.0 * step + call + 0.9, "rows": 4, "tokens": 28}
            where = {"program": "grpo", "step": step, "node": node, "pool": pool}
            number = 2 * step + call
            why = {
                "issued": 2.0 * step,
                "due": times["start"] - 0.05,
                "after": ["rows" if call else "weights", number - 1],
            }
            parts = [[rank, times["start"], times["start"] + 0.1, times["end"] - rank / 4] for rank in (0, 1)]
            lines(
                folder,
                "timeline",
                {**where, **times, "call": number, "piece": 0, **why, "ranks": [] if call else parts},
            )
        sizes = {
            "driver": {"resident": 10**9 + step, "children": 5},
            "rank 0": {"resident": 10**8, "device": 7 * 10**8},
        }
        lines(folder, "memory", {"program": "grpo", "step": step, "time": 2.0 * step + 1.9, "processes": sizes})
        moved = {"reads": {"actor.update": {"tokens": 100}}, "makes": {}, "weights": {"actor": 1000}}
        lines(folder, "traffic", {"program": "grpo", "step": step, "calls": {}, **moved, "lags": {"0": 1, "1": 1}})
        count = {"admitted": 4 * step + 4, "trained": 4 * step, "dropped": {"no signal": 2}, "live": 2}
        lines(folder, "ledger", {"program": "grpo", "step": step, "prompts": count, "rows": count})
        rows = [row(step, 2 * step + uid, place) for uid in (0, 1) for place in (0, 1)]
        for place, line in enumerate(rows if labels else ()):
            line |= {"finish_reason": "length" if place == 3 else "stop", "source": "code" if place > 1 else "math"}
        lines(folder, "trajectories", *rows)
    lines(folder, "events", {"time": 1.7e9, "kind": "alarm", "text": "entropy fell"})
    return folder


def graph_of(program: str, worker: str = "actor") -> dict[str, Any]:
    """What run.json has of a program of two calls."""
    nodes = tuple(
        Node(f"{of}.{op}", of, op, "grpo.py", line, f"batch = {of}.{op}(batch)")
        for line, (of, op) in enumerate(((worker, "generate"), ("reward", "score")), 6)
    )
    edges = (Edge(f"{worker}.generate", "reward.score", "data", ("response_ids",)),)
    graph = Graph(program, nodes, edges, (WorkerInfo(worker, "Actor"), WorkerInfo("reward", "FunctionReward")), ())
    return {"graph": graph.to_json(), "graphs": {program: graph.to_json()}}


def hostile_folder(folder: Path) -> Path:
    """A run whose every name and text wants to be something else."""
    foretold = {"source": HOSTILE, "notes": [HOSTILE], "calls": {HOSTILE: 1.0}, "pools": {HOSTILE: {"busy": 1.0}}}
    more = {"script": HOSTILE, "device": HOSTILE, "forecasts": {HOSTILE: foretold}}
    run_folder(folder, steps=1, **more, **graph_of(HOSTILE, HOSTILE))
    metrics = {"program": HOSTILE, "step": 0, HOSTILE: 1.0, "__proto__": 2.0}
    lines(folder, "metrics", *({**metrics, "step": step} for step in range(4)))
    texts = {"prompt": HOSTILE, "response": HOSTILE, HOSTILE: HOSTILE, "finish_reason": HOSTILE, "source": LABEL}
    lines(folder, "trajectories", {**row(0, 9, 0), "program": HOSTILE, **texts, LABEL: LABEL})
    large = {"response": "large " * 1_700_000, "source": "plain", LABEL: "plain"}
    lines(folder, "trajectories", {**row(0, 10, 0), "program": HOSTILE, **large})
    bar = {"program": HOSTILE, "step": 0, "node": HOSTILE, "pool": HOSTILE, "start": 0, "end": 9}
    why = {
        "call": 1,
        "after": [HOSTILE, 0],
        "issued": HOSTILE,
        "due": None,
        "ranks": [[0, 0, 1, 8], [HOSTILE], HOSTILE],
    }
    lines(folder, "timeline", {**bar, "call": 0}, {**bar, **why, "start": 9.5, "end": 12})
    held = {HOSTILE: {"resident": 10**9, "device": HOSTILE}, "rank 0": HOSTILE}
    lines(folder, "memory", {"program": HOSTILE, "step": 0, "time": 9.0, "processes": held}, {"processes": HOSTILE})
    lines(folder, "ledger", {"program": HOSTILE, "step": 0, "rows": {"admitted": 1, "dropped": {HOSTILE: 1}}})
    lines(folder, "events", {"time": 1.7e9, "kind": HOSTILE, "text": HOSTILE})
    return folder
