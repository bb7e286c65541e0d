"""The files of a new project: a shipped driver, the presets and the task that it uses, a plan and a test."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...flow import Flow
from ...shipped import FOLDER, find_plan
from .used_code import keep_used, names_asked_of

STEPS = 150  # of a program of the first run, at most: a minute or two on two cores
SMALL = 16  # a number of rows from here on is cut to FEW in the test
FEW = 4

TEST = '''"""The driver has no mistakes, and two small steps of each of its programs run as the plan says."""

from pathlib import Path

import pytest

import flowrl as fl

HERE = Path(__file__).parent
FEW = {few}


@pytest.fixture
def flow():
    return fl.load_script(str(HERE / "{name}.py"))


@pytest.mark.parametrize("program", FEW)
def test_a_program_has_no_mistakes(flow, program):
    assert not flow.check(program).errors


def test_small_steps_run(flow, tmp_path):
    how = {{"plan": HERE / "plan.yaml", "save_models": False, "quiet": True}}
    outcome = flow.run(*FEW, out=tmp_path / "run", parameters=FEW, **how)
    assert outcome.status == "done"
    assert [program for program, _ in outcome.last] == list(FEW)
'''


def project_files(name: str, flow: Flow) -> dict[str, str]:
    """Return the texts of a project by their paths; ``flow`` is that of the shipped algorithm."""
    files = {module: _text(module) for module in _modules(name)}
    for module in [m for m in files if m.startswith("tasks.")]:
        asked = [names_asked_of(text, module) for other, text in files.items() if other != module]
        every = {n for some in asked if some is not None for n in some}
        files[module] = files[module] if None in asked else keep_used(files[module], every)
    plan = find_plan("one_process")
    assert plan is not None, "it is shipped"
    packages = {module.partition(".")[0] for module in files if "." in module}
    return {
        **{f"{module.replace('.', '/')}.py": text.replace("algorithms/", "") for module, text in files.items()},
        **{f"{package}/__init__.py": _text(f"{package}.__init__") for package in sorted(packages)},
        "plan.yaml": plan.read_text(encoding="utf-8"),
        f"test_{name}.py": TEST.format(name=name, few=_few(flow)),
    }


def first_run(flow: Flow) -> list[str]:
    """Return the words that choose the programs of a first run and make it short: a warm-up first, easy prompts."""
    main = flow.default_program()
    chosen = [*(name for name in flow.programs if name not in (main, "evaluate")), main]
    words = ["--program", ",".join(chosen)] if len(chosen) > 1 else []
    for name in chosen:
        for option, value in _short(flow.programs[name].parameters):
            words += [f"--{name}.{option}" if len(chosen) > 1 else f"--{option}", value]
    return words


def _short(parameters: Mapping[str, inspect.Parameter]) -> Iterator[tuple[str, str]]:
    """Yield the options that make a program short, and its sums those of two digits."""
    for name, parameter in parameters.items():
        if name == "steps" and parameter.default > STEPS:
            yield "steps", str(STEPS)
        elif name == "one_digit" and parameter.default is None:
            yield "one-digit", "1.0"


def _few(flow: Flow) -> str:
    """Return the parameters of a small run of each program, as they are written in the test."""
    few = {name: dict(_cut(program.parameters)) for name, program in flow.programs.items()}
    return "{\n" + "".join(f"    {name!r}: {values!r},\n" for name, values in few.items()).replace("'", '"') + "}"


def _cut(parameters: Mapping[str, inspect.Parameter]) -> Iterator[tuple[str, int]]:
    for name, parameter in parameters.items():
        if name == "steps":
            yield name, 2
        elif type(parameter.default) is int and parameter.default >= SMALL:
            yield name, FEW


def _modules(name: str) -> list[str]:
    """Return a driver and the modules beside it that it imports, and that these import."""
    found = [name]
    for module in found:
        for node in ast.walk(ast.parse(_text(module))):
            if isinstance(node, ast.ImportFrom) and node.module:
                asked = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                found += [m for m in asked if "." in m and m not in found and _file(m).is_file()]
    return found


def _file(module: str) -> Path:
    return FOLDER / f"{module.replace('.', '/')}.py"


def _text(module: str) -> str:
    return _file(module).read_text(encoding="utf-8")
