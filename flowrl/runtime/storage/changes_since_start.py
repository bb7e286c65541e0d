"""Where a resumed run goes on, and what is not as it was when it was started: its words, workers, code and data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import At, ResumeError, shown
from ...graph.script.length_parameters import steps_of_only_loop
from ...lowering.lower import Execution
from ..values.values_in_records import ADDRESS, spelled
from .checkpoints import checkpoint_folder as checkpoint
from .checkpoints.choose_checkpoint import Chosen, load_answers, made_longer, newest_whole
from .checkpoints.left_behind import LeftBehind
from .journal import Journal
from .run_inputs import Inputs

NOT_THERE = "not there"
OLDER = "the run was started by a flowrl that did not note its workers, code and data: changes of these are not seen"
_MISSING = object()


@dataclass(frozen=True)
class Change:
    """Something that is not as it was when the run was started: ``Change("actor: lr", "0.001", "0.003", True)``.

    ``another``: with it a resumed run is none that could have been started so; ``final``: and cannot become it.
    """

    what: str
    before: str
    now: str
    another: bool
    more: str = ""
    final: bool = False

    def __str__(self) -> str:
        said = f"{self.before} -> {self.now}" if self.before else self.now
        return f"{self.what} {said}" + (f" ({self.more})" if self.more else "")


@dataclass(frozen=True)
class Continuation:
    """Where a run goes on: a checkpoint, or its start; and what has changed since then."""

    chosen: Chosen
    changes: tuple[Change, ...]
    notes: tuple[str, ...]


def find_continuation(
    out: Path,
    stages: Sequence[Execution],
    inputs: Inputs,
    record: Mapping[str, Any],
    journal: Journal,
    behind: LeftBehind,
    *,
    allow_changed: bool = False,
) -> Continuation:
    """Where the run in ``out`` goes on: from its newest whole checkpoint. Nothing is changed in the folder.

    What its programs have left at module level is ``behind`` them again then. The last program that the
    run has done goes on where it is asked for more ``steps`` now: from the end of its last loop, or from the checkpoint
    before where it has done more since then. Raises ResumeError where no checkpoint is whole, where the run cannot
    become the one that is asked for, and where it would become another run, unless ``allow_changed``.
    """
    chosen = newest_whole(out, record, journal)
    manifest = chosen.manifest
    _check_programs(record["programs"], [s.program for s in stages])
    before = (manifest or {}).get("inputs") or record.get("inputs") or _older(record, manifest)
    begun = manifest["stage"] - (manifest["program"] is None) if manifest is not None else 0  # the last that has
    changes = [*_compare(before, inputs, stages, begun), *_moved(record, inputs)]
    _refuse(out, [c for c in changes if c.another], allow_changed)
    if chosen.folder is not None:
        _check_done(chosen.folder, stages[begun])
    notes = [] if "code" in before else [OLDER]
    notes += [
        f"'{stages[begun].program}' is made longer, and line {at.line} uses {name} too: the steps that are done were "
        f"done with the {name} of then"
        for name, at in inputs.lengths[begun].items()
        if at is not None and _asked(before, begun, name) not in (_MISSING, spelled(stages[begun].parameters[name]))
    ]
    if manifest is not None and manifest["program"] is None:
        past = before["parameters"][begun]
        if any(
            c.what.startswith(f"{stages[begun].program}: ") for c in _parameters(past, stages[begun], inputs, begun)
        ):
            if "ended" not in manifest:
                _check_steps(past, stages[begun])
            chosen = made_longer(chosen, begun, lambda newer: newest_whole(out, record, journal, before=newer))
    load_answers(journal, chosen)
    left = (chosen.manifest or {}).get("left", {})
    lost = list(_lost(left, behind.put_back(left)))
    _refuse(out, [c for c in lost if c.another], allow_changed)
    return Continuation(chosen, (*changes, *lost), tuple(notes))


def _refuse(out: Path, another: Sequence[Change], allow_changed: bool) -> None:
    """Raise ResumeError with every change that makes another run, a line each."""
    final = [c for c in another if c.final]
    if final:
        raise ResumeError(
            "\n".join(["a program that has ended stays as it was.", *(f"  {c}" for c in final)]),
            fix="Leave it as it was, or start another run with --out.",
        )
    if another and not allow_changed:
        first = f"{shown(str(out))} would become another run. Changed since it was started:"
        raise ResumeError(
            "\n".join([first, *(f"  {c}" for c in another)]),
            fix="Put it back, or start another run with --out. --allow-changed (allow_changed=True) goes on all the "
            "same: what is done stays, and what follows is done with what is there now.",
        )


def _compare(before: Mapping[str, Any], now: Inputs, stages: Sequence[Execution], begun: int) -> Iterator[Change]:
    """What is not as it was, kind by kind."""
    for number, (past, stage) in enumerate(zip(before["parameters"], stages, strict=False)):
        for change in _parameters(past, stage, now, number):
            if number < begun:
                more = f"'{stages[number + 1].program}' has gone on from what it gave"
                yield replace(change, another=True, final=True, more=more)
            else:
                yield change if number == begun else replace(change, another=False)
    for kind in ("seed", "workers"):
        for name, old, new in different(before.get(kind, {}), now.record[kind]):
            is_new = old == NOT_THERE
            if not is_new or _has_part(before.get(kind, {}), name):
                yield Change(name, old, new, not is_new and name not in now.slight)
    for number, (past, some) in enumerate(zip(before.get("data", []), now.record["data"], strict=False)):
        for name, old, new in different(past, some):
            if {old, new} == {NOT_THERE, "null"}:
                continue  # an option that one of the two versions does not note, and the other notes as not given
            if old != NOT_THERE or _has_part(past, name):
                yield Change(f"data {name}", old, new, number <= begun)
    same_words = before.get("code of") == now.record["code of"]
    for name, old, new in different(before.get("code", {}), now.record["code"]):
        if old != NOT_THERE:  # new code is reached by code that was changed, or by a program that was added
            at = now.places.get(name)
            yield Change(name, old, new, same_words, str(At(at.file, at.line)) if at is not None else "")


def _parameters(past: Mapping[str, Any], stage: Execution, now: Inputs, number: int) -> Iterator[Change]:
    """The parameters of a program that are others now. Those that say how long it goes on make no other run."""
    for name, old, new in different(_comparable(past), _comparable(spelled(stage.parameters))):
        yield Change(f"{stage.program}: {name}", old, new, name not in now.lengths[number])


def _moved(record: Mapping[str, Any], now: Inputs) -> Iterator[Change]:
    """What a run may be moved to: another machine, other versions, another plan."""
    before = record.get("inputs", {})
    for name, old, new in different(before.get("machine", {}), now.record["machine"]):
        yield Change(name, old, new, another=False)
    plan = [
        f"{name.removeprefix('plan: ')} {old} -> {new}"
        for name, old, new in different(before.get("plan", {}), now.record["plan"])
    ]
    if plan and before:
        yield Change("plan:", "", ", ".join(plan), another=False)


def _lost(left: Mapping[str, Any], missing: Sequence[str]) -> Iterator[Change]:
    """What programs of the run left at module level and this process does not have."""
    for loss in left.get("lost", ()):
        what = f"{loss['name']} ({loss['at']}), as the programs before left it:"
        yield Change(what, loss["what"], "as the script makes it", another=not loss["made_again"])
    for name in missing:
        yield Change(f"{name}, which the programs before have changed", "there", NOT_THERE, another=True)


def different(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield what is not the same, as (name, before, now)."""
    for name in dict.fromkeys([*before, *now]):
        if before.get(name) != now.get(name):
            yield name, before.get(name, NOT_THERE), now.get(name, NOT_THERE)


def _has_part(before: Mapping[str, str], name: str) -> bool:
    """Whether something of a worker, or of a source, was there."""
    return any(known.partition(": ")[0] == name.partition(": ")[0] for known in before)


def _older(record: Mapping[str, Any], manifest: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the record of an older flowrl says of a run."""
    parameters = (manifest or {}).get("parameters") or record["parameters"]
    return {"parameters": parameters, "seed": {"seed": str((manifest or record)["seed"])}}


def _asked(before: Mapping[str, Any], number: int, name: str) -> Any:
    """What a program was given for a parameter."""
    asked = before["parameters"][number] if number < len(before["parameters"]) else {}
    return asked.get(name, _MISSING)


def _check_steps(before: Mapping[str, Any], stage: Execution) -> None:
    """Raise ResumeError where a program that has ended is asked for fewer steps than it has done."""
    had, asked = before.get("steps"), stage.parameters.get("steps")
    if isinstance(had, int) and isinstance(asked, int) and asked < had:
        raise ResumeError(
            f"'{stage.program}' has ended with {had} steps, and was asked to go on with {asked}.",
            fix="Give it at least the steps that are done.",
        )


def _check_done(folder: Path, stage: Execution) -> None:
    """Raise ResumeError where the loop of a program is asked for fewer steps than it has done, as far as that is known
    from its code and from its checkpoint: before a model is opened."""
    name, program = steps_of_only_loop(stage.fn), checkpoint.load_manifest(folder, reopened=True)["program"]
    asked = stage.parameters.get(name) if name is not None else None
    loops = ((program or {}).get("variables") or {}).get("loops", [])
    if not isinstance(asked, int) or len(loops) != 1:
        return
    done = (loops[0].get("end") or loops[0]["head"])["step"]
    if asked < done:
        raise ResumeError(
            f"'{stage.program}' was asked to go on with {asked} steps, and the run has done {done}.",
            fix=f"Give it {name}={done} or more, or leave it as it was.",
        )


def _check_programs(before: Sequence[str], now: Sequence[str]) -> None:
    if list(now[: len(before)]) != list(before):
        raise ResumeError(
            f"the run is one of {','.join(before)}, and was asked to go on with {','.join(now)}.",
            fix="Leave out --program; programs can only be added, after those of the run.",
        )


def _comparable(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Parameters as texts; the address of an object, which older records have, says nothing."""
    return {n: ADDRESS.sub("", json.dumps(v, sort_keys=True)) for n, v in parameters.items()}
