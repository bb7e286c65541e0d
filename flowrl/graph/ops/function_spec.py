"""A function with parameters that an op is given, such as a loss: named, comparable, and looked at by the trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from ...errors import FlowError, ProgramError
from ..script.site import caller
from ..stand_ins.scalars import ScalarValue
from .allowed import Allowed, problem


@dataclass(frozen=True)
class Spec:
    """A named function with parameters, handed to an op, such as a loss: what it reads counts as read by the op.

    ``remarks``: what ``check`` says of it where it is used.
    """

    name: str
    reads: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    remarks: tuple[str, ...] = ()
    allowed: Mapping[str, Allowed] = field(default_factory=dict[str, Allowed], kw_only=True)  # of the parameters

    def wrong_values(self) -> list[FlowError]:
        """Return what is wrong with the parameters, as far as they are known."""
        return [
            ProgramError(f"{self.name}: {problem(n, self.parameters[n], rule)}", fix=rule.mend(n, self.parameters[n]))
            for n, rule in self.allowed.items()
            if n in self.parameters and not rule.accepts(self.parameters[n])
        ]

    def with_parameters(self, parameters: Mapping[str, Any]) -> Spec:
        return replace(self, parameters=dict(parameters))

    def _no_arithmetic(self, other: Any) -> NoReturn:
        raise ProgramError(
            f"{self.name} is a loss, and losses are not added or multiplied.",
            at=caller(),
            fix="Give update one loss: weigh its parts (kl=, entropy=), train other rows along with pretraining=, or "
            "write the sum with rl.loss.",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _no_arithmetic

    def __repr__(self) -> str:
        inside = ", ".join(f"{k}={_written(v)}" for k, v in self.parameters.items())
        return f"{self.name}({inside})"


def _written(value: Any) -> str:
    """A parameter as Python writes it; a number of the program as it is computed."""
    return value.ref.text if isinstance(value, ScalarValue) and hasattr(value.ref, "text") else repr(value)
