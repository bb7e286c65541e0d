"""What a run of many steps takes to go on from its last checkpoint, and what its steps would take to go through.

    python benchmarks/resume.py [--steps 1000,10000] [--format table|json] [--out DIR]

A program with two ops, one of them journalled, one value that it reads and one variable is run so many steps, and is
then given one more, in a process of its own: once from its variables, and once with a checkpoint that has none, where
it goes through all steps that are done. Times are of the processor, from the loaded driver to the run's end; ``ratio``
is of the two. Both end with the same variable.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rows import Numbers

import flowrl as fl
from flowrl.runtime.storage.run_record import with_checksum, without_checksum

ROWS = 2


class Counted(Numbers):
    def cursor(self):
        return Counted(self.rows)

    def load_state(self, state):
        pass


class Nothing(fl.Worker):
    @fl.op(reads="x", adds="y: f32[]")
    def work(self, batch):
        return {"y": batch["x"]}


class Scorer(fl.Worker):
    @fl.op(reads="y", adds="rewards: f32[]", external=True)
    def score(self, batch):
        return {"rewards": batch["y"]}


flow = fl.Flow("long")
nothing = flow.worker(Nothing)
scorer = flow.worker(Scorer)


@flow.program
def long(steps: int = 1000):
    beta = 0.1
    for step, batch in flow.steps(Counted(ROWS), steps):
        batch = scorer.score(nothing.work(batch))
        mean = float(batch.rewards.mean())
        beta = beta * (1.1 if mean > 0.5 else 0.95) + 1e-3
        flow.log(step, reward=mean, beta=beta)


def go(out: Path, steps: int, resume: bool = False) -> float:
    """Run it; returns the seconds of the processor that it took."""
    start = time.process_time()
    how = {"checkpoint_every": 10**9, "resume": resume, "parameters": {"long": {"steps": steps}}}
    flow.run(out=out, runtime="eager", quiet=True, **how)
    return time.process_time() - start


def apart(out: Path, steps: int, resume: bool = False) -> float:
    """Do so in a process of its own, of which this is a module, as scripts of a command are."""
    program = f"import pathlib, resume; print(resume.go(pathlib.Path({str(out.absolute())!r}), {steps}, {resume}))"
    asked = [sys.executable, "-c", program]
    here = Path(__file__).parent
    return float(subprocess.run(asked, check=True, capture_output=True, text=True, cwd=here).stdout.splitlines()[-1])


def without_variables(out: Path) -> None:
    """Have the checkpoints of a run be as if the variables of its program could not be kept."""
    for path in out.glob("checkpoints/*/manifest.json"):
        manifest = without_checksum(path.read_bytes())
        manifest["program"].pop("variables")
        path.write_text(json.dumps(with_checksum(manifest)))


def measure(steps: int, folder: Path) -> dict[str, float]:
    run = folder / f"run{steps}"
    if not run.exists():
        apart(run, steps)
    found: dict[str, float] = {"steps": steps}
    ends = set()
    for name in ("variables", "steps_again"):
        copy = folder / "copy"
        shutil.copytree(run, copy)
        if name == "steps_again":
            without_variables(copy)
        found[name + "_s"] = round(apart(copy, steps + 1, resume=True), 2)
        *_, last = (copy / "metrics.jsonl").open()
        ends.add(json.loads(last)["beta"])
        shutil.rmtree(copy)
    assert len(ends) == 1, "both end with the same variable"
    return {**found, "ratio": round(found["steps_again_s"] / found["variables_s"], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", default="1000,10000")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--out", type=Path, help="where the runs stay, and are taken from another time")
    said = parser.parse_args()
    folder = said.out or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    rows = [measure(int(steps), folder) for steps in said.steps.split(",")]
    if said.out is None:
        shutil.rmtree(folder)
    if said.format == "json":
        print(json.dumps(rows))
        return
    print(f"{'steps':>8}{'from its variables':>20}{'through its steps':>20}{'ratio':>8}")
    for row in rows:
        print(f"{row['steps']:>8}{row['variables_s']:>18} s{row['steps_again_s']:>18} s{row['ratio']:>8}")


if __name__ == "__main__":
    main()
