"""Which checkpoint a run goes on from, and what waits in its folder until it is sure that it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..journal import Journal
from . import checkpoint_folder as checkpoint
from .damage import survey


@dataclass(frozen=True)
class Chosen:
    """The checkpoint that a run goes on from, None for its start; and what is done in the folder once that is sure.

    ``damaged`` ones are put aside, those that are ``undone`` taken away, and with ``reopens`` the chosen one is again
    what it was before its program ended. ``said``: what there is to tell of it.
    """

    folder: Path | None = None
    manifest: dict[str, Any] | None = None
    damaged: tuple[Path, ...] = ()
    undone: tuple[Path, ...] = ()
    reopens: bool = False
    said: tuple[str, ...] = ()

    def settle(self) -> None:
        """Do it."""
        for path in self.damaged:
            checkpoint.put_aside(path)
        for path in self.undone:
            checkpoint.remove(path)
        if self.reopens and self.folder is not None:
            checkpoint.reopen(self.folder)


def newest_whole(out: Path, record: Mapping[str, Any], journal: Journal, *, before: Path | None = None) -> Chosen:
    """The newest whole checkpoint of a run, of those older than ``before``. Raises ResumeError where none is left."""
    found = survey(out, record, lacks=lambda manifest: _lacks(manifest, journal), before=before)
    manifest = checkpoint.load_manifest(found.whole) if found.whole is not None else None
    return Chosen(found.whole, manifest, tuple(found.damaged), said=tuple(found.lines()))


def _lacks(manifest: Mapping[str, Any], journal: Journal) -> str:
    """Which of the values that the program of a checkpoint has read are lost; empty where none is.

    Parts of the journal that were written before the checkpoint are looked at where it has no variables.
    """
    program = manifest.get("program") if "ended" not in manifest else None
    reads = program["reads"] if program else 0
    journal.load(_needed(manifest, reads))
    lost = journal.lost(manifest["stage"], reads)
    if not lost:
        return ""
    which = f"value {lost[0] + 1}" if len(lost) == 1 else f"{len(lost)} values, the first of them value {lost[0] + 1},"
    return f"{which} of the {reads} that its program has read {'is' if len(lost) == 1 else 'are'} lost from the journal"


def load_answers(journal: Journal, chosen: Chosen) -> None:
    """Have a journal know what a run that goes on from this checkpoint needs of it."""
    program = chosen.manifest["program"] if chosen.manifest else None
    journal.load(_needed(chosen.manifest, program["reads"] if program else 0) if chosen.manifest else {})


def _needed(manifest: Mapping[str, Any], reads: int) -> Mapping[str, int]:
    """From which parts on the journals are needed: all of them where so many reads are answered from there."""
    return manifest.get("journal", {}) if not reads or "variables" in manifest["program"] else {}


def made_longer(newest: Chosen, program: int, older: Callable[[Path], Chosen]) -> Chosen:
    """Where a program that has ended goes on: at the end of its last loop, or where it has done more since then before.

    ``older`` gives the newest whole checkpoint of those before another one.
    """
    assert newest.folder is not None and newest.manifest is not None, "a program ended with a checkpoint"
    if "ended" in newest.manifest:
        return replace(newest, manifest=checkpoint.load_manifest(newest.folder, reopened=True), reopens=True)
    found, undone = newest, list[Path]()
    while found.folder is not None and found.manifest is not None and found.manifest["stage"] > program:
        undone.append(found.folder)
        past = older(found.folder)
        found = replace(past, damaged=found.damaged + past.damaged, said=found.said + past.said)
    return replace(found, undone=tuple(undone))
