"""What a run is made of: all that decides its results, and what it ran on, as a record that a resume compares."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from ...data.identity import folder_digest, identity, roots
from ...errors import At
from ...graph.script.length_parameters import lengths
from ...graph.script.reachable_code import digest, plain_text, reached
from ...graph.tracing.trace_records import HandleLike, Traced
from ...lowering.lower import Execution
from ..values.values_in_records import spelled
from .package_versions import versions

ENVIRONMENT = ("OMP_NUM_THREADS", "PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE")
_SECRET = ("key", "token", "secret", "password")
_LONG = 80  # characters of a value that is kept as it is


@dataclass(frozen=True)
class Inputs:
    """What a run is asked for: ``record`` as ``run.json`` has it, flat by kind.

    ``{"seed": {"seed": "0"}, "workers": {"actor: lr": "0.001"}, "code": {"exact_match in tasks.py": "9f2c41d07a3e"},
    "data": [{"prompts: batch": "16", ...}], "machine": {...}, "plan": {...}}``; ``parameters`` and ``data`` are lists
    with an entry for each program. ``places``: where each piece of code is. ``lengths``: of each program, the
    parameters that say how long it goes on (:func:`flowrl.graph.script.length_parameters.lengths`). ``slight``:
    names among the workers' that change no results.
    """

    record: Mapping[str, Any]
    places: Mapping[str, At]
    lengths: Sequence[Mapping[str, At | None]]
    slight: frozenset[str] = frozenset()

    def free_lengths(self, program: int) -> frozenset[str]:
        """Return the parameters of a program that nothing but its loops' ends depends on."""
        return frozenset(name for name, at in self.lengths[program].items() if at is None)

    def same(self, program: int) -> str:
        """Return a digest of all that the variables of a program depend on: where it differs, they may be others."""
        kinds = {kind: self.record[kind] for kind in ("seed", "workers", "code", "code of")}
        free, asked = self.free_lengths(program), self.record["parameters"][program]
        parameters = {name: value for name, value in asked.items() if name not in free}
        return digest(json.dumps([kinds, parameters, self.record["data"][program]], sort_keys=True))


def inputs_of(
    stages: Sequence[Execution],
    traces: Sequence[Traced],
    handles: Sequence[HandleLike],
    *,
    seed: int,
    plan: Mapping[str, Any],
    runtime: str,
    checkpoint: str = "",
) -> Inputs:
    """What a run of these programs is made of; ``handles`` are the workers that they call.
    ``checkpoint``: that of another run that it begins with.

    Asked before anything runs: what the programs change at module level is as the script has made it.
    """
    sources = [dict(_sources(traced)) for traced in traces]
    given = [r for some in sources for source in some.values() for r in roots(source)]
    programs = [stage.fn for stage in stages]
    functions = [stage.parameters for stage in stages]  # a preset's, say, which the program calls
    code = reached([*(x for h in handles for x in (h.cls, h.arguments)), *given, *functions], programs=programs)
    environment = {name: os.environ.get(name, "not set") for name in ENVIRONMENT}
    python = {"python": ".".join(platform.python_version_tuple()[:2])}
    record: dict[str, Any] = {
        "parameters": [spelled(stage.parameters) for stage in stages],
        "seed": {"seed": str(seed), **({"checkpoint": checkpoint} if checkpoint else {})},
        "workers": {k: v for handle in handles for k, v in _worker(handle)},
        "data": [{k: v for n, s in some.items() for k, v in _flat(n, identity(s))} for some in sources],
        "code": {name: found.says for name, found in code.items()},
        "code of": python,  # another Python may write the same code in other words
        "machine": {"host": platform.node(), **versions(), **environment},
        "plan": {"runtime": runtime, **dict(_flat("plan", plan))},
    }
    slight = frozenset(f"{h.name}: {name}" for h in handles for name in getattr(h.cls, "without_effect", ()))
    return Inputs(
        record, {n: found.at for n, found in code.items()}, [lengths(program) for program in programs], slight
    )


def _sources(traced: Traced) -> Iterator[tuple[str, Any]]:
    """The sources that a program draws from, each once, by names that tell them apart."""
    keys: dict[Any, str] = {}
    counts: dict[str, int] = {}
    for draw in (d for trail in traced.trails for d in trail.draws.values()):
        if draw.key not in keys:
            number = counts[draw.name] = counts.get(draw.name, 0) + 1
            keys[draw.key] = draw.name if number == 1 else f"{draw.name} {number}"
            yield keys[draw.key], draw.source


def _worker(handle: HandleLike) -> Iterator[tuple[str, str]]:
    yield f"{handle.name}: class", f"{handle.cls.__module__.rpartition('.')[2]}.{handle.cls.__qualname__}"
    for name, value in handle.arguments.items():
        yield from _flat(f"{handle.name}: {name}", value)


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """A value as texts by name: records and mappings entry by entry, a folder with a model as what it holds."""
    if is_dataclass(value) and not isinstance(value, type):
        entries = {f.name: getattr(value, f.name) for f in fields(value)}
    elif isinstance(value, Mapping):
        entries = {str(k): v for k, v in cast("Mapping[Any, Any]", value).items()}
    else:
        folder = Path(value) if isinstance(value, (str, Path)) else None
        is_model = folder is not None and (folder / "config.json").is_file()
        yield name, f"{folder.name} ({folder_digest(folder)})" if folder and is_model else _text(name, value)
        return
    for key, item in entries.items():
        yield from _flat(f"{name}.{key}" if ": " in name or "." in name else f"{name}: {key}", item)


def _text(name: str, value: Any) -> str:
    """A value as a short text; a digest of a long one, and of one that nobody else should read."""
    plain = plain_text(value)
    said = plain if plain is not None else str(spelled(value))
    if isinstance(value, str) and name.lower().endswith(_SECRET):
        return f"a text ({digest(said)})"
    return said if len(said) <= _LONG else digest(said)
