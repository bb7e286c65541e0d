"""Products of matrices: torch's own, but in fp32 on an AMD from Zen 5 on, where those take twice as long as need be.

There torch calls MKL, which uses AVX-512 on CPUs of Intel alone. oneDNN, which torch has too, uses it on both. It
prepares a kernel for each number of rows, so rows are rounded up to one of eight numbers in each octave. Zen 4 has
AVX-512 too, but computes it in two halves: there oneDNN gains a tenth from 512 rows on, loses more for few rows, and a
whole step is faster without it (docs/benchmarks.md).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

LEAST = 4  # rows; with fewer there is nothing to be had
ZEN_5 = 26  # the family, as /proc/cpuinfo counts; Zen 4 is of 25


def serves(rows: Tensor) -> bool:
    """Whether products with rows [rows, size] are made by :func:`by_onednn`."""
    return rows.shape[0] >= LEAST and rows.dtype == torch.float32 and rows.device.type == "cpu" and _torch_is_slow()


def prepared(count: int) -> int:
    """The number of rows that a kernel is prepared for, where there are so many: ``prepared(130) == 144``."""
    return count + -count % (1 << max(0, count.bit_length() - 4))


def rounded_up(rows: Tensor) -> Tensor:
    """Rows [rows, size] with zeros behind them: ``rounded_up(torch.ones(130, 8)).shape == (144, 8)``."""
    count = rows.shape[0]
    if (whole := prepared(count)) == count:
        return rows
    found = rows.new_empty(whole, rows.shape[1])
    found[:count] = rows
    found[count:] = 0
    return found


def multiply(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``rows @ weight.T + bias`` without gradient, for rows [..., size]."""
    flat = rows.reshape(-1, rows.shape[-1])
    if not serves(flat):
        return linear(rows, weight, bias)
    count = flat.shape[0]
    found = by_onednn(rounded_up(flat), weight, bias)
    return (found if found.shape[0] == count else found[:count]).view(*rows.shape[:-1], weight.shape[0])


def by_onednn(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same, for rows [rows, size] as they are."""
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


@cache
def _torch_is_slow() -> bool:
    """Whether this is such a CPU, and torch has both libraries."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        return is_wide_amd(Path("/proc/cpuinfo").read_text())
    except OSError:
        return False


def is_wide_amd(cpuinfo: str) -> bool:
    """Whether the text of ``/proc/cpuinfo`` is that of an AMD that computes 512 bits at once."""
    lines = (line.partition(":") for line in cpuinfo.split("\n\n")[0].splitlines())
    known = {name.strip(): value.strip() for name, _, value in lines}
    family = known.get("cpu family", "")
    return known.get("vendor_id") == "AuthenticAMD" and family.isdecimal() and int(family) >= ZEN_5
