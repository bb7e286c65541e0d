"""Programs that are run between the steps of others, on the weights as they are there, and change nothing of these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ...graph.stand_ins import current_session as sessions
from ...graph.tracing.log_names import Logged
from ...lowering.lower import Execution
from ...workers.environment_waits import EnvironmentWaits
from ..executor import Executor
from ..storage.journal import Journal
from ..storage.recorder import first_groups
from ..values.call import Call, outcome
from ..values.episode_counts import EpisodeCounts
from ..values.step_records import Hooks, Step, Traffic
from .run_settings import Evaluation
from .running_program import Running

_CALLS, _PROGRAMS = 1 << 20, 1 << 4  # of one evaluation, and evaluations between two calls: each has a place


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation came to: its ``step``, of all that it did, and what became of its rows."""

    step: Step
    ledger: Mapping[str, Any]


class Evaluations:
    """Runs evaluations while the session of another program stands still, as programs of their own.

    Their rows have the seeds that they would have if the program was run alone. The copies that generate are given the
    weights that are trained, and after that back what they had. ``after``: how many programs the run has.
    """

    def __init__(
        self, asked: Sequence[Evaluation], executor: Executor, journal: Journal, seed: int, *, after: int, groups: int
    ) -> None:
        self.asked = {each.name: each for each in asked}
        self._executor, self._journal, self._seed = executor, journal, seed
        self._after, self._groups = after, groups

    def due(self, done: int, ended: bool) -> list[str]:
        """Return the programs that are to be run once so many steps are done, or the program has ended."""
        return [name for name, each in self.asked.items() if ended or done % each.every == 0]

    def run(
        self,
        name: str,
        outer: Running,
        calls: int,
        during: Callable[[Running | None], None],
        *,
        settle: Callable[[Call, int], None],
        not_finite: Callable[[Call, Any], None],
    ) -> Evaluated:
        """Run a program while ``outer`` stands still, which has made so many calls. ``during`` is told its session.

        ``settle``, ``not_finite``: as of :class:`Hooks`.
        """
        number = list(self.asked).index(name)
        execution = _in_place_of(outer.scheme.setup.memory, outer.scheme.residents, self.asked[name].execution)
        steps: list[Step] = []

        def place(index: int) -> tuple[int, float]:
            """Between the numbers of the last call of ``outer`` and the next one."""
            return outer.number, calls - 1 + (number * _CALLS + index + 1) / (_CALLS * _PROGRAMS)

        def gather(step: Step) -> None:
            if step.rows is not None:
                some = step.readable(first_groups(step.rows, self._groups)) if self._groups and not steps else None
                step.rows = step.recorded = some
            step.marked = None
            steps.append(step)

        with self._exact_weights(execution, outer):
            self._executor.begin_anew(n for n in execution.workers if n not in outer.dispatcher.workers)
            session = Running(
                execution,
                self._after + number,
                self._seed,
                executor=self._executor,
                journal=self._journal,
                hooks=_hooks(gather, self._groups, settle, not_finite),
                resume=None,
                place=place,
            )
            session.machine.residency = outer.machine.residency
            during(session)
            try:
                with sessions.using(session):
                    execution.fn(**execution.parameters)
                    session.finish()
            finally:
                during(None)
                session.close(True)
        return Evaluated(_together(steps), session.end_ledger())

    @contextmanager
    def _exact_weights(self, execution: Execution, outer: Running) -> Iterator[None]:
        """Have the copies that generate the weights as they are trained meanwhile."""
        before: dict[str, tuple[int, Any]] = {}
        for name in execution.servers:
            version, server = self._executor.workers[name].read_version(), self._executor.servers[name]
            if server.version != version:
                if name in outer.dispatcher.servers:  # it goes on with those that its schedule has given it
                    before[name] = server.version, server.stage()
                self._executor.install(name, version)
        yield
        for name, (version, weights) in before.items():
            self._executor.install(name, version, weights)


def _in_place_of(memory: Mapping[str, Any], residents: Mapping[str, Any], execution: Execution) -> Execution:
    """Return a program whose workers take turns in the memory of their pools with those of another one."""
    scheme = replace(execution.scheme, residents=residents, setup=replace(execution.scheme.setup, memory=memory))
    return replace(execution, scheme=scheme)


def _hooks(
    gather: Callable[[Step], None],
    groups: int,
    settle: Callable[[Call, int], None],
    not_finite: Callable[[Call, Any], None],
) -> Hooks:
    """Return the hooks of a program that is run between the steps of another: its steps are gathered, nothing else."""
    return Hooks(
        commit=gather,
        note=lambda step: None,
        checkpoint=lambda point: None,
        marks=dict,
        due=lambda step: False,
        stop=lambda: False,
        sampled=lambda step: groups,
        settle=settle,
        not_finite=not_finite,
    )


def _together(steps: Sequence[Step]) -> Step:
    """Return all steps of an evaluation as one, which has the mean of each number that they have logged."""
    whole = Step(0)
    numbers: dict[str, list[float]] = defaultdict(list)
    lines: dict[str, Logged] = {}
    for step in steps:
        for name, value, item in _numbers(step):
            numbers[name].append(value)
            lines[name] = item
        whole.timings += step.timings
        whole.skipped += step.skipped
        _add_traffic(whole.traffic, step.traffic)
        for node, (tokens, responses) in step.sampled.items():
            before = whole.sampled.get(node, (0, 0))
            whole.sampled[node] = before[0] + tokens, before[1] + responses
        for node, count in step.cut_off.items():
            whole.cut_off[node] = whole.cut_off.get(node, 0) + count
        for node, lengths in step.lengths.items():
            whole.lengths.setdefault(node, []).extend(lengths)
        for node, episodes in step.episodes.items():
            whole.episodes.setdefault(node, EpisodeCounts()).add(episodes)
        for node, slots in step.slots.items():
            known = whole.slots.setdefault(node, replace(slots, used=0, there=0))
            known.used, known.there = known.used + slots.used, known.there + slots.there
        for node, waits in step.waits.items():
            whole.waits.setdefault(node, EnvironmentWaits()).add(waits)
        whole.made |= step.made
        whole.parts |= step.parts
        whole.ledger = step.ledger or whole.ledger
        if whole.rows is None:
            whole.rows = whole.recorded = step.recorded
    values = {name: sum(some) / len(some) for name, some in numbers.items()}
    whole.logs = [(0, [Logged(name, value, lines[name].of, lines[name].at) for name, value in values.items()])]
    return whole


def _numbers(step: Step) -> Iterator[tuple[str, float, Logged]]:
    """Yield the numbers that a step has logged, by name."""
    for item in (item for _, items in step.logs for item in items):
        plain = outcome(item.value.ref) if hasattr(item.value, "ref") else item.value
        entries = {item.under(n): v for n, v in plain.items()} if isinstance(plain, Mapping) else {item.name: plain}
        for name, value in entries.items():
            found = value.mean() if hasattr(value, "mean") else value.item() if hasattr(value, "item") else value
            if isinstance(found, (int, float)):
                yield name, float(found), item


def _add_traffic(whole: Traffic, more: Traffic) -> None:
    for node, count in more.calls.items():
        whole.calls[node] = whole.calls.get(node, 0) + count
    for mine, others in ((whole.reads, more.reads), (whole.makes, more.makes)):
        for node, fields in others.items():
            known = mine.setdefault(node, {})
            for name, size in fields.items():
                known[name] = known.get(name, 0) + size
    whole.prompts += more.prompts
    whole.responses += more.responses
    whole.sources += more.sources
