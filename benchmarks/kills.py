"""Processes of a run killed and stopped, again and again: nothing is lost or done twice, the weights are the same.

    python benchmarks/kills.py [--faults 300] [--kinds publish,driver] [--limit 20] [--backend fsdp2] [--seed 0]
    python benchmarks/kills.py --total 1000 --faults 8 --staleness 0,1,4 --publish drain,interrupt --order fifo,window \
                               --program plain,refill,evaluate --record kills.jsonl
    python benchmarks/kills.py --total 100 --faults 8 --staleness 0,1,4 --publish drain,interrupt --engine vllm \
                               --limit 120 --deadline 120 --record kills_vllm.jsonl

The run of ``kills_driver.py`` is made undisturbed, then under faults, one after the other as soon as it makes progress
again. Each recovery is timed, from the signal to the next step that is recorded, and held against a limit. In the end
every line of metrics, every reward and every weight has to be what it was, every reward asked for exactly once, every
fault that was asked for has to have happened, and nothing may be left: no process, file of shared memory, growing
number of descriptors or threads. What ``account.py`` checks holds of every run: the ledger of rows closes at each
commit, no row is lost, trained on twice, older than its plan allows or rewarded by nobody, and nothing is asked twice
but rows that had to be sampled again.

Where steps overlap by more than one (``--staleness`` above 1), where a publish interrupts, and with ``--order window``,
the weights that a row sees depend on when things happen: there weights, metrics and rewards are not compared, nor with
``--engine vllm``, whose sums depend on the rows beside a row; such a run is not made undisturbed. ``--program refill``
drops groups that are alike and draws others, ``evaluate`` samples held-out prompts in each step. Exit status 1 where
something is not so; the run folder is then kept.

With ``--total`` there are many short runs, each of some ``--faults``, one setting of ``--staleness``, ``--publish``,
``--order`` and ``--program`` after the other, as far as a plan may have it. Each is a line of ``--record``, and what
such a file has already is counted: it goes on where it was left. With ``--restart 0`` no lost replica is waited for:
the run goes on with the others of its pool, a further kind, ``gone``, keeps it away for some steps, and numbers are
compared up to rounding. With ``--runtime local`` all is in one process, the driver, which is killed and stopped.
"""

from __future__ import annotations

import argparse
import json
import math
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
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from account import ON_ITS_WAY, Setting, account, answers, ledger
from disturbed import (
    FAULTS,
    GONE,
    KINDS,
    OF_DRIVER,
    POINTS,
    SHARES,
    STARTS,
    Disturbed,
    Done,
    Stuck,
    choose,
    limit_of,
    strike,
)
from faults import Fault
from kills_driver import EVERY, MESHES, TOKENS
from leftovers import Held, left_behind, shared_memory

from flowrl.analysis.run_difference import CLOCKED

#: Which order a program may have besides fifo: groups of several generates of a step are not exchanged.
ORDER = {"plain": "window", "refill": "fifo", "evaluate": "fifo"}
Planned = list[tuple[str, list[Fault]]]


def planned(asked: argparse.Namespace, chance: random.Random) -> Planned:
    """All faults in their order: ``each`` point of the kinds once, or each of the kinds and then more by chance.

    Of many short runs each has kinds by chance alone.
    """
    if asked.each:
        return [(kind, [Fault(*point)]) for kind in asked.kinds for point in POINTS.get(kind, ())]
    kinds = [] if asked.total else chance.sample(asked.kinds, len(asked.kinds))
    while sum(FAULTS.get(kind, 1) for kind in kinds) < asked.faults:
        kinds += chance.choices(asked.kinds, [SHARES[kind] for kind in asked.kinds])
    return [(kind, choose(kind, chance)) for kind in kinds]


def metrics(out: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k.split("/")[-1] not in CLOCKED} for line in lines]


def alike(calm: list[dict[str, float]], found: list[dict[str, float]], *, elastic: bool) -> bool:
    """Whether two runs have the same metrics; ``elastic``: up to how sums are rounded."""
    if not elastic:
        return calm == found
    return [line.keys() for line in calm] == [line.keys() for line in found] and all(
        a == b or (isinstance(a, float) and math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-4))
        for one, other in zip(calm, found, strict=True)
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def on_their_way(given: list[tuple[int, str]]) -> Counter[str]:
    """The last answer of each process: one that it was killed with before the journal had it is asked for again."""
    last: dict[int, list[str]] = {}
    for pid, row in given:
        last.setdefault(pid, []).append(row)
    return Counter(row for rows in last.values() for row in rows[-ON_ITS_WAY:])


def digest(out: Path) -> str | None:
    return json.loads((out / "run.json").read_text()).get("weights_digest")


def compared(calm: Path, out: Path, *, elastic: bool = False) -> dict[str, str]:
    """What is not as it is without faults, each with what was seen.

    ``elastic``: other replicas may have computed it, which rounds sums otherwise.
    """
    wanted, found = answers(calm), answers(out)
    counts, end = ledger(calm)[1], ledger(out)[1]
    calls = Counter(row for _, row in wanted), Counter(row for _, row in found)
    more, fewer = calls[1] - calls[0], calls[0] - calls[1]
    twice = more - on_their_way(found)
    if again := (more - twice).total():
        print(f"{again} of {len(wanted)} rewards were on their way when their process was killed, and asked for again")
    same = digest(calm) == digest(out) is not None or elastic
    return {
        "counts of rows differ": "" if end == counts else f"{end} and {counts}",
        "weights differ": "" if same else f"{digest(calm)} and {digest(out)}",
        "metrics differ": "" if alike(metrics(calm), metrics(out), elastic=elastic) else "see metrics.jsonl of both",
        "rewards asked for twice": f"{twice.total()} of {len(wanted)}" if twice else "",
        "rewards lost": f"{fewer.total()}" if fewer else "",
    }


def table(done: list[Done]) -> None:
    """Recoveries by kind."""
    print(f"{'kind':12} {'faults':>6} {'median s':>9} {'max s':>7} {'limit s':>8} {'late':>5}")
    for kind in [k for k in (*KINDS, GONE) if any(d.kind == k for d in done)]:
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
        run.wait(lambda: run.lines() > EVERY, 5 * max(STARTS, asked.limit), "the first steps")
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


def one_run(
    asked: argparse.Namespace, setting: Setting, *, seed: int, ends: float
) -> tuple[list[Done], dict[str, str]]:
    """A disturbed run under one setting, and an undisturbed one where the rows are to be the same.

    Returns the faults, and what was wrong by its name.
    """
    folder, mark = Path(tempfile.mkdtemp(prefix="kills-")), uuid.uuid4().hex
    there, done, findings = shared_memory(), list[Done](), dict[str, str]()
    local = asked.runtime == "local"
    kinds = [k for k in asked.kinds if k in OF_DRIVER] or list(OF_DRIVER) if local else asked.kinds
    elastic = not local and not asked.restart
    asked = argparse.Namespace(**{**vars(asked), "kinds": kinds, "seed": seed})
    coming = planned(asked, random.Random(seed))
    each = 10 if elastic else 2 + setting.staleness  # others come, or are ahead, while steps are made
    steps = each * len(coming) + len(coming) // 2 + 2 * EVERY
    more = ["--backend", asked.backend, *(["--gloo"] if asked.gloo else []), "--runtime", asked.runtime]
    more += ["--staleness", str(setting.staleness), "--publish", setting.publish, "--copies", str(asked.copies)]
    more += ["--engine", asked.engine, "--restart", str(asked.restart)]
    more += ["--order", setting.order, "--program", setting.program, "--tokens", str(asked.tokens)]
    settled = setting.is_settled and asked.engine == "hf"
    for name in ("killed", "calm") if settled else ("killed",):
        run = Disturbed(folder / name, steps=steps, deadline=asked.deadline, mark=mark, more=more)
        try:
            if name == "killed":
                done, findings = disturb(run, coming, asked, ends)
                if not findings["it stood still"]:
                    findings |= account(folder / "killed", setting, steps)
            else:
                run.process.wait(max(1.0, ends - time.monotonic()))
                findings |= compared(folder / "calm", folder / "killed", elastic=elastic)
        except subprocess.TimeoutExpired:
            findings["it took too long"] = f"more than {asked.seconds:.0f} s"
        finally:
            run.end()
        if findings.get("it stood still"):
            break
    findings["left behind"] = left_behind(mark, there)
    if any(findings.values()):
        findings["kept"] = str(folder)
    else:
        shutil.rmtree(folder)
    return done, findings


def settings_of(asked: argparse.Namespace) -> list[Setting]:
    """All settings that were asked for and that a plan may have, those of one program together."""
    every = [Setting(*each) for each in product(asked.staleness, asked.publish, asked.order, asked.program)]
    every.sort(key=lambda setting: asked.program.index(setting.program))
    return [
        s for s in every if (s.staleness or s == Setting(program=s.program)) and s.order in ("fifo", ORDER[s.program])
    ]


def many_runs(asked: argparse.Namespace, ends: float) -> int:
    """Short runs, one setting after the other, until so many faults are on record. Returns how many were wrong."""
    settings = settings_of(asked)
    record: Path = asked.record
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    while sum(line["faults"] for line in lines) < asked.total and time.monotonic() < ends:
        setting = settings[len(lines) % len(settings)]
        seed, began = asked.seed + len(lines), time.monotonic()
        done, findings = one_run(asked, setting, seed=seed, ends=began + asked.seconds)
        lines.append(
            {
                **asdict(setting),
                "engine": asked.engine,
                "restart": asked.restart,
                "tokens": asked.tokens,
                "seed": seed,
                "faults": sum(d.count for d in done),
                "kinds": [d.kind for d in done],
                "took": [round(d.took, 1) for d in done],
                "seconds": round(time.monotonic() - began),
                "wrong": {what: seen for what, seen in findings.items() if seen},
            }
        )
        with record.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        if not done:  # what cannot begin would be tried for ever
            break
    summary(settings, lines)
    return sum(bool(line["wrong"]) for line in lines)


def summary(settings: list[Setting], lines: list[dict[str, Any]]) -> None:
    """Runs by their setting: faults, late ones, and runs in which something was wrong, as a table of the docs."""
    print("| setting | runs | faults | late | lost | twice | else wrong |\n|---|---|---|---|---|---|---|")
    for setting in settings:
        mine = [line for line in lines if asdict(setting).items() <= line.items()]
        wrong = [set(line["wrong"]) - {"kept"} for line in mine]
        late = sum(line["wrong"]["late"].count("; ") + 1 for line in mine if "late" in line["wrong"])
        words = ("lost", "twice")
        lost, twice = (sum(any(word in what for what in found) for found in wrong) for word in words)
        other = sum(any(what != "late" and not any(w in what for w in words) for what in found) for found in wrong)
        count = sum(line["faults"] for line in mine)
        print(f"| {setting.name} | {len(mine)} | {count} | {late} | {lost} | {twice} | {other} |")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--kinds", type=lambda text: text.split(","), help=", ".join((*KINDS, GONE)))
    parser.add_argument("--each", action="store_true", help="instead of --faults: every point of the kinds, once")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds of one recovery")
    parser.add_argument("--deadline", type=float, default=15.0, help="of the run, which finds a stopped rank")
    parser.add_argument("--backend", choices=MESHES, default="fsdp2", help="of the two ranks that train")
    parser.add_argument("--gloo", action="store_true", help="have weights go as from host to host")
    parser.add_argument("--runtime", choices=("ray", "local"), default="ray")
    parser.add_argument("--staleness", type=lambda text: [int(s) for s in text.split(",")], default=[0])
    parser.add_argument("--publish", type=lambda text: text.split(","), default=["drain"])
    parser.add_argument("--order", type=lambda text: text.split(","), default=["fifo"], help="fifo, window")
    parser.add_argument("--program", type=lambda text: text.split(","), default=["plain"], help=", ".join(ORDER))
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf", help="what samples")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a response, at most")
    parser.add_argument("--copies", type=int, choices=(1, 2), default=1, help="of sampled rows, as the plan says")
    parser.add_argument(
        "--restart", type=float, default=120.0, help="seconds that a lost replica is waited for; 0: it is gone for good"
    )
    parser.add_argument("--total", type=int, default=0, help="faults of many short runs, each of --faults")
    parser.add_argument("--record", type=Path, default=Path("kills.jsonl"), help="what the runs of --total came to")
    parser.add_argument("--hours", type=float, default=12.0, help="for --total: begin no other run after that time")
    parser.add_argument("--seconds", type=float, default=7200.0, help="for one run and its undisturbed one")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(words)
    known = KINDS if asked.restart else (*KINDS, GONE)
    asked.kinds = asked.kinds or list(known)
    if unknown := [k for k in asked.kinds if k not in known]:
        parser.error(
            f"--kinds {unknown[0]}: there are {', '.join(known)}{', and gone with --restart 0' * (GONE not in known)}"
        )
    if unknown := [p for p in asked.program if p not in ORDER]:
        parser.error(f"--program {unknown[0]}: there are {', '.join(ORDER)}")
    if not settings_of(asked):
        parser.error("--publish interrupt and --order window need --staleness 1 or more, and window --program plain")
    if asked.total:
        return int(bool(many_runs(asked, time.monotonic() + 3600 * asked.hours)))
    ends = time.monotonic() + asked.seconds
    done, findings = one_run(asked, settings_of(asked)[0], seed=asked.seed, ends=ends)
    table(done)
    kept = findings.pop("kept", "")
    for what, seen in findings.items():
        print(f"{'YES' if seen else 'NO'}: {what}{f' ({seen})' if seen else ''}")
    if kept:
        print(f"kept: {kept}")
    return int(any(findings.values()))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the run ends with this process
    sys.exit(main())
