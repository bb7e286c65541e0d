"""Which class a name of ``--track`` means: one of flowrl's, one that a package offers, or ``module:Class``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module, metadata, util

from ..errors import UsageError, did_you_mean
from .tracker import TrackedRun, Tracker

#: Of each tracker here, which is called like the module that it needs, its class, and the package with that module.
TRACKERS = {
    "tensorboard": ("TensorBoard", "tensorboard"),
    "wandb": ("WandB", "wandb"),
    "mlflow": ("MLflow", "mlflow-skinny"),
    "trackio": ("Trackio", "trackio"),
}
#: The entry points under which packages offer trackers: ``[project.entry-points."flowrl.trackers"]``.
GROUP = "flowrl.trackers"


def find_trackers(names: str | Sequence[str]) -> dict[str, Callable[[TrackedRun], Tracker]]:
    """Return what makes the trackers of some names, each once. Raises as :func:`find_tracker` does."""
    return {name: find_tracker(name) for name in ([names] if isinstance(names, str) else names)}


def find_tracker(name: str) -> Callable[[TrackedRun], Tracker]:
    """Return what makes the tracker of a name. Nothing of its package is imported yet, except for ``module:Class``.

    Raises UsageError for a name that means nothing and for a package that is not installed.
    """
    if name in TRACKERS:
        cls, package = TRACKERS[name]
        if util.find_spec(name) is None:
            raise UsageError(f"--track {name} needs {package}, which is not installed.", fix=f"pip install {package}")
        return lambda run: getattr(import_module(f".{name}_tracker", __package__), cls)(run)
    if ":" in name:
        return _of_module(name)
    offered = {point.name: point for point in metadata.entry_points(group=GROUP)}
    if name in offered:
        return lambda run: offered[name].load()(run)
    known = [*TRACKERS, *offered]
    fix = did_you_mean(name, known, "Name your own as module:Class.")
    raise UsageError(f"--track {name}: there is no such tracker.", have=", ".join(known), fix=fix)


def _of_module(name: str) -> Callable[[TrackedRun], Tracker]:
    module, _, cls = name.partition(":")
    try:
        return getattr(import_module(module), cls)
    except (ImportError, AttributeError, ValueError) as error:
        fix = "Write --track module:Class, with a module that Python finds."
        raise UsageError(f"--track {name} cannot be loaded: {error}.", fix=fix) from error
