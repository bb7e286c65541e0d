"""Tools from plain typed Python functions: a JSON schema from the signature and the docstring, and calls of it."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..errors import WorkerError
from ..graph.script.site import defined_at

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_ARGS = re.compile(r"^(Args|Arguments|Parameters):\s*$")
_SECTION = re.compile(r"^(Returns|Raises|Yields|Examples?|Notes?):")
_ARG = re.compile(r"^(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
#: A parameter of this name is the state of the episode; the model does not see it.
HIDDEN = "state"


class BadCall(Exception):
    """A call of a tool that the model has not made as its schema says. The model is told, and may try again."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call: ``Tool("add", "Add two numbers.", {"type": "object", ...}, add)``."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    fn: Callable[..., Any]
    takes_state: bool = False

    @staticmethod
    def of(fn: Callable[..., Any]) -> Tool:
        """A tool of a function. Raises WorkerError for a signature that no schema can say."""
        name = getattr(fn, "__name__", type(fn).__name__)
        summary, said = _docstring(inspect.getdoc(fn) or "")
        hints = _hints(fn, name)
        properties: dict[str, Any] = {}
        required: list[str] = []
        takes_state = False
        for parameter in inspect.signature(fn).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise _wrong(
                    fn, name, f"'{parameter}' has no name that a call could give", "Give it a name and a type."
                )
            if parameter.name == HIDDEN:
                takes_state = True
                continue
            if parameter.name not in hints:
                fix = f"Write {parameter.name}: str, or another type."
                raise _wrong(fn, name, f"parameter '{parameter.name}' has no type", fix)
            schema = _schema(hints[parameter.name])
            if schema is None:
                what = f"parameter '{parameter.name}' is a {hints[parameter.name]}, which JSON cannot say"
                raise _wrong(fn, name, what, "Use str, int, float, bool, list, dict, Literal, or a union of them.")
            if said.get(parameter.name):
                schema = {**schema, "description": said[parameter.name]}
            properties[parameter.name] = schema
            if parameter.default is parameter.empty:
                required.append(parameter.name)
        return Tool(name, summary, {"type": "object", "properties": properties, "required": required}, fn, takes_state)

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates and servers take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def arguments(self, given: Any) -> dict[str, Any]:
        """The arguments of a call, as the signature has them. Raises BadCall for others."""
        if not isinstance(given, Mapping):
            raise BadCall(f"the arguments of {self.name} are {given!r}, no object")
        properties = self.parameters["properties"]
        unknown = [name for name in given if name not in properties]
        if unknown:
            raise BadCall(f"{self.name} has no argument '{unknown[0]}'; it has {', '.join(properties) or 'none'}")
        missing = [name for name in self.parameters["required"] if name not in given]
        if missing:
            raise BadCall(f"{self.name} needs the argument '{missing[0]}'")
        for name, value in given.items():
            if not fits(value, properties[name]):
                raise BadCall(
                    f"the argument '{name}' of {self.name} is {value!r}, which is no {_said(properties[name])}"
                )
        return dict(given)


def tools_of(functions: Sequence[Callable[..., Any] | Tool]) -> dict[str, Tool]:
    """Tools by name. Raises WorkerError where two have one name."""
    found: dict[str, Tool] = {}
    for fn in functions:
        if not callable(fn) and not isinstance(fn, Tool):
            raise WorkerError(f"A tool is a function, not {fn!r}.", fix="Write tools = (fn,).")
        tool = fn if isinstance(fn, Tool) else Tool.of(fn)
        if tool.name in found:
            raise _wrong(tool.fn, tool.name, "is the name of two tools", "Rename one.")
        found[tool.name] = tool
    return found


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value that came as JSON is what a schema of this module says."""
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    kind = schema.get("type")
    if kind is None:
        return True
    if kind == "array":
        return isinstance(value, list) and all(fits(one, schema.get("items", {})) for one in value)
    if kind == "object":
        return isinstance(value, dict) and all(fits(v, schema.get("additionalProperties", {})) for v in value.values())
    if isinstance(value, bool) or kind == "boolean":
        return isinstance(value, bool) and kind == "boolean"
    allowed: Mapping[str, Any] = {"string": str, "integer": int, "number": (int, float), "null": type(None)}
    return isinstance(value, allowed[kind])


def _said(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_said(one) for one in schema["anyOf"])
    return f"one of {schema['enum']}" if "enum" in schema else str(schema.get("type", "value"))


def _schema(hint: Any) -> dict[str, Any] | None:
    """The JSON schema of a type; None where there is none."""
    if hint is Any:
        return {}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(inside)} if all(type(one) in _PLAIN for one in inside) else None
    if origin in (Union, types.UnionType):
        each = [_schema(one) for one in inside]
        return None if None in each else {"anyOf": each}
    if hint is list or origin is list:
        items = _schema(inside[0]) if inside else {}
        return None if items is None else {"type": "array", **({"items": items} if items else {})}
    if hint is dict or origin is dict:
        values = _schema(inside[1]) if inside else {}
        named = not inside or inside[0] is str
        more = {"additionalProperties": values} if values else {}
        return {"type": "object", **more} if named and values is not None else None
    return None


def _hints(fn: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(fn, localns={"int": int, "float": float})  # a traced program has others in their place
    except Exception as error:  # names that are not there, of whatever kind
        raise _wrong(fn, name, f"its types cannot be read: {error}", "Import what they name.") from None


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring says of the function, and of each parameter."""
    summary: list[str] = []
    said: dict[str, str] = {}
    inside, last = False, ""
    for line in text.splitlines():
        stripped = line.strip()
        if _ARGS.match(stripped):
            inside = True
        elif _SECTION.match(stripped):
            inside, last = False, ""
            summary.append("\0")
        elif inside and (found := _ARG.match(stripped)) and not (last and line.startswith(" " * 8)):
            last = found[1]
            said[last] = found[2]
        elif inside and last and stripped:
            said[last] = f"{said[last]} {stripped}".strip()
        elif not inside:
            summary.append(stripped)
    whole = " ".join(summary)
    return " ".join(whole.split("\0")[0].split()), said


def _wrong(fn: Callable[..., Any], name: str, what: str, fix: str) -> WorkerError:
    return WorkerError(f"The tool {name}: {what}.", at=defined_at(fn), fix=fix)
