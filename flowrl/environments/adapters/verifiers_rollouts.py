"""What adapters of verifiers share: its rollouts run in one event loop, and its errors are told apart by name."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from ...workers.base import Opening
from ..opened_once import opened_once
from .event_loop import start_loop
from .package_rollouts import PackageRollouts

_INFRASTRUCTURE = {"InfraError", "SandboxError", "TunnelError", "InterceptionError"}


class VerifiersRollouts(PackageRollouts):
    """Base of adapters whose ``agent`` is a rollout of verifiers; ``state.result`` is what it leaves behind."""

    turns: int = 1000  # verifiers has a limit of its own

    def open(self, opening: Opening) -> None:
        super().open(opening)
        _ = self._loop  # before several threads ask for it

    def close(self) -> None:
        loop = vars(self).pop("_loop", None)
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
        super().close()

    @opened_once
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The loop in which all rollouts run, as an environment may share clients and locks among them."""
        return start_loop("flowrl-verifiers")

    def _wait_for(self, running: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(running, self._loop).result()


def failure_named(kinds: set[str], said: str, error: Exception | None = None) -> Exception:
    """An error of verifiers by the names of its classes: an OSError where the machine is at fault."""
    return OSError(said) if kinds & _INFRASTRUCTURE else error or RuntimeError(said)
