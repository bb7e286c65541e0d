"""A program goes on from its variables: each of these equals one that was left alone, without its steps gone through."""

import importlib
import json
import re
import shutil
import sys
import textwrap

import pytest
from flows import metrics

from flowrl.cli.arguments.script import load_script
from flowrl.errors import ResumeError
from flowrl.runtime.driver.issued_calls import IssuedCalls
from flowrl.runtime.driver.loop_heads import LoopHeads

DRIVER = """
import collections, random
import numpy as np
import flowrl as fl
from small_flow import Counter, Numbers, World

TOTALS = {{"all": 0.0, "last": []}}
LEVEL = 1.0
OTHERS = Numbers(batch=2)

class Level:
    def __init__(self):
        self.value, self.seen = 0.0, []
    def add(self, x):
        self.value = 0.5 * self.value + x
        self.seen.append(self.value)

flow = fl.Flow("train")
counter = flow.worker(Counter, start=1.0)
world = flow.worker(World)

@flow.program
def train(steps: int = 7):
{body}
"""
STEP = """
    batch = world.judge(counter.values(batch))
    mean = float(batch.r.mean())
"""
EVERY = "for step, batch in flow.steps(Numbers(), steps):" + STEP
LOG = "    flow.log(step, counter.update(batch), x=x)\n"

GOES_ON = {
    "numbers": "x = 0.1\n" + EVERY + "    x = x * 0.9 + mean\n" + LOG + "flow.log(step, last=x, m=mean)",
    "nothing": EVERY + "    x = mean\n" + LOG,
    "lists that are one": "a = b = []\n" + EVERY + "    a.append(mean)\n    x = sum(b) + len(a)\n" + LOG,
    "containers": "a = {'d': collections.deque(maxlen=3), 'c': collections.Counter()}\n" + EVERY
    + "    a['d'].append(mean)\n    a['c'][step % 2] += 1\n    x = sum(a['d']) + a['c'][0] * 10\n" + LOG,
    "a number that nobody has read": "x = 0.5\n" + EVERY + "    x = x * 0.5 + counter.update(batch).total\n"
    + "    flow.log(step, x=x)\n",
    "rows of the step before": "old = None\n" + EVERY + "    x = mean if old is None else old.r.mean()\n"
    + "    old = batch\n" + LOG,
    "rows in a list": "kept = []\n" + EVERY + "    kept = [*kept[-1:], batch]\n"
    + "    x = sum(float(b.y.mean()) for b in kept)\n" + LOG,
    "a function inside": "x = 0.0\ndef add(y):\n    nonlocal x\n    x = 0.5 * x + y\n" + EVERY + "    add(mean)\n" + LOG,
    "values at module level": "global LEVEL\n" + EVERY + "    LEVEL = LEVEL * 0.5 + mean\n"
    + "    TOTALS['all'] += LEVEL\n    TOTALS['last'].append(mean)\n    x = TOTALS['all'] + len(TOTALS['last'])\n" + LOG,
    "an object": "level = Level()\n" + EVERY + "    level.add(mean)\n    x = sum(level.seen)\n" + LOG,
    "random numbers": "random.seed(3)\nmine, other = random.Random(5), np.random.default_rng(7)\n" + EVERY
    + "    x = random.random() + mine.random() + float(other.random())\n" + LOG,
    "an array": "a = np.zeros(3)\n" + EVERY + "    a[step % 3] += mean\n    x = float(a @ [1, 2, 3])\n" + LOG,
    "what was read before": "batch = world.judge(counter.values(flow.take(OTHERS)))\nfirst = float(batch.r.mean())\n"
    + EVERY + "    x = mean + first\n" + LOG,
    "another source": EVERY + "    x = flow.take(OTHERS).x.mean()\n" + LOG,
    "two loops": "x = 0.0\nfor step, batch in flow.steps(Numbers(batch=3), 2):" + STEP + "    x += mean\n" + LOG
    + "x += float(counter.values(flow.take(OTHERS)).y.mean())\n" + EVERY + "    x += mean\n" + LOG,
    "a source that ends": "x, n = 0.0, 0\nfor step, batch in flow.steps(Numbers(rows=12)):\n    n += 1\n"
    + EVERY + "    x += mean + n\n" + LOG,
    "a loop while": "x, n = 0.0, 0\nwhile n < 3:\n    n += 1\n" + textwrap.indent(
        "for step, batch in flow.steps(Numbers(), steps - 4):" + STEP + "    x += mean + n\n" + LOG, "    "),
}  # fmt: skip
WHOLE = {  # all steps are gone through, and why
    "a loop in a loop": ("x = 0.0\nfor n in (1, 2):\n" + textwrap.indent(
        "for step, batch in flow.steps(Numbers(), steps - 3):" + STEP + "    x += mean + n\n" + LOG, "    "),
        "inside of another one"),
    "numbered steps": ("for n, (step, batch) in enumerate(flow.steps(Numbers(), steps)):" + STEP + "    x = n\n" + LOG,
        "go through another function"),
    "a function": ("def loop():\n" + textwrap.indent(EVERY + "    x = mean\n" + LOG, "    ") + "\nloop()",
        "not in the program's own body"),
    "an iterator": ("a = iter(range(100))\n" + EVERY + "    x = next(a)\n" + LOG, "a cannot be put back"),
    "an object of the loop": ("a = None\n" + EVERY + "    a = a or Level()\n    a.add(mean)\n    x = a.value\n" + LOG,
        "a is a Level"),
    "an object of a library": ("a = collections.ChainMap({})\n" + EVERY + "    a[step] = mean\n    x = len(a)\n" + LOG,
        "a is a ChainMap"),
    "a loop that is left": ("for step, batch in flow.steps(Numbers()):\n    if step == 1:\n        break\n" + EVERY
        + "    x = mean\n" + LOG, "leaves a loop before its end"),
    "a deleted name": ("a = 1\n" + EVERY + "    x = mean\n" + LOG + "    if step == 0:\n        del a\n",
        "a is deleted"),
    "rows before the loop": ("a = [counter.values(flow.take(OTHERS))]\n" + EVERY
        + "    x = a[0].y.mean()\n" + LOG, "a holds a batch"),
    "a source of the loop": (EVERY + "    x = flow.take(Numbers(batch=2)).x.mean()\n" + LOG, "a source is made"),
    "too much": ("a = ''\n" + EVERY + "    a = 'x' * 2000000\n    x = len(a)\n" + LOG, "more than a checkpoint"),
}  # fmt: skip


@pytest.fixture
def go(tmp_path, monkeypatch):
    """Run a driver, loaded as a process of its own would load it."""
    number = iter(range(100))

    def run(body, out, **how):
        name = f"heads_{next(number)}"
        path = tmp_path / name / "driver.py"
        path.parent.mkdir()
        path.write_text(DRIVER.format(body=textwrap.indent(body, "    ")))
        sys.modules.pop("driver", None)
        importlib.invalidate_caches()
        flow = load_script(str(path))
        how = {"checkpoint_every": 2, "runtime": "eager", **how}
        flow.run(out=tmp_path / out, quiet=True, save_models=False, **how)
        return tmp_path / out

    yield run
    sys.modules.pop("driver", None)
    sys.path[:] = [p for p in sys.path if not p.startswith(str(tmp_path))]


@pytest.fixture
def jumps(monkeypatch):
    """How often a program was given its variables."""
    found, real = [], IssuedCalls.jump
    monkeypatch.setattr(IssuedCalls, "jump", lambda self, **how: (found.append(how), real(self, **how))[1])
    return found


@pytest.fixture
def heads(monkeypatch):
    """The loops of each program that was run: they say why variables were not kept."""
    found, real = [], LoopHeads.__init__
    monkeypatch.setattr(LoopHeads, "__init__", lambda self, *of, **how: (found.append(self), real(self, *of, **how))[1])
    return found


def cut(out, calls=None):
    """Have a run be as if it had been killed after its first checkpoint but one."""
    newest = sorted((out / "checkpoints").glob("0*"))[-1]
    shutil.rmtree(newest)


def of(out):
    record = json.loads((out / "run.json").read_text())
    digests = (out / "digests.jsonl").read_text()
    return metrics(out), digests, record["weights_digest"], record["ledger"]


def manifest(out):
    return json.loads((sorted((out / "checkpoints").glob("0*"))[-1] / "manifest.json").read_text())


@pytest.mark.parametrize("what", GOES_ON)
def test_a_program_goes_on_from_its_variables(go, jumps, what):
    left_alone = go(GOES_ON[what], "alone")
    resumed = go(GOES_ON[what], "resumed")
    cut(resumed)
    assert not jumps and manifest(resumed)["program"]["variables"], "it has variables"
    go(GOES_ON[what], "resumed", resume=True)
    assert jumps and of(resumed) == of(left_alone)


@pytest.mark.parametrize("what", WHOLE)
def test_where_a_variable_cannot_be_kept_all_steps_are_gone_through(go, jumps, heads, what):
    body, why = WHOLE[what]
    left_alone = go(body, "alone")
    resumed = go(body, "resumed")
    assert re.search(why, heads[-1].why)
    cut(resumed)
    assert "variables" not in (manifest(resumed)["program"] or {})
    go(body, "resumed", resume=True)
    assert not jumps and of(resumed) == of(left_alone)


@pytest.mark.parametrize("what", ["numbers", "two loops", "rows in a list"])
def test_again_and_again_and_at_once_in_pools(go, jumps, what):
    left_alone = go(GOES_ON[what], "alone", steps=9)
    resumed = go(GOES_ON[what], "resumed", steps=3, runtime="local")
    for steps in (4, 6, 9):
        go(GOES_ON[what], "resumed", resume=True, steps=steps, runtime="local")
    assert len(jumps) >= 2 and of(resumed)[:3:2] == of(left_alone)[:3:2]


def test_another_program_or_parameter_is_gone_through_from_its_start(go, jumps):
    body = GOES_ON["numbers"]
    run = go(body, "run", steps=4)
    with pytest.raises(ResumeError, match="would become another run"):
        go(body.replace("0.9", "0.8"), "run", resume=True, steps=6)
    assert not jumps
    go(body.replace("0.9", "0.8"), "run", resume=True, steps=6, allow_changed=True)
    kept = [line.get("last", line.get("x")) for line in metrics(run)]
    x = 0.1
    for step, mean in enumerate(
        line["value"] for line in map(json.loads, (run / "journal.jsonl").open()) if "read" in line
    ):
        x = x * 0.8 + mean
        if step >= 4:
            assert kept[step] == x, "with what the changed program would have had"
    assert not jumps


def test_steps_that_something_else_depends_on_are_gone_through(go, jumps):
    body = "x = 1.0 / steps\n" + EVERY + "    x = x + mean\n" + LOG
    go(body, "run", steps=4)
    go(body, "run", resume=True, steps=6)
    assert not jumps


def test_variables_are_not_taken_where_the_loop_begins_with_other_values(go, jumps, tmp_path):
    """Such as a process that has made more at module level by itself."""
    body = "a = [[1.0]] * (1 + (fl.__name__ == 'flowrl'))\nx = 0.0\n" + EVERY + "    x += mean\n" + LOG
    left_alone = go(body, "alone")
    resumed = go(body, "resumed")
    cut(resumed)
    path = sorted((resumed / "checkpoints").glob("0*"))[-1] / "manifest.json"
    said = json.loads(path.read_text())
    head = said["program"]["variables"]["loops"][0]["head"]
    head["variables"] = re.sub(r'"begins": "\w+"', '"begins": "0"', head["variables"])
    del said["checksum"]
    path.write_text(json.dumps(said))
    go(body, "resumed", resume=True)
    assert not jumps and of(resumed) == of(left_alone)


def test_a_program_that_comes_to_its_loop_on_another_way_is_refused(go, tmp_path, monkeypatch):
    body = "import os\nif os.environ.get('MORE'):\n    counter.values(flow.take(OTHERS))\nx = 0.0\n"
    body += EVERY + "    x += mean\n" + LOG
    run = go(body, "run", steps=4)
    monkeypatch.setenv("MORE", "1")
    with pytest.raises(ResumeError, match="took another course"):
        go(body, "run", resume=True, steps=6)
    monkeypatch.delenv("MORE")
    go(body, "run", resume=True, steps=6)
    assert len(metrics(run)) == 6


def test_a_damaged_snapshot_has_the_checkpoint_before_taken(go, jumps):
    left_alone, run = go(GOES_ON["numbers"], "alone"), go(GOES_ON["numbers"], "run")
    path = sorted((run / "checkpoints").glob("0*"))[-1] / "manifest.json"
    path.write_text(re.sub(r'\\"x\\": \d', r'\\"x\\": 9', path.read_text(), count=1))
    go(GOES_ON["numbers"], "run", resume=True)
    assert jumps and of(run) == of(left_alone)


def test_the_folder_of_an_older_flowrl_goes_on(go, jumps, monkeypatch):
    """Its checkpoints have no variables, and another digest of the calls."""
    body = GOES_ON["numbers"]
    left_alone = go(body, "alone")
    real = IssuedCalls.snapshot

    def snapshot(self, *given):
        record, live = real(self, *given)
        return {**record, "course": self._digest.hexdigest()}, live

    monkeypatch.setattr(IssuedCalls, "snapshot", snapshot)
    monkeypatch.setattr(LoopHeads, "record", lambda self, *given: None)
    run = go(body, "run")
    monkeypatch.undo()
    cut(run)
    go(body, "run", resume=True)
    assert of(run) == of(left_alone)


def test_a_run_says_once_why_no_variables_are_kept_and_where(go):
    out = go(WHOLE["an iterator"][0], "run")
    said = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    texts = [line["text"] for line in said if line["kind"] == "not kept"]
    assert len(texts) == 1, "there are several checkpoints"
    line = 2 + next(n for n, text in enumerate(DRIVER.splitlines()) if "{body}" in text)
    assert f"driver.py:{line}: no checkpoint can hold the variables of 'train' here: a cannot be put" in texts[0]
    kept = go(GOES_ON["numbers"], "kept")
    assert "not kept" not in (kept / "events.jsonl").read_text()
