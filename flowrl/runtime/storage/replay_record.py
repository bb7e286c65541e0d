"""What a folder is to do again, as it is written there: which run, up to where, and what timing had decided in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ...schedule.events import Begun, Groups
from .digest_lines import begun_line, begun_of, groups_of

NAME = "replay.json"


@dataclass(frozen=True)
class Replay:
    """What is done again: ``Replay("runs/grpo", 0, 7)``.

    ``program`` is the number of the last program in the run, and ``until`` its last step; None for all of it. Where
    timing has decided it, ``begun`` is what pools that sample began with, each in its order, and ``taken`` are the
    groups that calls have got. With ``forced`` the rows that the run has sampled take the place of those that the
    replay samples.
    """

    run: str
    program: int
    until: int | None = None
    begun: Sequence[Begun] = ()
    taken: Mapping[int, Groups] = field(default_factory=dict[int, "Groups"])
    forced: bool = False

    def ends_after(self, program: int, step: int) -> bool:
        """Whether this step of this program is the last one."""
        return program == self.program and step == self.until

    def ends_before(self, program: int, step: int) -> bool:
        """Whether this step of this program comes after the last one: it may be under way as the replay stops."""
        return program == self.program and self.until is not None and step > self.until


def read_replay(folder: Path) -> Replay | None:
    """What a folder is to do again; None for that of a run."""
    try:
        said = json.loads((folder / NAME).read_text())
    except FileNotFoundError:
        return None
    begun = [begun_of(each) for each in said["begun"]]
    taken = {int(call): groups_of(groups) for call, groups in said["taken"].items()}
    return Replay(**{**said, "begun": begun, "taken": taken})


def write_replay(folder: Path, replay: Replay) -> None:
    """Have a folder do this again."""
    (folder / NAME).write_text(json.dumps({**asdict(replay), "begun": [*map(begun_line, replay.begun)]}))
