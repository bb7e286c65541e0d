"""What a step costs beside its seconds: device-hours, money at prices of a file, time that failures take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

from ...errors import PlanError, UsageError, did_you_mean, shown
from ..cluster.cluster import Cluster
from ..cluster.device_specs import KINDS
from .given_costs import read_entries

_STEPS = 1000  # that are priced together


@dataclass(frozen=True)
class Prices:
    """What an hour of a device costs, by kind: ``Prices({"h100-80": 2.5}, "prices.yaml")``."""

    hour: Mapping[str, float]
    file: str = ""

    @staticmethod
    def load(path: str | Path) -> Prices:
        """Read ``{h100-80: 2.5, l40s: 0.9}``. Raises PlanError with file and line."""
        found: dict[str, float] = {}
        for entry in read_entries(path):
            if entry.name not in KINDS:
                what = f"a price is given for '{entry.name}', which is no kind of device."
                raise PlanError(what, at=entry.at, have=KINDS, fix=did_you_mean(entry.name, KINDS, "Take it out."))
            try:
                price = float(entry.text)
            except ValueError:
                price = -1.0
            if not 0 <= price < float("inf"):
                fix = f"Write what an hour of one device costs, 0 or more, as in {entry.name}: 2.5."
                raise PlanError(f"'{entry.name}': '{entry.text}' is no price.", at=entry.at, fix=fix)
            found[entry.name] = price
        return Prices(found, shown(str(path)))


@dataclass(frozen=True)
class Failures:
    """How often devices fail, and what that costs: ``Failures(hours=40000, checkpoint=60, restart=300)``.

    ``hours``: the mean time between failures of one device. Seconds in which the run stops for a checkpoint, and from a
    failure until it goes on from the last one.

    >>> Failures.read("40000,60,300").interval(devices=1024, step=30.0)
    (4110.0, 137)
    """

    hours: float
    checkpoint: float
    restart: float

    @staticmethod
    def read(text: str) -> Failures:
        """Read ``HOURS,CHECKPOINT,RESTART``. Raises UsageError."""
        try:
            hours, checkpoint, restart = (float(part) for part in text.split(","))
        except ValueError:
            hours = checkpoint = restart = -1.0
        if not (hours > 0 and checkpoint >= 0 and restart >= 0 and isfinite(hours + checkpoint + restart)):
            fix = "Write hours between failures of a device, seconds of a checkpoint and of a restart: 40000,60,300."
            raise UsageError(f"--failures {text}: these are no three numbers.", fix=fix)
        return Failures(hours, checkpoint, restart)

    def interval(self, *, devices: int, step: float) -> tuple[float, int]:
        """Return the seconds from checkpoint to checkpoint that lose least, and the steps that they are.

        The root of twice a checkpoint times the time between failures (Young 1974), in whole steps.
        """
        steps = max(1, round(sqrt(2 * self.checkpoint * self.every(devices)) / step)) if step else 1
        return steps * step, steps

    def every(self, devices: int) -> float:
        """Return the seconds from one failure of any device to the next."""
        return self.hours * 3600 / max(devices, 1)

    def lost(self, *, devices: int, step: float) -> float:
        """Return seconds lost for each second of work: checkpoints, and half an interval and a restart by failure."""
        seconds, _ = self.interval(devices=devices, step=step)
        return (self.checkpoint / seconds if seconds else 0.0) + (seconds / 2 + self.restart) / self.every(devices)


@dataclass(frozen=True)
class MachineHours:
    """What a step of ``seconds`` takes of all devices of a cluster, rented as a whole whether a plan uses them or not.

    ``price`` of a step is None without prices; ``step_seconds`` has what failures take in it.
    """

    devices: Mapping[str, int]
    step_seconds: float
    device_hours: float
    price: float | None
    checkpoint_steps: int | None
    lost: float
    words: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "words": list(self.words)}


def machine_hours(
    cluster: Cluster, seconds: float, prices: Prices | None = None, failures: Failures | None = None
) -> MachineHours:
    """Return what a step takes. Raises PlanError for a kind of device of the cluster without a price."""
    devices = Counter(cluster.kind(device).name for device in range(cluster.size))
    if prices is not None and (missing := [kind for kind in devices if kind not in prices.hour]):
        kind = missing[0]
        what = f"{prices.file or 'the prices'} has none for '{kind}', of which the cluster has {devices[kind]}."
        raise PlanError(what, have=prices.hour, fix=f"Add a line, as in {kind}: 2.5.")
    lost = failures.lost(devices=cluster.size, step=seconds) if failures is not None else 0.0
    whole = seconds * (1 + lost)
    hours = cluster.size * whole / 3600
    price = sum(n * prices.hour[kind] for kind, n in devices.items()) * whole / 3600 if prices is not None else None
    words: list[str] = []
    steps = None
    if failures is not None:
        apart, steps = failures.interval(devices=cluster.size, step=seconds)
        every = failures.every(cluster.size)
        words.append(
            f"a device fails every {failures.hours:g} hours (as said), one of {cluster.size} every {every / 3600:.3g}: "
            f"with a checkpoint every {steps} steps ({apart / 60:.3g} minutes) a step takes {whole:.4g} s,"
            f" {lost:.1%} more"
        )
    has = " and ".join(f"{n} {kind}" for kind, n in devices.items())
    words.append(f"a step takes {hours:.4g} device-hours of {has}, {_STEPS} steps {_STEPS * hours:.4g}")
    if price is not None and prices is not None:
        given = f" (prices of {prices.file})" if prices.file else ""
        words.append(f"a step costs {price:.4g}, {_STEPS} steps {_STEPS * price:.4g}{given}")
    return MachineHours(dict(devices), whole, hours, price, steps, lost, tuple(words))
