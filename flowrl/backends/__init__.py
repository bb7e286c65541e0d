"""Engines that train and generate: one folder each, imported by name on the rank where it opens."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, PlanError, near

if TYPE_CHECKING:
    from ..workers.records import Build, Model

#: The extra of the package that installs what an engine imports. The reference engine needs none.
EXTRAS = {"vllm": "vllm", "sglang": "sglang", "megatron": "megatron"}


def names() -> list[str]:
    """The engines that are here: the folders beside this file."""
    return sorted(p.parent.name for p in Path(__file__).parent.glob("*/engine.py"))


def open_engine(name: str, build: Build) -> Any:
    """Open the engine ``name`` with the model that ``build`` describes; its heavy imports happen now.

    Raises PlanError for an unknown name, and ModelError where the packages that the engine needs are not installed.
    """
    known = names()
    if name not in known:
        meant = near(name, known)
        raise PlanError(
            f"There is no engine '{name}'.", have=known, fix=f"Write {meant}." if meant else "Name one of these."
        )
    try:
        module = import_module(f".{name}.engine", __package__)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == __name__.partition(".")[0]:
            raise
        extra = f"[{EXTRAS[name]}]" if name in EXTRAS else ""
        raise ModelError(
            f"The engine '{name}' needs '{error.name}', which is not installed.",
            fix=f"Install flowrl with all that it needs: pip install '.{extra}' in the source tree.",
        ) from error
    return module.open_engine(build)


def open_tokenizer(model: Model) -> Any:
    """The tokenizer of a model, without the model. Raises ModelError where it has none."""
    found = import_module(".hf.load", __package__).load_tokenizer(model)
    if found is None:
        raise ModelError(
            f"The model '{model.title}' has no tokenizer.",
            fix="Give it one: Model(config=..., tokenizer=build_tokenizer).",
        )
    return found
