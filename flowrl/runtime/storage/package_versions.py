"""The versions of Python and of the packages that decide a result."""

from __future__ import annotations

import platform
from functools import cache
from importlib import import_module, metadata

from ...placement.backends import packages

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "peft", "ray")


def versions() -> dict[str, str]:
    """Versions of Python and the packages that decide a result."""
    found = {"python": platform.python_version(), "flowrl": import_module("flowrl").__version__}
    for name in (*PACKAGES, *packages()):
        try:
            found[name] = _installed(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def _installed(name: str) -> str:
    """The version of a package, which this process goes on with whatever is installed later."""
    return metadata.version(name)
