"""The flows that the runtime tests run, each loaded anew, and what their runs recorded."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path


def module_of(name: str):
    """A module beside this one, fresh."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def metrics(out: Path) -> list[dict]:
    """The recorded metrics, without the seconds."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]
