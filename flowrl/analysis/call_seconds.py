"""How long the calls of a study take on the virtual clock, priced as they are issued."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ..placement.cost.calibrated_costs import Calibrated
from ..placement.cost.continuous_batch import Engine
from ..placement.cost.cost_model import Costs
from ..placement.cost.length_distribution import Lengths
from ..placement.cost.link_parts import link_parts
from ..placement.cost.roofline import Roofline
from ..placement.cost.work import Work, Workload
from ..schedule.engine_slots import Rows
from ..schedule.events import Call
from ..schedule.fly_program import Made
from ..schedule.shared_links import Parts

if TYPE_CHECKING:
    from .study import Study


def prompts_of(made: Made) -> int:
    """The prompts of a call's rows, of which it may have asked ``n`` each."""
    n = made.call.arguments.get("n")
    return made.rows // n if isinstance(n, int) and n else made.rows


def plays_episodes(made: Made) -> bool:
    """Whether a call plays episodes: it asks a policy row by row for rows of its own."""
    return bool(made.call.serves) and made.call.op.external and made.call.op.rows == "expand"


class NoTime:
    """Calls that take no time: for looking at a program, not at a schedule."""

    def seconds(self, call: Call) -> float:
        return 0.0

    def rows(self, call: Call) -> Rows | None:
        return None

    def publish(self, worker: str) -> float:
        return 0.0

    def swap(self, pool: str, resident: str, what: str) -> float:
        return 0.0

    def parts(self, call: Call) -> Parts:
        return {}

    def publish_parts(self, worker: str) -> Parts:
        return {}


@dataclass(frozen=True)
class Faster:
    """Costs with the calls of one pool faster: ``Faster(costs, 0.9, pool="train")`` take nine tenths of the time."""

    costs: Costs
    factor: float
    pool: str

    @property
    def source(self) -> str:
        return self.costs.source

    def seconds(self, work: Work) -> float:
        """Return seconds of one call; moves of weights are as they were."""
        moves = work.kind in ("publish", "offload", "onload")
        return self.costs.seconds(work) * (self.factor if work.pool == self.pool and not moves else 1.0)

    def engine(self, work: Work) -> Engine | None:
        """Return the engine of a generate, faster too."""
        found = _engine_of(self.costs, work)
        if found is None or work.pool != self.pool:
            return found
        return replace(found, step=lambda rows: found.step(rows) * self.factor, prefill=found.prefill * self.factor)


def _engine_of(costs: Costs, work: Work) -> Engine | None:
    """The engine of costs that know one."""
    return costs.engine(work) if isinstance(costs, (Roofline, Calibrated, Faster)) else None


def _parts_of(costs: Costs, work: Work) -> Parts:
    """The parts of links that a work keeps busy, by costs that know its links."""
    if isinstance(costs, Faster):
        return _parts_of(costs.costs, work)
    return link_parts(costs, work) if isinstance(costs, Roofline) else {}


@lru_cache(maxsize=64)  # the same calls under another plan have rows of the same lengths
def _groups(lengths: Lengths, rows: int, seed: str, size: int) -> Sequence[Sequence[float]]:
    """The lengths of so many rows, by groups of a size."""
    drawn = lengths.draw(rows, seed, size)
    return [drawn[i : i + size] for i in range(0, rows, size)]


class Pace:
    """The costs of a study, for the virtual clock. Equal calls are priced once."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self.nodes: dict[int, str] = {}
        self._works: dict[int, Work] = {}
        self._made: dict[int, Made] = {}
        self._known: dict[tuple[str, Workload], float] = {}
        self._engines: dict[tuple[str, Workload], Engine] = {}
        self._moves: dict[tuple[str, ...], float] = {}
        self._shares: dict[Hashable, Parts] = {}

    def note(self, made: Made) -> int:
        """Remember a call before it is issued. Returns its prompt groups."""
        study, call = self._study, made.call
        self.nodes[call.index] = study.ids.get(call.place, call.title)
        work = study.work(made)
        if work is not None:
            self._works[call.index] = work
            self._made[call.index] = made
        return max(1, prompts_of(made))

    def seconds(self, call: Call) -> float:
        work = self._works.get(call.id)
        if work is None:
            return 0.0
        key = (work.node, work.load)
        if key not in self._known:
            self._known[key] = self._study.cost_model.seconds(work)
        return self._known[key]

    def rows(self, call: Call) -> Rows | None:
        """Rows of their own lengths, in an engine that is as fast as the costs have it for so many rows. Rows of one
        length are a block, unless they have turns, or the call is beside others with which it shares the engine.
        """
        made = self._made.get(call.id)
        lengths = self._study.lengths.of(made) if made is not None else None
        turns = self._study.episode_turns(made) if made is not None else None
        if made is None or lengths is None or not made.rows or not (lengths.varies or turns or call.joins):
            return None
        size = max(1, made.rows // max(1, call.groups or prompts_of(made)))
        groups = _groups(lengths, made.rows, f"{self._study.seed} {call.id}", size)
        return Rows(groups, self._engine(call, lengths.mean), turns)

    def _engine(self, call: Call, mean: float) -> Engine:
        """Of a roofline, the engine that it prices, and that of a run which tells of it; of costs that are seconds of a
        whole call, one that runs all of its rows at once, each token taking what it takes in a row of average length.
        """
        work = self._works[call.id]
        key = (work.node, work.load)
        if key not in self._engines:
            costs, found = self._study.cost_model, None
            if work.role.model is not None:
                found = _engine_of(costs, work)
            if found is None:
                each = self.seconds(call) / mean
                found = Engine(work.load.rows, lambda rows: each)
            self._engines[key] = found
        return self._engines[key]

    def publish(self, worker: str) -> float:
        return self._move(("publish", worker), lambda: self._study.publish(worker))

    def parts(self, call: Call) -> Parts:
        work = self._works.get(call.id)
        return {} if work is None else self._parts((work.node, work.load), lambda: work)

    def publish_parts(self, worker: str) -> Parts:
        return self._parts(worker, lambda: self._study.publish(worker))

    def _parts(self, key: Hashable, work: Callable[[], Work]) -> Parts:
        if key not in self._shares:
            self._shares[key] = _parts_of(self._study.cost_model, work())
        return self._shares[key]

    def swap(self, pool: str, resident: str, what: str) -> float:
        return self._move((pool, resident, what), lambda: self._study.swap(pool, resident, what))

    def _move(self, key: tuple[str, ...], work: Callable[[], Work]) -> float:
        if key not in self._moves:
            self._moves[key] = self._study.cost_model.seconds(work())
        return self._moves[key]
