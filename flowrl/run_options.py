"""What a run may be asked for: its options, and the parameters of each of its programs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .errors import UsageError, did_you_mean
from .graph.ops.allowed import flag, one_of, text, whole
from .graph.script.site import caller
from .program import Program

#: What the options of a run may be.
RUN_OPTIONS = {
    "runtime": one_of("local", "eager", "ray"),
    "seed": whole(),
    "resume": flag(),
    "allow_changed": flag(),
    "unlock": flag(),
    "overwrite": flag(),
    "checkpoint_every": whole(least=1),
    "keep_last": whole(least=1),
    "keep_best": text(),
    "stop_when": text(),
    "save_models": flag(),
    "trajectories": whole(least=0),
    "trajectories_every": whole(least=1),
    "keep_sampled": flag(),
    "quiet": flag(),
}


def parameters_of_run(
    every: Mapping[str, Program],
    names: Sequence[str],
    by_program: Mapping[str, Mapping[str, Any]],
    keywords: Mapping[str, Any],
    options: Sequence[str],
    *,
    beside: Collection[str] = (),
) -> dict[str, dict[str, Any]]:
    """Return the parameters of each program of a run: those given by its name, and the keywords that it alone has.

    ``every``: the programs of the flow. ``options``: the keywords of a run itself. ``beside``: programs that are run
    between the steps of these, whose parameters are given by their names alone. Raises UsageError for a program that is
    not run, and for a keyword that no program has, that several have, or that is given twice.
    """
    programs = {name: every[name] for name in names}
    parameters = {name: dict(by_program.get(name, {})) for name in (*programs, *beside)}
    stray = next((name for name in by_program if name not in parameters), None)
    if stray is not None:
        together = ", ".join(map(repr, (*programs, stray)))
        raise UsageError(
            f"parameters= names '{stray}', which is none of the programs that are run.",
            at=caller(),
            have=programs,
            fix=f"Run it too: flow.run({together}, ...)." if stray in every else None,
        )
    for key, value in keywords.items():
        owners = [name for name, program in programs.items() if key in program.parameters]
        if len(owners) != 1 or key in parameters[owners[0]]:
            raise _no_keyword(key, programs, owners, options)
        parameters[owners[0]][key] = value
    return parameters


def _no_keyword(key: str, programs: Mapping[str, Program], owners: Sequence[str], options: Sequence[str]) -> UsageError:
    """The error of a keyword of ``Flow.run`` that is no parameter, that of several programs, or given twice."""
    what = f"flow.run({key}=...): "
    have = dict.fromkeys(name for program in programs.values() for name in program.parameters)
    if len(owners) > 1:
        which = ", ".join(f"'{owner}'" for owner in owners)
        what, fix = what + f"programs {which} have it.", f'Write parameters={{"{owners[0]}": {{"{key}": ...}}}}.'
    elif owners:
        what, fix = what + f"parameters= gives it to '{owners[0]}' too.", "Give it once."
    else:
        whose = " or ".join(f"'{name}'" for name in programs)
        what += f"neither flow.run nor program {whose} has it."
        fix = did_you_mean(key, [*have, *options])
    return UsageError(what, at=caller(), have=None if owners else have, fix=fix)
