"""The user's modules that are loaded and nowhere installed: they travel to ranks by value."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from ....graph.script.site import is_shipped, is_users


def own_modules() -> list[ModuleType]:
    """The modules that are loaded and nowhere installed: the script, shipped or not, and what lies beside it."""
    installed = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    found: list[ModuleType] = []
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and module.__name__ != "__main__" and is_users(module):
            path = Path(file).resolve()
            if not path.is_file():  # torch.ops says that it lies in _ops.py, which is nowhere
                continue
            elsewhere = "site-packages" not in path.parts and not any(path.is_relative_to(f) for f in installed)
            if elsewhere or is_shipped(file):
                found.append(module)
    return found
