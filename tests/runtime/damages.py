"""Kinds of damage to the folder of a run, and what a resume says of each. docs/damage.md is made of this table.

The run has 8 steps and was killed in its eighth: checkpoint 000001 was taken after step 4, 000002 after step 6.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NEWEST, BEFORE = "checkpoints/000002", "checkpoints/000001"

#: What a resume comes to.
EQUAL = "Nothing is lost."
STEPS_AGAIN = "The steps since the checkpoint before are done again; nothing is lost."
ASKED_AGAIN = "The external op is asked again for the rows of that line; no other row is."
LINES_LOST = "The weights are those of the undisturbed run; the records of these steps are lost."
ONE_NUMBER = "The weights are those of the undisturbed run; what was changed in the record stays."
STOPS = "The run stops, and the folder is as it was."


@dataclass(frozen=True)
class Damage:
    """One kind: what happened, how it is done to a folder, the lines that a resume says, and what it comes to."""

    what: str
    do: Callable[[Path], None]
    said: tuple[str, ...] = ()
    comes_to: str = EQUAL


def flip(name: str, at: float = 0.5) -> Callable[[Path], None]:
    """Turn a bit round; ``at`` says where in the file."""

    def do(run: Path) -> None:
        raw = bytearray((run / name).read_bytes())
        raw[min(len(raw) - 1, int(at * len(raw)))] ^= 1
        (run / name).write_bytes(raw)

    return do


def line(name: str, change: Callable[[list[bytes]], object]) -> Callable[[Path], None]:
    """Do something to the lines of a file."""

    def do(run: Path) -> None:
        lines = (run / name).read_bytes().splitlines(keepends=True)
        change(lines)
        (run / name).write_bytes(b"".join(lines))

    return do


def text(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda run: (run / name).write_bytes(change((run / name).read_bytes())) and None


def cut(name: str, to: float) -> Callable[[Path], None]:
    return text(name, lambda raw: raw[: int(to * len(raw))])


def zeros(name: str) -> Callable[[Path], None]:
    return text(name, lambda raw: bytes(len(raw)))


def tail(name: str, more: bytes) -> Callable[[Path], None]:
    return text(name, lambda raw: raw + more)


def gone(name: str) -> Callable[[Path], None]:
    return lambda run: shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Put something else in the place of a file or folder."""

    def do(run: Path) -> None:
        gone(name)(run)
        make(run / name)

    return do


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def to_nothing(path: Path) -> None:
    path.symlink_to("nowhere")


def folder(path: Path) -> None:
    path.mkdir()


def closed(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).chmod(0)


def both(*damages: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda run: [do(run) for do in damages] and None


def other_run(run: Path) -> None:
    """The manifest of a run of the same script."""
    path = run / NEWEST / "manifest.json"
    from flowrl.runtime.storage.run_record import with_checksum

    path.write_text(json.dumps(with_checksum({**json.loads(path.read_text()), "run": "another"})))


def older_flowrl(run: Path) -> None:
    """A checkpoint as it was written before there were checksums."""
    for path in (run / NEWEST / "manifest.json", run / BEFORE / "manifest.json"):
        manifest = json.loads(path.read_text())
        for name in ("checksum", "files", "run", "record"):
            manifest.pop(name)
        manifest["marks"] = {name: size for name, (size, _) in manifest["marks"].items()}
        path.write_text(json.dumps(manifest))
    record = json.loads((run / "run.json").read_text())
    for name in ("checksum", "id", "checkpoints"):
        record.pop(name)
    (run / "run.json").write_text(json.dumps(record))
    journal = [json.loads(raw) for raw in (run / "journal.jsonl").read_text().splitlines()]
    (run / "journal.jsonl").write_text(
        "".join(json.dumps({**e, "crc": None}) + "\n" for e in journal).replace(', "crc": null', "")
    )


def swapped(first: str, second: str) -> Callable[[Path], None]:
    def do(run: Path) -> None:
        raw = (run / first).read_bytes()
        (run / first).write_bytes((run / second).read_bytes())
        (run / second).write_bytes(raw)

    return do


def copied(source: str, target: str) -> Callable[[Path], None]:
    return lambda run: shutil.copytree(run / source, run / target) and None


def bare(name: str) -> Callable[[Path], None]:
    """What a kill has left of a checkpoint."""
    return both(copied(BEFORE, name), lambda run: (run / name / "manifest.json").unlink())


def aside(why: str, *, more: str = ", and checkpoint 000001 is taken in its place") -> str:
    return f"checkpoint 000002 is damaged: {why}; it is put aside as 000002.damaged{more}"


def stops(what: str, fix: str) -> str:
    return f"ResumeError: {what} Nothing was changed.\n  fix  {fix}"


BACK = "Bring the files back, or start anew with --overwrite."
READABLE = "Make it readable, or take it away, and go on with --resume."
TENSORS = f"{NEWEST}/memory.0.safetensors"
OTHER = "has other contents than were written"
NOT_JSON = "lines that are no JSON are left out"


def _checkpoint(what: str, do: Callable[[Path], None], why: str) -> Damage:
    return Damage(what, do, (aside(why),), STEPS_AGAIN)


def _answer(lines: list[bytes], number: int) -> int:
    """Where in a journal the answers of a step are."""
    return [i for i, raw in enumerate(lines) if b'"call":' in raw][number]


def _read(lines: list[bytes], number: int) -> int:
    return [i for i, raw in enumerate(lines) if b'"read":' in raw][number]


def _spoil(which: Callable[[list[bytes], int], int], number: int) -> Callable[[list[bytes]], None]:
    def change(lines: list[bytes]) -> None:
        at = which(lines, number)
        raw = bytearray(lines[at])
        raw[raw.index(b'"value":' if b'"value":' in raw else b'"inputs":') + 11] ^= 1
        lines[at] = bytes(raw)

    return change


LOST_VALUES = "of checkpoint 000002"

DAMAGES = (
    _checkpoint("a bit of the weights is flipped", flip(TENSORS, 0.99), f"its memory.0.safetensors {OTHER}"),
    _checkpoint("a bit of their header is flipped", flip(TENSORS, 0.1), f"its memory.0.safetensors {OTHER}"),
    _checkpoint("weights are cut in half", cut(TENSORS, 0.5), "its memory.0.safetensors has N bytes of N"),
    _checkpoint("weights are cut to nothing", cut(TENSORS, 0), "its memory.0.safetensors has N bytes of N"),
    _checkpoint("weights are longer than they were", tail(TENSORS, b"\0"), "its memory.0.safetensors has N bytes of N"),
    _checkpoint("weights are full of zeros", zeros(TENSORS), f"its memory.0.safetensors {OTHER}"),
    _checkpoint("weights are missing", gone(TENSORS), "its memory.0.safetensors is missing"),
    _checkpoint("a folder is in the place of the weights", instead(TENSORS, folder), "its memory.0.safetensors is a folder"),
    _checkpoint("a link to itself is in their place", instead(TENSORS, loop),
                "its memory.0.safetensors cannot be read (Too many levels of symbolic links)"),
    _checkpoint("a link to nothing is in their place", instead(TENSORS, to_nothing), "its memory.0.safetensors is missing"),
    _checkpoint("weights may not be read", closed(TENSORS), "its memory.0.safetensors cannot be read (Permission denied)"),
    _checkpoint("the boxes of the weights are missing", gone(f"{NEWEST}/memory.0.boxes"), "its memory.0.boxes is missing"),
    _checkpoint("a bit of the boxes is flipped", flip(f"{NEWEST}/memory.0.boxes"), f"its memory.0.boxes {OTHER}"),
    _checkpoint("a bit of a worker's record is flipped", flip(f"{NEWEST}/counter.json"), f"its counter.json {OTHER}"),
    _checkpoint("a worker's record is missing", gone(f"{NEWEST}/counter.json"), "its counter.json is missing"),
    _checkpoint("the records of two workers are swapped", swapped(f"{NEWEST}/counter.json", f"{NEWEST}/memory.json"),
                "its memory.json has N bytes of N, and 1 more of its files are damaged"),
    _checkpoint("a bit of the rows that the program held is flipped", flip(f"{NEWEST}/live.safetensors", 0.99),
                f"its live.safetensors {OTHER}"),
    _checkpoint("the rows that the program held are missing", gone(f"{NEWEST}/live.safetensors"),
                "its live.safetensors is missing"),
    _checkpoint("several files are damaged", both(flip(TENSORS), gone(f"{NEWEST}/counter.json")),
                f"its memory.0.safetensors {OTHER}, and 1 more of its files are damaged"),
    _checkpoint("a file of another checkpoint was copied there",
                lambda run: (run / NEWEST / "counter.1.boxes").write_text("[]") and None,
                "it holds counter.1.boxes, which is none of its files"),
    _checkpoint("the manifest is missing", gone(f"{NEWEST}/manifest.json"), "it has no manifest.json"),
    _checkpoint("the manifest is empty", cut(f"{NEWEST}/manifest.json", 0), "its manifest.json is empty"),
    _checkpoint("the manifest is cut in half", cut(f"{NEWEST}/manifest.json", 0.5), "its manifest.json is no JSON"),
    _checkpoint("the manifest is full of zeros", zeros(f"{NEWEST}/manifest.json"), "its manifest.json is full of zeros"),
    _checkpoint("a digit of the manifest is another", text(f"{NEWEST}/manifest.json", lambda raw: raw.replace(b'"steps": 6', b'"steps": 7')),
                f"its manifest.json {OTHER}"),
    _checkpoint("the manifest holds something else", text(f"{NEWEST}/manifest.json", lambda raw: b"[]"),
                "its manifest.json holds no record"),
    _checkpoint("a folder is in the place of the manifest", instead(f"{NEWEST}/manifest.json", folder),
                "its manifest.json cannot be read (Is a directory)"),
    _checkpoint("the manifest is that of another run", other_run, "its manifest.json is of another run"),
    _checkpoint("the manifest is that of the checkpoint before",
                lambda run: shutil.copy(run / BEFORE / "manifest.json", run / NEWEST / "manifest.json") and None,
                f"its memory.0.safetensors {OTHER}, and 3 more of its files are damaged"),
    _checkpoint("the checkpoint is an empty folder", instead(NEWEST, folder), "it has no manifest.json"),
    _checkpoint("the checkpoint is a file", instead(NEWEST, lambda path: path.write_text("")), "it is no folder"),
    _checkpoint("the checkpoint may not be read", closed(NEWEST), "its manifest.json cannot be read (Permission denied)"),
    Damage("all checkpoints are damaged", both(flip(TENSORS), gone(f"{BEFORE}/manifest.json")),
           (stops(f"no checkpoint of RUN is whole: of 000002, its memory.0.safetensors {OTHER}; of 000001, it has no "
                  "manifest.json.", BACK),), STOPS),
    Damage("all checkpoints are gone", gone("checkpoints"),
           (stops("the run in RUN has taken checkpoints, and none of them is there.",
                  "Bring the folder checkpoints back, or start anew with --overwrite."),), STOPS),
    Damage("a file is in the place of all checkpoints", instead("checkpoints", lambda path: path.write_text("")),
           (stops("RUN/checkpoints cannot be read: Not a directory.", READABLE),), STOPS),
    Damage("a link to itself is in their place", instead("checkpoints", loop),
           (stops("RUN/checkpoints cannot be read: Too many levels of symbolic links.", READABLE),), STOPS),
    Damage("a link to nothing is in their place", instead("checkpoints", to_nothing),
           (stops("RUN/checkpoints cannot be read: it is a link to nothing.", READABLE),), STOPS),
    Damage("the checkpoints may not be read", closed("checkpoints"),
           (stops("RUN/checkpoints cannot be read: Permission denied.", READABLE),), STOPS),
    Damage("a kill has left a checkpoint that was being written", bare("checkpoints/.000003.part")),
    Damage("a kill has left a checkpoint that was being taken away", bare("checkpoints/.000000.gone")),
    Damage("a kill has left half of an old checkpoint, with an older flowrl", bare("checkpoints/000000")),
    Damage("an older flowrl has written the run, without checksums", older_flowrl,
           ("checkpoint 000002 is of an older flowrl, without checksums: it is taken unchecked",)),
    Damage("the journal ends in the middle of a line", tail("journal.jsonl", b'{"program":0,"ca'),
           ("journal.jsonl ends in the middle of a line: its last N bytes are cut off, and what they held is asked again "
            "where the run needs it",)),
    Damage("the journal ends in zeros", tail("journal.jsonl", bytes(64)),
           ("journal.jsonl ends in the middle of a line: its last N bytes are cut off, and what they held is asked again "
            "where the run needs it",)),
    Damage("a bit is flipped in answers of before the checkpoint", line("journal.jsonl", _spoil(_answer, 1)),
           ("line 3 of journal.jsonl is damaged: rows whose answers were there are asked again where the run needs them",)),
    Damage("a bit is flipped in answers of after the checkpoint", line("journal.jsonl", _spoil(_answer, 6)),
           ("line 13 of journal.jsonl is damaged: rows whose answers were there are asked again where the run needs them",),
           ASKED_AGAIN),
    Damage("a bit is flipped in a value that the program has read", line("journal.jsonl", _spoil(_read, 5)),
           (aside("value 6 of the 6 that its program has read is lost from the journal"),
            "line 12 of journal.jsonl is damaged: rows whose answers were there are asked again where the run needs them"),
           STEPS_AGAIN),
    Damage("the same, in a value that both checkpoints need", line("journal.jsonl", _spoil(_read, 0)),
           (stops("no checkpoint of RUN is whole: of 000002, value 1 of the 6 that its program has read is lost from the "
                  "journal; of 000001, value 1 of the 4 that its program has read is lost from the journal.", BACK),), STOPS),
    Damage("the journal is missing", gone("journal.jsonl"),
           (stops("no checkpoint of RUN is whole: of 000002, 6 values, the first of them value 1, of the 6 that its program "
                  "has read are lost from the journal; of 000001, 4 values, the first of them value 1, of the 4 that its "
                  "program has read are lost from the journal.", BACK),), STOPS),
    Damage("a folder is in the place of the journal", instead("journal.jsonl", folder),
           (stops("RUN/journal.jsonl cannot be read: Is a directory.", READABLE),), STOPS),
    Damage("the journal may not be read", closed("journal.jsonl"),
           (stops("RUN/journal.jsonl cannot be read: Permission denied.", READABLE),), STOPS),
    Damage("metrics end in the middle of a line", tail("metrics.jsonl", b'{"program": "tra')),
    Damage("metrics end in zeros", tail("metrics.jsonl", bytes(4096))),
    Damage("metrics are cut to nothing", cut("metrics.jsonl", 0),
           ("metrics.jsonl has N bytes of the N that it had at the checkpoint: the lines that are lacking are lost",), LINES_LOST),
    Damage("metrics are missing", gone("metrics.jsonl"),
           ("metrics.jsonl has N bytes of the N that it had at the checkpoint: the lines that are lacking are lost",), LINES_LOST),
    Damage("metrics are cut in the middle", cut("metrics.jsonl", 0.4),
           ("metrics.jsonl has N bytes of the N that it had at the checkpoint: the lines that are lacking are lost",), LINES_LOST),
    Damage("a line of the metrics is full of zeros", line("metrics.jsonl", lambda lines: lines.__setitem__(1, bytes(len(lines[1])))),
           (f"metrics.jsonl has other contents than it had at the checkpoint: {NOT_JSON}",), LINES_LOST),
    Damage("a digit of the metrics is another", text("metrics.jsonl", lambda raw: raw.replace(b'"step": 1', b'"step": 9', 1)),
           (f"metrics.jsonl has other contents than it had at the checkpoint: {NOT_JSON}",), ONE_NUMBER),
    Damage("a folder is in the place of the metrics", instead("metrics.jsonl", folder),
           (stops("RUN/metrics.jsonl cannot be read: Is a directory.", READABLE),), STOPS),
    Damage("a line of the timeline is none", line("timeline.jsonl", lambda lines: lines.__setitem__(2, b"\xff\xfe\n")),
           (f"timeline.jsonl has other contents than it had at the checkpoint: {NOT_JSON}",)),
    Damage("the timeline ends in the middle of a line", cut("timeline.jsonl", 0.99)),
    Damage("the record of traffic is missing", gone("traffic.jsonl"),
           ("traffic.jsonl has N bytes of the N that it had at the checkpoint: the lines that are lacking are lost",)),
    Damage("events end in the middle of a line", tail("events.jsonl", b'{"time": 17')),
    Damage("run.json is missing", gone("run.json"),
           ("run.json is missing; the copy in checkpoint 000002 is taken in its place",)),
    Damage("run.json is cut in half", cut("run.json", 0.5),
           ("run.json is no JSON; the copy in checkpoint 000002 is taken in its place",)),
    Damage("run.json is full of zeros", zeros("run.json"),
           ("run.json is full of zeros; the copy in checkpoint 000002 is taken in its place",)),
    Damage("a digit of run.json is another", text("run.json", lambda raw: raw.replace(b'"seed": 0', b'"seed": 1')),
           (f"run.json {OTHER}; the copy in checkpoint 000002 is taken in its place",)),
    Damage("a folder is in the place of run.json", instead("run.json", folder),
           (stops("RUN/run.json cannot be read: Is a directory.", READABLE),), STOPS),
    Damage("run.json and the newest checkpoint are damaged", both(cut("run.json", 0), gone(f"{NEWEST}/manifest.json")),
           (aside("it has no manifest.json"), "run.json is empty; the copy in checkpoint 000001 is taken in its place"),
           STEPS_AGAIN),
    Damage("run.json and all checkpoints are damaged", both(cut("run.json", 0), gone(f"{NEWEST}/manifest.json"), gone(f"{BEFORE}/manifest.json")),
           (stops("RUN/run.json is empty, and no checkpoint has a copy of it.", "Bring the file back, or start anew with --overwrite."),), STOPS),
    Damage("a kill has left a part of run.json", lambda run: (run / "run.json.part").write_text("{") and None),
    Damage("the lock is no lock", lambda run: (run / "run.lock").write_text("torn") and None),
)  # fmt: skip
