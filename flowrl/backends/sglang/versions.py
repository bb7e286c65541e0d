"""Which versions of SGLang are supported."""

from __future__ import annotations

from ...errors import ModelError

SUPPORTED = ("0.5.23",)


def check_version(version: str) -> None:
    """Raise ModelError for a version whose protocol was not tried."""
    if version not in SUPPORTED:
        known = ", ".join(SUPPORTED)
        raise ModelError(f"SGLang {version} is there; flowrl supports {known}.", fix=f"Install sglang=={known}.")
