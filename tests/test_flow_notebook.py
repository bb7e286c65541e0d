"""Cells of a notebook run again: what a later cell declares takes the place of what an earlier one did."""

import linecache
import sys
from types import ModuleType, SimpleNamespace

import pytest

import flowrl as fl
from flowrl.errors import At, ProgramError, ResumeError, UsageError

FLOW = 'import flowrl as fl\nflow = fl.Flow("count")\n'
WORKER = """
class Counter(fl.Worker):
    keeps = ("total",)
    def __init__(self, start=0):
        self.total = start
    @fl.op(updates="total")
    def add(self, amount: int = 1) -> fl.Metrics:
        self.total += amount
        return fl.Metrics(total=self.total)

counter = flow.worker(Counter, {start})
"""
PROGRAM = """
@flow.program
def count(steps: int = 2):
    for step in range(steps):
        flow.log(step, counter.add({by}))
"""


class Notebook:
    """Runs cells one after the other over one set of names, each compiled as IPython does it."""

    def __init__(self):
        self.names = {"__name__": "__main__"}
        self.count = 0

    def __call__(self, text):
        self.count += 1
        file = f"/tmp/ipykernel_1/{self.count}.py"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        exec(compile(text, file, "exec"), self.names)


@pytest.fixture
def cell():
    return Notebook()


def total(out):
    return float((out / "metrics.jsonl").read_text().splitlines()[-1].partition('"total":')[2].partition(",")[0])


def test_a_cell_with_everything_is_run_again(cell, tmp_path):
    for number, by in enumerate((1, 5, 5)):
        text = FLOW if not number else ""
        cell.names["out"] = tmp_path / str(number)
        cell(text + WORKER.format(start=10) + PROGRAM.format(by=by) + "flow.run(out=out, quiet=True)\n")
    assert [total(tmp_path / str(n)) for n in range(3)] == [12.0, 20.0, 20.0]
    assert len(cell.names["flow"].handles) == 1


def test_a_program_is_declared_again_alone(cell, tmp_path):
    cell(FLOW + WORKER.format(start=0))
    cell(PROGRAM.format(by=1))
    flow = cell.names["flow"]
    flow.run(out=tmp_path / "first", quiet=True)
    cell(PROGRAM.format(by=7))
    flow.run(out=tmp_path / "second", quiet=True)
    assert (total(tmp_path / "first"), total(tmp_path / "second")) == (2.0, 14.0)


def test_a_worker_is_declared_again_alone(cell, tmp_path):
    cell(FLOW + WORKER.format(start=0))
    cell("other = flow.worker(Counter, name='second')\n" + PROGRAM.format(by="1"))
    cell(WORKER.format(start=100))
    cell("other = flow.worker(Counter, 3, name='second')\n")
    cell(
        PROGRAM.format(by="1").replace("flow.log(step, counter.add(1))", "flow.log(step, counter.add(1), other.add(1))")
    )
    flow = cell.names["flow"]
    flow.run(out=tmp_path / "run", quiet=True)
    assert [(h.name, h.args) for h in flow.handles] == [("counter", (100,)), ("second", (3,))]
    line = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert '"counter/total": 102' in line and '"second/total": 5' in line


def test_a_helper_that_is_defined_again_is_traced_again(cell):
    cell(FLOW + WORKER.format(start=0))
    cell("def more():\n    return counter.add(1)\n")
    cell(PROGRAM.format(by=1).replace("counter.add(1)", "more()"))
    cell("flow.check()")
    cell("def more():\n    return counter.ad(1)\n")
    cell("report = flow.check()")
    assert [e.what for e in cell.names["report"].errors] == [
        "counter.ad is not there; the ops of Counter are add.",
    ]


def test_two_of_a_name_in_one_cell_are_refused(cell):
    cell(FLOW + WORKER.format(start=0))
    with pytest.raises(ProgramError, match=r"this flow has a program 'count' already, at line 3\."):
        cell(PROGRAM.format(by=1) + PROGRAM.format(by=2))
    cell("a, b = (flow.worker(Counter, name='same') for _ in range(2))")
    cell(PROGRAM.format(by=1).replace("flow.log", "a.add(); b.add(); flow.log"))
    errors = cell.names["flow"].check().errors
    assert any(e.what == "several workers of this line are called 'same'." for e in errors)


def test_two_of_a_name_in_a_script_are_refused(tmp_path):
    path = tmp_path / "driver.py"
    path.write_text(FLOW + WORKER.format(start=0) + PROGRAM.format(by=1) * 2)
    with pytest.raises(ProgramError, match="already, at line 16"):
        exec(compile(path.read_text(), str(path), "exec"), {"__name__": "driver"})


def test_main_is_for_scripts(cell):
    cell(FLOW + WORKER.format(start=0) + PROGRAM.format(by=1))
    with pytest.raises(UsageError) as found:
        cell("flow.main()")
    assert (found.value.what, found.value.fix) == (
        "flow.main() is the command line of a script, and this flow is in none.",
        "Write flow.run().",
    )


class Once(fl.Worker):
    @fl.op(cost="local")
    def now(self) -> float:
        return 1.0


def test_a_class_of_a_script_is_no_cell():
    flow = fl.Flow("x")
    flow.worker(Once, name="first"), flow.worker(Once, name="second")
    first, second = flow.handles
    assert first.cell is second.cell  # none, or the text that this Python was started with


REWARD = """
def half(response: str) -> float:
    return len(response) / {by}

def other(x):
    return x + {more}
"""


def test_a_run_goes_on_where_another_function_of_a_cell_was_edited(cell, tmp_path, monkeypatch):
    """A cell that is run again has another file; what the program can reach is the same."""
    kernel = ModuleType("__main__")  # in no file, as that of a notebook
    monkeypatch.setitem(sys.modules, "__main__", kernel)
    cell.names = vars(kernel)
    cell.names["out"] = tmp_path / "run"
    cell(FLOW + WORKER.format(start=0))
    cell(REWARD.format(by=2, more=1))
    cell(PROGRAM.format(by="int(half('abcd'))"))
    cell("print('a note', flow.name)\n" + PROGRAM.format(by="int(half('abcd'))"))
    cell("flow.run(out=out, quiet=True)")
    cell("# edited\n" + REWARD.format(by=2, more=7) + "print(other(1))\n")
    cell("flow.run(out=out, quiet=True, resume=True, parameters={'count': {'steps': 4}})")
    assert total(tmp_path / "run") == 8.0
    cell(REWARD.format(by=4, more=7))
    with pytest.raises(ResumeError, match="half in a cell"):
        cell("flow.run(out=out, quiet=True, resume=True, parameters={'count': {'steps': 6}})")


def test_places_in_cells_are_told_as_ipython_numbers_them(monkeypatch):
    """Its own compiler names cells; that of other files is None."""
    compiler = pytest.importorskip("IPython.core.compilerop").CachingCompiler()
    name = compiler.cache("x = 1\n", 3)
    shell = SimpleNamespace(compile=compiler)
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    assert str(At(name, 6, "x = 1")) == "Cell In[3]:6   x = 1"
    assert str(At("driver.py", 6)) == "driver.py:6"
