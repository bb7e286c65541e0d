"""The weights of experts under the names, and in the boxes, in which transformers and what trains have them.

There gate and up of all experts of a layer are one weight, where the plan has two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ...placement.model.rank_parameters import Parameter, Part

_GATE, _UP, _DOWN = (f".mlp.experts.{name}_proj.weight" for name in ("gate", "up", "down"))
_BOTH = ".mlp.experts.gate_up_proj"


def as_transformers_has_them(parameters: Iterable[Parameter]) -> Iterator[Parameter]:
    """Yield the parameters of a rank with parts of the weights that transformers has; see the test for an instance."""
    for one in parameters:
        yield replace(one, parts=_joined([_renamed(part) for part in one.parts]))


def _renamed(part: Part) -> Part:
    """Return the part as one of gate and up together, whose rows of up come behind those of gate."""
    for end in (_GATE, _UP):
        if part.name.endswith(end):
            experts, inner, hidden = part.shape
            first, last = (row + (inner if end == _UP else 0) for row in part.box[1])
            name, box = part.name.removesuffix(end) + _BOTH, (part.box[0], (first, last), part.box[2])
            return replace(part, name=name, shape=(experts, 2 * inner, hidden), box=box)
    return replace(part, name=part.name.removesuffix(".weight")) if part.name.endswith(_DOWN) else part


def _joined(parts: list[Part]) -> tuple[Part, ...]:
    """Return two parts of gate and up as one where one lies behind the other in the weight as in the parameter."""
    if len(parts) == 2 and parts[0].name == parts[1].name:
        one, two = parts
        box, at = (_behind(a, b) for a, b in ((one.box, two.box), (one.at, two.at)))
        if box and at:
            return (replace(one, box=box, at=at),)
    return tuple(parts)


def _behind(one: tuple[tuple[int, int], ...], two: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...] | None:
    """Return the box of both, where the second one follows the first along dim 1."""
    fits = one[0] == two[0] and one[2] == two[2] and one[1][1] == two[1][0]
    return (one[0], (one[1][0], two[1][1]), one[2]) if fits else None
