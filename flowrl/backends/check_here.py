"""Whether this machine has the devices and the engines of a plan, asked before the first model is opened."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module

from ..errors import ModelError, PlanError
from ..lowering.deployment import Deployments, WorkerSpec
from ..placement.backends import REFERENCE, backend
from ..placement.plan.plan import Plan


def check_here(plan: Plan, deployments: Deployments, models: Collection[str], *, in_this_process: bool) -> None:
    """Raise PlanError, at the line of the plan, for what ``models`` need and this machine does not have.

    ``models``: the workers that have one. ``in_this_process``: they are opened here; ranks have devices of their own.
    """
    for (name, serving), deployment in deployments.items():
        if name not in models:
            continue
        spec, use = deployment.spec, "generate" if serving else "train"
        if in_this_process:
            _check_device(plan, deployment.pool, spec.device)
        if versions := backend(spec.backend).versions:
            try:
                import_module(versions).check_here(spec.options, _kind(spec))
            except ModelError as error:
                what = f"{plan.title_of(name, use)}: {error.what}"
                raise PlanError(what, at=plan.place_of(name, use).at, fix=error.fix) from None


def _check_device(plan: Plan, pool: str, device: str) -> None:
    """Raise PlanError for a device of a pool that torch does not find."""
    if device in ("auto", "cpu"):
        return
    try:
        _pick_device(device)
    except ModelError as error:
        fix = f"Write {pool}: {{device: auto}}, which is a GPU where there is one, or {pool}: {{device: cpu}}."
        raise PlanError(f"pool '{pool}': {error.what}", at=plan.pools[pool].at, fix=fix) from None


def _kind(spec: WorkerSpec) -> str:
    """Return the kind of device that a copy of a worker has: ``cpu`` or ``cuda``."""
    return _pick_device("auto") if spec.device == "auto" else spec.device.partition(":")[0]


def _pick_device(said: str) -> str:
    return import_module(f".{REFERENCE}.load", __package__).pick_device(said).type
