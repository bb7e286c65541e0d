"""Where the shipped algorithms and plans lie: ``algorithms/`` of the source tree, or inside an installed package."""

from __future__ import annotations

from pathlib import Path

_HOME = Path(__file__).absolute().parent
_INSTALLED = _HOME / "drivers"
#: The folder of the drivers, with their ``tasks/``, ``presets/`` and ``plans/``.
FOLDER = _INSTALLED if _INSTALLED.is_dir() else _HOME.parent / "algorithms"


def names() -> list[str]:
    """Return the names of the shipped algorithms."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def plan_names() -> list[str]:
    """Return the names of the shipped plans."""
    return sorted(path.stem for path in (FOLDER / "plans").glob("*.yaml"))


def find_driver(name: str) -> Path | None:
    """Return the driver of a shipped algorithm, such as ``grpo``; None where there is none of that name."""
    return FOLDER / f"{name}.py" if name in names() else None


def find_plan(name: str) -> Path | None:
    """Return the file of a shipped plan, such as ``split_cpu``; None where there is none of that name."""
    path = FOLDER / "plans" / f"{name}.yaml"
    return path if Path(name).name == name and path.is_file() else None
