"""Which way a traced program goes where it asks for a value: every outcome is tried, in a run of the program each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from ...errors import At

NUMBERS = (1, 0, 2)  # what stands for a number that plain Python is given: the first, else the others
SAME_IN_A_ROW = 2  # how often a loop may go round on one condition within a step; no other outcome is tried after it
ROUNDS = 16  # how often such a loop goes round on a condition whose outcome is known, as nothing in it changes
PATIENT = 100  # and where it is known that the loop ends by itself before
ENDLESS = 1000  # how often a condition comes out the same in plain Python that makes nothing


@dataclass(frozen=True)
class Exit:
    """A place where plain Python is given a number: ``Exit("int(reward.mean)", At("curriculum.py", 21))``."""

    text: str
    at: At


@dataclass(frozen=True)
class Decision:
    """An outcome on a path: ``Decision("step % 50 == 0", True, At("grpo.py", 21), iteration=1)``."""

    condition: str
    outcome: bool
    at: At
    iteration: int
    calls: frozenset[int] = frozenset()  # whose results the condition looks at
    time: int = 1  # how often this line asked it in the step
    forced: bool = False  # it ends a loop that would go on for ever
    exit: Exit | None = None  # of the number that it chose for plain Python
    key: str = field(default="", compare=False)  # the condition, of the keys of its numbers

    @property
    def label(self) -> str:
        """The condition in words of the program."""
        text = self.condition if self.outcome else f"not ({self.condition})"
        return text + " again" * (self.time - 1)


@dataclass
class Numbers:
    """What stands for a number that plain Python is given.

    The first of its ``choices`` is what a path takes; the second is tried too at the places in ``forks``. Those that
    are written as ``plain`` says are never symbols, as a library takes none.

    Beside them stands which conditions are no ends of loops, however often they come out the same.
    """

    forks: frozenset[Exit] = frozenset()
    choices: dict[Exit, tuple[int, ...]] = field(default_factory=dict[Exit, "tuple[int, ...]"])
    plain: set[str] = field(default_factory=set[str])
    symbols_only: bool = False  # none is, as that did not help
    patient: set[Hashable] = field(default_factory=set[Hashable])  # places in loops that end by themselves
    endless: set[Hashable] = field(default_factory=set[Hashable])  # and in loops that do not
    _hopeless: set[Exit] = field(default_factory=set[Exit])

    def of(self, exit: Exit) -> tuple[int, ...]:
        return self.choices.get(exit, NUMBERS)

    def with_second(self, exits: Iterable[Exit], number: int) -> Numbers:
        """Return the numbers with another second one at these places, where none of them is given up."""
        return replace(self, choices={**self.choices, **{exit: (self.of(exit)[0], number) for exit in exits}})

    def give_up(self, path: Path, *, first: bool = True) -> bool:
        """Take another number at the last place of a failed path that chose one. Returns whether there is one.

        Without ``first`` only a second number is given up.
        """
        last = next((d for d in reversed(path.taken) if d.exit is not None), None)
        if last is None or last.exit is None or last.exit in self._hopeless or (last.outcome and not first):
            return False
        taken, *others = self.of(last.exit)
        if not others:  # no number is to blame
            self.choices[last.exit] = NUMBERS
            self._hopeless.add(last.exit)
            return True
        self.choices[last.exit] = tuple(others) if last.outcome else (taken, *others[1:])
        return True


@dataclass
class Path:
    """One run of the program: the outcomes it was told, and those it went on to take.

    ``exits``: where numbers left, in which ways, and the calls that they come from.
    """

    told: tuple[bool, ...] = ()
    taken: list[Decision] = field(default_factory=list[Decision])
    free: list[bool] = field(default_factory=list[bool])  # whether the other outcome is worth a run
    numbers: Numbers = field(default_factory=Numbers)
    exits: dict[Exit, dict[str, None]] = field(default_factory=dict[Exit, "dict[str, None]"])
    ended: dict[Hashable, bool] = field(default_factory=dict[Hashable, bool])  # places of forced ends; whether known
    _known: dict[str, bool] = field(default_factory=dict[str, bool])
    _plain: dict[str, int] = field(default_factory=dict[str, int])
    _rounds: dict[Hashable, tuple[bool, int]] = field(default_factory=dict[Hashable, "tuple[bool, int]"])
    _times: Counter[Hashable] = field(default_factory=Counter[Hashable])

    def number(
        self, key: str, text: str, at: At, iteration: int, calls: frozenset[int], *, way: str, shift: int = 0
    ) -> int:
        """The plain number in the place of a symbol, the same for the same ``key`` throughout the path, and ``shift``.

        That it is this one and no other is a decision like that of a condition: ``int(reward.mean) == 1``.
        """
        exit = Exit(text, at)
        self.exits.setdefault(exit, {})[way] = None
        if key not in self._plain:
            first, *others = self.numbers.of(exit)
            place = len(self.taken)
            same = self.told[place] if place < len(self.told) else True
            self._plain[key] = first if same or not others else others[0]
            self._known.setdefault(f"eq({key}, {first})", same)
            self.taken.append(Decision(f"{text} == {first + shift}", same, at, iteration, calls, exit=exit))
            self.free.append(exit in self.numbers.forks and bool(others))
        return self._plain[key] + shift

    def chosen(self, key: str) -> int:
        """The number that was chosen for a key."""
        return self._plain.get(key, NUMBERS[0])

    def ask(
        self,
        key: str,
        condition: str,
        at: At,
        iteration: int,
        calls: frozenset[int],
        *,
        place: Hashable,
        loops: bool,
    ) -> bool:
        """The outcome of a condition; the same one for the same ``key`` throughout the path.

        Two conditions on one line differ in ``place``. Where the same one is asked for the third time of a step,
        and came out the same twice, no more paths leave there. If ``loops`` says that a loop went round in between, it
        ends, unless it is known that the loop ends by itself. Else plain Python asks it of several things, as in
        ``any(m.kl > 0.1 for m in ...)``: it stays the same.
        """
        before, same = self._rounds.get((place, iteration), (False, 0))
        known = self._known.get(key)
        most = SAME_IN_A_ROW if known is None else ROUNDS
        most = ENDLESS if not loops else PATIENT if place in self.numbers.patient else most
        ends = same >= most
        open_ = not ends and same < SAME_IN_A_ROW
        if ends:
            outcome = not before
            self.ended[place] = self.ended.pop(place, False) or known is not None
        elif known is not None:
            outcome = known
        elif not open_:
            outcome = before
        else:
            outcome = self.told[len(self.taken)] if len(self.taken) < len(self.told) else False
        self._rounds[(place, iteration)] = (outcome, same + 1 if outcome == before else 1)
        if known is not None and not ends:
            return outcome
        self._known[key] = outcome
        self._times[(condition, at, iteration)] += 1
        time = self._times[(condition, at, iteration)]
        self.taken.append(Decision(condition, outcome, at, iteration, calls, time, forced=ends, key=key))
        self.free.append(open_)
        return outcome

    @property
    def open_end(self) -> bool:
        """Whether the other outcome of its last condition is tried too."""
        asked = (free for d, free in zip(self.taken, self.free, strict=True) if d.exit is None)
        return [*asked][-1:] == [True]

    def fixed(self, decision: Decision) -> bool:
        """Whether a decision chose a number for plain Python, and no path takes another one."""
        return decision.exit is not None and decision.exit not in self.numbers.forks

    def others(self) -> Iterator[tuple[bool, ...]]:
        """The paths that leave this one at a decision it made by itself."""
        outcomes = [d.outcome for d in self.taken]
        for place in range(len(self.told), len(outcomes)):
            if self.free[place]:
                yield (*outcomes[:place], not outcomes[place])
