"""A flow whose program hands the numbers of its run to Python in every way there is."""

from __future__ import annotations

import copy
import json
import math
import statistics

import numpy as np
from small_flow import Counter, Numbers

import flowrl as fl

LEVELS = [0.5, 0.25, 0.125]
BY_KEY = {0: 3.0, 1: 5.0, 2: 7.0}

flow = fl.Flow("exits")
counter = flow.worker(Counter)


def ways(x) -> dict[str, float]:
    """What Python makes of a number, which may not be there yet."""
    return {
        "index": LEVELS[int(x) % 3],
        "count": len(list(range(int(x) % 5))),
        "slice": sum(LEVELS[: math.floor(x) % 3]),
        "key": BY_KEY[int(x) % 3],
        "default": BY_KEY.get(round(x), 9.0),
        "member": float(math.trunc(x) in {1, 2, 3}),
        "itself": float({x: 4.0}[float(x)]),
        "hash": hash(x) % 97,
        "floor": math.floor(x),
        "ceil": math.ceil(x),
        "rounded": round(x, 2),
        "whole": round(x),
        "text": float(str(x)),
        "format": float(f"{x:.3f}"),
        "percent": float("%.4f" % x),  # noqa: UP031
        "json": json.loads(json.dumps([float(x)]))[0],
        "copy": float(copy.deepcopy([x])[0]),
        "root": float(np.sqrt(x + 10)),
        "twice": float(np.float64(2) * x),
        "array": float((np.array([1.0, 2.0]) * x).sum()),
        "mean": float(np.mean([x, 1.0])),
        "statistics": statistics.mean([float(x), 1.0]),
        "divided": float(divmod(x, 2)[0]) + float(divmod(x, 2)[1]),
        "shifted": 1 << (int(x) % 4),
        "bits": int(x) ^ 5,
        "float": float(isinstance(float(x), float) and float(x).is_integer()),
        "exp": math.exp(-abs(x)),
        "sign": float(+x),
    }


@flow.program
def exits(steps: int = 3):
    for step, batch in flow.steps(Numbers(), steps):
        metrics = counter.update(counter.values(batch))
        flow.log(step, x=metrics.total, **ways(metrics.total))
