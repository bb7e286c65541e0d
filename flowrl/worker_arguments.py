"""Other arguments of a worker than its driver gives: ``--arg actor.lr=2e-6``, ``flow.use_arguments``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from .errors import FlowError, UsageError, did_you_mean, near, shown
from .graph.ops.check_arguments import described, rule_of, wrong_value
from .graph.ops.shown_settings import written_setting
from .graph.script.names_in_other_libraries import meant_argument
from .graph.stand_ins import current_session as sessions
from .graph.stand_ins.values import is_handle
from .handle import Handle
from .workers.model_options import Model

_OTHERS = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def find_worker(handles: Sequence[Handle], name: str, words: str) -> Handle:
    """Return the worker of that name. Raises UsageError with the near miss; ``words`` say who asks, and which flow."""
    handle = next((h for h in handles if h.name == name), None)
    if handle is None:
        names = [h.name for h in handles]
        what = f"{words} has no worker '{name}'."
        raise UsageError(what, have=names, fix=did_you_mean(name, names))
    return handle


def use_arguments(handle: Handle, handles: Sequence[Handle], given: Mapping[str, Any]) -> None:
    """Give a worker other arguments, and check it and the workers of ``handles`` that are made of it.

    Raises UsageError, or the error of its class, at the line of the caller; then nothing is changed.
    """
    before = handle.args, handle.kwargs, handle.arguments
    words = " ".join(f"--arg {handle.name}.{name}" for name in given)
    try:
        changed = {name: _read(handle, name, value) for name, value in given.items()}
        handle.rebind(changed)
        for each in handles:
            if each is handle or any(value is handle for value in each.arguments.values()):
                each.check(words)
    except FlowError as error:
        handle.args, handle.kwargs, handle.arguments = before
        error.at = sessions.caller()
        raise


def shown_arguments(handle: Handle) -> dict[str, str]:
    """Return the arguments of a worker that words can change, with their values as a program writes them.

    >>> shown_arguments(fl.Flow("example").worker(fl.Reference, "a/model", name="ref"))
    {'dtype': "'auto'"}
    """
    known = {n: v for n, v in handle.arguments.items() if n != "model" and _needs_code(handle, n) is None}
    return {n: written_setting(v) for n, v in known.items() if _parameter(handle, n).kind not in _OTHERS}


def _read(handle: Handle, name: str, value: Any) -> Any:
    """Return what an argument is to be, of a value as YAML or Python says it. Raises UsageError where it cannot be."""
    what = f"--arg {handle.name}.{name}=...: "
    parameters = inspect.signature(handle.cls).parameters
    known = [n for n, p in parameters.items() if p.kind not in _OTHERS]
    if name not in known and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        what += f"worker '{handle.name}' ({handle.cls.__name__}) has no argument '{name}'."
        meant = meant_argument(name, known) or near(name, known)
        raise UsageError(what, have=known, fix=f"Did you mean {handle.name}.{meant}?" if meant else None)
    if not _is_plain(value):
        return value
    if name == "model":
        fix = f"Write --model {handle.name}=NAME, a hub name or a folder."
        raise UsageError(f"{what}a model has an option of its own.", fix=fix)
    fix = f"Change it in the driver, at {shown(handle.at.file)}:{handle.at.line}."
    if (code := _needs_code(handle, name)) is not None:
        raise UsageError(f"{what}that is {code}, which is written in Python.", fix=fix)
    parameter, now = _parameter(handle, name), _now(handle, name)
    record = _record(_hints(handle.cls.__init__).get(name), now)
    if record is not None and value is not None and not _takes_text(parameter.annotation):
        return _made(record, value, f"--arg {handle.name}.{name}", fix)
    return _shaped(value, parameter.annotation, parameter.default, now)


def _parameter(handle: Handle, name: str) -> inspect.Parameter:
    """The parameter of an argument; a plain one for what ``**options`` takes."""
    found = inspect.signature(handle.cls).parameters.get(name)
    return found or inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)


def _now(handle: Handle, name: str) -> Any:
    """What an argument is, also one that ``**options`` has taken; None where it was not given."""
    others = {n: v for n, v in handle.arguments.items() if _parameter(handle, n).kind is inspect.Parameter.VAR_KEYWORD}
    return {**handle.arguments, **next(iter(others.values()), {})}.get(name)


def _needs_code(handle: Handle, name: str) -> str | None:
    """What an argument is, where no word can say it: a worker, a function, data, an object of a class; else None."""
    value, annotation = _now(handle, name), _parameter(handle, name).annotation
    rule = rule_of(handle.cls.__init__, name)
    if is_handle(value):
        return f"the worker '{value.name}'"
    if rule is not None and rule.kind == "worker":
        return rule.form or "another worker"
    if not _is_plain(value) and (isinstance(value, (Model, type)) or not is_dataclass(value)):
        return described(value)
    return _annotated_code(annotation, _hints(handle.cls.__init__).get(name))


def _annotated_code(annotation: Any, hint: Any) -> str | None:
    """What a value is by its annotation, and the type that this names, where no word can say it; else None."""
    if _takes_text(annotation):
        return None
    if kind := re.search(r"\b(Callable|Model)\b", _text(annotation)):
        return {"Callable": "a function", "Model": "a model"}[kind[1]]
    return _of_records(hint)


def _hints(thing: Any) -> dict[str, Any]:
    """The types that a function, or a record, is annotated with."""
    try:
        return get_type_hints(thing)
    except Exception:  # a name that is imported for type checkers alone
        return {}


def _record(hint: Any, now: Any) -> type | None:
    """The record that a value is: as it is annotated, else as it is now."""
    records = (kind for kind in (*_alternatives(hint), type(now)) if isinstance(kind, type) and is_dataclass(kind))
    return next(records, None)


def _of_records(hint: Any) -> str | None:
    """What holds records, as it is annotated: ``a list of Lora``; None where nothing does."""
    for kind in _alternatives(hint):
        for inside in get_args(kind):
            record = _record(inside, None)
            named = record.__name__ if record is not None else _of_records(inside)
            if named is not None:
                return f"a {get_origin(kind).__name__} of {named}"
    return None


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """What a value may be: ``(Lora, NoneType)`` of ``Lora | None``."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _made(record: type, value: Any, title: str, code_fix: str, form: str = "VALUE") -> Any:
    """Return a record with these fields: ``{r: 16}`` as ``fl.Lora(r=16)``. Raises UsageError, or its own error.

    ``code_fix`` says where to write what is written in Python; in ``form`` the argument's value has this one's place.
    """
    known = {f.name: f for f in fields(cast("Any", record)) if f.init}
    first = next(iter(known), "NAME")
    example = f"{title}={_within(form, first)}"
    if not isinstance(value, Mapping):
        what = f"{title}=...: that is {record.__name__}, and was given {described(value)}."
        raise UsageError(what, have=known, fix=f"Write {example}.")
    given = {str(n): v for n, v in cast("Mapping[Any, Any]", value).items()}
    if (wrong := next((n for n in given if n not in known), None)) is not None:
        what = f"{title}=...: {record.__name__} has no '{wrong}'."
        fix = f"Write {wrong.replace(':', ': ')}, with a space." if ":" in wrong else f"Write {example}."
        raise UsageError(what, have=known, fix=did_you_mean(wrong, known, fix))
    made = {n: _made_field(record, known[n], v, title, code_fix, form) for n, v in given.items()}
    try:
        return record(**made)
    except FlowError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".rstrip(".")
        raise UsageError(f"{title}=...: {record.__name__} cannot be made so: {cause}.", have=known) from None


def _made_field(record: type, field: Field[Any], value: Any, title: str, code_fix: str, form: str) -> Any:
    """Return what a field of a record is to be: a record where it is one. Raises as :func:`_made` does."""
    hint, name = _hints(record).get(field.name), field.name
    if value and (code := _annotated_code(field.type, hint)) is not None:
        what = f"{title}=...: '{name}' of {record.__name__} is {code}, which is written in Python."
        raise UsageError(what, fix=code_fix)
    inner = _record(hint, field.default)
    if inner is not None and value is not None and not _takes_text(field.type):
        return _made(inner, value, title, code_fix, _within(form, name))
    made = _shaped(value, field.type, field.default)
    if (error := wrong_value(cast("Any", record).__init__, name, made, record.__name__)) is not None:
        raise error
    return made


def _within(form: str, name: str) -> str:
    """``{inner: {a: VALUE}}`` of ``{inner: VALUE}`` and ``a``."""
    return form.replace("VALUE", f"{{{name}: VALUE}}")


def _shaped(value: Any, annotation: Any, *usual: Any) -> Any:
    """Return a list as a tuple, where that is what the parameter is declared or used to be."""
    if not isinstance(value, list):
        return value
    is_tuple = any(isinstance(v, tuple) for v in usual) or re.search(r"\btuple\b", _text(annotation))
    return tuple(cast("list[Any]", value)) if is_tuple else cast("Any", value)


def _takes_text(annotation: Any) -> bool:
    return re.search(r"\bstr\b", _text(annotation)) is not None


def _text(annotation: Any) -> str:
    """An annotation without what stands in brackets: ``Callable | None``."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"^(typing\.)?(Optional|Union)\[(.*)\]$", r"\3", text)
    while (shorter := re.sub(r"\[[^\[\]]*\]", "", text)) != text:
        text = shorter
    return text


def _is_plain(value: Any) -> bool:
    """Whether a value is one that words can say: None, a number, a text, and lists and mappings of them."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, cast("Sequence[Any]", value)))
    if isinstance(value, Mapping):
        return all(map(_is_plain, cast("Mapping[Any, Any]", value).values()))
    return value is None or isinstance(value, (bool, int, float, str, Path))
