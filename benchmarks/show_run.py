"""How fast ``flowrl show`` opens a large run: makes its files, then asks the server as the page does.

    python benchmarks/show_run.py make /tmp/large --steps 10000 --rows 256     # the files of a run
    python benchmarks/show_run.py measure /tmp/large                           # first view, index, search, memory

The rows have 20 tokens of prompt and 40 of response with log-probabilities, versions and advantages, as a run with
``--trajectories 1000 --trajectories-every 1`` records them. Words are drawn from 5,000 with Zipf's law.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np

GROUP = 8  # rows of a prompt
NODES = (("actor.generate", 0.45), ("reward.score", 0.1), ("ref.logprobs", 0.15), ("actor.update", 0.3))
SOURCES = ("math", "code", "logic")
METRICS = (
    *("loss", "grad_norm", "lr", "tokens", "rows", "steps", "truncated", "entropy", "rollout_kl", "ratio", "ratio_max"),
    *("approx_kl", "clip_fraction", "ess", "clip_low", "clip_high", "silent_groups", "repetition", "kl", "gap_mean"),
    *("gap_max", "gap_k3", "response_length", "tokens_per_second", "reward/math", "reward/code", "reward/logic"),
)


def make(folder: Path, steps: int, rows: int) -> None:
    """Write the files of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    letters = list("abcdefghijklmnopqrstuvwxyz")
    words = np.array(["".join(draw.choice(letters, draw.integers(2, 9))) for _ in range(5000)])
    chance = 1 / np.arange(1, 5001)
    chance /= chance.sum()
    write_record(folder, steps)
    names = ("metrics", "timeline", "traffic", "memory", "ledger", "trajectories", "events")
    files = {name: (folder / f"{name}.jsonl").open("w") for name in names}
    for step in range(steps):
        numbers = dict(zip(METRICS, draw.random(len(METRICS)).round(6).tolist(), strict=True))
        reward = 1 - 0.8 * np.exp(-step / (steps / 3))
        line = {"program": "grpo", "step": step, "reward": round(reward, 6), **numbers, "seconds": 1.0}
        write(files["metrics"], line)
        start = float(step)
        for call, (node, part) in enumerate(NODES):
            where = {"program": "grpo", "step": step, "node": node, "pool": "cpu" if "reward" in node else "main"}
            where |= {"start": start, "end": start + part, "rows": rows, "tokens": rows * 60}
            number = 4 * step + call
            why = {
                "issued": float(step),
                "due": start,
                "after": ["rows" if call else "weights", number - 1 if number else None],
            }
            ranks = (
                []
                if "reward" in node
                else [[r, start, start + part / 20, start + part * (1 - r / 20)] for r in range(4)]
            )
            write(files["timeline"], {**where, "call": number, "piece": 0, **why, "ranks": ranks})
            start += part
        held = {"resident": 10**9 + 1000 * step, "peak": 2 * 10**9, "device": 4 * 10**10, "device_peak": 6 * 10**10}
        processes = {name: held for name in ("driver", *(f"rank {r}" for r in range(4)))}
        write(files["memory"], {"program": "grpo", "step": step, "time": float(step + 1), "processes": processes})
        reads = {node: {"tokens": rows * 240, "rollout_logprobs": rows * 160} for node, _ in NODES}
        traffic = {
            "calls": {node: 1 for node, _ in NODES},
            "reads": reads,
            "makes": reads,
            "weights": {"actor": 1 << 20},
        }
        spread = {"prompts": [20] * 21, "responses": [40] * 21, "lags": {"0": rows // GROUP}}
        write(files["traffic"], {"program": "grpo", "step": step, **traffic, **spread})
        done = {"admitted": (step + 1) * rows, "trained": (step + 1) * rows, "dropped": {}, "live": 0}
        write(files["ledger"], {"program": "grpo", "step": step, "rows": done, "prompts": done})
        write_rows(files["trajectories"], draw, words, chance, step=step, rows=rows, reward=float(reward))
    for file in files.values():
        file.close()


def write(file, line) -> None:
    file.write(json.dumps(line) + "\n")


def write_rows(file, draw, words, chance, *, step: int, rows: int, reward: float) -> None:
    prompts = [" ".join(some) for some in words[draw.choice(5000, (rows // GROUP, 20), p=chance)]]
    answers = [" ".join(some) for some in words[draw.choice(5000, (rows, 40), p=chance)]]
    rewards = (draw.random(rows) < reward).astype(float).tolist()
    logprobs = (-draw.exponential(0.5, (rows, 40))).round(6).tolist()
    tokens = draw.integers(0, 50000, (rows, 60)).tolist()
    for row in range(rows):
        uid = step * (rows // GROUP) + row // GROUP
        line = {
            "program": "grpo", "step": step, "key": [uid, row % GROUP], "prompt": prompts[row // GROUP],
            "answer": str(uid % 97), "prompt_ids": tokens[row][:20], "response_ids": tokens[row][20:],
            "tokens": tokens[row], "response_mask": [True] * 40, "rollout_logprobs": logprobs[row],
            "versions": [step] * 40, "finished": row % 16 > 0, "finish_reason": "stop" if row % 16 else "length",
            "source": SOURCES[uid % len(SOURCES)] if uid % 1000 else "rare", "rewards": rewards[row],
            "advantages": [rewards[row] - 0.5] * 40, "response": answers[row],
        }  # fmt: skip
        if row == rows // 2 and step == 4321:
            line["response"] += " needleinthehaystack"
        write(file, line)


def write_record(folder: Path, steps: int) -> None:
    """A record with the graph of the shipped GRPO driver, where the checkout has it."""
    from flowrl.cli.arguments.script import load_script
    from flowrl.runtime.storage import run_record

    graph = load_script(str(Path(__file__).parents[1] / "algorithms" / "grpo.py")).graph().to_json()
    record = {"script": "grpo.py", "arguments": [f"--steps={steps}"], "programs": ["grpo"], "seed": 0, "status": "done"}
    plan = {"pools": {"main": {"device": "cpu"}, "cpu": {"device": "cpu"}}, "place": {}}
    foretold = {
        "step_seconds": 0.9,
        "source": "roofline",
        "notes": [],
        "calls": dict(NODES),
        "pools": {"main": {"busy": 0.9}},
    }
    record |= {
        "forecasts": {"grpo": foretold},
        "plan": plan,
        "graph": graph,
        "graphs": {"grpo": graph},
        "started": time.time(),
        "id": "generated",
    }
    run_record.write_record(folder, record)


def measure(folder: Path, cache: Path) -> None:
    """Start the server, and time what the page asks for, by the clock and in seconds of its CPU."""
    print(f"{(folder / 'trajectories.jsonl').stat().st_size / 1e9:.2f} GB of trajectories, index in {cache}")
    began = time.perf_counter()
    command = [sys.executable, "-m", "flowrl", "show", str(folder), "--no-browser"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        asked = Asked(next(line.split()[-1] for line in process.stdout if "http://" in line), process.pid)
        run = asked("runs")["runs"][0]["id"]
        charts = {"run": run, "program": "grpo", "name": ["reward", *METRICS[:11]]}
        with (folder / "metrics.jsonl").open("rb") as file:
            steps = sum(1 for _ in file)
        while sum(loop["count"] for loop in asked("curves", **charts)["curves"]["reward"]) < steps:
            time.sleep(0.05)
        print(
            f"  first view: {time.perf_counter() - began:.2f} s, CPU {asked.cpu():.2f} s, from the start of the process"
        )
        slowest, first = 0.0, 0.0  # seconds of a page of rows, and until the newest rows are there
        while asked("runs")["runs"][0]["indexed"] < 1:
            found, took, _ = asked.timed("rows", run=run, program="grpo")
            slowest, first = max(slowest, took), first or (found["rows"] and time.perf_counter() - began)
            time.sleep(1.0)
        print(f"  all rows indexed after {time.perf_counter() - began:.0f} s, CPU {asked.cpu():.0f} s")
        print(f"  the newest rows are listed after {first:.1f} s; a page of rows meanwhile: at most {slowest:.2f} s")
        for what in SEARCHES:
            times = [asked.timed("rows", run=run, program="grpo", **what) for _ in range(3)]
            took, cpu = max(took for _, took, _ in times), max(cpu for *_, cpu in times)
            print(f"  {what}: {len(times[0][0]['rows'])} rows, {took:.3f} s, CPU {cpu:.2f} s (slowest of 3)")
        for what, more in (
            ("prompts", {}),
            ("prompts", {"is.source": "rare"}),
            ("prompts", {"is.finish_reason": "length", "text": "th"}),
            ("lanes", {}),
            ("lanes", {"step": steps // 2}),
            ("ledger", {}),
            ("events", {}),
            ("forecast", {}),
        ):
            _, took, cpu = asked.timed(what, run=run, program="grpo", **more)
            print(f"  {what} {more or ''}: {took:.3f} s, CPU {cpu:.2f} s")
        while asked("graph", run=run, program="grpo")["picture"] is None:
            time.sleep(0.1)
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
        index = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
        print(f"  memory: {int(peak) / 1e3:.0f} MB at most, the graph of it all included; index {index / 1e9:.2f} GB")
    finally:
        process.terminate()
        process.wait()


SEARCHES = (
    {},
    {"order": "best"},
    {"order": "longest"},
    {"text": "needleinthehaystack"},
    {"text": "needleinthehaystack", "order": "worst"},
    {"text": "th"},
    {"text": "th", "order": "best"},
    {"order": "worst", "first": "9000", "last": "9050"},
    {"order": "best", "least": "0.5", "most": "0.6"},
    {"is.finish_reason": "length"},
    {"is.source": "rare", "order": "worst"},
    {"is.source": "code", "is.finish_reason": "length", "order": "longest", "text": "th"},
    {"min_tokens": "41"},
    {"min_tokens": "40", "max_tokens": "40", "order": "best"},
)


class Asked:
    """Asks the server as the page does."""

    def __init__(self, address: str, process: int) -> None:
        parts = urllib.parse.urlsplit(address)
        self.base = f"{parts.scheme}://{parts.netloc}/api/"
        self.token = urllib.parse.parse_qs(parts.query)["token"][0]
        self.process = process

    def __call__(self, what: str, **words) -> dict:
        query = urllib.parse.urlencode(words, doseq=True)
        request = urllib.request.Request(f"{self.base}{what}?{query}", headers={"X-Flowrl-Token": self.token})
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def timed(self, what: str, **words) -> tuple[dict, float, float]:
        """An answer, the seconds that it took, and those of the server's CPU."""
        began, before = time.perf_counter(), self.cpu()
        answer = self(what, **words)
        return answer, time.perf_counter() - began, self.cpu() - before

    def cpu(self) -> float:
        """Seconds of CPU that the server has used."""
        words = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("make", "measure"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--cache", type=Path, help="where the index is kept, for a second time; default: nowhere")
    options = parser.parse_args()
    if options.what == "make":
        make(options.folder, options.steps, options.rows)
    else:
        with tempfile.TemporaryDirectory() as empty:
            measure(options.folder, options.cache or Path(empty))


if __name__ == "__main__":
    main()
