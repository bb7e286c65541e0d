"""What programs leave at module level for those after them: written down, and put back in a new process.

A new process begins with the modules as they are loaded. What an earlier program of the run has changed there, such as
a list that it filled, is told by the place that holds it; nothing that is written down can run code.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ....errors import shown
from ....graph.script.surroundings import Place, Surroundings, line_of, set_state, state_of
from ...values.plain_values import CannotKeep, Reader, Writer


@dataclass(frozen=True)
class Lost:
    """Something that a later process will not have: ``Lost("BEST", "a Model", "driver.py:31", False)``.

    ``made_again``: it was None before, as of what is made when it is first needed.
    """

    name: str
    what: str
    at: str
    made_again: bool

    def __str__(self) -> str:
        return f"{self.name} ({self.at}): {self.what}"


class LeftBehind:
    """The state around some programs as a process begins, and what they make of it."""

    def __init__(self, *programs: Callable[..., Any]) -> None:
        self.around = Surroundings(*programs)
        self._shared = shared_generators()

    def changed(self) -> list[str]:
        """The names of what is not as it was."""
        return [part_name(place, part) for place in self.around.places for part, _ in changes_of(place)]

    def record(self, program: Callable[..., Any]) -> tuple[dict[str, Any], list[Lost]]:
        """What is not as it was, as JSON, and what of it no record can hold. ``program`` has just ended."""
        writer = Writer(self.around)
        lost: list[Lost] = []
        lines: list[dict[str, Any]] = []

        def say(name: str, what: str, again: bool = False) -> None:
            at = line_of(program, name)
            lost.append(Lost(name, what, f"{shown(at.file)}:{at.line}", again))

        for label, place in writer.places.items():
            for part, change in changes_of(place):
                try:
                    lines.append({"place": list(label), **written(writer, change)})
                except CannotKeep as why:
                    say(part_name(place, part), str(why), bool(part) and place.was.get(part, "") is None)
        for name in self.around.taken():
            say(name, "how far it is")
        drawn = {n: state for n, state in shared_generators().items() if state != self._shared.get(n)}
        return {"places": lines, "random": drawn}, lost

    def put_back(self, record: Mapping[str, Any]) -> list[str]:
        """Bring what was recorded to the places of this process. Returns the names of those that are not there."""
        reader = Reader(self.around)
        missing: list[str] = []
        for line in record.get("places", ()):
            place = reader.places.get(tuple(line["place"]))
            try:
                if place is None:
                    raise KeyError(line["place"][0])
                fill(reader, place, line)
            except (KeyError, TypeError, ValueError, AttributeError):
                missing.append(line.get("name") or line.get("gone") or line["place"][0])
        set_shared(record.get("random", {}))
        return missing


def part_name(place: Place, part: str) -> str:
    """Return what a part of a place is called, such as ``LEVELS`` or ``box.count``."""
    return f"{place.name}.{part}" if part and place.name else part or place.name


def changes_of(place: Place) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is to be written of a place that has changed: by name where it has names, else as a whole."""
    holder, was = place.holder, place.was
    if place.kind in ("names", "attributes"):
        now, was = _named(holder), {n: v for n, v in was.items() if not str(n).startswith("__")}
        for name in dict.fromkeys([*was, *now]):
            if name not in now:
                yield name, {"gone": name}
            elif name not in was or now[name] is not was[name]:
                yield name, {"name": name, "value": now[name]}
    elif place.kind == "entries":
        if list(holder) != list(was) or any(holder[k] is not was[k] for k in was):
            yield "", {"pairs": list(holder.items())}
    elif place.kind == "items":
        if len(holder) != len(was) or any(a is not b for a, b in zip(holder, was, strict=True)):
            yield "", {"items": list(holder)}
    elif place.kind == "members":
        if holder != was:
            yield "", {"items": sorted(holder, key=repr)}
    elif place.kind == "content":
        if holder.cell_contents is not was:
            yield "", {"value": holder.cell_contents}
    elif place.kind == "state":
        now = state_of(holder)
        if _listed(now) != _listed(was):
            yield "", {"value": now}
    elif not bool((holder == was).all()):
        yield "", {"numbers": holder}


def _named(holder: Any) -> dict[str, Any]:
    """Names and values of a module, an object, a class or slots."""
    if isinstance(holder, dict):
        return {n: v for n, v in cast("dict[str, Any]", holder).items() if not str(n).startswith("__")}
    if isinstance(holder, type):
        return {n: v for n, v in vars(holder).items() if not n.startswith("__")}
    return {s: getattr(holder, s) for cls in type(holder).__mro__ for s in _slots(cls) if hasattr(holder, s)}


def _slots(cls: type) -> Sequence[str]:
    said: Any = vars(cls).get("__slots__", ())
    return [s for s in ((said,) if isinstance(said, str) else said) if s not in ("__dict__", "__weakref__")]


def _listed(state: Any) -> Any:
    """The state of a generator in lists, which can be compared."""
    if isinstance(state, dict):
        return {n: _listed(v) for n, v in cast("dict[str, Any]", state).items()}
    if isinstance(state, (list, tuple)):
        return [_listed(v) for v in cast("Sequence[Any]", state)]
    return state.tolist() if hasattr(state, "tolist") else state


def shared_generators() -> dict[str, Any]:
    """The states of the generators that everybody shares, in lists."""
    found = {"random": _listed(random.getstate())}
    if "numpy" in sys.modules:
        found["numpy"] = _listed(sys.modules["numpy"].random.get_state())
    if "torch" in sys.modules:
        found["torch"] = bytes(sys.modules["torch"].get_rng_state().tolist()).hex()
    return found


def set_shared(states: Mapping[str, Any]) -> None:
    """Give generators that everybody shares the states that they had."""
    if "random" in states:
        version, inside, gauss = states["random"]
        random.setstate((version, tuple(inside), gauss))
    if "numpy" in states:
        import numpy as np

        np.random.set_state(tuple(states["numpy"]))
    if "torch" in states:
        import torch

        torch.set_rng_state(torch.tensor(list(bytes.fromhex(states["torch"])), dtype=torch.uint8))


def _set(holder: Any, name: str, value: Any, gone: bool = False) -> None:
    if isinstance(holder, dict):
        (holder.pop(name, None) if gone else holder.__setitem__(name, value))
    elif gone:
        delattr(holder, name)
    elif isinstance(holder, type):
        setattr(holder, name, value)
    else:
        object.__setattr__(holder, name, value)


def fill(reader: Reader, place: Place, line: Mapping[str, Any]) -> None:
    """Have a place hold what a line says. Raises KeyError where that is not there in this process."""
    holder = place.holder
    if "gone" in line:
        _set(holder, line["gone"], None, gone=True)
    elif "name" in line:
        _set(holder, line["name"], reader.value(line["value"]))
    elif "pairs" in line:
        pairs = [(reader.value(k), reader.value(v)) for k, v in line["pairs"]]
        holder.clear()
        for key, value in pairs:  # a Counter would add them up
            holder[key] = value
    elif "items" in line:
        items = [reader.value(v) for v in line["items"]]
        holder.clear()
        (holder.update if isinstance(holder, set) else holder.extend)(items)
    elif place.kind == "content":
        holder.cell_contents = reader.value(line["value"])
    elif place.kind == "state":
        set_state(holder, reader.value(line["value"]))
    else:
        value = reader.value(line["value"])
        holder.detach().copy_(value) if hasattr(holder, "copy_") else holder.__setitem__(..., value)


def written(writer: Writer, change: Mapping[str, Any]) -> dict[str, Any]:
    """A change as JSON. Raises CannotKeep."""

    def write() -> dict[str, Any]:
        if "pairs" in change:
            return {"pairs": [[writer.kept(k), writer.kept(v)] for k, v in change["pairs"]]}
        if "items" in change:
            return {"items": [writer.kept(v) for v in change["items"]]}
        if "numbers" in change:
            return {"value": writer.numbers(change["numbers"])}
        return {k: writer.kept(v) if k == "value" else v for k, v in change.items()}

    return writer.trial(write)
