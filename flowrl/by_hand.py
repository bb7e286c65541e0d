"""Workers made by hand, whose ops are called on plain batches: in a debugger, or line by line in a notebook."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from .errors import ModelError
from .placement.backends import REFERENCE
from .placement.plan.rules import check_option
from .workers.base import Worker
from .workers.engine import Engine
from .workers.model_options import Build

W = TypeVar("W", bound=Worker)

_OPENED: Counter[str] = Counter()


def _told_apart(name: str) -> str:
    """Return the name under which a worker made by hand samples rows: ``actor``, then ``actor (2)``."""
    _OPENED[name] += 1
    return name if _OPENED[name] == 1 else f"{name} ({_OPENED[name]})"


def open_worker(
    worker: W,
    *,
    name: str = "",
    device: str = "auto",
    backend: str = REFERENCE,
    options: Mapping[str, float | bool | str] = {},
    engine: Engine | None = None,
) -> W:
    """Open a worker made by hand, to call its ops on plain batches: ``actor = fl.open(fl.Actor("folder"))``.

    A program can be run line by line this way, in a debugger or a notebook, with the numbers that it gives in a flow.
    Workers of one ``name`` are the same one to the rows that they sample; without a name each is another one.
    ``backend`` names the engine of its model, as a plan does, and ``options`` what a plan says beside that.
    ``engine``: an engine that is there, such as ``fl.testing.FakeEngine``, in place of one with the worker's model.
    Raises PlanError for an option that the backend does not have.

    >>> class Double(fl.Worker):
    ...     @fl.op(reads="rewards", adds="doubled: f32[]")
    ...     def double(self, batch):
    ...         return {"doubled": batch.rewards * 2}
    >>> fl.open(Double()).double(fl.Batch.of(2, rewards=[1.0, 0.5])).doubled.to_list()
    [2.0, 1.0]
    """
    from .backends import open_engine
    from .workers.base import Opening
    from .workers.model_worker import ModelWorker
    from .workers.tokens.tokenizer import find_tokenizer

    worker.name = name or worker.name or type(worker).__name__.lower()
    worker.opened_as = name or _told_apart(worker.name)
    for option, value in options.items():
        check_option(worker.name, backend, option, value, None)

    def tokenizer(said: Any) -> Any:
        if said is None:
            raise ModelError(
                f"{worker.name} belongs to no flow, so there is no actor whose tokenizer it could take.",
                fix="Give it tokenizer=: an open actor, a function that builds one, a hub name or a folder.",
            )
        return said.tokenizer if isinstance(said, ModelWorker) else find_tokenizer(said)

    def opened(build: Build) -> Engine:
        return open_engine(backend, replace(build, options=options)) if engine is None else engine

    worker.open(
        Opening(
            open_engine=opened,
            peer=lambda other: other,
            tokenizer=tokenizer,
            warn=lambda text: warnings.warn(text, stacklevel=2),
            apart=lambda other: "",
            device=device,
            by_hand=True,
        )
    )
    worker.program_starts()
    return worker


open_worker.__name__ = open_worker.__qualname__ = "open"  # help(fl.open) shows the name that users write
