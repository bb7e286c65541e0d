"""Write docs/damage.md from tests/runtime/damages.py: ``python docs/make_damage.py``. A test keeps them equal."""

import runpy
from itertools import groupby
from pathlib import Path

HERE = Path(__file__).parent
TABLE = HERE.parent / "tests" / "runtime" / "damages.py"
HEAD = """\
# Damage

What `--resume` says of a run folder in which something is damaged, and what becomes of the run. Each line is
printed, and is an event of kind `damaged` in `events.jsonl`. A run that stops has changed nothing in the folder.

Every file of a checkpoint has a checksum (CRC-32) in its manifest, and so have the manifest, `run.json` and each line
of the journal; a manifest also has those of `metrics.jsonl`, `timeline.jsonl`, `traffic.jsonl`, `memory.jsonl`,
`digests.jsonl`, `ledger.jsonl` and `trajectories.jsonl` up to its step, of a longer file of its last 4 MiB at least.
They show what a broken disk does, not what a
person means to do. The two checkpoints that are kept share no file.

Nothing is cut or taken away before the program has come to the point where the run goes on.

The page is made from `tests/runtime/damages.py` by `docs/make_damage.py`; a test does each of these things to
a folder. The run has 8 steps and was killed in its last: checkpoint 000001 was taken after step 4, 000002 after step 6.
"""
TAIL = """\

## A disk that takes no more

A full disk, a quota, a limit of the size of files, a broken disk or one that can only be read ends the run with one
line. It names the file, what there was to write, what is free, and how to go on. What was written of a
checkpoint is taken away at once, and of a line nothing stays, so the folder is as after the last whole line:

```text
DiskError: runs/a/checkpoints/.000003.part/actor.0.safetensors could not be written:
No space left on device (1.2 GB to write, 0.3 GB free).
  fix  Make room, then go on with --resume.
```
"""


def page() -> str:
    """The page: kinds of damage, by what they come to."""
    table = runpy.run_path(str(TABLE))
    order = [table[n] for n in ("STEPS_AGAIN", "EQUAL", "ASKED_AGAIN", "LINES_LOST", "ONE_NUMBER", "STOPS")]
    kinds_in_order = sorted(table["DAMAGES"], key=lambda damage: order.index(damage.comes_to))
    parts: list[str] = []
    for comes_to, kinds in groupby(kinds_in_order, lambda damage: damage.comes_to):
        parts.append(f"## {comes_to.rstrip('.')}\n\n| what has happened | what the run says |\n|---|---|")
        for kind in kinds:
            said = "<br>".join(f"`{line.strip()}`" for text in kind.said for line in text.splitlines())
            parts.append(f"| {kind.what} | {said or 'nothing'} |")
        parts.append("")
    return HEAD + "\n" + "\n".join(parts) + TAIL


if __name__ == "__main__":
    (HERE / "damage.md").write_text(page())
