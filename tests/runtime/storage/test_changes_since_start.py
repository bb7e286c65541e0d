"""A resumed run is told from another run: what was changed since its start is refused, or said."""

from __future__ import annotations

import importlib
import json
import random
import sys
import textwrap

import pytest
from flows import events

import flowrl as fl
from flowrl.cli.arguments.script import load_script
from flowrl.errors import ResumeError
from flowrl.graph.script.length_parameters import lengths
from flowrl.graph.script.reachable_code import reached
from flowrl.placement.plan.plan import Place, Plan
from flowrl.runtime.storage.run_record import with_checksum

DRIVER = '''
"""A driver."""
import flowrl as fl
import helper
from helper import FACTOR, twice as doubled
from small_flow import Counter, Numbers

BONUS = 0.5
WEIGHTS = [1.0, 2.0]
TABLE = helper.table()


class Judge(fl.Worker):
    """Touches the world."""

    def __init__(self, scale=1.0, api_key="abc"):
        self.scale = scale

    @fl.op(reads="y", adds="r: f32[]", cost="external")
    def judge(self, batch):
        """Adds r."""
        return {"r": [score(y) * self.scale for y in batch.y.to_list()]}


def score(y):
    # how good it is
    return doubled(y) + BONUS * FACTOR + WEIGHTS[0] + TABLE["a"]


def unused(x):
    return x + 1


flow = fl.Flow("train")
counter = flow.worker(Counter, start=1.0)
judge = flow.worker(Judge, scale=1.0)


@flow.program
def train(steps: int = 2, kl: float = 0.1, n: int = 4):
    """Trains."""
    for step, batch in flow.steps(Numbers(batch=n), steps):
        batch = judge.judge(counter.values(batch))
        flow.log(step, counter.update(batch, scale=1.0 - kl), r=batch.r.mean())


@flow.program
def after(rounds: int = 1):
    for step, batch in flow.steps(Numbers(), rounds):
        flow.log(step, n=counter.values(batch).count())
'''
HELPER = """
FACTOR = 2.0
ROWS = {"a": 1.0}


def table():
    return dict(ROWS)


def twice(x):
    return 2 * x
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Write a driver with a module beside it, and run it as a process of its own would load it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    number = iter(range(100))

    def go(*programs, driver=DRIVER, helper=HELPER, preset=None, **how):
        name = f"d{next(number)}"  # Python keeps the bytes of a file whose time and size are those of another
        folder = tmp_path / name
        folder.mkdir()
        (folder / "driver.py").write_text(driver)
        (folder / "helper.py").write_text(helper)
        sys.path.insert(0, str(folder))
        for module in ("driver", "helper"):
            sys.modules.pop(module, None)
        importlib.invalidate_caches()
        try:
            flow = load_script(str(folder / "driver.py"))
            values = flow.find_program(None).preset(preset) if preset else {}
            return flow.run(*programs, out=tmp_path / "run", quiet=True, save_models=False, **values, **how)
        finally:
            sys.path.remove(str(folder))
            sys.path[:] = [p for p in sys.path if p != str(folder)]

    yield go
    for module in ("driver", "helper"):
        sys.modules.pop(module, None)


def changed(tmp_path):
    return [event["text"] for event in events(tmp_path / "run", "changed")]


def swapped(text, old, new):
    assert old in text
    return text.replace(old, new)


ANOTHER = {
    "a parameter": ({"kl": 0.2}, "", "", "train: kl 0.1 -> 0.2"),
    "rows a step": ({"n": 5}, "", "", "train: n 4 -> 5"),
    "the seed": ({"seed": 3}, "", "", "seed 0 -> 3"),
    "an argument of a worker": ({}, "scale=1.0)\n\n\n@", "scale=3.0)\n\n\n@", "judge: scale 1.0 -> 3.0"),
    "a function that a worker calls": ({}, "doubled(y) +", "doubled(y) -", "score in driver.py "),
    "a constant": ({}, "BONUS = 0.5", "BONUS = 0.75", "BONUS in driver.py 0.5 -> 0.75 (d1/driver.py:8)"),
    "a list": ({}, "[1.0, 2.0]", "[1.5]", "WEIGHTS in driver.py [1.0, 2.0] -> [1.5]"),
    "the class of a worker": ({}, "self.scale for", "-self.scale for", "Judge in driver.py "),
    "the program": ({}, "scale=1.0 - kl", "scale=1.0 + kl", "train in driver.py "),
    "a default": ({}, "kl: float = 0.1", "kl: float = 0.3", "train: kl 0.1 -> 0.3"),
}  # fmt: skip


@pytest.mark.parametrize("what", ANOTHER)
def test_what_makes_another_run_is_refused_in_a_line_unless_it_is_allowed(project, tmp_path, what):
    how, old, new, line = ANOTHER[what]
    driver = swapped(DRIVER, old, new) if old else DRIVER
    project()
    before = (tmp_path / "run" / "run.json").read_text()
    with pytest.raises(ResumeError) as raised:
        project(driver=driver, resume=True, steps=3, **how)
    first, *lines = raised.value.what.splitlines()
    assert first == "run would become another run. Changed since it was started:"
    assert any(said.strip().startswith(line) for said in lines), lines
    assert len(lines) == 1 + (what == "rows a step"), "the batch of the source too"
    assert "--allow-changed" in raised.value.fix
    assert json.loads((tmp_path / "run" / "run.json").read_text())["inputs"] == json.loads(before)["inputs"]
    assert project(driver=driver, resume=True, steps=3, allow_changed=True, **how).status == "done"
    assert any(said.startswith(line.partition(" (")[0]) for said in changed(tmp_path))
    before = len(changed(tmp_path))
    assert project(driver=driver, resume=True, steps=4, **how).status == "done", "what was allowed is what holds now"
    assert changed(tmp_path)[before:] == ["train: steps 3 -> 4"]


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("return 2 * x", "return 3 * x", "twice in helper.py "),
        ("FACTOR = 2.0", "FACTOR = 4.0", "FACTOR in helper.py 2.0 -> 4.0"),
        ('"a": 1.0', '"a": 7.0', 'TABLE in driver.py {"a": 1.0} -> {"a": 7.0}'),
    ],
)
def test_a_module_beside_the_script_that_was_changed_is_noticed(project, old, new, line):
    project()
    with pytest.raises(ResumeError) as raised:
        project(helper=swapped(HELPER, old, new), resume=True, steps=3)
    assert any(said.strip().startswith(line) for said in raised.value.what.splitlines())


def test_a_function_of_a_preset_that_was_changed_is_noticed(project):
    driver = swapped(DRIVER, "n: int = 4):", "n: int = 4, rule=abs):").replace("scale=1.0 - kl", "scale=rule(kl)")
    driver = driver.replace("@flow.program\ndef train", '@flow.program(presets={"own": {"rule": unused}})\ndef train')
    project(driver=driver, preset="own")
    with pytest.raises(ResumeError) as raised:
        project(driver=swapped(driver, "return x + 1", "return x + 2"), preset="own", resume=True, steps=3)
    assert any(line.strip().startswith("unused in driver.py ") for line in raised.value.what.splitlines())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# how good it is", "# how very good it is\n    # indeed"),
        ('"""Trains."""', '"""Trains it."""'),
        ("return {\"r\": [score", "return {\n            \"r\": [score"),
        ("BONUS = 0.5", "BONUS = 0.50  # half"),
        ("return x + 1", "return x + 2"),
        ("def unused(x):", "def added(y):\n    return y\n\n\ndef unused(x):"),
        ("n=counter.values(batch).count()", "m=counter.values(batch).count()"),
    ],
)  # fmt: skip
def test_what_is_not_of_the_run_or_says_the_same_is_not_refused(project, tmp_path, old, new):
    project()
    project(driver=swapped(DRIVER, old, new), resume=True, steps=3)
    assert changed(tmp_path) == ["train: steps 2 -> 3"]


def test_versions_environment_and_plan_are_told(project, tmp_path, monkeypatch):
    whole = project(steps=4)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr("flowrl.runtime.storage.run_inputs.versions", lambda: {"python": "3.99", "torch": "0.1"})
    plan = Plan({"a": "cpu", "b": "cpu"}, {"judge": Place("b")})
    again = project(resume=True, plan=plan, steps=4)
    assert again.weights_digest == whole.weights_digest
    said = changed(tmp_path)
    assert "OMP_NUM_THREADS 1 -> 3" in said or "OMP_NUM_THREADS not set -> 3" in said
    assert any(line.startswith("torch ") and line.endswith(" -> 0.1") for line in said)
    assert sum(line.startswith("plan: ") and "pools.b.device not there" in line for line in said) == 1


def test_arguments_that_change_no_results_are_told(project, tmp_path):
    driver = swapped(DRIVER, '"""Touches the world."""', 'without_effect = ("scale",)')
    project(driver=driver)
    project(driver=swapped(driver, "scale=1.0)\n\n\n@", "scale=3.0)\n\n\n@"), resume=True, steps=3)
    assert changed(tmp_path) == ["train: steps 2 -> 3", "judge: scale 1.0 -> 3.0"]
    assert set(fl.FunctionReward.without_effect) >= {"timeout", "retries", "concurrency"}, (
        "as messages of failures advise"
    )


def test_a_key_of_a_service_is_in_no_record(project, tmp_path):
    project(driver=swapped(DRIVER, "(Judge, scale=1.0)", '(Judge, api_key="sk-123456789")'))
    assert "sk-123456789" not in json.dumps(json.loads((tmp_path / "run" / "run.json").read_text())["inputs"])
    with pytest.raises(ResumeError, match="judge: api_key a text "):
        project(driver=swapped(DRIVER, "(Judge, scale=1.0)", '(Judge, api_key="sk-987")'), resume=True)


def test_a_program_may_be_added_and_one_that_has_not_begun_may_have_other_parameters(project, tmp_path):
    project()
    project("train", "after", resume=True)
    assert changed(tmp_path) == []
    project("train", "after", "after", resume=True, parameters={"after": {"rounds": 1}})
    with pytest.raises(ResumeError, match=r"train: kl 0.1 -> 0.9 \('after' has gone on from what it gave\)"):
        project("train", "after", "after", resume=True, kl=0.9, allow_changed=True)


def test_a_run_of_an_older_flowrl_goes_on_with_a_note(project, tmp_path):
    project(checkpoint_every=1)
    run = tmp_path / "run"
    for file in (run / "run.json", *run.glob("checkpoints/*/manifest.json")):
        record = json.loads(file.read_text())
        parameters = record.pop("inputs")["parameters"]
        for name in ("checksum", "files", "run", "id", "record", "checkpoints"):
            record.pop(name, None)
        file.write_text(json.dumps({**record, "parameters": parameters}))
    with pytest.raises(ResumeError, match="train: kl 0.1 -> 0.2"):
        project(resume=True, kl=0.2, steps=3)
    project(resume=True, driver=swapped(DRIVER, "BONUS = 0.5", "BONUS = 0.7"), steps=3)
    assert changed(tmp_path)[-1].startswith("the run was started by a flowrl that did not note")
    with pytest.raises(ResumeError, match="BONUS"):
        project(resume=True, steps=4)


@pytest.fixture
def start(tmp_path):
    """Run a program on a file of these words."""

    def start(words, **how):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": w}) + "\n" for w in words))
        flow = fl.Flow("count")
        counts = flow.worker(Counts, name="counts")
        source = fl.data.jsonl(tmp_path / "a.jsonl", batch=2, tokenizer=Letters, **how.pop("reading", {}))

        def count(steps: int = 2):
            for step, batch in flow.steps(source, steps):
                flow.log(step, counts.count(batch))

        flow.program(count)
        return flow.run(out=tmp_path / "run", quiet=True, **how)

    return start


@pytest.mark.parametrize("noted", [None, "null"])
def test_an_option_of_data_that_is_not_given_need_not_be_in_the_record(start, tmp_path, noted):
    """Versions differ in what options there are, and in whether those that are not given are noted."""
    start("abcdef", checkpoint_every=1)
    run = tmp_path / "run"
    for file in (run / "run.json", *run.glob("checkpoints/*/manifest.json")):
        record = json.loads(file.read_text())
        [entries] = record["inputs"]["data"]
        for name in ("source: chat_template_kwargs", "source: system"):
            entries.pop(name, None)
            entries.update({name: noted} if noted else {})
        file.write_text(json.dumps(with_checksum(record)))
    assert start("abcdef", resume=True, steps=3).status == "done"
    assert changed(tmp_path) == ["count: steps 2 -> 3"]


def test_data_that_was_changed_is_refused(start):
    start("abcdef")
    start("abcdef", resume=True, steps=3)
    with pytest.raises(ResumeError, match=r"data source: rows \"\w+\" -> \"\w+\""):
        start("abcdxf", resume=True, steps=4)
    with pytest.raises(ResumeError, match=r"data source: seed 0 -> 1"):
        start("abcdef", resume=True, steps=4, reading={"seed": 1})
    with pytest.raises(ResumeError, match='data source: chat_template_kwargs not there -> "thinks=False"'):
        start("abcdef", resume=True, steps=4, reading={"chat": True, "chat_template_kwargs": {"thinks": False}})
    assert start("abcdxf", resume=True, steps=4, allow_changed=True).status == "done"


class Letters:
    """A tokenizer of a token per letter."""

    pad_token_id, eos_token_id = 0, 1
    chat_template = "{{ thinks }}"

    def __call__(self, texts, **how):
        return {"input_ids": [[ord(c) for c in text] for text in texts]}

    def get_vocab(self):
        return {}

    def __len__(self):
        return 200


class Counts(fl.Worker):
    @fl.op(reads="prompt")
    def count(self, batch) -> fl.Metrics:
        return fl.Metrics(letters=sum(map(len, batch["prompt"].to_list())))


def test_a_parameter_that_only_says_how_long_a_run_is_is_known_by_the_loops_that_it_bounds():
    flow = fl.Flow("f")

    def one(steps: int = 2, n: int = 3, k: int = 4):
        for _, batch in flow.steps(n, steps):
            for _ in range(k):
                print(batch)

    def other(rounds: int = 1, epochs: int = 2):
        if rounds > 3:
            print(rounds)
        for _ in range(epochs):
            for step, batch in flow.steps(None, steps=rounds):
                print(step, batch)

    def falling(n: int = 5):
        rate = 1 / n
        for step, _ in flow.steps(None, n):
            print(step, rate)

    def elsewhere(steps: int = 5, more: int = 1):
        one(steps, more)

    assert lengths(one) == {"steps": None} and lengths(other) == {"epochs": None}
    assert lengths(elsewhere) == {"steps": None}
    assert lengths(falling)["n"].text == "" and lengths(falling)["n"].line == falling.__code__.co_firstlineno + 1


def test_of_a_longer_run_it_is_said_where_its_length_is_used_too(project, tmp_path):
    driver = swapped(DRIVER, "scale=1.0 - kl", "scale=1.0 - kl / steps")
    project(driver=driver)
    project(driver=driver, resume=True, steps=4)
    number = driver.splitlines().index(next(line for line in driver.splitlines() if "kl / steps" in line)) + 1
    assert changed(tmp_path) == [
        "train: steps 2 -> 4",
        f"'train' is made longer, and line {number} uses steps too: the steps that are done were done with the steps "
        "of then",
    ]


def test_code_is_found_behind_partials_methods_lambdas_decorators_and_closures(tmp_path, monkeypatch):
    name = f"code_{random.randrange(10**9)}"
    text = """
    import functools

    def deco(fn):
        @functools.wraps(fn)
        def inner(*a):
            return fn(*a)
        return inner

    def base(x): return x
    class Box:
        def call(self, x): return base(x)
    BOX = Box()
    part = functools.partial(base, 1)
    fns = {"a": lambda x: deep(x)}
    def deep(x): return LIMIT
    LIMIT = 7

    @deco
    def wrapped(x): return x

    def make(k):
        def closed(x): return k(x)
        return closed
    closed = make(lambda x: x * 3)

    @functools.cache
    def cached(x): return x

    def root():
        return BOX.call(part(fns["a"](wrapped(closed(cached(1))))))
    """
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    found = {key.partition(" in ")[0] for key in reached([module.root])}
    assert found >= {"root", "Box", "base", "deep", "LIMIT", "wrapped", "make.closed", "cached", "fns", "BOX", "deco"}
    assert reached([module.root])[f"LIMIT in {name}.py"].says == "7"
