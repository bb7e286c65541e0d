"""Open what a program needs before it starts: its workers, their copies that generate, and those of evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ...lowering.lower import Execution
from ...marks import other_ids, vocabulary
from ..executor import Executor
from ..storage.checkpoints import checkpoint_folder as checkpoint

_COPY = ", the copy that generates,"


def open_workers(
    execution: Execution,
    evaluations: Sequence[Execution],
    executor: Executor,
    opening: Callable[[str], AbstractContextManager[None]],
    *,
    resumed: bool,
    begun_with: Path | None,
) -> None:
    """Open the workers of a program and of those that are run between its steps, and get them ready.

    ``opening`` is a block in which a worker is opened. Workers that are new have their state in the checkpoint
    ``begun_with`` of another run, if there is one; what the program before has updated is published. A ``resumed``
    program goes on with the state that its workers have. Raises ModelError for tokenizers that differ.
    """

    def open_worker(name: str) -> None:
        with opening(f"worker '{name}'"):
            executor.open(name)

    def open_copy(name: str) -> None:
        with opening(f"worker '{name}'{_COPY}"):
            executor.open_server(name)

    new = [name for name in execution.workers if name not in executor.workers]
    for name in execution.workers:
        open_worker(name)
    if begun_with is not None and not resumed:
        _begin_with_checkpoint(begun_with, new, executor)
    for name in execution.servers:
        open_copy(name)
    _compare_tokenizers(execution, executor)
    for other in evaluations:
        for name in other.workers:
            open_worker(name)
        for name in other.servers:
            open_copy(name)
        _compare_tokenizers(other, executor)
    executor.start_program(execution.workers, resumed=resumed)
    if not resumed:
        _publish(execution, executor)


def _begin_with_checkpoint(folder: Path, names: Iterable[str], executor: Executor) -> None:
    """Give workers that were just opened their state in the checkpoint of another run."""
    saved = checkpoint.load_manifest(folder, reopened=True)["stamps"]
    for name in names:
        if name in saved:
            checkpoint.load_worker(folder, name, executor.open(name))


def _compare_tokenizers(execution: Execution, executor: Executor) -> None:
    """Raise ModelError, with the line, where a call would read ids that another tokenizer made."""
    for read in execution.readings:
        mine, theirs = (vocabulary(executor.tokenizer(said)) for said in (read.reader, read.maker))
        if mine and theirs and mine != theirs:
            error = other_ids(read.title, read.column, read.other, read.own, read.instead)
            error.at = read.at
            raise error


def _publish(execution: Execution, executor: Executor) -> None:
    """Publish what the program before has updated to who follows a worker, and to copies that have other weights."""
    for name in {**execution.scheme.setup.followers, **dict.fromkeys(execution.servers)}:
        version = executor.workers[name].read_version()
        if name in execution.servers and executor.servers[name].version != version:
            executor.install(name, version)
