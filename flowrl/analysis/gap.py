"""The gap doctor: which one change of what an engine does explains the gap between it and the trainer.

Rows of a run are taken as they were sampled, and the checkpoint whose weights they were sampled with. The trainer's
log-probabilities are computed anew, each time with one thing otherwise; what brings them to the engine's is named.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from ..backends import open_engine
from ..errors import UsageError, shown
from ..placement.backends import REFERENCE
from ..runtime.driver.monitoring.gap_alarm import MEAN
from ..runtime.storage.checkpoints import checkpoint_folder as checkpoint
from ..runtime.storage.checkpoints.state_files import StateFiles, read_record
from ..runtime.storage.run_record import read_record as read_run_record
from ..runtime.storage.run_record import records_within
from ..workers.actor import Actor
from ..workers.tokens.kept_cache import versions_begun_with
from ..workers.tokens.sampling import SamplingArguments

#: A change that explains less of a gap than this is not called its cause.
LEAST = 0.5
#: Changes whose shares lie closer together than this are not told apart: the wider one is named.
ALIKE = 0.01


@dataclass(frozen=True)
class Tried:
    """One change: ``Tried("temperature", "0.7 in place of 1", before=0.21, after=1e-7, explained=1.0)``.

    ``before`` and ``after`` are the mean differences of a token without it and with it; ``explained`` the share of the
    gap that is gone, 0 where it grows.
    """

    cause: str
    what: str
    before: float
    after: float
    explained: float


@dataclass(frozen=True)
class Diagnosis:
    """What was found of the rows of one step; ``tried`` has the best change first, ``found`` is the cause, if any."""

    worker: str
    program: str
    step: int
    version: int
    rows: int
    tokens: int
    gap: float
    bound: float
    tried: tuple[Tried, ...]

    @property
    def found(self) -> Tried | None:
        """The change that explains the gap; None where there is no gap, or nothing explains it."""
        if self.gap <= self.bound or not self.tried or self.tried[0].explained < LEAST:
            return None
        return self.tried[0]

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {**asdict(self), "found": None if self.found is None else asdict(self.found)}


def diagnose(
    run: Path, handles: Sequence[Any], *, step: int | None = None, name: str | None = None, rows: int = 16, **said: Any
) -> Diagnosis:
    """Look for the cause of the gap in rows of a run.

    Args:
        run: the folder.
        handles: the workers that its flow declares.
        step: whose rows; None takes the newest step whose weights a checkpoint has.
        name: the actor; None is the one that is trained.
        rows: how many rows at most.
        said: ``traces``, the traced programs, of which is read how they sample.

    Raises UsageError where the folder has no such rows, or not the weights of these.
    """
    handle = _actor(handles, name)
    lines, points = _trajectories(run), _points(run, handle.name)
    program, number, version, point = _chosen(run, lines, points, step)
    mine = [x for x in lines if (x["program"], x["step"]) == (program, number)][:rows]
    worker = handle.cls(**handle.arguments)
    worker.name = handle.name
    worker.introduce(lambda other: other.cls(**other.arguments))
    weights, causes = (
        import_module(f"flowrl.backends.{REFERENCE}.gap_doctor.{m}") for m in ("gap_weights", "gap_causes")
    )
    engine = open_engine(REFERENCE, worker.build())
    olds = [weights.at_start(engine)]
    with StateFiles(point, handle.name) as files:
        meta = read_record(point, handle.name)["engine"]
        before = weights.one_step_back(engine, files, meta, _rate(run, program, handle.name, number))
        olds = [*([before] if before else []), *olds]
        engine.load_state_shards(files.fill, meta)
    for other, there in points.items():
        if other != version:
            with StateFiles(there, handle.name) as files:
                olds.append(weights.of_checkpoint(engine, files, f"the weights of version {other}"))
    frozen = _frozen(mine, version, [*_samplings(worker, said.get("traces", ()))])
    tried = sorted(_tried(causes, engine, frozen, olds), key=lambda t: -round(t.explained / ALIKE))
    bound = MEAN * import_module("flowrl.backends.gap").bound_of(engine.net.compute)
    gap = frozen.gap(
        import_module(f"flowrl.backends.{REFERENCE}.gap_doctor.gap_scores").Scores(engine.net, frozen).now()
    )
    tokens = int(frozen.compared.sum())
    return Diagnosis(handle.name, program, number, version, len(mine), tokens, gap, bound, tuple(tried))


def _tried(causes: Any, engine: Any, rows: Any, olds: Sequence[Any]) -> Iterator[Tried]:
    scores = import_module(f"flowrl.backends.{REFERENCE}.gap_doctor.gap_scores").Scores(engine.net, rows)
    before = rows.gap(scores.now())
    for change in causes.changes(engine, rows, olds):
        try:
            after = rows.gap(change.compute())
        except (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError, IndexError):
            continue  # the model does not run like this, so no engine did
        if after == after:  # a number
            yield Tried(change.cause, change.what, before, after, max(0.0, 1 - after / before) if before else 0.0)


# -- what the run has kept --------------------------------------------------------------------------------------------


def _actor(handles: Sequence[Any], name: str | None) -> Any:
    actors = [h for h in handles if isinstance(h.cls, type) and issubclass(h.cls, Actor)]
    if name is not None:
        actors = [h for h in actors if h.name == name]
    trained = [h for h in actors if h.cls.is_trained(h.arguments)] or actors
    if not trained:
        have = [h.name for h in handles]
        raise UsageError("the script has no such actor." if name else "the script has no actor.", have=have)
    return trained[0]


def _trajectories(run: Path) -> list[dict[str, Any]]:
    """The rows that the run has kept with all that is needed; of one that was done again, as it was last."""
    needed = {"prompt_ids", "tokens", "response_mask", "rollout_logprobs", "versions", "temperature"}
    found: dict[Any, dict[str, Any]] = {}
    path = run / "trajectories.jsonl"
    for line in records_within(path) if path.exists() else ():
        if needed <= line.keys():
            found[(line["program"], line["step"], tuple(line["key"]))] = line
    if not found:
        raise UsageError(f"{path} has no rows that an actor has sampled.", fix="Run with --trajectories-every 1.")
    return list(found.values())


def _points(run: Path, name: str) -> dict[int, Path]:
    """The checkpoints by the version of the weights that they hold."""
    folder = run / "checkpoints"
    found: dict[int, Path] = {}
    for path in checkpoint.numbered(folder) if folder.exists() else ():
        if (path / f"{name}.json").exists():
            record = read_record(path, name)
            found[int(record["version"]) + bool(record["dirty"])] = path
    if not found:
        raise UsageError(f"{folder} has no checkpoint of '{name}'.", fix="Run with --checkpoint-every, to have one.")
    return found


def _chosen(
    run: Path, lines: Sequence[Mapping[str, Any]], points: Mapping[int, Path], step: int | None
) -> tuple[str, int, int, Path]:
    """The newest step, or this one, some of whose tokens were sampled with weights that a checkpoint has."""
    for line in reversed(lines):
        there = sorted(points.keys() & set(line["versions"]))
        if there and (step is None or line["step"] == step):
            return line["program"], line["step"], there[-1], points[there[-1]]
    raise _no_such_rows(run, lines, points, step)


def _no_such_rows(
    run: Path, lines: Sequence[Mapping[str, Any]], points: Mapping[int, Path], step: int | None
) -> UsageError:
    """The error for rows whose weights no checkpoint has, with the steps that can be asked for or how to have one."""
    there = ", ".join(map(str, sorted(points)))
    can = sorted({line["step"] for line in lines if points.keys() & set(line["versions"])})
    have = sorted({v for line in lines if step is None or line["step"] == step for v in line["versions"]})
    which = f"step {step}" if step is not None else "the steps that are kept"
    if have:
        versions = f"version {', '.join(map(str, have))}" if len(have) < 6 else f"versions {have[0]} to {have[-1]}"
        what = f"the rows of {which} were sampled with {versions} of the weights"
    else:
        what = f"the rows of {which} were not kept"
    what += f", and the checkpoints in {run} have version {there}"
    if can:
        steps = ", ".join(map(str, can))
        return UsageError(
            f"{what}. Rows and weights are there of step{'s' if len(can) > 1 else ''} {steps}.",
            fix=f"Ask for {'one of those' if len(can) > 1 else 'it'}: --step {can[-1]}, or leave out --step.",
        )
    return UsageError(
        f"{what}. There is no step of which both are there.",
        fix=_made_longer(run),
    )


def _made_longer(run: Path) -> str:
    """How a run does the steps that sample with the weights of its last checkpoint, and keeps their rows.

    With staleness S these are S steps later than the next one.
    """
    record = read_run_record(run)[0]
    names: Sequence[str] = record.get("programs") or [""]
    parameters: Sequence[Mapping[str, Any]] = record.get("parameters") or [{}]
    stale: int = ((record.get("plan") or {}).get("pipeline") or {}).get("staleness", 0)
    steps = parameters[-1].get("steps")
    more = str(steps + 1 + stale) if isinstance(steps, int) else "MORE"
    option = f"--{names[-1]}.steps" if sum("steps" in of for of in parameters) > 1 else "--steps"
    words = [shown(str(record.get("script", "SCRIPT"))), "--out", shown(str(run)), "--resume", option, more]
    which = f"step {stale + 1}" if stale else "the step"
    command = shlex.join(["flowrl", "run", *words, "--trajectories-every", "1"])
    why = f"{which} after its last checkpoint samples with the weights that this one has."
    return f"Make the run longer: {why} {command}"


def _rate(run: Path, program: str, name: str, step: int) -> float | None:
    """The learning rate of the step before, as far as it was logged."""
    path = run / "metrics.jsonl"
    for line in records_within(path) if path.exists() else ():
        if line.get("program") == program and line.get("step") == step - 1:
            found = line.get("lr", line.get(f"{name}/lr"))
            return float(found) if isinstance(found, (int, float)) else None
    return None


def _frozen(lines: Sequence[Mapping[str, Any]], version: int, samplings: Sequence[Any]) -> Any:
    import torch

    prompts = [x["tokens"][: len(x["tokens"]) - len(x["response_mask"])] for x in lines]  # an agent writes its own
    responses = [x["tokens"][len(prompt) :] for x, prompt in zip(lines, prompts, strict=True)]
    flat = [v for x in lines for v in x["rollout_logprobs"]]
    there = [
        m and v == version and p is not None and (first == version or x.get("cache") != "kept")
        for x in lines
        for m, v, p, first in zip(
            x["response_mask"],
            x["versions"],
            x["rollout_logprobs"],
            versions_begun_with(x["versions"], x["response_mask"]),
            strict=True,
        )
    ]
    return import_module("flowrl.backends.frozen_rows").FrozenRows(
        prompts=prompts,
        responses=responses,
        temperature=torch.tensor([x["temperature"] for x in lines], dtype=torch.float64),
        logprobs=torch.tensor([float("nan") if v is None else v for v in flat], dtype=torch.float64),
        compared=torch.tensor(there, dtype=torch.bool),
        texts=[x.get("prompt") if x["prompt_ids"] == own else None for x, own in zip(lines, prompts, strict=True)],
        samplings=samplings,
    )


def _samplings(worker: Any, traces: Sequence[Any]) -> Iterator[Any]:
    """How the programs sample with the worker: as declared, and as their calls say."""
    yield worker.sampling
    calls = [call for traced in traces for trail in traced.trails for call in _listed(trail.calls)]
    for call in calls:
        if call.worker == worker.name and call.op.cost == "generate":
            said = {n: v for n, v in call.arguments.items() if isinstance(v, (int, float, bool))}
            known = {n: said.get(n) for n in SamplingArguments.__dataclass_fields__ if n not in ("stop", "support")}
            sampling = SamplingArguments(**{**known, "greedy": bool(known["greedy"])})
            made = replace(worker.sampling, **{n: v for n, v in asdict(sampling).items() if v is not None})
            if made != worker.sampling:
                yield made


def _listed(calls: Any) -> list[Any]:
    return list(calls.values()) if isinstance(calls, Mapping) else list(calls)
