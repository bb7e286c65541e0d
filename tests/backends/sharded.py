"""An engine of one process and one on a mesh with the same weights, the rows that both are given, and how far they are apart."""

from __future__ import annotations

import math

import tiny as T
import torch

from flowrl.backends import open_engine
from flowrl.batch import CallInfo, Column
from flowrl.workers.model_options import Build, Model, Optim

OPTIM = Optim(lr=1e-2, weight_decay=0.1, grad_clip=0.5, warmup=2)


EXACT = 1e-9


def build(axes, kind="qwen2", extra=None, **more):
    return Build(
        Model(config={**T.CONFIGS[kind], **(extra or {})}),
        axes=axes,
        **{"optim": OPTIM, "dtype": "fp64", **more},
    )


def opened(axes, kind="qwen2", extra=None, **more):
    """The engine of one process, with weights that are scaled up, and one on the mesh with the same."""
    one = open_engine("hf", build({}, kind, extra, **more))
    with torch.no_grad():
        for name, weight in one.net.model.named_parameters():
            if weight.dim() > 1 and ".lora_" not in name:
                weight.mul_(3.0)
    engine = open_engine("fsdp2", build(axes, kind, extra, **more))
    engine.copy_weights_from(one)
    one_layout(kind, one, engine)
    return one, engine


def one_layout(kind, *engines):
    """Have rows alone in all passes, where transformers computes a model's norms in float32 whatever its dtype.

    A prompt that rows share is rounded once there, and once for each row elsewhere: more than ``EXACT``.
    """
    for engine in engines:
        engine.net.grouped &= kind in ("gpt2", "phi")


def rollouts(seed=3):
    """Sixteen rows with all that the losses here read; some tokens are observations."""
    batch = T.rollouts(T.engine("qwen2", dtype="fp64"), n=4, seed=seed)
    mask = batch.response_mask
    noise = torch.randn(3, len(mask.values), generator=torch.Generator().manual_seed(0))
    seen = mask.with_values(torch.arange(len(mask.values)) % 5 != 3)
    old = batch.rollout_logprobs
    return batch.drop("response_mask", "rollout_logprobs").with_columns(
        {
            "response_mask": seen,
            "rollout_logprobs": old + 0.1 * old.with_values(noise[0]),
            "ref_logprobs": old + 0.1 * old.with_values(noise[1]),
            "returns": old.with_values(noise[2]),
            "values": old.with_values(noise[1]),
        }
    )


def pairs():
    """Eight pairs: the first two rows of each prompt, and the other two."""
    batch = rollouts()
    rows = [(4 * i + j, i) for i in range(4) for j in range(4)]
    keys = [(key // 2, key % 2) for key, _ in rows]
    again = type(batch)(keys, dict(batch.columns), CallInfo(seed=1))
    return again.with_columns({"preferred": Column.of([key[1] == 0 for key in keys], dtype="bool")})


def part(batch, engine, sizes):
    """This rank's rows: ``sizes`` of them for each place, by turns so that they are not in the order of keys."""
    rows = list(range(len(batch)))
    cut = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    assert cut[-1] == len(batch) and len(sizes) == engine.team.data
    mine = rows[cut[engine.team.place] : cut[engine.team.place + 1]]
    return batch.take(mine[::2] + mine[1::2] if len(mine) % 2 else mine)


def apart_by_token(wanted, found):
    """How far numbers by token of rows that are written down are from each other; they are of the same tokens."""
    assert [(said["key"], list(said)) for said in found] == [(said["key"], list(said)) for said in wanted]
    worst = 0.0
    for one, other in zip(wanted, found, strict=True):
        for name in one.keys() - {"key"}:
            for a, b in zip(one[name], other[name], strict=True):
                assert (a is None) == (b is None)
                worst = max(worst, 0.0 if a is None else abs(a - b))
    return worst


def apart(a, b):
    return max((abs(a[k] - b[k]) if not (math.isnan(a[k]) and math.isnan(b[k])) else 0.0 for k in a), default=0.0)
