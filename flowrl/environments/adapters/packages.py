"""Imports the package that an adapter plays, or says which extra installs it."""

from __future__ import annotations

import importlib
from typing import Any

from ...errors import WorkerError


def import_package(name: str, *, extra: str, asks: object) -> Any:
    """Import a module of a package that is optional. Raises WorkerError where it is not installed, or is broken."""
    who, package = type(asks).__name__, name.partition(".")[0]
    fix = f"pip install 'flowrl-lm[{extra}]'."
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if error.name in (package, name, None):
            raise WorkerError(f"{who} needs the package {package}.", fix=fix) from None
        raise WorkerError(f"{who} cannot import {name}: {error}.", fix=fix) from error
