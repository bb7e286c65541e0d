"""The lines of metrics of a step: what the program has logged, and what was measured that it has not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...batch import Column
from ...graph.tracing.log_names import Logged, Names
from ...marks import unlike
from ...workers.engine import Published
from ..values.call import outcome
from ..values.step_records import Step
from .traffic import length_quantiles

SOURCES = 50  # whose rewards are told apart
BESIDE_REFERENCE = ("response_mask", "rollout_logprobs", "ref_logprobs")


@dataclass(frozen=True)
class Pace:
    """What a step came to by the clock: ``Pace(2.5, {"": 640})``.

    ``seconds`` are those between its commit and the one before; ``tokens`` its response tokens, by the call that
    sampled them, as :attr:`Step.sampled` has them.
    """

    seconds: float
    tokens: Mapping[str, int]


def pace_of(step: Step, seconds: float) -> Pace:
    """Return what a step came to that committed so many seconds after the one before."""
    return Pace(seconds, {name: tokens for name, (tokens, _) in step.sampled.items()})


def metric_lines(program: str, step: Step, names: Names, paces: Sequence[Pace]) -> list[dict[str, Any]]:
    """Return a line for each number of a step that was logged.

    ``names``: what was logged under them so far. ``paces``: of the steps over which tokens per second are taken, the
    last of them of this step. Raises ProgramError where two numbers have one name.
    """
    lines = _numbers(program, step, names)
    for line in lines:
        line["seconds"] = round(paces[-1].seconds / len(lines), 6)
        _add_lengths(line, step, paces)
    line = lines[-1]
    _add_gaps(line, step.gaps)
    _add_measures(line, step.updates)
    _add_sources(line, step.sourced)
    _add_reference(line, step.beside_reference)
    line |= {"rows_skipped": step.skipped} if step.skipped else {}
    line |= {f"{node}/decode_slots_used": slots.share for node, slots in step.slots.items()}
    for node, waits in step.waits.items():
        line |= {f"{node}/environment_seconds": round(waits.mean, 6)} if waits.mean is not None else {}
    for node, episodes in step.episodes.items():
        line |= {f"{node}/{name}": value for name, value in episodes.metrics().items()}
    for title, told in step.published.items():
        line |= {f"{title}/{name}": value for name, value in publish_numbers(told).items()}
    return lines


def _numbers(program: str, step: Step, names: Names) -> list[dict[str, Any]]:
    """A line for each number of a step that was logged: between steps a program may count by itself."""
    lines: dict[Any, dict[str, Any]] = {}
    for said, values in step.logs:
        number = _number(said)
        line = lines.setdefault(number, {"program": program, "step": number})
        for item in values:
            for name, value in _flat(item).items():
                if (error := names.add(number, name, item.of, item.at)) is not None:
                    raise error
                line[name] = _number(value)
    return list(lines.values()) or [{"program": program, "step": step.number}]


def _add_lengths(line: dict[str, Any], step: Step, paces: Sequence[Pace]) -> None:
    """Add how long the responses of a step are, by the call that sampled them, and how fast they came.

    Of steps that overlap one may commit milliseconds after another. So tokens per second are those of as many steps as
    overlap, by their seconds: a step begins no earlier than the commit before the first of them.
    """
    seconds = sum(pace.seconds for pace in paces)
    for name, (tokens, responses) in step.sampled.items():
        if not tokens:
            continue
        before = f"{name}/" if name else ""
        line[f"{before}response_length"] = tokens / responses
        for part, length in length_quantiles(step.lengths.get(name, ())).items():
            line[f"{before}response_length_{part}"] = length
        if name in step.cut_off:
            line[f"{before}response_truncated"] = step.cut_off[name] / responses
        together = sum(pace.tokens.get(name, 0) for pace in paces)
        line[f"{before}tokens_per_second"] = round(together / max(seconds, 1e-9), 1)


def publish_numbers(told: Published) -> dict[str, float]:
    """What an engine has told of a publish, as files have it."""
    seconds = {"load_seconds": round(told.load, 6), "proof_seconds": round(told.proof, 6)}
    return seconds | {"probe_gap": told.gap, "probe_rows": told.rows}


def _add_gaps(line: dict[str, Any], gaps: Mapping[str, Mapping[str, float]]) -> None:
    """Add the gaps of a step's updates to its line, under their calls, where the program has not logged them."""
    logged = {value for name, value in line.items() if name.rpartition("/")[2] == "gap_mean"}
    for node, gap in gaps.items():
        if gap["gap_tokens"] and gap["gap_mean"] not in logged:
            line |= {f"{node}/{name}": value for name, value in gap.items()}


def _add_measures(line: dict[str, Any], updates: Mapping[str, Mapping[str, float]]) -> None:
    """Add what a step's updates have measured, under their calls, where the program has not logged their metrics."""
    logged = {value for name, value in line.items() if name.rpartition("/")[2] == "repetition"}
    norms = {value for name, value in line.items() if name.rpartition("/")[2] == "grad_norm"}
    for node, update in updates.items():
        if not (update["repetition"] in logged and update["grad_norm"] in norms):
            line |= {f"{node}/{name}": value for name, value in update.items()}


def _add_sources(line: dict[str, Any], rows: Any) -> None:
    """Add the mean reward of the rows of each source, as ``reward/math``, where the program has not logged it.

    So with each reward that has a name of its own: ``reward/correct``.
    """
    found: dict[str, list[float]] = {}
    if not rows:
        return
    for name in rows.fields:
        if name not in ("rewards", "source"):
            found[f"reward/{name}"] = [float(x) for x in rows[name].to_list() if isinstance(x, (int, float))]
    for source, reward in (
        zip(rows["source"].to_list(), rows["rewards"].to_list(), strict=True) if "source" in rows else ()
    ):
        found.setdefault(f"reward/{source}", []).append(reward)
    for name in [name for name, rewards in found.items() if rewards][:SOURCES]:
        line.setdefault(name, sum(found[name]) / len(found[name]))


def _add_reference(line: dict[str, Any], rows: Any) -> None:
    """Add how far the policy that sampled is from the reference, KL(policy, reference) by the estimator k3, where the
    program has logged no such number."""
    logged = {name.rpartition("/")[2] for name in line} & {"kl", "ref_kl"}
    if rows is None or logged or unlike("ref_kl", {n: rows[n].marks for n in BESIDE_REFERENCE[1:]}) is not None:
        return
    mask, sampled, reference = (rows[name].values for name in BESIDE_REFERENCE)
    if mask.any():
        from ...rl.math.kl import estimate

        line["ref_kl"] = float(estimate(sampled[mask].double(), reference[mask].double(), "k3").mean())


def _flat(item: Logged) -> dict[str, Any]:
    """Metrics are spread into their entries; ``critic=metrics`` gives ``critic/loss``."""
    plain = outcome(item.value.ref) if hasattr(item.value, "ref") else item.value
    if isinstance(plain, Mapping):
        entries: Mapping[str, Any] = plain  # type: ignore[assignment]
        return {item.under(name): value for name, value in entries.items()}
    return {item.name: plain}


def _number(value: Any) -> Any:
    value = outcome(value.ref) if hasattr(value, "ref") else value
    if isinstance(value, Column):
        return value.mean()
    return value.item() if hasattr(value, "item") else value
