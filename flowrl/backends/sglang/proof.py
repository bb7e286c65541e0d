"""The proof that a server computes with the weights that were published: their sums, and what they give."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from ...errors import RunError
from ...placement.backends import Fused

_FEW = 3  # of a list, as an error shows it
_PADDED = 64  # the vocabulary of a server is a multiple of it, with rows of zeros
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


def sums(weights: Mapping[str, Tensor], fused: Sequence[Fused]) -> dict[str, str]:
    """Return the sums that a server on a CPU has of these weights, by its own names.

    It keeps several as one, one behind the other; a head that is tied is not among them.
    """
    together: dict[str, dict[int, Tensor]] = {}
    for name, weight in weights.items():
        if name in _VOCABULARY and (more := -len(weight) % _PADDED):
            weight = torch.cat([weight, weight.new_zeros(more, weight.shape[1])])
        place = 0
        for rule in fused:
            for number, part in enumerate(rule.of):
                if f".{part}." in name:
                    name, place = name.replace(f".{part}.", f".{rule.name}."), number
        together.setdefault(name, {})[place] = weight
    return {name: _sum([parts[place] for place in sorted(parts)]) for name, parts in together.items()}


def _sum(parts: Sequence[Tensor]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part.detach().contiguous().view(torch.uint8).reshape(-1).numpy().data)
    return found.hexdigest()[:16]


def check_sums(what: str, there: Mapping[str, str], here: Mapping[str, str], before: Mapping[str, str]) -> None:
    """Raise RunError where a server does not have the weights that lie here; ``before``: what it had."""
    if unlike := sorted({*there} ^ {*here}):
        raise RunError(
            f"{what}: SGLang and the model here do not have the same weights: {_few(unlike)}.",
            fix="Use a kind of model that docs/engines.md names.",
        )
    known = {total: name for name, total in here.items()}
    causes: dict[str, list[str]] = {}
    for name, total in there.items():
        if total != here[name]:
            cause = "other numbers"
            if before.get(name) == total:
                cause = "as before this publish"
            elif total in known:
                cause = f"those of {known[total]}"
            causes.setdefault(cause, []).append(name)
    if causes:
        said = "; ".join(f"{cause}: {_few(names)}" for cause, names in causes.items())
        raise RunError(
            f"{what}: SGLang has other weights than were published. {said}.",
            fix="Somebody else publishes to this server, or it did not take them as they lie there; see its log.",
        )


def check_probe(what: str, there: Sequence[Any], here: Sequence[Sequence[float]], allowed: float) -> float:
    """Return the largest difference of a log-probability of the probe. Raises RunError where it is not allowed."""
    worst = (0.0, 0, 0)
    for row, (said, wanted) in enumerate(zip(there, here, strict=True)):
        given = [entry[0] for entry in said["meta_info"]["input_token_logprobs"][1:]]
        if len(given) != len(wanted):
            raise RunError(f"{what}: SGLang read {len(given)} tokens of row {row} of the probe, of {len(wanted)}.")
        for token, (a, b) in enumerate(zip(given, wanted, strict=True)):
            gap = abs(a - b) if isinstance(a, float | int) else inf
            worst = max(worst, (inf if gap != gap else gap, row, token))
    gap, row, token = worst
    if gap > allowed:
        raise RunError(
            f"{what}: SGLang computes something else with the weights that were published: token {token + 1} in row "
            f"{row} of the probe is {gap:.2g} apart from what they give here; {allowed:g} is allowed.",
            fix="The configuration is read in two ways, or a kernel is at fault; report it with the configuration.",
        )
    return gap


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")
