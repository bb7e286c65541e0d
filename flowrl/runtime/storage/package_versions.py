"""The versions of Python and of the packages that decide a result."""

from __future__ import annotations

import platform
from importlib import import_module, metadata

from ...placement.backends import packages

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "peft", "ray")


def versions() -> dict[str, str]:
    """Versions of Python and the packages that decide a result."""
    found = {"python": platform.python_version(), "flowrl": import_module("flowrl").__version__}
    for name in (*PACKAGES, *packages()):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
