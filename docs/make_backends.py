"""Ask every backend for everything, and write docs/backends.json and the tables of docs/backends.md.

``python docs/make_backends.py`` runs the contracts of tests/backends/contracts.py on one process and on two ranks of
gloo, in some minutes; with ``--page`` it writes the tables of what docs/backends.json says. A test keeps the page up to
date.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from runpy import run_path
from typing import Any

from flowrl.placement.backends import BACKENDS as ROWS
from flowrl.placement.backends import Backend

DOCS = Path(__file__).parent
RECORD = DOCS / "backends.json"
PAGE = DOCS / "backends.md"
TESTS = DOCS.parent / "tests" / "backends"
YES = "yes"
#: The columns of the tables: a backend and the mesh that it is asked on.
COLUMNS: list[tuple[str, dict[str, int]]] = [
    ("hf", {}),
    ("fsdp2", {"fsdp": 2}),
    ("fsdp2", {"tp": 2}),
    ("fsdp2", {"pp": 2}),
    ("megatron", {"tp": 2}),
    ("megatron", {"pp": 2}),
]
BACKENDS = ("hf", "fsdp2", "megatron")
#: Rows of the table of traits: what it says, and what of a row of the table it is.
TRAITS: dict[str, Callable[[Backend], Any]] = {
    "a run has it": lambda row: row.built,
    "trains": lambda row: ("on several devices" if row.collective else "on one device") if row.trains else False,
    "generates": lambda row: row.generates,
    "axes": lambda row: _words(row.axes),
    "axes that a run has": lambda row: (
        _words(row.axes if row.run_axes is None else row.run_axes) if row.built else False
    ),
    "a run refuses it on GPUs": lambda row: row.cpu_alone or _on_cpus(row),
    "a model over several ranks": lambda row: row.collective,
    "takes new weights by": lambda row: _words(row.publishes),
    "log-probabilities of what it samples": lambda row: _words(row.logprobs),
    "leaves the memory of its devices between its turns": lambda row: row.sleeps,
    "computes a prompt once for all rows to it": lambda row: row.reads_prompts_once,
    "has keys and values of a prompt once": lambda row: row.keeps_prompts_once,
    "gradients": lambda row: row.gradients or False,
    "`offload: true`": lambda row: row.offload,
    "options beside it": lambda row: _words(tuple(option.name for option in row.options)),
    "adapters (`lora=`) over": lambda row: _words(row.adapters) if row.trains else False,
    "frozen weights (`freeze=`) over": lambda row: _words(row.freezes) if row.trains else False,
    "not in one mesh": lambda row: ", ".join(" with ".join(f"`{a}`" for a in pair) for pair in row.excludes) or False,
    "on CUDA alone": lambda row: _words(row.cuda_axes),
}


def measure() -> dict[str, Any]:
    """Every answer of every backend."""
    sys.path[:0] = [str(TESTS)]
    import contracts

    tables: dict[str, Any] = {}
    for table, names in (("capability", list(contracts.CAPABILITIES)), ("model", list(contracts.KINDS))):
        rows: dict[str, list[str]] = {name: [] for name in names}
        for backend, axes in COLUMNS:
            for name, answer in zip(names, asked(table, names, backend, axes), strict=True):
                rows[name].append(answer)
        tables[table] = {"columns": [title(b, a) for b, a in COLUMNS], "rows": rows}
    rows = {name: [asked("axis", [name], b, {name: 2})[0] for b in BACKENDS] for name in contracts.AXES}
    tables["axis"] = {"columns": list(BACKENDS), "rows": rows}
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "megatron-core")}
    return {"versions": versions, "tables": tables}


def asked(table: str, names: list[str], backend: str, axes: dict[str, int]) -> list[str]:
    """The answers of the first rank; one that differs on another rank is said too."""
    import contracts
    import ranks

    count = math.prod(axes.values())
    by_rank = ranks.run(contracts.answers, count, table, names, backend, axes, timeout=600)
    return [next((a for a in each if a != YES), YES) for each in zip(*by_rank, strict=True)]


def title(backend: str, axes: dict[str, int]) -> str:
    """The head of a column: ``fsdp2, tp=2``."""
    return ", ".join([backend, *(f"{axis}={n}" for axis, n in axes.items())])


# -- the page ------------------------------------------------------------------------------------------------------


def table(name: str) -> str:
    """A table of the page. What is not there has a number, and below what is said instead."""
    record = json.loads(RECORD.read_text())["tables"][name]
    notes: dict[str, int] = {}

    def cell(answer: str, row: str) -> str:
        return YES if answer == YES else f"no ({notes.setdefault(_alike(answer, row), len(notes) + 1)})"

    head = ["", *(f"`{column}`" for column in record["columns"])]
    lines = [head, ["---"] * len(head)]
    lines += [[_named(row, name), *(cell(a, row) for a in answers)] for row, answers in record["rows"].items()]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([text, *([""] if notes else []), *(f"{n}. {said}" for said, n in notes.items())])


def _alike(answer: str, row: str) -> str:
    """An answer without what is that of its row alone, so that rows share their notes."""
    answer = re.sub(rf"\b{row}=\d+\b", "AXIS=2", answer) if len(row) < 5 else answer
    answer = re.sub(rf"\baxis {row}\b", "axis AXIS", answer)
    answer = answer.replace(f"of the kind '{row.partition('-')[0]}'", "of this kind")
    answer = re.sub(r"^\w+ is no embedding", "It is no embedding", answer)
    return re.sub(r"^\w+ has the weight '.*?'", "It has the weight '...'", answer)


def _named(row: str, table: str) -> str:
    return row if table == "capability" else f"`{row}`"


def traits() -> str:
    """The table of backends as a table of the page; an empty cell is a no."""
    lines = [["", *(f"`{row.name}`" for row in ROWS.values())], ["---"] * (len(ROWS) + 1)]
    for said, of in TRAITS.items():
        cells = [of(row) for row in ROWS.values()]
        lines.append([said, *(("yes" if c else "") if isinstance(c, bool) else c for c in cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _on_cpus(row: Backend) -> str | bool:
    """What runs have had on CPUs alone."""
    found = [f"with `{axis}`" for axis in row.cpu_axes] + (["mixtures of experts"] if row.cpu_experts else [])
    return ", ".join(found) or False


def _words(names: tuple[str, ...]) -> str | bool:
    return ", ".join(f"`{name}`" for name in names) or False


def versions() -> str:
    """What was asked, in a sentence."""
    found = json.loads(RECORD.read_text())["versions"]
    return "Asked with " + ", ".join(f"{name} {number}" for name, number in found.items()) + ", on the CPU, in fp32."


BLOCKS = {name: (lambda name=name: table(name)) for name in ("capability", "axis", "model")}
BLOCKS |= {"versions": versions, "traits": traits}


def page(text: str) -> str:
    """The page with fresh blocks between their markers."""
    return run_path(str(DOCS / "fill_blocks.py"))["fill"](text, BLOCKS, "docs/make_backends.py")


if __name__ == "__main__":
    if "--page" not in sys.argv:
        RECORD.write_text(json.dumps(measure(), indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text()))
