"""What type checkers see: drivers, tasks and the docs' programs pass strictly, and wrong calls are refused."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TYPED = ROOT / "tests" / "typed"
WRONG = TYPED / "wrong.py"


def blocks(page: str) -> str:
    return "\n\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S))


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Every program that a reader sees, as files: drivers, tasks, the tutorial, and those of pages."""
    folder = tmp_path_factory.mktemp("pages")
    language = (ROOT / "docs" / "language.md").read_text().split("## Line by line")[0]
    for name, page in (("language_page", language), ("readme_page", (ROOT / "README.md").read_text())):
        (folder / f"{name}.py").write_text(blocks(page))
    beside = (ROOT / "algorithms" / name for name in ("tasks", "presets"))
    drivers = [*(ROOT / "algorithms").glob("*.py"), *(file for f in beside for file in f.glob("[a-z]*.py"))]
    return [*drivers, ROOT / "docs" / "tutorial_program.py", *folder.glob("*.py"), TYPED / "right.py"]


def by_mypy(files) -> set[tuple[str, int, str]]:
    """File, line and message of each error."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^(.*?):(\d+): error: (.*)$", done.stdout, re.M)
    return {(Path(file).name, int(line), message) for file, line, message in found}


def by_pyright(files) -> set[tuple[str, int, str]]:
    """File, line and message of each error."""
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    told = json.loads(done.stdout)
    return {
        (Path(d["file"]).name, d["range"]["start"]["line"] + 1, d["message"])
        for d in told["generalDiagnostics"]
        if d["severity"] == "error"
    }


@pytest.fixture(
    scope="module",
    params=[pytest.param(by_mypy, marks=pytest.mark.nightly, id="mypy"), pytest.param(by_pyright, id="pyright")],
)
def found(request, programs):
    """What a type checker says of all programs, and of the wrong one, in one run of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "algorithms"), prepend=":")
        return request.param([*programs, WRONG])


@pytest.mark.slow
def test_programs_have_the_types_that_a_reader_expects(found, programs):
    assert len(programs) > 15
    assert {error for error in found if error[0] != WRONG.name} == set()


@pytest.mark.slow
def test_wrong_calls_are_refused_at_their_lines(found):
    marked = {i for i, line in enumerate(WRONG.read_text().splitlines(), 1) if line.endswith("# wrong")}
    assert len(marked) == 12
    assert {line for file, line, _ in found if file == WRONG.name} == marked
