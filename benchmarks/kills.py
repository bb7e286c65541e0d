"""Processes of a run killed and stopped, again and again: nothing is lost or done twice, the weights are the same.

    python benchmarks/kills.py [--faults 300] [--kinds publish,driver] [--limit 20] [--backend fsdp2] [--seed 0]

The run of ``kills_driver.py`` is made undisturbed, then under faults, one after the other as soon as it makes progress
again. Each recovery is timed, from the signal to the next step that is recorded, and held against a limit. In the end
every line of metrics, every reward and every weight has to be what it was, every reward asked for exactly once, every
fault that was asked for has to have happened, and nothing may be left: no process, file of shared memory, growing
number of descriptors or threads. Exit status 1 where something is not so; the run folder is then kept.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import faults
from disturbed import FAULTS, KINDS, POINTS, SHARES, STARTS, Disturbed, Done, Stuck, choose, limit_of, strike
from faults import Fault
from kills_driver import EVERY, MESHES
from leftovers import Held, left_behind, shared_memory

ON_ITS_WAY = 1  # answers of a process that may not be in the journal yet: it gives one in twice the time that takes
Planned = list[tuple[str, list[Fault]]]


def planned(asked: argparse.Namespace, chance: random.Random) -> Planned:
    """All faults in their order: ``each`` point of the kinds once, or each of the kinds and then more by chance."""
    if asked.each:
        return [(kind, [Fault(*point)]) for kind in asked.kinds for point in POINTS.get(kind, ())]
    kinds = chance.sample(asked.kinds, len(asked.kinds))
    while sum(FAULTS.get(kind, 1) for kind in kinds) < asked.faults:
        kinds += chance.choices(asked.kinds, [SHARES[kind] for kind in asked.kinds])
    return [(kind, choose(kind, chance)) for kind in kinds]


def metrics(out: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if k.split("/")[-1] not in ("seconds", "tokens_per_second")} for line in lines
    ]


def answers(out: Path) -> list[tuple[int, str]]:
    """Each reward that was given, by the world's own account: the process, and the row in words."""
    lines = (faults.beside(out) / "answers.jsonl").read_text().splitlines()
    return [(pid, f"{prompt}{response}") for pid, prompt, response in map(json.loads, lines)]


def on_their_way(given: list[tuple[int, str]]) -> Counter[str]:
    """The last answer of each process: one that it was killed with before the journal had it is asked for again."""
    last: dict[int, list[str]] = {}
    for pid, row in given:
        last.setdefault(pid, []).append(row)
    return Counter(row for rows in last.values() for row in rows[-ON_ITS_WAY:])


def digest(out: Path) -> str | None:
    return json.loads((out / "run.json").read_text()).get("weights_digest")


def compared(calm: Path, out: Path) -> dict[str, str]:
    """What is not as it is without faults, each with what was seen."""
    wanted, found = answers(calm), answers(out)
    calls = Counter(row for _, row in wanted), Counter(row for _, row in found)
    more, fewer = calls[1] - calls[0], calls[0] - calls[1]
    twice = more - on_their_way(found)
    if again := (more - twice).total():
        print(f"{again} of {len(wanted)} rewards were on their way when their process was killed, and asked for again")
    return {
        "weights differ": "" if digest(calm) == digest(out) is not None else f"{digest(calm)} and {digest(out)}",
        "metrics differ": "" if metrics(calm) == metrics(out) else "see metrics.jsonl of both",
        "rewards asked for twice": f"{twice.total()} of {len(wanted)}" if twice else "",
        "rewards lost": f"{fewer.total()}" if fewer else "",
    }


def table(done: list[Done]) -> None:
    """Recoveries by kind."""
    print(f"{'kind':12} {'faults':>6} {'median s':>9} {'max s':>7} {'limit s':>8} {'late':>5}")
    for kind in [k for k in KINDS if any(d.kind == k for d in done)]:
        mine = [d for d in done if d.kind == kind]
        took = [d.took for d in mine]
        late = sum(d.took > d.limit for d in mine)
        count = sum(d.count for d in mine)
        print(f"{kind:12} {count:6} {statistics.median(took):9.1f} {max(took):7.1f} {mine[0].limit:8.0f} {late:5}")


def disturb(
    run: Disturbed, coming: Planned, asked: argparse.Namespace, ends: float
) -> tuple[list[Done], dict[str, str]]:
    """All faults, and what was wrong with them."""
    chance, done, held = random.Random(asked.seed), list[Done](), Held(run)
    stood = ""
    try:
        run.wait(lambda: run.lines() > EVERY, 2 * STARTS, "the first steps")
        for kind, at_points in coming:
            if time.monotonic() > ends:
                break
            done.append(strike(run, kind, at_points, chance, limit_of(kind, asked.limit, asked.deadline)))
            print(f"{done[-1].kind:12} {done[-1].took:5.1f} s  {done[-1].what}", flush=True)
            held.look()
        run.process.wait(max(1.0, ends - time.monotonic()))
    except (Stuck, subprocess.TimeoutExpired, ProcessLookupError) as error:  # the last one: a rank that is gone already
        stood = str(error)
    wanted, happened = sum(FAULTS.get(kind, 1) for kind, _ in coming), sum(d.count for d in done)
    late = [d for d in done if d.took > d.limit]
    return done, {
        "it stood still": stood,
        "fewer faults than asked": f"{happened} of {wanted}" if happened < wanted else "",
        "late": "; ".join(f"{d.what}: {d.took:.1f} s of {d.limit:.0f}" for d in late),
        "another rank was blamed": "; ".join(f"{d.what}: rank {d.blamed}" for d in done if d.blamed is not None),
        "grew": held.grown(),
    }


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS), help=", ".join(KINDS))
    parser.add_argument("--each", action="store_true", help="instead of --faults: every point of the kinds, once")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds of one recovery")
    parser.add_argument("--deadline", type=float, default=15.0, help="of the run, which finds a stopped rank")
    parser.add_argument("--backend", choices=MESHES, default="fsdp2", help="of the two ranks that train")
    parser.add_argument("--gloo", action="store_true", help="have weights go as from host to host")
    parser.add_argument("--seconds", type=float, default=7200.0, help="for all of it")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(words)
    if unknown := [k for k in asked.kinds if k not in KINDS]:
        parser.error(f"--kinds {unknown[0]}: there are {', '.join(KINDS)}")
    ends = time.monotonic() + asked.seconds
    folder, mark = Path(tempfile.mkdtemp(prefix="kills-")), uuid.uuid4().hex
    there, done, findings = shared_memory(), list[Done](), dict[str, str]()
    coming = planned(asked, random.Random(asked.seed))
    steps = 5 * len(coming) // 2 + 2 * EVERY
    more = ["--backend", asked.backend, *(["--gloo"] if asked.gloo else [])]
    for name in ("killed", "calm"):
        run = Disturbed(folder / name, steps=steps, deadline=asked.deadline, mark=mark, more=more)
        try:
            if name == "killed":
                done, findings = disturb(run, coming, asked, ends)
            else:
                run.process.wait(max(1.0, ends - time.monotonic()))
                findings |= compared(folder / "calm", folder / "killed")
        except subprocess.TimeoutExpired:
            findings["it took too long"] = f"more than {asked.seconds:.0f} s"
        finally:
            run.end()
        if findings.get("it stood still"):
            break
    findings["left behind"] = left_behind(mark, there)
    table(done)
    for what, seen in findings.items():
        print(f"{'YES' if seen else 'NO'}: {what}{f' ({seen})' if seen else ''}")
    if any(findings.values()):
        print(f"kept: {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the run ends with this process
    sys.exit(main())
