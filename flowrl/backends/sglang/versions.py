"""Which versions of SGLang are supported."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ...errors import ModelError
from .process import installed

SUPPORTED = ("0.5.23",)


def check_here(options: Mapping[str, Any], device: str) -> None:
    """Raise ModelError where the Python that ``options`` name has no SGLang that is supported; not for a server."""
    del device
    if not options.get("url"):
        check_version(installed(str(options.get("python") or sys.executable)))


def check_version(version: str) -> None:
    """Raise ModelError for a version whose protocol was not tried."""
    if version not in SUPPORTED:
        known = ", ".join(SUPPORTED)
        raise ModelError(f"SGLang {version} is there; flowrl supports {known}.", fix=f"Install sglang=={known}.")
