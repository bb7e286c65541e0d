"""Run the commands of the pages on plans and on the simulator, and write what they print below them.

``python docs/make_command_outputs.py``; a test keeps the pages up to date. A ``console`` block holds one command and
its output. A ``yaml`` block that begins with ``# NAME.yaml`` is a file that later commands of its page use. Tables of
figures stand between markers.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flowrl.cli import main
from flowrl.errors import PlanError
from flowrl.placement.backends import BACKENDS
from flowrl.placement.cluster.device_specs import KINDS
from flowrl.placement.cost.efficiency import Efficiency
from flowrl.placement.plan.plan import Plan

DOCS = Path(__file__).parent
PAGES = ("plans.md", "schedule.md", "simulator.md")
_BLOCK = re.compile(r"^```(yaml|console)\n(.*?)^```$", re.M | re.S)
_TABLE = re.compile(r"(<!-- table: (\w+), written by docs/make_command_outputs.py -->\n).*?(<!-- end -->)", re.S)


def page(text: str) -> str:
    """The page with fresh outputs and tables."""
    with tempfile.TemporaryDirectory() as folder, _inside(Path(folder)):
        text = _BLOCK.sub(lambda found: _fresh(found[0], found[1], found[2]), text)
    return _TABLE.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", text)


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """In a folder that has ``algorithms``, as the source tree has."""
    (folder / "algorithms").symlink_to(DOCS.parent / "algorithms")
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _fresh(block: str, language: str, body: str) -> str:
    first = body.partition("\n")[0]
    named = re.match(r"# (\w+\.yaml)$", first)
    if language == "yaml" and named:
        Path(named[1]).write_text(body)
    if language == "console" and first.startswith("$ flowrl "):
        command, _, head = first.removeprefix("$ flowrl ").partition(" | head -n ")
        said = _said(shlex.split(command, comments=True))
        lines = said.splitlines()[: int(head) if head else None]
        return "\n".join(["```console", first, *lines, "```"])
    return block


def _said(words: list[str]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        main(words)
    return out.getvalue()


# -- tables ----------------------------------------------------------------------------------------------------


def _gigabytes(size: float | None) -> str:
    return "" if size is None else f"{size / 1e9:.4g}"


def devices() -> str:
    """The figures of every kind of device, per device, and where each is from."""
    head = ("figure", *KINDS)
    rows = [
        ("bf16, TFLOP/s", *(f"{k.flops['bf16'] / 1e12:.4g}" for k in KINDS.values())),
        ("fp8, TFLOP/s", *(f"{k.flops['fp8'] / 1e12:.4g}" if "fp8" in k.flops else "" for k in KINDS.values())),
        ("memory, GB", *(f"{k.memory / 1e9:.4g}" for k in KINDS.values())),
        ("memory bandwidth, GB/s", *(f"{k.bandwidth / 1e9:.4g}" for k in KINDS.values())),
        ("to its node, GB/s", *(f"{k.link / 1e9:.4g}" for k in KINDS.values())),
        ("to other nodes, GB/s", *(f"{k.network / 1e9:.4g}" for k in KINDS.values())),
        ("to its host, GB/s", *(f"{k.host / 1e9:.4g}" for k in KINDS.values())),
        ("its share of host memory, GB", *(_gigabytes(k.host_memory) for k in KINDS.values())),
    ]
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\n" + _sources()


def _sources() -> str:
    lines: list[str] = []
    for name, kind in KINDS.items():
        by_source: dict[str, list[str]] = {}
        for figure, source in kind.sources.items():
            by_source.setdefault(source, []).append(figure)
        lines.append(f"- `{name}`: " + "; ".join(f"{', '.join(f)}: {s}" for s, f in by_source.items()))
    return "\n".join(lines).replace("_", " ")


def efficiency() -> str:
    """What a roofline assumes of each peak."""
    own = Efficiency()
    rows = [f"| `{name}` | {getattr(own, name):g} | {source} |" for name, source in own.sources.items()]
    return "\n".join(["| factor | value | source |", "|---|---|---|", *rows])


def shipped() -> str:
    """The plans of algorithms/plans, with the comment at the top of each, and why no run has one."""
    rows: list[str] = []
    for path in sorted((DOCS.parent / "algorithms" / "plans").glob("*.yaml")):
        comment = [line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#")]
        rows.append(f"| `{path.name}` | {' '.join(comment)} | {refused(Plan.load(path))} |")
    return "\n".join(["| file | for | a run has it |", "|---|---|---|", *rows])


def refused(plan: Plan) -> str:
    """Whether ``flowrl run`` takes a plan: yes, or why not."""
    try:
        plan.check_workers(plan.place, [row.name for row in BACKENDS.values() if row.built])
    except PlanError as error:
        return "no: " + error.what.split(": ", 1)[-1].split(", and this place")[0]
    return "yes"


TABLES = {"devices": devices, "efficiency": efficiency, "shipped": shipped}


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(page((DOCS / name).read_text()))
