"""The Python state around a program, such as a list at module level: put back as it was after a trace ran through it.

A trace runs the program for real, on stand-ins for values. What it appends to a list, counts in an object or draws from
``random`` would otherwise be there when the run begins.
"""

from __future__ import annotations

import operator
import random
import sys
import types
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from ...errors import At, ProgramError
from .named_in_code import Named, first_part, lines, lines_of
from .site import defined_at, is_users

LIMIT = 200_000  # objects that are looked after; the ones nearest to the program come first
LARGE = 1 << 26  # bytes of an array or a tensor: larger ones are not copied, and only looked at
_AROUND = (types.ModuleType, types.CellType)  # what holds variables, and is none
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis)))


@dataclass(frozen=True)
class Place:
    """Something that can change, as it was: ``Place("LEVELS", "items", LEVELS, [1])``.

    ``kind``: ``names`` of a module, ``attributes`` of an object, a class or slots, ``entries`` of a dict, ``items`` of
    a list, a deque or a bytearray, ``members`` of a set, the ``content`` of a closure's cell, the ``state`` of a random
    generator, ``numbers`` of a tensor or an array.
    """

    name: str
    kind: str
    holder: Any
    was: Any


class Surroundings:
    """All that programs can reach and change: their modules' values, closures, defaults, and what these hold.

    Objects of libraries are left out, save containers, arrays, tensors and random generators. ``seen``: all of it, with
    names, those nearest to the programs first; ``places``: what of it can change. ``names`` are further values to begin
    with, such as the variables of a program that runs.
    """

    def __init__(
        self, program: Callable[..., Any], *others: Callable[..., Any], names: Mapping[str, Any] | None = None
    ) -> None:
        self.program = program
        self.seen: list[tuple[str, Any]] = []
        self.places: list[Place] = []
        self.whole = True  # nothing was left out because there is too much of it
        self._kinds: dict[type, bool] = {}
        self._looks: dict[type, Callable[[str, Any], None] | None] = {}
        self._ways: list[tuple[Any, Callable[[str, Any], None]]] = [
            (types.FunctionType, self._function),
            (types.MethodType, lambda name, m: self._hold(name, [m.__self__, m.__func__])),
            (partial, lambda name, p: self._hold(name, [p.func, *p.args, *p.keywords.values()])),
            (types.ModuleType, lambda name, module: self._mapping(name, module.__dict__, "names")),
            (types.CellType, self._cell),
            (type, self._class),
            (dict, self._mapping),
            ((list, deque, bytearray), self._sequence),
            ((tuple, frozenset), self._hold),
            (set, self._set),
            (random.Random, self._random),
        ]
        self._seen: dict[int, Any] = {}  # kept, so that no other object gets its id
        self._back: list[Callable[[], None]] = []
        self._taken: list[tuple[Named, Callable[[], bool]]] = []  # what cannot be put back, and whether it changed
        self._waiting: deque[Named] = deque(Named("", value, value) for value in (program, *others))
        self._waiting.extend(Named(name, value, value) for name, value in (names or {}).items())
        while self._waiting:
            if len(self._seen) > LIMIT:
                self.whole = False
                break
            self._now = self._waiting.popleft()
            self._look_at(self._now.name, self._now.value)
        self._back += list(_generators_of_numbers())

    def restore(self) -> None:
        """Put everything back that was changed since."""
        for put_back in self._back:
            put_back()

    def taken(self) -> list[str]:
        """The names of what was changed and cannot be put back, such as iterators."""
        return [named.name for named, changed in self._taken if changed()]

    def leaks(self) -> list[ProgramError]:
        """Return errors of what was changed and cannot be put back, as findings of a check."""
        return [
            ProgramError(
                f"'{named.name}' is outside of the program, and the program takes from it or changes it: check, which "
                "runs the program too, has done so already.",
                at=next(lines_of(self.program, named), None) or line_of(self.program, named.name),
                fix="Make it inside of the program, which begins with it anew.",
            )
            for named, changed in self._taken
            if changed()
        ]

    # -- what there is ------------------------------------------------------------------------------------------

    def _look_at(self, name: str, value: Any) -> None:
        # Asked of the class: some objects answer isinstance with work, or not at all.
        kind = cast("type[Any]", type(value))
        if kind in _PLAIN or (issubclass(kind, types.ModuleType) and not is_users(value)):
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        self.seen.append((name, value))
        if kind not in self._looks:
            self._looks[kind] = next((look for of, look in self._ways if issubclass(kind, of)), None)
        if (look := self._looks[kind]) is not None:
            look(name, value)
        elif kind.__module__.partition(".")[0] in ("torch", "numpy"):
            self._numbers(name, value)
        elif hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools"):
            self._iterator(name, value)
        if self.is_own(kind):
            self._object(name, value)

    def is_own(self, kind: type) -> bool:
        """Whether objects of a class are the user's to change."""
        if kind not in self._kinds:
            plain = kind in (types.SimpleNamespace, Namespace)
            self._kinds[kind] = plain or (not issubclass(kind, type) and is_users(kind))
        return self._kinds[kind]

    def _iterator(self, name: str, value: Any) -> None:
        """Note an iterator, which cannot be put back: where it is now, or else whether the program names it."""
        if type(value).__name__ == "count" or hasattr(value, "__length_hint__") or hasattr(value, "gi_frame"):
            was = _progress(value)
            self._taken.append((self._now, lambda: _progress(value) != was))
        else:
            named = self._now
            self._taken.append((named, lambda: any(True for _ in lines_of(self.program, named))))

    def _hold(self, name: str, values: Any) -> None:
        """Look at some values later: those nearest to the program come first."""
        for value in values:
            self._later(name, value)

    def _later(self, name: str, value: Any) -> None:
        if type(value) not in _PLAIN:
            now = self._now
            part = now.name and not isinstance(now.first, _AROUND) and first_part(name) == first_part(now.name)
            self._waiting.append(Named(name, value, now.first if part else value))

    def _function(self, name: str, fn: types.FunctionType) -> None:
        if not is_users(fn):
            return
        if id(fn.__globals__) not in self._seen:
            self._seen[id(fn.__globals__)] = fn.__globals__
            self._mapping("", fn.__globals__, "names")
        self._mapping(fn.__name__, fn.__dict__, "attributes")
        for free, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
            self._later(free, cell)
        self._hold(fn.__name__, [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()])

    def _cell(self, name: str, cell: types.CellType) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # still empty
            return

        def put_back() -> None:
            cell.cell_contents = value

        self._note(name, "content", cell, value, put_back)
        self._hold(name, [value])

    def _class(self, name: str, cls: type) -> None:
        if not is_users(cls):
            return
        was = {n: v for n, v in vars(cls).items() if not n.startswith("__")}

        def put_back() -> None:
            now = {n: v for n, v in vars(cls).items() if not n.startswith("__")}
            for attribute in now.keys() - was.keys():
                delattr(cls, attribute)
            for attribute, value in was.items():
                if attribute not in now or now[attribute] is not value:
                    setattr(cls, attribute, value)

        self._note(name, "attributes", cls, was, put_back)
        for n, v in was.items():
            self._later(f"{name}.{n}" if name else n, v)

    def _note(self, name: str, kind: str, holder: Any, was: Any, put_back: Callable[[], None]) -> None:
        self.places.append(Place(name, kind, holder, was))
        self._back.append(put_back)

    def _mapping(self, name: str, mapping: dict[Any, Any], kind: str = "entries") -> None:
        was = dict(mapping)
        plain: Any = OrderedDict if isinstance(mapping, OrderedDict) else dict  # a Counter's update would add

        def put_back() -> None:
            if _same(mapping, was) and _same(mapping.values(), was.values()):
                return
            for key in [key for key in mapping if key not in was]:
                plain.__delitem__(mapping, key)
            plain.update(mapping, was)
            if not _same(mapping, was):  # some were away meanwhile, and are last now
                plain.clear(mapping)
                plain.update(mapping, was)

        self._note(name, kind, mapping, was, put_back)
        for key, value in was.items():
            if type(value) not in _PLAIN and key != "__builtins__":  # Python's own, which are in every module
                part = f"[{key!r}]" if kind == "entries" else f".{key}"
                self._later(f"{name}{part}" if name else str(key), value)
        self._hold(name, was)

    def _sequence(self, name: str, values: Any) -> None:
        was = list(values)
        plain: Any = next(kind for kind in (list, deque, bytearray) if isinstance(values, kind))  # a user's may do more

        def put_back() -> None:
            if not _same(values, was):
                plain.clear(values)
                plain.extend(values, was)

        self._note(name, "items", values, was, put_back)
        self._hold(name, was)

    def _set(self, name: str, values: set[Any]) -> None:
        was, plain = set(values), cast("Any", set)

        def put_back() -> None:
            if values != was:
                plain.clear(values)
                plain.update(values, was)

        self._note(name, "members", values, was, put_back)
        self._hold(name, was)

    def _random(self, name: str, generator: Any) -> None:
        state = state_of(generator)
        self._note(name, "state", generator, state, lambda: set_state(generator, state))

    def _object(self, name: str, value: Any) -> None:
        """The attributes of an object, in its dict and in slots."""
        try:
            attributes: dict[str, Any] | None = object.__getattribute__(value, "__dict__")
        except AttributeError:
            attributes = None
        if attributes is not None:
            self._mapping(name or type(value).__name__, attributes, "attributes")
        slots = [s for cls in type(value).__mro__ for s in _slots(cls)]
        was = {s: getattr(value, s) for s in slots if hasattr(value, s)}
        if slots:

            def put_back() -> None:
                for slot in slots:
                    if slot in was and getattr(value, slot, None) is not was[slot]:
                        object.__setattr__(value, slot, was[slot])
                    elif slot not in was and hasattr(value, slot):
                        object.__delattr__(value, slot)

            self._note(name, "attributes", value, was, put_back)
            self._hold(name, was.values())

    def _numbers(self, name: str, value: Any) -> None:
        """Note a tensor or an array: a copy of a small one, the state of a large one."""
        if type(value).__name__ in ("Generator", "RandomState"):
            self._random(name, value)
        elif hasattr(value, "copy_"):  # a tensor counts its changes
            version = _version(value)
            was = value.detach().clone() if value.nbytes <= LARGE else None
            if was is None:
                self._taken.append((self._now, lambda: _version(value) != version))
            else:

                def put_back() -> None:
                    if _version(value) != version:
                        value.detach().copy_(was)

                self._note(name, "numbers", value, was, put_back)
        elif hasattr(value, "tobytes") and getattr(value, "flags", None) is not None and value.flags.writeable:
            if value.nbytes <= LARGE:
                copied = value.copy()
                self._note(name, "numbers", value, copied, lambda: value.__setitem__(..., copied))
            else:
                total = hash(value.tobytes())
                self._taken.append((self._now, lambda: hash(value.tobytes()) != total))


def state_of(generator: Any) -> Any:
    """The state of a random generator: of Python, numpy or torch."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Give a random generator a state that it had."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def line_of(program: Callable[..., Any], name: str) -> At:
    """The line of a program that names a value, or of a function that it leads to, else its first."""
    return next(lines(program, name), None) or defined_at(program)


def _same(now: Any, was: Any) -> bool:
    return len(now) == len(was) and all(map(operator.is_, now, was))


def _progress(iterator: Any) -> Any:
    """How far an iterator is, as far as it can be seen from outside."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, {n: id(v) for n, v in frame.f_locals.items()})
    return iterator.__length_hint__() if hasattr(iterator, "__length_hint__") else repr(iterator)


def _generators_of_numbers() -> Iterator[Callable[[], None]]:
    """Yield functions that set the shared generators of random numbers back to where they are now."""
    state = random.getstate()
    yield lambda: random.setstate(state)
    if "numpy" in sys.modules:
        numpy: Any = sys.modules["numpy"]
        legacy = numpy.random.get_state()
        yield lambda: numpy.random.set_state(legacy)
    if "torch" in sys.modules:
        torch: Any = sys.modules["torch"]
        drawn = torch.get_rng_state()
        yield lambda: torch.set_rng_state(drawn)


def _slots(cls: type) -> tuple[str, ...]:
    slots: Any = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(n for n in names if n not in ("__dict__", "__weakref__"))


def _version(tensor: Any) -> int:
    return -1 if tensor.is_inference() else tensor._version
