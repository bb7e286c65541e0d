"""Calls that touch the world: every row is asked for once, and answered from the journal from then on.

What is kept is kept by row, so that a run may go on under another plan: with other chunks, or other processes for
rewards. A row has its answer where its key and what was read of it are those of then. An op that hands over rows which
it makes of its own, as an environment does its episodes, is called with all of its rows and those that it has handed
over before: it asks for none of these again, and the others come out as they would have among all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ....batch import Batch, CallInfo, Key
from ....errors import FlowError
from ....graph.ops.apply import merge
from ....graph.ops.op import Op
from ....graph.ops.partial_answers import handed_to
from ....graph.ops.signature import Signature
from ....graph.ops.update_metrics import Metrics
from ..journal import Journal
from ..replay_record import read_replay
from .answer_book import AnswerBook
from .known_answers import (
    Fingerprints,
    KnownAnswers,
    answers_in,
    in_order_of,
    is_whole,
    parent_row,
    plain_arguments,
    some_prints,
)


class LeftUnanswered(FlowError):
    """A call that the run has no answer of, in a step that a replay does not do again: nobody is asked."""


def once(
    journal: Journal,
    place: tuple[int, float],
    op: Op,
    worker: Any,
    arguments: Mapping[str, Any],
    into: Mapping[str, str],
    info: CallInfo,
    warn: Callable[[str], None],
) -> Any:
    """Run an external call for the rows that have no answer in the journal yet; those of all others come from there.

    ``place`` is the call's: the number of its program in the run, and its own in the program. Rows are asked for again
    as far as they depend on each other: alone, with those of their prompt, or all of the call (``pieces=`` of the op).
    Raises LeftUnanswered in place of asking for rows of a step behind the last one of a replay.
    """
    main = next((a for a in arguments.values() if isinstance(a, Batch)), None)
    if main is None:
        return op.run(worker, arguments, into, info)
    init = getattr(worker, "init_arguments", {})
    signature = op.signature(init, arguments, frozenset(main.fields))
    read = _read(op, signature, main)
    prints = Fingerprints.of(read, plain_arguments(arguments))
    known = KnownAnswers(journal.answers(*place, main.keys), info, main.keys, prints)
    if op.returns != "batch":
        return _value_once(journal, place, info, known, lambda: op.run(worker, arguments, into, info))
    unit = "call" if op.rows == "regroup" else op.unit(init, arguments)
    found = known.lines_of_rows(unit, read)
    made = known.rows_made_of(found) if op.rows == "expand" and unit != "call" else None
    if made is not None and found:  # also those that were kept as a whole: the op is called with all of its rows
        made = made.concat(*answers_in(found))
        found = {}
    lacking = [i for i, key in enumerate(main.keys) if key not in found]
    parents = set(main.keys)
    begun = {parent_row(key, parents) for key in (made.keys if made is not None else ())}
    asked_for = [main.keys[i] for i in lacking if main.keys[i] not in begun]
    if asked_for and (said := known.describe_differences(asked_for)):
        warn(f"{op.title(worker)} of step {info.step}: {said}")
    answers = answers_in(found)
    if lacking:
        _expect_to_ask(journal, place, info)
    if lacking or not len(main):
        some = main if len(lacking) == len(main) else main.take(lacking)
        asked = {name: some if value is main else value for name, value in arguments.items()}
        kept = prints if some is main else some_prints(prints, lacking)
        apart = replace(op, rows="apart")  # what is handed over are fields of rows alone

        def complete(keys: Sequence[Key], adds: Mapping[str, Any]) -> Batch:
            return merge(apart, info.op, Batch(keys, {}), adds, signature, into)

        names = {new: name for name, new in into.items()}
        before = None if made is None else made.rename(**{n: names[n] for n in made.fields if n in names})
        book = AnswerBook(journal, place, info, some, kept, complete, before, apart=unit != "call")
        with handed_to(book):
            try:
                result = op.run(worker, asked, into, info)
            except BaseException:
                book.end()
                raise
        fresh = _added(op, result, main)
        book.close(fresh)
        if some is main:
            return result
        answers.append(fresh)
    added = answers[0] if is_whole(found, main.keys) else in_order_of(answers, main.keys)
    if not op.inherits:
        return added
    rows = main if op.rows == "same" else main.take_keys(added.keys)
    return rows.with_columns(dict(added.columns))


def _value_once(
    journal: Journal, place: tuple[int, float], info: CallInfo, known: KnownAnswers, ask: Callable[[], Any]
) -> Any:
    """The same for a call that gives metrics, a number or nothing."""
    keys, prints = known.keys, known.prints
    for line in known.lines:
        if "value" in line and line["keys"] == keys and tuple(line["inputs"]) == prints.rows:
            return _plain(line["value"])
    _expect_to_ask(journal, place, info)
    value = ask()
    journal.keep(*place, keys, prints.rows, prints.fields, of=info, value=value)
    return value


def _expect_to_ask(journal: Journal, place: tuple[int, float], info: CallInfo) -> None:
    """Raise LeftUnanswered for a call of a step that comes after those that a replay does again."""
    replay = read_replay(journal.path.parent)
    of_step = not info.outside and isinstance(place[1], int)  # and not of an evaluation between steps
    if replay is not None and of_step and replay.ends_before(place[0], info.step):
        raise LeftUnanswered(
            f"{info.op} of step {info.step} was not over in the run, and a replay asks for none of it."
        )


def _plain(value: Any) -> Any:
    return Metrics(value) if isinstance(value, dict) else value


def _added(op: Op, made: Batch, main: Batch) -> Batch:
    """What a call has made, without what its batch had before."""
    return made.select(*(n for n in made.fields if not op.inherits or n not in main.fields)).with_call(None)


def _read(op: Op, signature: Signature, main: Batch) -> Batch:
    """The rows with the fields that the call reads: what its answer depends on, and what a rank has of them."""
    fields = signature.reads.get(op.batch_parameter)
    return main if fields is None else main.select(*(n for n in fields if n in main))
