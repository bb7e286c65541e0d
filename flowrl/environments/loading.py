"""Finds an environment by name: an installed one, a class in a module, or a class in a file."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ..errors import UsageError, near
from ..workers.env import Env

#: The group of entry points that packages name their environments in.
GROUP = "flowrl.environments"
_FORMS = "Write the name of an installed one, package.module:Class, or file.py:Class."


def find_environment(name: str) -> type[Env]:
    """Return the class of an environment: ``"wordle"``, ``"package.module:Class"`` or ``"file.py:Class"``.

    A package installs one by an entry point of the group ``flowrl.environments``. Of a module with one environment the
    class may be left out. Raises UsageError for a name that leads nowhere.

    >>> fl.environments.find_environment("flowrl.environments:Environment").__name__
    'Environment'
    """
    module, _, wanted = name.partition(":")
    if wanted or module.endswith(".py"):
        return _class_in(_module(module, name), wanted, name)
    installed = {point.name: point for point in entry_points(group=GROUP)}
    if name in installed:
        found = installed[name].load()
        return found if _is_environment(found) else _class_in(found, "", name)
    if "." in name:
        return _class_in(_module(name, name), "", name)
    meant = near(name, installed)
    raise UsageError(
        f"There is no environment '{name}' among the {len(installed)} that are installed.",
        fix=f"Did you mean {meant}?" if meant else _FORMS,
    )


def load_environment(name: str, **arguments: Any) -> Env:
    """Return an environment by its name, made with these arguments; see :func:`find_environment`.

    >>> type(fl.environments.load_environment("flowrl.environments:Environment")).__name__
    'Environment'
    """
    found = find_environment(name)
    try:
        return found(**arguments)
    except TypeError as error:
        raise UsageError(f"{found.__name__}: {error}.", fix="Give it the arguments that its __init__ has.") from error


def _module(where: str, name: str) -> Any:
    if where.endswith(".py"):
        path = Path(where)
        if not path.exists():
            raise UsageError(f"There is no file {where}.", fix=_FORMS)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None, "a file ending with .py has a loader"
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        sys.path.insert(0, str(path.parent))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(path.parent))
        return module
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name and not where.startswith(error.name):
            raise
        raise UsageError(f"There is no module '{where}', which '{name}' names.", fix=_FORMS) from error


def _class_in(module: Any, wanted: str, name: str) -> type[Env]:
    own = {
        key: value
        for key, value in vars(module).items()
        if _is_environment(value) and (value.__module__ == module.__name__ or key == wanted)
    }
    if wanted in own:
        return own[wanted]
    if len(own) == 1 and not wanted:
        return next(iter(own.values()))
    what = f"has no environment '{wanted}'" if wanted else f"has {len(own)} environments"
    raise UsageError(
        f"{name.partition(':')[0]} {what}.", have=sorted(own), fix="Write module:Class, with one of these."
    )


def _is_environment(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Env)
