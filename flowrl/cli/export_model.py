"""A checkpoint of an actor made a Hugging Face folder, whose logits are held against those of the actor itself."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ..backends import open_engine
from ..errors import UsageError
from ..placement.backends import REFERENCE
from ..runtime.driver.model_card import model_card
from ..runtime.storage.checkpoints import checkpoint_folder as checkpoints
from ..runtime.storage.checkpoints.other_run import chosen_checkpoint
from ..runtime.storage.checkpoints.state_files import StateFiles, read_record
from ..runtime.storage.disk import writing
from ..runtime.storage.run_record import last_records
from ..workers.actor import Actor
from .arguments.recorded_run import recorded_run, reopen

DTYPES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Exported:
    """What was written: ``Exported("actor", "checkpoint 000004, grpo step 199", "bf16", 64, 0.0)``."""

    worker: str
    place: str
    dtype: str
    tokens: int
    difference: float


def export_model(
    run: Path, folder: Path, *, worker: str | None = None, checkpoint: str = "last", dtype: str | None = None
) -> Exported:
    """Write the actor of a run as a Hugging Face folder with a card, as a checkpoint has it.

    The folder appears when transformers has loaded it and given the actor's logits; weights are rounded to ``dtype``
    after that. Raises UsageError for what is not there, RunError where the two differ.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty.", fix="Name a folder that is not there yet.")
    record = recorded_run(run)
    point = chosen_checkpoint(run, record, checkpoint)
    manifest = checkpoints.load_manifest(point, reopened=True)
    handle = _actor(reopen(record)[0].handles, worker, manifest["stamps"])
    made = handle.cls(**handle.arguments)
    made.name = handle.name
    made.introduce(lambda other: other.cls(**other.arguments))
    engine = open_engine(REFERENCE, made.build())
    with StateFiles(point, handle.name) as files:
        engine.load_state_shards(files.fill, read_record(point, handle.name)["engine"])
    last = _last_line(run, manifest)
    reference = import_module(f"flowrl.backends.{REFERENCE}.exported")
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            engine.save(part)
            tokens, difference, said = reference.hold_against(part, engine, dtype)
            card = model_card(record, handle.name, last, checkpoint=point.name, folder=part)
            (part / "README.md").write_text(card, encoding="utf-8")
            part.chmod(0o755)
            if folder.exists():
                folder.rmdir()
            part.rename(folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    at = f", {last['program']} step {last['step']}" if last else ""
    return Exported(handle.name, f"checkpoint {point.name}{at}", said, tokens, difference)


def _actor(handles: Sequence[Any], name: str | None, saved: Mapping[str, Any]) -> Any:
    """The actor of this name, or the one that is trained. Raises UsageError."""
    actors = [h for h in handles if isinstance(h.cls, type) and issubclass(h.cls, Actor) and h.name in saved]
    found = [h for h in actors if h.name == name] if name else [h for h in actors if h.cls.is_trained(h.arguments)]
    if len(found) == 1:
        return found[0]
    have = [h.name for h in actors]
    if not found:
        raise UsageError(f"the run has no actor '{name}'." if name else "the run trains no actor.", have=have)
    raise UsageError("the run trains several actors.", have=have, fix="Say which with --worker.")


def _last_line(run: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What was logged last before a checkpoint; empty where nothing was."""
    size = manifest["marks"]["metrics"][0]
    return next(iter(last_records(run / "metrics.jsonl", size, 1)), {})
