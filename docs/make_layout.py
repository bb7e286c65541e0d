"""Write docs/layout.md, the folders and files with the question that each answers: ``python docs/make_layout.py``.

The words are the first lines of the files. A test keeps the page up to date.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

DOCS = Path(__file__).parent
FLOWRL = DOCS.parent / "flowrl"
#: The folders in the order of the data: from the program, over where, when and how, to the engines and the shell.
ORDER = ("", "rl", "data", "column", "workers", "graph", "placement", "schedule", "lowering", "analysis", "runtime")
ORDER += ("trackers", "backends", "testing", "show", "cli")
#: Folders in folders that have an order of their own; others follow by name.
INNER = {
    "graph": ("ops", "script", "stand_ins", "tracing", "draw"),
    "workers": ("tokens", "user_code", "weights"),
    "placement": ("cluster", "model", "plan", "reshard", "cost", "search"),
    "runtime": ("driver", "local", "distributed", "transfer", "values", "storage"),
}
HEAD = """\
# Layout

Every folder of `flowrl/` in the order in which data passes through it, and the question that each file answers: what a
driver is written in (`rl`, `data`, `workers`), what it becomes (`graph`), where and when it runs (`placement`,
`schedule`), what is handed to a runtime or looked at without one (`lowering`, `analysis`), what does the work
(`runtime`, `backends`), what shows it elsewhere (`trackers`), what tests use in place of a model (`testing`),
the page that shows runs (`show`), and the command line. [The journey](journey.md) follows one step through it.

`docs/make_layout.py` writes this page from the first lines of the files.
"""


def page() -> str:
    """The page: a section for every folder, a line for every file."""
    return "\n".join([HEAD, *(_section(folder) for folder in folders())])


def folders() -> list[Path]:
    """Every folder with files of Python, in the order of the page."""
    found = {path.parent for path in FLOWRL.rglob("*.py")}
    return sorted(found, key=_place)


def _place(folder: Path) -> tuple[tuple[int, str], ...]:
    parts = folder.relative_to(FLOWRL).parts
    if not parts:
        return ()
    order = ORDER.index(parts[0]) if parts[0] in ORDER else len(ORDER)
    inner = INNER.get(parts[0], ())
    second = [(inner.index(name) if name in inner else len(inner), name) for name in parts[1:2]]
    return ((order, ""), *second, *((0, name) for name in parts[2:]))


def _section(folder: Path) -> str:
    name = "/".join(("flowrl", *folder.relative_to(FLOWRL).parts))
    level = min(4, 2 + name.count("/") - (name != "flowrl"))
    files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    lines = [f"{'#' * level} {name}/", "", first_line(folder / "__init__.py")]
    if files:
        lines += ["", "| file | what it answers |", "|---|---|"]
        lines += [f"| `{path.name}` | {first_line(path)} |" for path in files]
    return "\n".join([*lines, ""])


def first_line(path: Path) -> str:
    """The first sentence or line of a file's docstring, as Markdown."""
    text = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("\n", " ")
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`").rstrip(":").strip()
    return text.replace("|", r"\|") if path.name != "__init__.py" else text


if __name__ == "__main__":
    (DOCS / "layout.md").write_text(page())
