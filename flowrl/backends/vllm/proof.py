"""The proof that an engine computes with the weights that were published: their digest, and what they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isnan
from typing import Any

from ...errors import RunError
from ...workers.weights.weight_boxes import Sums

_FEW = 3  # of a list, as an error shows it


def check_weights(what: str, said: Mapping[str, Any], sums: Sums) -> None:
    """Raise RunError, which names the weights, where vLLM does not compute with those that were published.

    ``said``: what vLLM's process answered; ``sums``: those of the weights here.
    """
    if said["lacking"]:
        raise RunError(
            f"{what}: vLLM has weights that were not among those published: {_few(said['lacking'])}.",
            fix="Use a kind of model that docs/engines.md names.",
        )
    there = {name: (kind, tuple(shape), total) for name, (kind, shape, total) in said["sums"].items()}
    if torn := sorted(name for name in {*there, *sums} if there.get(name) != sums.get(name)):
        raise RunError(
            f"{what} came to vLLM with other numbers in {_few(torn)}.",
            fix="Somebody wrote them while vLLM was reading, or the transport is at fault; report it with the plan.",
        )
    if said["differing"]:
        causes = [f"{cause}: {_few(names)}" for cause, names in said["differing"].items()]
        number, seen = sum(map(len, said["differing"].values())), said["seen"]
        raise RunError(
            f"{what}: the weights came whole, and vLLM computes with others in {number} of {seen} that were looked at. "
            f"{'; '.join(causes[:_FEW])}.",
            fix="vLLM did not take them as they lie there; report it with the model's configuration.",
        )
    if said["prefixes"]:
        raise RunError(
            f"{what}: the prefix cache still has {said['prefixes']} blocks of keys and values of the weights before.",
            fix="Write prefix_cache: false beside the engine, and report it.",
        )


def _few(names: Sequence[str]) -> str:
    """The first names, and how many there are besides."""
    return ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")


def check_probe(what: str, there: Sequence[Sequence[float]], here: Sequence[Sequence[float]], allowed: float) -> float:
    """Return the largest difference of two tables of log-probabilities. Raises RunError where it is not allowed."""
    gaps = [[_gap(a, b) for a, b in zip(*pair, strict=True)] for pair in zip(there, here, strict=True)]
    worst, row, token = max((gap, r, t) for r, mine in enumerate(gaps) for t, gap in enumerate(mine))
    if worst > allowed:
        raise RunError(
            f"{what}: each weight that was looked at is as it was published, and vLLM computes something else with "
            f"them: token {token + 1} in row {row} of the probe has a log-probability of {there[row][token]:.4f} there "
            f"and of {here[row][token]:.4f} by the weights, {worst:.2g} apart; {allowed:g} is allowed.",
            fix="The configuration is read in two ways, or a kernel is at fault; report it with the configuration.",
        )
    return worst


def _gap(there: float, here: float) -> float:
    """How far two numbers are apart: without end where one is none."""
    gap = abs(there - here)
    return inf if isnan(gap) else gap
