"""The one flow of a script, loaded without running it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any, NoReturn

from ... import shipped
from ...errors import FlowError, ProgramError, UsageError, did_you_mean, names_instead, near_file, shown
from ...flow import Flow
from ...graph.script.site import own_frames, raised_at


def load_script(path: str, name: str | None = None) -> Flow:
    r"""The one flow of a script, which is loaded with its folder first on ``sys.path`` and not as ``__main__``.

    The name of a shipped algorithm stands for its driver, where no file has that name: ``fl.load_script("grpo")``. A
    script in a package is loaded as a module of it, so that its relative imports work; ``name`` is that of the module
    where Python knows it (``python -m package.driver``).

    >>> import pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "mine.py"
    >>> lines = ["import flowrl as fl", "flow = fl.Flow('mine')", "@flow.program", "def mine(): ..."]
    >>> _ = file.write_text("\n".join(lines))
    >>> fl.load_script(str(file)).name
    'mine'
    """
    script = Path(path)
    if not script.is_file():
        driver = shipped.find_driver(path)
        if driver is None and script.is_dir():
            inside = [str(p) for p in script.glob("*.py")]
            raise UsageError(f"{path} is a folder, not a script.", have=inside or None)
        script = driver or _no_script(script)
    script = script.resolve()
    if str(script.parent) not in sys.path:
        sys.path.insert(0, str(script.parent))
    module = _module(script, name or _name_in_package(script))
    try:
        _load_package(module, script)
        sys.modules[module.__name__] = module
        spec = module.__spec__
        assert spec is not None and spec.loader is not None, "a file has a loader"
        spec.loader.exec_module(module)
    except FlowError as error:
        error.at = error.at or raised_at(error)
        raise
    except (ImportError, SyntaxError) as error:
        what = f"{shown(path)} cannot be loaded: {type(error).__name__}: {error}."
        raise UsageError(what, at=raised_at(error), fix=_import_fix(error, script)) from error
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".rstrip(".")
        fix, have = names_instead(error)
        what = f"{shown(path)} failed while it was loaded: {cause}."
        failure = ProgramError(what, at=raised_at(error), have=have, fix=fix)
        raise failure from (error if len(own_frames(error)) > 1 else None)
    flows = list({id(value): value for value in vars(module).values() if isinstance(value, Flow)}.values())
    if len(flows) != 1:
        raise UsageError(
            f"{shown(path)} has {len(flows)} flows; a script has one.",
            fix='Write flow = fl.Flow("name") once, at module level.',
        )
    flow = flows[0]
    if not flow.programs:
        raise UsageError(f"{shown(path)} has no program.", fix="Write a function under @flow.program.")
    return flow


def _no_script(script: Path) -> NoReturn:
    """Raise UsageError for a path that is no file, with the files and the shipped algorithms that it may mean."""
    names = shipped.names()
    if script.suffix or len(script.parts) > 1:
        where = "" if script.is_absolute() else f" below {Path.cwd()}"
        module = Path(str(script).replace(".", "/") + ".py")  # of a script that is named as Python names a module
        meant = str(module) if module.is_file() else near_file(script, "*.py", names)
        fix = f"Did you mean {meant}?" if meant else "Name a file, or a shipped algorithm such as grpo."
        raise UsageError(f"there is no script {script}{where}.", fix=fix)
    beside = [str(p) for p in script.parent.glob("*.py")] if script.parent.is_dir() else []
    fix = did_you_mean(str(script), [*names, *beside], "Name a file, or one of these.", form="Did you mean {}?")
    raise UsageError(f"there is no script {script}, and no shipped algorithm {script}.", have=names, fix=fix)


def _name_in_package(script: Path) -> str | None:
    """The dotted name of a script whose folder is a package; None for one that stands by itself."""
    parts, folder = [script.stem], script.parent
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        parts, folder = [folder.name, *parts], folder.parent
    return ".".join(parts) if len(parts) > 1 else None


def _load_package(module: Any, script: Path) -> None:
    """Import the package of a module, if it is in one, from the folder that the package lies in."""
    package = module.__name__.rpartition(".")[0]
    if not package:
        return
    folder = script.parents[package.count(".")]
    if str(folder.parent) not in sys.path:
        sys.path.append(str(folder.parent))
    top = importlib.import_module(folder.name)
    if folder not in [Path(path).resolve() for path in getattr(top, "__path__", ())]:
        raise UsageError(
            f"{shown(str(script))} is in a package '{folder.name}', and Python knows another '{folder.name}', "
            f"{shown(getattr(top, '__file__', None) or repr(top))}.",
            fix=f"Give the folder {shown(str(folder))} another name.",
        )
    importlib.import_module(package)


def _import_fix(error: ImportError | SyntaxError, script: Path) -> str | None:
    """Return the fix of a relative import that has no package, or of what is shipped; None for another error."""
    if "no known parent package" in str(error):
        folder, name = shown(str(script.parent)), f"{script.parent.name}.{script.stem}"
        return f"Make {folder} a package, with a file __init__.py in it, or run it as a module: python -m {name}."
    missing = (error.name or "").removeprefix("flowrl.") if isinstance(error, ModuleNotFoundError) else ""
    if missing and (shipped.FOLDER / missing.replace(".", "/")).is_dir():
        return (
            f"What ships with flowrl is in flowrl.algorithms: from flowrl.algorithms.{missing} import ...; "
            "flowrl new grpo my_project makes a driver with a task of its own."
        )
    return None


def _module(script: Path, dotted: str | None) -> Any:
    """An empty module for a script, named like it unless something else has that name."""
    other = sys.modules.get(script.stem)
    taken = other is not None and getattr(other, "__file__", None) != str(script)
    name = dotted or (f"{script.stem}_script" if taken or script.stem in sys.stdlib_module_names else script.stem)
    spec = importlib.util.spec_from_file_location(name, script)
    if spec is None:
        raise UsageError(f"{shown(str(script))} is no Python file.", fix="A script's name ends in .py.")
    return importlib.util.module_from_spec(spec)
