"""Predict steps that others published, and write docs/published.md: ``python docs/make_published.py``.

``--fit`` searches for the constants of ``Efficiency.published()`` anew and prints them; it takes minutes. A test keeps
the page up to date. What was published, and how it is predicted, is in a file for each of those who did.
"""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path
from runpy import run_path

from flowrl.placement.cost.efficiency import Efficiency

DOCS = Path(__file__).parent
PAGE = DOCS / "published.md"
NEMO_RL, VERL, HYBRIDFLOW = (run_path(str(DOCS / f"published_{who}.py")) for who in ("nemo_rl", "verl", "hybridflow"))
FITTED = NEMO_RL["FITTED"]  # the rows that the constants were fitted on
WITHIN = 0.3  # of what was published


def tables() -> dict[str, str]:
    """The tables of the page by name."""
    return {
        **NEMO_RL["tables"](WITHIN),
        "verl": VERL["table"](WITHIN),
        "hybridflow": HYBRIDFLOW["table"](WITHIN),
        "constants": _constants(Efficiency.published()),
    }


def _constants(own: Efficiency) -> str:
    plain = Efficiency()
    names = [f.name for f in fields(own) if f.name not in ("sources", "name", "error")]
    rows = [f"| `{n}` | {getattr(plain, n):g} | {getattr(own, n):g} | {own.sources[n]} |" for n in names]
    return "\n".join(["| constant | assumed | `published` | source |", "|---|---|---|---|", *rows])


def page(text: str) -> str:
    """The page with fresh tables."""
    for name, table in tables().items():
        block = re.compile(rf"(<!-- {name}: written by docs/make_published.py -->\n).*?(<!-- end -->)", re.S)
        text, count = block.subn(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text)
        assert count == 1, f"the page has {count} places for the table {name}"
    return text


if __name__ == "__main__":
    if "--fit" in sys.argv[1:]:
        for name, value in NEMO_RL["fit"]().items():
            print(f"{name}: {value:.3g}")
    else:
        PAGE.write_text(page(PAGE.read_text()))
