"""What a run leaves when all of its programs are done: a digest of all weights, and the trained models."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ..executor import Executor
from ..storage.disk import writing
from ..storage.recorder import Recorder


def save_models(executor: Executor, recorder: Recorder, out: Path, *, save: bool) -> str:
    """Save each trained model in a folder of ``out``, unless ``save`` is false; return the digest of all weights."""
    workers = {name: executor.open(name) for name in executor.workers}
    digests = {n: d for n, w in sorted(workers.items()) if (d := w.digest()) is not None}
    digest = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
    recorder.run_record(weights_digest=digest, weights_digests=digests)
    for name, worker in workers.items() if save else ():
        if getattr(worker, "trains", hasattr(type(worker), "update")):
            with writing(out / name):
                worker.save_model(str(out / name))
    return digest
