"""What is said of a call whose fields do not fit: missing, added twice, or made by what they must not come from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from ...batch import Batch
from ...errors import At, FieldError, FlowError, ProgramError, did_you_mean
from ...marks import OWN, UNMARKED, Marks, foreign_rows, other_temperature, unlike, values
from ..ops.check_arguments import described
from ..ops.field_types import parse_fields
from ..ops.function_spec import Spec
from ..ops.signature import CallShape, Signature
from ..script.fields_read_in_source import fields_read
from ..stand_ins.values import BatchValue

if TYPE_CHECKING:
    from ..ops.op import Op

_NO_FIELDS = frozenset(dir(Batch))  # attributes of a batch that are no fields


def new_names(title: str, into: Any, op: Op, at: At) -> dict[str, str]:
    """The names of ``into=`` by those that the op says. Raises ProgramError for what is no dict."""
    if into is None or isinstance(into, Mapping):
        return dict(cast("Mapping[str, str]", into or {}))
    added = next(iter(parse_fields(op.adds)), "rewards") if isinstance(op.adds, str) else "rewards"
    name = into if isinstance(into, str) else f"my_{added}"
    what = f"{title}: into= takes a dict of names, and was given {described(into)}."
    raise ProgramError(what, at=at, fix=f'Write into={{"{added}": "{name}"}}.')


def missing_field(title: str, name: str, have: Any, at: Any, adders: Any, made: str | None = None) -> FieldError:
    """The error of a read of a field that nothing before it adds.

    ``adders`` are calls that would add it; ``made`` says which call added it to a batch that is not this one.
    """
    fix = made or (adding(name, adders) if adders else did_you_mean(name, have, adding(name, ())))
    return FieldError(f"{title} reads '{name}', which no op before it adds.", at=at, have=have, fix=fix)


def adding(name: str, adders: Sequence[str]) -> str:
    """The fix of a field that is missing: the calls that would add it."""
    what = " or ".join(adders) or f"an op that adds '{name}'"
    return f"Add {what} before this line."


def undeclared_reads(op: Op, title: str, arguments: Mapping[str, Any], signature: Signature) -> list[FieldError]:
    """Return the errors of the fields that the body of an op looks up, and that its ``reads=`` does not name.

    ``arguments``: those of a trace. Where a function gives ``reads=``, the body may look up more in other calls.
    """
    if callable(op.reads) or op.fn.__module__.startswith("flowrl."):
        return []
    errors: list[FieldError] = []
    for param, declared in signature.reads.items():
        value = arguments.get(param)
        if isinstance(value, BatchValue):
            body = fields_read(op.fn, param, inside=("columns",), besides=_NO_FIELDS)
            found = {name: at for name, at in body.items() if name not in declared}
            errors += [undeclared(op, title, param, n, declared, value.ref.fields, at) for n, at in found.items()]
    return errors


def undeclared(
    op: Op, title: str, param: str, name: str, declared: Iterable[str], have: Iterable[str], at: At | None
) -> FieldError:
    """The error of an op that reads a field of a batch, ``have``, which its ``reads=`` does not name."""
    declared = list(declared)
    fix = f"Name {name} in its reads=."
    if isinstance(op.reads, str):
        fix = f'Write reads="{_with(op.reads, name)}".'
    elif op.reads is not None and not callable(op.reads):
        texts = {**op.reads, param: _with(op.reads.get(param, ""), name)}
        fix = f"Write reads={{{', '.join(f'{json.dumps(p)}: {json.dumps(text)}' for p, text in texts.items())}}}."
    if name not in have:
        fix = did_you_mean(name, [*declared, *have], fix)
    return FieldError(f"{title} reads '{name}', which its reads= does not name.", at=at, have=declared, fix=fix)


def _with(reads: str, name: str) -> str:
    """The text of ``reads=`` with another field."""
    return f"{reads}, {name}" if reads.strip() else name


def written_twice(title: str, names: Sequence[str], at: Any) -> FieldError:
    """The error of an op that adds fields that the batch already has."""
    first = names[0]
    fix = (
        f"Give it another name: into={{'{first}': 'other_{first}'}}."
        if len(names) == 1
        else "Call it on the batch as it was before they were added."
    )
    return FieldError(f"{title} adds {quoted(names)}, which the batch already has.", at=at, fix=fix)


def misread(
    op: Op, title: str, worker: str, arguments: Mapping[str, Any], reads: Mapping[str, Mapping[str, Marks]]
) -> list[FlowError]:
    """Return the errors of a read, by the marks of its fields: rows of others, log-probabilities of unlike kinds.

    ``reads``: the marks of the fields that are read, by parameter.
    """
    main = dict(reads.get(op.batch_parameter, {}))
    loss: Any = next((v for v in arguments.values() if isinstance(v, Spec)), None)
    shape = CallShape({}, arguments, frozenset(main), worker=worker, marks=main)
    own = op.marks(shape).get(OWN, UNMARKED) if op.marks is not None else UNMARKED
    reader = f"{title} with loss {loss.name}" if loss is not None else title
    # An update that measures the gap to the engine reads this, also where its loss does not compare with it.
    apart = {"rollout_logprobs"} - set(parse_fields(loss.reads)) if loss is not None else set[str]()
    # Rows that an op puts together anew have their columns from it: it hands them on, and compares none.
    compared = {} if op.rows == "regroup" else {name: of for name, of in main.items() if name not in apart}
    errors: list[FlowError | None] = [unlike(reader, {**compared, OWN: own})]
    foreign = arguments.get("foreign")
    meant = getattr(loss, "foreign", False) or not (foreign is None or foreign is False)
    if op.cost == "train" and getattr(loss, "on", "") == "logprobs" and not meant:
        rows = main.get("tokens", UNMARKED)
        others = sorted(values(rows, "sampler") - {worker})
        errors += [foreign_rows(title, loss, others, worker)] if others else []
        errors += [] if others else [other_temperature(title, loss, own, rows)]
    return [error for error in errors if error is not None]


def quoted(names: Iterable[str]) -> str:
    """Names in a message, in order."""
    return ", ".join(f"'{n}'" for n in sorted(names)) or "nothing"
