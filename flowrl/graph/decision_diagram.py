"""Under which outcomes something happens or differs: the paths of a trace as a decision diagram, and it in words."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from ..errors import At
from .tracing.follow_branches import Decision
from .tracing.trace_records import Trail

Term = tuple["Atom", ...]


class _Question(NamedTuple):
    """A condition that a path came to, in which iteration, and how often its line had asked it by then."""

    condition: str
    at: At
    iteration: int
    time: int


def _question(decision: Decision) -> _Question:
    return _Question(decision.condition, decision.at, decision.iteration, decision.time)


@dataclass(frozen=True)
class Leaf:
    """What is so on all paths that come here."""

    value: Hashable


@dataclass(frozen=True)
class Test:
    """A decision on which it hangs: ``yes`` where the condition holds. ``trail`` is the number of a path that asked.

    ``iteration`` is 1 where it looks at nothing but results of the step before, whenever it was asked.
    """

    condition: str
    iteration: int
    time: int
    yes: Diagram
    no: Diagram
    trail: int = field(compare=False)
    decision: Decision = field(compare=False)


Diagram = Leaf | Test


@dataclass(frozen=True)
class Atom:
    """An outcome in a condition: ``Atom("step % 50 == 0", True, iteration=2)``."""

    condition: str
    outcome: bool
    iteration: int
    time: int = 1

    def __str__(self) -> str:
        text = self.condition if self.outcome else f"not ({self.condition})"
        return text + " again" * (self.time - 1) + (" in the step before" if self.iteration == 1 else "")


def diagram(values: Mapping[int, Hashable], trails: Sequence[Trail]) -> Diagram | None:
    """The decision diagram of a value by path. Paths that are not in ``values`` say nothing; None: none is.

    A trace that was cut short does not know all paths; then the diagram is as small as those that are known allow.
    """
    paths = list(values)
    if len(set(values.values())) <= 1:
        return Leaf(values[paths[0]]) if paths else None
    asked = _asked(paths, trails)
    return _grown(paths, _needed(paths, values, asked), values, asked, trails)


def tests(found: Diagram | None) -> Iterator[Test]:
    """Every decision of a diagram."""
    if isinstance(found, Test):
        yield found
        yield from tests(found.yes)
        yield from tests(found.no)


def condition(found: Diagram | None) -> str | None:
    """A diagram of truth values in words: ``step % 50 == 0 or step == 99``; None for one that is true throughout."""
    if not isinstance(found, Test):
        return None
    terms = [_worded(term) for term in _terms(found)]
    return " or ".join(f"({term})" if len(terms) > 1 and " and " in term else term for term in terms)


@dataclass(frozen=True)
class _Asked:
    """What paths were asked: a bit for each question, set in ``asked`` where a path came to it."""

    questions: Mapping[_Question, int]
    asked: Mapping[int, int]
    outcomes: Mapping[int, int]

    def differ(self, one: int, other: int) -> int:
        """The questions that two paths both came to and answered differently."""
        return self.asked[one] & self.asked[other] & (self.outcomes[one] ^ self.outcomes[other])


def _asked(paths: Sequence[int], trails: Sequence[Trail]) -> _Asked:
    questions: dict[_Question, int] = {}
    asked: dict[int, int] = {}
    outcomes: dict[int, int] = {}
    for path in paths:
        asked[path] = outcomes[path] = 0
        for decision in trails[path].path.taken:
            if not decision.forced:
                bit = questions.setdefault(_question(decision), 1 << len(questions))
                asked[path] |= bit
                outcomes[path] |= bit * decision.outcome
    return _Asked(questions, asked, outcomes)


def _needed(paths: Sequence[int], values: Mapping[int, Hashable], asked: _Asked) -> list[_Question]:
    """Return as few questions as tell paths of different values apart; those of this step before those of the last."""
    apart = {asked.differ(a, b) for a, b in combinations(paths, 2) if values[a] != values[b]} - {0}
    kept = 0  # the others tell no paths apart
    for pair in apart:
        kept |= pair
    order = sorted(asked.questions.items(), key=lambda q: (q[0].iteration, -q[1]))
    for _, bit in order:
        if bit & kept and all(pair & kept & ~bit for pair in apart):
            kept &= ~bit
    return [question for question, bit in asked.questions.items() if bit & kept]


def _grown(
    paths: list[int], questions: list[_Question], values: Mapping[int, Hashable], asked: _Asked, trails: Sequence[Trail]
) -> Diagram | None:
    """The diagram of some paths. One that did not come to a question may be on either side of it."""
    if len({values[path] for path in paths}) <= 1:
        return Leaf(values[paths[0]]) if paths else None
    for place, question in enumerate(questions):
        bit = asked.questions[question]
        came = [path for path in paths if asked.asked[path] & bit]
        if len({asked.outcomes[path] & bit for path in came}) < 2:
            continue
        sides = ([p for p in paths if p not in came or bool(asked.outcomes[p] & bit) == side] for side in (True, False))
        rest = questions[place + 1 :]
        yes, no = (_grown(side, rest, values, asked, trails) for side in sides)
        if yes is None or no is None or yes == no:
            return no if yes is None else yes
        decision = next(d for d in trails[came[0]].path.taken if not d.forced and _question(d) == question)
        looks_at = {trails[came[0]].calls[call].iteration for call in decision.calls}
        iteration = 1 if looks_at == {1} else decision.iteration
        return Test(decision.condition, iteration, decision.time, yes, no, came[0], decision)
    return Leaf(values[paths[0]])


def _terms(found: Diagram) -> list[Term]:
    """The ways in which a diagram comes out true, none of which is part of another."""
    if isinstance(found, Leaf):
        return [()] if found.value else []
    yes, no = (Atom(found.condition, outcome, found.iteration, found.time) for outcome in (True, False))
    if found.yes == Leaf(True):  # or: what comes after is asked only where this does not hold
        return [(yes,), *_terms(found.no)]
    if found.no == Leaf(True):
        return [(no,), *_terms(found.yes)]
    then, otherwise = _terms(found.yes), _terms(found.no)
    both = [term for term in then if term in otherwise]
    return [
        *((yes, *term) for term in then if term not in both),
        *((no, *term) for term in otherwise if term not in both),
        *both,
    ]


def _worded(term: Term) -> str:
    """The outcomes of this step first; of a loop's condition only that of its last round."""
    order = sorted(term, key=lambda atom: -atom.iteration)
    later = {(a.condition, a.outcome, a.iteration, a.time - 1) for a in term}
    return " and ".join(str(a) for a in order if (a.condition, a.outcome, a.iteration, a.time) not in later)
