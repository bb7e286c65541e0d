"""Modules of other libraries as they were released: their wheels are downloaded, and single files of them are loaded.

Such a file is run as it is, on the torch that is installed. What it imports beyond torch, numpy, ray and the modules that
are named here is a stand-in, which lets decorators and annotations pass and fails when it is computed with. Nothing is
installed, and ``sys.modules`` stays as it is.
"""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

#: Packages that a peer's module gets as they are, besides the standard library.
REAL = ("torch", "numpy", "ray")


@dataclass(frozen=True)
class Peer:
    """A release and the modules of it that are loaded as they are: ``Peer("verl==0.9.1", ("verl.utils.groupwise",))``.

    All else of the package is a stand-in, and so is whatever is not installed here.
    """

    release: str
    modules: tuple[str, ...]


VERL = Peer(
    "verl==0.9.1",
    (
        "verl.trainer.ppo.core_algos",
        "verl.trainer.ppo.rollout_corr_helper",
        "verl.utils.torch_functional",
        "verl.utils.groupwise",
    ),
)
OPENRLHF = Peer(
    "openrlhf==0.11.2",
    (
        "openrlhf.models.loss",
        "openrlhf.models.utils",
        "openrlhf.trainer.ppo_utils.experience_maker",
        "openrlhf.trainer.ppo_utils.length_penalty",
        "openrlhf.trainer.ppo_utils.kl_controller",
    ),
)
AREAL = Peer(
    "areal==1.0.4",
    (
        "areal.utils.constants",
        "areal.utils.functional.functional",
        "areal.utils.data",
        "areal.trainer.ppo.actor",
    ),
)
SKYRL = Peer(
    "skyrl==0.3.0",
    (
        "skyrl.backends.skyrl_train.utils.ppo_utils",
        "skyrl.backends.skyrl_train.utils.torch_utils",
        "skyrl.backends.skyrl_train.utils.off_policy_correction_utils",
    ),
)


@cache
def load(peer: Peer, name: str) -> ModuleType:
    """The module ``name`` of a peer. The test is skipped where its wheel cannot be downloaded."""
    wheel = _wheel(peer.release)
    file = name.replace(".", "/") + ".py"
    inside = next(n for n in wheel.namelist() if n == file or n.endswith(f".data/purelib/{file}"))
    module = ModuleType(name)
    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": partial(_import, peer)}
    with pytest.MonkeyPatch.context() as patch:  # dataclasses look their module up
        patch.setitem(sys.modules, name, module)
        exec(compile(wheel.read(inside), f"{peer.release}/{file}", "exec"), module.__dict__)
    return module


def _import(peer: Peer, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    """What an import statement in a peer's module gives: the real package, a module of the peer, or a stand-in."""
    if level:
        name = ".".join([*globals["__name__"].split(".")[:-level], *filter(None, [name])])
    top = name.partition(".")[0]
    if top in REAL or top in sys.stdlib_module_names:
        return builtins.__import__(name, globals, locals, fromlist, 0)
    return _module(peer, name if fromlist else top)


def _module(peer: Peer, name: str) -> ModuleType:
    return load(peer, name) if name in peer.modules else StandIn(peer, name)


def _wheel(release: str) -> zipfile.ZipFile:
    """The wheel of a release, kept in ``$FLOWRL_PEERS`` or the user's cache folder."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("FLOWRL_PEERS") or Path(cache_home) / "flowrl" / "peers") / release
    if not list(folder.glob("*.whl")):
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), release]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{release} cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    return zipfile.ZipFile(next(folder.glob("*.whl")))


class StandIn(ModuleType):
    """A module of a peer that is not loaded: what is in it are the peer's modules, and :class:`Nothing`."""

    def __init__(self, peer: Peer, name: str) -> None:
        super().__init__(name)
        self.__dict__["_peer"] = peer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self.__name__}.{name}"
        if any(m == path or m.startswith(f"{path}.") for m in self._peer.modules):
            return _module(self._peer, path)
        return Nothing(path)


class Nothing:
    """Stands for an object that is not there: it passes as decorator, base class and annotation, and as nothing else."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decorates = len(args) == 1 and not kwargs and (isinstance(args[0], type) or hasattr(args[0], "__code__"))
        return args[0] if decorates else Nothing(f"{self.__name__}(...)")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(f"{self.__name__}.{name}")

    def __getitem__(self, item: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)

    def __bool__(self) -> bool:
        raise TypeError(f"{self.__name__} is not installed here, and was asked whether it is true")
