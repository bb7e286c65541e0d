"""Engines that train and generate: one folder each, imported by name on the rank where it opens."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, PlanError, did_you_mean
from ..placement.backends import BACKENDS, REFERENCE

if TYPE_CHECKING:
    from ..workers.model_options import Build, Model


def names() -> list[str]:
    """Return the engines that a run can have."""
    return sorted(row.name for row in BACKENDS.values() if row.built)


def open_engine(name: str, build: Build) -> Any:
    """Return the engine ``name``, opened with the model that ``build`` describes; its heavy imports happen now.

    Raises PlanError for an unknown name, and ModelError where the packages that the engine needs are not installed.
    """
    known = names()
    if name not in known:
        fix = did_you_mean(name, known, "Name one of these.", form="Write {}.")
        raise PlanError(f"There is no engine '{name}'.", have=known, fix=fix)
    try:
        module = import_module(BACKENDS[name].module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == __name__.partition(".")[0]:
            raise
        extra = f"[{BACKENDS[name].extra}]" if BACKENDS[name].extra else ""
        raise ModelError(
            f"The engine '{name}' needs '{error.name}', which is not installed.",
            fix=f"Install flowrl with all that it needs: pip install '.{extra}' in the source tree.",
        ) from error
    return module.open_engine(build)


def open_tokenizer(model: Model) -> Any:
    """Return the tokenizer of a model, without the model. Raises ModelError where it has none."""
    found = import_module(f".{REFERENCE}.load", __package__).load_tokenizer(model)
    if found is None:
        raise ModelError(
            f"The model '{model.title}' has no tokenizer.",
            fix="Give it one: Model(config=..., tokenizer=build_tokenizer).",
        )
    return found
