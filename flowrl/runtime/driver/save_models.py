"""What a run leaves when all of its programs are done: a digest of all weights, and the trained models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..executor import Executor
from ..storage.checkpoints import checkpoint_folder as checkpoint
from ..storage.disk import writing
from ..storage.recorder import Recorder
from .model_card import model_card


def save_models(executor: Executor, recorder: Recorder, out: Path, *, save: bool) -> str:
    """Save each trained model in a folder of ``out``, unless ``save`` is false; return the digest of all weights."""
    workers = {name: executor.open(name) for name in executor.workers}
    digests = {n: d for n, w in sorted(workers.items()) if (d := w.digest()) is not None}
    digest = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
    recorder.run_record(weights_digest=digest, weights_digests=digests)
    for name, worker in workers.items() if save else ():
        if is_trained(worker):
            _save(worker, out / name, partial(model_card, recorder.record, name, recorder.last()))
    return digest


def save_best(executor: Executor, recorder: Recorder, checkpoints: Path, out: Path) -> None:
    """Save the trained models as the best checkpoint has them, which the workers are given back; none where none is.

    Nothing may be computed with them after that.
    """
    folder = checkpoint.best(checkpoints) if checkpoints.exists() else None
    if folder is None:
        return
    manifest = checkpoint.load_manifest(folder, reopened=True)
    said = manifest["best"]
    where = (said["program"], said["step"])
    line = next((line for line in recorder.metrics() if (line["program"], line["step"]) == where), {})
    for name in executor.workers:
        worker = executor.open(name)
        if is_trained(worker) and name in manifest["stamps"]:
            checkpoint.load_worker(folder, name, worker)
            _save(worker, out / name, partial(model_card, recorder.record, name, line, best=said))
    recorder.run_record(best={**{n: v for n, v in said.items() if n != "score"}, "checkpoint": folder.name})


def is_trained(worker: Any) -> bool:
    """Whether a worker has a model that the run trains."""
    return getattr(worker, "trains", hasattr(type(worker), "update"))


def _save(worker: Any, folder: Path, card: Callable[..., str]) -> None:
    with writing(folder):
        worker.save_model(str(folder))
        if folder.is_dir():  # a worker of one's own may save nothing
            (folder / "README.md").write_text(card(folder=folder), encoding="utf-8")
