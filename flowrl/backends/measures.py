"""What every policy update measures of its tokens and rows without being asked, the same on every layout.

Over the response tokens that are trained and computed, in all optimizer steps of the update (a row without a signal may
be left out of them). Sums are float64, so micro-batches and ranks change nothing but the last digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..batch import Batch, Key
from ..rl.loss_spec import Loss, LossInputs
from ..rl.math.kl import estimate
from .gap import LARGEST, add_sums

GRAM = 4  # tokens of a sequence that counts as repeated
_MARK = "measured/"  # before the names of these sums, among those of what a loss reports
_RATIO = _MARK + LARGEST  # the largest ratio, which is added up as the largest gap is


def trains_policy(loss: Loss, batch: Batch) -> bool:
    """Return whether an update trains a policy: by advantages, or on rows that say how their sampling ended."""
    return loss.of_policy or (loss.on == "logprobs" and "finished" in batch)


def is_measured(name: str) -> bool:
    """Return whether a sum is one of these, and nothing that a loss reports."""
    return name.startswith(_MARK)


def token_sums(x: LossInputs, reports: Mapping[str, Tensor], entropy: Tensor | None) -> dict[str, Tensor]:
    """Return the sums over the trained tokens of one pass; ``reports`` are those of the loss, [total] each."""
    found: dict[str, Tensor] = {}
    if entropy is not None:
        found["entropy"] = entropy[x.mask].sum(dtype=torch.float64)
    # With a support both are over it: the kind of numbers that the loss takes a ratio of.
    engine = next((name for name in ("rollout_logprobs", "sampling_logprobs") if name in x.fields), None)
    ratio = reports["ratio"].detach()[x.mask].double() if "ratio" in reports else None
    if engine is not None:
        sampled, now = x[engine][x.mask], x.predicted.detach()[x.mask]
        found["rollout_kl"] = estimate(sampled, now, "k3").sum(dtype=torch.float64)
        ratio = (now.double() - sampled).exp() if ratio is None else ratio  # what the loss would take, if it took one
    if ratio is not None:
        found |= {"ratio": ratio.sum(), "squares": ratio.square().sum()}
        found[LARGEST] = ratio.max() if len(ratio) else ratio.sum()
        if {"ratio", "clip_fraction"} <= set(reports):
            clipped = reports["clip_fraction"].detach()[x.mask].double()
            found |= {"clip_low": (clipped * (ratio < 1)).sum(), "clip_high": (clipped * (ratio >= 1)).sum()}
    found |= _before_bounds(x, reports)
    return {_MARK + name: value for name, value in found.items()}


def _before_bounds(x: LossInputs, reports: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sums of the ratios of corrections before their bounds; their means are reports like any other."""
    found: dict[str, Tensor] = {}
    for name in [n.removesuffix("_ratio") for n in reports if n.startswith("correction") and n.endswith("_ratio")]:
        ratio = reports[f"{name}_ratio"].detach()[x.mask].double()
        found |= {f"{name}_sum": ratio.sum(), f"{name}_squares": ratio.square().sum()}
        found[f"{name}_{LARGEST}"] = ratio.max() if len(ratio) else ratio.sum()
        found[f"{name}_beyond_rows"] = (x.row_sum(reports[f"{name}_beyond"].detach()) > 0).sum().double()
    return found


def measured_names(loss: Loss, batch: Batch) -> tuple[str, ...]:
    """Return which of these an update of some rows reports, also where it computes no token of them."""
    rollout = ("rollout_kl",) if "rollout_logprobs" in batch else ()
    ratio = ("ratio_max", "ess") if rollout or "ratio" in loss.reports else ()
    clipped = ("clip_low", "clip_high") if {"ratio", "clip_fraction"} <= set(loss.reports) else ()
    return ("entropy", *rollout, *ratio, *clipped) if trains_policy(loss, batch) else ()


def measures_of(sums: Iterable[Mapping[str, float]], tokens: int, rows: int) -> dict[str, float]:
    """Return the metrics of an update from the sums of all ranks; no numbers where no token was computed."""
    total: dict[str, float] = {}
    for part in sums:
        add_sums(total, {name.removeprefix(_MARK): value for name, value in part.items()})
    means = ("entropy", "rollout_kl", "clip_low", "clip_high")
    found = {name: total[name] / max(1, tokens) for name in means if name in total}
    if "ratio" in total:
        found["ratio_max"] = total[LARGEST]
        found["ess"] = total["ratio"] ** 2 / max(tokens * total["squares"], 1e-300)
    for name in [n.removesuffix("_beyond_rows") for n in total if n.endswith("_beyond_rows")]:
        found[f"{name}_ratio_max"] = total[f"{name}_{LARGEST}"]
        found[f"{name}_ess"] = total[f"{name}_sum"] ** 2 / max(tokens * total[f"{name}_squares"], 1e-300)
        found[f"{name}_beyond_rows"] = total[f"{name}_beyond_rows"] / max(1, rows)
    return found if tokens else dict.fromkeys(found, math.nan)


# -- rows -------------------------------------------------------------------------------------------------------------


def without_signal(batch: Batch) -> list[bool]:
    """Return of each row whether the advantages of all its trained tokens are 0."""
    mask = batch.response_mask
    speaks = mask.values.cpu() & (batch.advantages.values.cpu() != 0)
    row = torch.repeat_interleave(torch.arange(len(mask.lengths)), mask.lengths)
    return (torch.bincount(row[speaks], minlength=len(batch)) == 0).tolist()


def silent_groups(keys: Sequence[Key], silent: Sequence[bool]) -> float:
    """Return the share of prompts all of whose rows are without a signal.

    >>> silent_groups([(0, 0), (0, 1), (1, 0), (1, 1)], [True, True, True, False])
    0.5
    """
    groups: dict[Any, bool] = {}
    for key, still in zip(keys, silent, strict=True):
        groups[key[0]] = groups.get(key[0], True) and still
    return sum(groups.values()) / len(groups) if groups else math.nan


def repeated_grams(batch: Batch) -> tuple[int, int]:
    """Return how many sequences of four trained tokens came earlier in the same response, and how many there are."""
    mask = batch.response_mask
    inside = mask.values.cpu().numpy()
    row = np.repeat(np.arange(len(mask.lengths)), mask.lengths.numpy())[inside]
    tokens = batch.tokens
    starts = (tokens.offsets[1:] - mask.lengths).repeat_interleave(mask.lengths)  # responses are at the ends of rows
    within = torch.arange(len(mask.values)) - mask.offsets[:-1].repeat_interleave(mask.lengths)
    ids = tokens.values.cpu()[starts + within].numpy()[inside]
    gram, width = np.unique(ids, return_inverse=True)[1].astype(np.int64), 1
    while width < GRAM and len(gram) > width:  # numbers of pairs of what was numbered before
        gram, width = _numbered(gram[:-width], gram[width:]), 2 * width
    if width < GRAM or not len(gram):
        return 0, 0
    same = row[: len(gram)] == row[GRAM - 1 :]
    count = int(same.sum())
    return count - len(np.unique(_numbered(gram[same], row[: len(gram)][same]))), count


def _numbered(first: Any, second: Any) -> Any:
    """The number of each pair, equal where the pairs are."""
    return np.unique(first * (int(second.max(initial=0)) + 1) + second, return_inverse=True)[1].astype(np.int64)
