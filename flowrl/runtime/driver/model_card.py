"""The card of a trained model: which run it comes from, and how that was asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .card_metadata import card_metadata, front_matter


def model_card(
    record: Mapping[str, Any],
    worker: str,
    last: Mapping[str, Any],
    best: Mapping[str, Any] | None = None,
    checkpoint: str = "",
    folder: Path | None = None,
) -> str:
    """Return the card of a worker's model as Markdown, from run.json and the line of metrics that it was saved with.

    ``best`` says that it is that of the best checkpoint, by which metric of which step; ``checkpoint`` of which one
    it is, where its weights are not the last ones. ``folder`` is where the model was saved.
    """
    workers: Mapping[str, str] = record.get("inputs", {}).get("workers", {})
    mine = {n.partition(": ")[2]: value for n, value in workers.items() if n.startswith(f"{worker}: ")}
    programs = zip(record.get("programs", ()), record.get("parameters", ()), strict=False)
    versions = record.get("versions", {})
    numbers = {n: v for n, v in last.items() if isinstance(v, (int, float)) and n not in ("step", "seconds")}
    lines = [
        front_matter(card_metadata(record, worker, folder)),
        "",
        f"# {worker}, trained with flowrl",
        "",
        _about(record, best, checkpoint),
        "",
        "| asked for | |",
        "|---|---|",
        *(_row(f"{program}: {name}", value) for program, given in programs for name, value in given.items()),
        *(_row(f"{worker}: {name}", value) for name, value in mine.items()),
        _row("seed", record.get("seed")),
        *(_row(name, versions[name]) for name in ("flowrl", "torch", "transformers") if name in versions),
        "",
        f"| at step {last['step']} of {last['program']} | |" if last else "| nothing was logged | |",
        "|---|---|",
        *(_row(name, f"{value:.4g}") for name, value in numbers.items()),
        "",
    ]
    return "\n".join(lines)


def _about(record: Mapping[str, Any], best: Mapping[str, Any] | None, checkpoint: str) -> str:
    what = f"The weights of checkpoint `{checkpoint}`" if checkpoint else "The final weights"
    if best is not None:
        what = f"The weights of the best checkpoint, by `{best['metric']}`,"
    code = (
        f" on commit `{record['commit']}`{' with changes' if record.get('dirty') else ''}"
        if record.get("commit")
        else ""
    )
    digest = (
        f" Digest of all final weights of the run: `{record['weights_digest']}`."
        if record.get("weights_digest")
        else ""
    )
    return f"{what} of run `{record.get('id', '')}` of `{record.get('script', '')}`{code}.{digest}"


def _row(name: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return f"| {name} | {text} |".replace("\n", " ")
