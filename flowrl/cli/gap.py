"""``flowrl gap``: say which one change explains the gap between the engine that sampled and the trainer."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments.options import put, read_run_words, whole_number
from .arguments.recorded_run import recorded_run, reopen

if TYPE_CHECKING:
    from ..analysis.gap import Diagnosis


def gap_command(words: Sequence[str]) -> int:
    """Print what explains the gap in rows of a run. Returns the exit status: 1 where a gap has no known cause."""
    options = read_options(words)
    flow, given = reopen(recorded_run(options.run))
    traces = [flow.trace(name, **given.parameters.get(name, {})) for name in given.programs]

    from ..analysis.gap import diagnose

    asked = {"step": options.step, "name": options.worker, "rows": options.rows}
    found = diagnose(options.run, flow.handles, **asked, traces=traces)
    put(json.dumps(found.to_json(), indent=1) if options.format == "json" else text(found), options.out)
    return 1 if found.gap > found.bound and found.found is None else 0


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """The options of this command. Raises UsageError."""
    return read_run_words("gap", words, _add_options)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the folder of the run; its script is loaded, not run")
    parser.add_argument("--step", type=whole_number, metavar="K", help="whose rows; default: the newest that can be")
    parser.add_argument("--worker", metavar="NAME", help="the actor; default: the one that is trained")
    parser.add_argument("--rows", type=whole_number, default=16, metavar="N", help="rows at most (16)")


def text(found: Diagnosis, most: int = 12) -> str:
    """The diagnosis in words, and a table of the changes that explain most."""
    where = f"{found.program}, step {found.step}: {found.rows} rows that '{found.worker}' sampled with version"
    lines = [f"{where} {found.version} of its weights, {found.tokens} tokens."]
    lines.append(f"Engine and trainer differ by {found.gap:.2g} on average; rounding explains {found.bound:.2g}.")
    best = found.found
    if found.gap <= found.bound:
        return "\n".join([*lines, "There is no gap in these rows."])
    if best is None:
        lines.append("No single change that was tried explains half of it.")
    else:
        lines.append(f"The cause: {best.cause}: {best.what}. It explains {best.explained:.1%} of the gap.")
        others = {t.cause for t in found.tried[1:] if best.explained - t.explained < 0.01} - {best.cause}
        if others:
            lines.append(f"These rows do not tell it apart from: {', '.join(sorted(others))}.")
    shown = found.tried[:most]
    width = max(len(f"{t.cause}: {t.what}") for t in shown) if shown else 0
    lines += ["", f"{'what was changed':<{width}}  gap before  gap after  explained"]
    lines += [
        f"{f'{t.cause}: {t.what}':<{width}}  {t.before:>10.2g}  {t.after:>9.2g}  {t.explained:>9.1%}" for t in shown
    ]
    if len(found.tried) > most:
        lines.append(f"and {len(found.tried) - most} more that explain less; --format json has all")
    return "\n".join(lines)
