"""Rewards by function: user code, plain or async, run concurrently, with a time limit, its failures named by row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from types import CodeType
from typing import TYPE_CHECKING, Any, cast

from ..batch import CallInfo
from ..errors import At, FieldError, WorkerError, near
from ..graph.ops.allowed import number, whole
from ..graph.ops.check_arguments import described, takes
from ..graph.ops.declare import op
from ..graph.ops.field_types import STANDARD
from ..graph.ops.partial_answers import answers_of_call
from ..graph.ops.signature import CallShape
from ..graph.script.names_in_other_libraries import meant_column
from ..graph.script.site import defined_at, is_users_code
from ..graph.tracing.column_origins import FIRST
from ..marks import other_ids, values, vocabulary
from .base import Opening, Worker
from .user_code.event_loops import EventLoops
from .user_code.failed_rewards import Died, Failures, Policy, ask_again, first_failure, said, settle
from .user_code.returned_rewards import number_of, numbers_of
from .user_code.rows_in_progress import DEATHS, Notes, Row, code_of, named_row
from .user_code.run_rows import run_rows

if TYPE_CHECKING:
    from ..batch import Batch

_GIVEN = ("prompt", "response")
_LISTS = ("completions", "responses", "outputs", "prompts", "queries")  # what other libraries call lists of them


def _row_by_row(shape: CallShape) -> bool | str:
    return False if shape.init.get("batched", False) else "row"


def _columns(shape: CallShape) -> str:
    """What a reward function asks for, by its parameters."""
    wanted = ["response_ids", "prompt" if "prompt" in shape.have else "prompt_ids"]
    parameters = inspect.signature(shape.init["fn"]).parameters.values()
    named: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            wanted += sorted(name for name in shape.have if name not in STANDARD)
        elif parameter.name not in _GIVEN and (parameter.default is parameter.empty or parameter.name in shape.have):
            named.append(parameter.name)
    _expect_columns(shape, named)
    return ", ".join(dict.fromkeys([*wanted, *named]))


def _expect_columns(shape: CallShape, names: Sequence[str]) -> None:
    """Refuse parameters that no column has the name of. Of a standard field the trace says which op adds it."""
    wrong = [name for name in names if name not in shape.have and name not in STANDARD]
    if not wrong:
        return
    fn, which = shape.init["fn"], "which is no column" if len(wrong) == 1 else "which are no columns"
    raise FieldError(
        f"{_called(fn)} takes {_in_words(map(repr, wrong))}, {which} of the batch: "
        "a reward is fn(prompt, response, **columns) -> float.",
        at=_place(fn),
        have=[*_GIVEN, *sorted(n for n in shape.have if n not in STANDARD and n not in _GIVEN)],
        fix=_mended(wrong, [*_GIVEN, *sorted(shape.have)]),
    )


def _mended(wrong: Sequence[str], known: Sequence[str]) -> str:
    """The fix of parameters that no column has the name of."""
    meant = {name: meant_column(name) or near(name, known) for name in wrong}
    fixes: list[str] = []
    for name, column in meant.items():
        if meant_column(name) is not None:
            lists = ", or with lists where FunctionReward has batched=True" if name in _LISTS else ""
            fixes.append(f"Write {column} for {name}: it is called once for each row{lists}.")
        elif column is not None:
            fixes.append(f"Write {column} for {name}.")
    if unknown := [name for name, column in meant.items() if column is None]:
        named = _in_words(unknown)
        fixes.append(f"Have the data, or an op before the reward, give {named}; or take a column that is there.")
    return " ".join(fixes)


def _in_words(names: Iterable[str]) -> str:
    """Names as a sentence lists them: ``a, b and c``."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _place(fn: Any) -> At | None:
    """The user's line of a function, of a method, or of what is called of an object; None where it has none."""
    fn = fn.func if isinstance(fn, partial) else inspect.unwrap(fn)
    for one in (fn, type(fn).__call__):
        if isinstance(code := getattr(one, "__code__", None), CodeType):
            return defined_at(cast("Any", one)) if is_users_code(code) else None
    return None


def _adds(shape: CallShape) -> str:
    marks = shape.init.get("on_error") == "mark"
    return "rewards: f32[], failed: bool[], failed_why: any" if marks else "rewards: f32[]"


class FunctionReward(Worker):
    """A reward by function: ``fn(prompt: str, response: str, **columns) -> float``.

    ``fn`` takes ``prompt``, ``response`` and the columns of the batch that its parameters name (all of them with
    ``**columns``). With ``batched=True`` it takes lists and returns a list. It may be ``async``.

    Args:
        fn: the function, a pure one or one that touches the world; it is never called twice for the same row of a run.
        batched: it takes all rows at once.
        concurrency: rows in flight at once (threads of plain functions, tasks of async ones).
        timeout: seconds for one row (for the whole call when ``batched``); None waits for ever.
        on_error: what becomes of a row that failed or timed out, also the last time that it was asked. ``"raise"``
            stops the run, naming the row. ``"mark"`` adds ``failed`` bool[] and ``failed_why``, the reason as a text,
            empty for other rows; the row's reward is nan: leave it out with ``batch.filter(~batch.failed)`` before
            advantages, which are then over the other rows of its prompt. A number is its reward. Failures of a call
            are one warning in the run's events.
        retries: how often rows that failed are asked again. A pure function that fails fails again.
        backoff: seconds before the first time, twice as many before each further one, at most 30.
        max_failed: the share of the rows of a call above which failures, 8 or more, stop the run whatever
            ``on_error`` says: a service that is down is no reward. All rows of the call count, in whichever pieces
            and processes they are.
        tokenizer: what decodes ``response_ids``; None takes that of the flow's actor.

    >>> def exact(prompt: str, response: str, answer: str) -> float:
    ...     return float(response.strip() == answer)
    >>> flow = fl.Flow("example")
    >>> reward = flow.worker(fl.FunctionReward, exact, concurrency=32, on_error="mark")
    """

    without_effect = ("concurrency", "timeout", "retries", "backoff", "max_failed")
    notes_rows = True

    @takes(
        concurrency=whole(least=1),
        timeout=number(above=0, fix="Give seconds, or None to wait for ever.") | None,
        retries=whole(least=0),
        backoff=number(least=0),
        max_failed=number(least=0, most=1),
    )
    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        batched: bool = False,
        concurrency: int = 8,
        timeout: float | None = 60.0,
        on_error: str | float = "raise",
        retries: int = 0,
        backoff: float = 1.0,
        max_failed: float = 0.5,
        tokenizer: Any = None,
    ) -> None:
        if not callable(fn):
            raise WorkerError(
                f"A reward is one function, not {_listed(fn)}.",
                fix="Declare a worker for each, and add what they give: into={'rewards': 'brevity'} renames it."
                if isinstance(fn, (list, tuple))
                else "Give fn(prompt, response, **columns) -> float.",
            )
        positional = [p for p in inspect.signature(fn).parameters.values() if p.kind is p.POSITIONAL_ONLY]
        if positional:
            raise WorkerError(
                f"{_called(fn)}: parameter '{positional[0].name}' is positional-only.", fix="Let it be given by name."
            )
        if isinstance(on_error, str) and on_error not in ("raise", "mark"):
            raise WorkerError(
                f"on_error={on_error!r} is neither 'raise' nor 'mark' nor a number.",
                fix="Write on_error='mark', and leave out the rows that failed with batch.filter(~batch.failed).",
            )
        # The op's reads and adds depend on them, also where no flow made this worker.
        self.init_arguments = {"fn": fn, "on_error": on_error}
        self.failing = Policy(on_error, retries, backoff, max_failed)
        self.fn, self.batched, self.concurrency = fn, batched, concurrency
        self.timeout, self.said_tokenizer = timeout, tokenizer
        self._tokenizer: Callable[[], Any] = lambda: None
        self._warn: Callable[[str], None] = lambda text: None
        self._settle: Callable[[Failures], None] | None = None
        self._notes, self._loops = Notes(), EventLoops()

    @classmethod
    def declared_tokenizer(cls, arguments: Mapping[str, Any]) -> Any:
        parameters = inspect.signature(arguments["fn"]).parameters
        asked = any(p.kind is p.VAR_KEYWORD or n == "response" for n, p in parameters.items())
        return (arguments.get("tokenizer") or FIRST) if asked else None

    def open(self, opening: Opening) -> None:
        self._tokenizer = cache(lambda: opening.tokenizer(self.said_tokenizer))
        self._warn, self._settle, self._notes = opening.warn, opening.settle, opening.notes

    @op(reads=_columns, adds=_adds, cost="external", pieces=_row_by_row)
    def score(self, batch: Batch) -> Mapping[str, Any]:
        """Adds ``rewards``, one per row; with ``on_error="mark"`` also ``failed`` and ``failed_why``.

        Raises RewardError as ``on_error`` and ``max_failed`` say.
        """
        rows = self._arguments(batch)
        outcomes = self._whole(batch, rows) if self.batched else self._by_row(batch, rows)
        errors = {i: o for i, o in enumerate(outcomes) if isinstance(o, BaseException)}
        if errors:
            self._failed(batch, errors)
        rewards = [self.failing.reward if isinstance(o, BaseException) else o for o in outcomes]
        if not self.failing.marks:
            return {"rewards": rewards}
        why = [said(errors[i]) if i in errors else "" for i in range(len(batch))]
        return {"rewards": rewards, "failed": [i in errors for i in range(len(batch))], "failed_why": why}

    def _failed(self, batch: Batch, errors: Mapping[int, BaseException]) -> None:
        """Raise the first failure of these rows, or have it settled once all rows of the call are done."""
        step = f" of step {batch.call.step}" if batch.call is not None else ""
        title = f"{self._title}{step}: {_called(self.fn)}"
        first = next(iter(errors.values()))
        named = {f"row {named_row(batch.keys[i])}": error for i, error in errors.items()}
        if self.batched and all(error is first for error in named.values()) and len(named) == len(batch) > 1:
            ends = named_row(batch.keys[0]), named_row(batch.keys[-1])
            named = {f"all {len(batch)} rows, {ends[0]} to {ends[1]}": first}
        if self.failing.on_error == "raise":
            raise first_failure(title, named, self._code)
        if (answers := answers_of_call()) is not None:
            answers.fail([batch.keys[i] for i in errors])
        why = {row: said(error) for row, error in named.items()}
        found = Failures(title, why, len(errors), self.failing.max_failed, batch.call or CallInfo())
        if self._settle is not None:
            self._settle(found)
        else:
            settle([found], len(batch), self._warn)

    def _arguments(self, batch: Batch) -> list[dict[str, Any]]:
        """Keyword arguments of the function, a dict per row."""
        if not len(batch):  # of nothing, transformers makes one empty text
            return []
        tokenizer = self._tokenizer()
        own, parameters = vocabulary(tokenizer), inspect.signature(self.fn).parameters
        every = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        columns = {n: batch[n].to_list() for n in batch.fields if n in parameters or (every and n not in STANDARD)}
        decoded = ["response_ids"] if "response" in parameters or every else []
        decoded += ["prompt_ids"] if ("prompt" in parameters or every) and "prompt" not in columns else []
        for name in decoded:
            if own and values(batch[name].marks, "tokenizer") - {own}:
                raise other_ids(f"{self.name or 'reward'}.score", name)
        if "response" in parameters or every:
            columns["response"] = tokenizer.batch_decode(batch["response_ids"].to_list(), skip_special_tokens=True)
        if ("prompt" in parameters or every) and "prompt" not in columns:
            columns["prompt"] = tokenizer.batch_decode(batch["prompt_ids"].to_list(), skip_special_tokens=True)
        names = list(columns)
        if not names:
            return [{} for _ in range(len(batch))]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _by_row(self, batch: Batch, rows: Sequence[Mapping[str, Any]]) -> list[float | BaseException]:
        """The reward of each row, or why it failed."""
        told, tell = self._rows(batch), self._tell(batch)

        def ask(numbers: Sequence[int]) -> list[Any]:
            dead = {i: self._notes.count_deaths(told[i]) for i in numbers}
            outcomes: dict[int, Any] = {i: Died(times) for i, times in dead.items() if times >= DEATHS}
            outcomes |= self._asked([i for i in numbers if not dead[i]], self.concurrency, rows, told, tell)
            outcomes |= self._asked([i for i in numbers if 0 < dead[i] < DEATHS], 1, rows, told, tell)
            return [number_of(outcomes[i]) for i in numbers]

        return ask_again(ask, len(rows), self.failing)

    def _asked(
        self,
        numbers: Sequence[int],
        concurrency: int,
        rows: Sequence[Mapping[str, Any]],
        told: Sequence[Row],
        tell: Callable[[int, Any], None],
    ) -> dict[int, Any]:
        """What the function gives for some rows, so many of them at a time."""
        outcomes = run_rows(
            self.fn,
            [rows[i] for i in numbers],
            concurrency=concurrency,
            timeout=self.timeout,
            notes=self._notes,
            loops=self._loops,
            at=lambda place: told[numbers[place]],
            tell=lambda place, outcome: tell(numbers[place], outcome),
        )
        return dict(zip(numbers, outcomes, strict=True))

    def _rows(self, batch: Batch) -> list[Row]:
        """The rows of a batch as notes name them."""
        call, title, code, timeout = batch.call or CallInfo(), self._title, self._code, self.timeout
        texts = batch["prompt"].to_list() if "prompt" in batch.fields else [""] * len(batch)
        return [
            Row(call.program, call.step, title, key, code, text if isinstance(text, str) else "", timeout=timeout)
            for key, text in zip(batch.keys, texts, strict=True)
        ]

    def _tell(self, batch: Batch) -> Callable[[int, Any], None]:
        """What hands a row's reward over as soon as it is there."""
        answers = answers_of_call()
        more = {"failed": [False], "failed_why": [""]} if self.failing.marks else {}

        def tell(row: int, outcome: Any) -> None:
            reward = number_of(outcome)
            if answers is not None and not isinstance(reward, BaseException):
                answers.keep([batch.keys[row]], {"rewards": [reward], **more})

        return tell

    def _whole(self, batch: Batch, rows: Sequence[Mapping[str, Any]]) -> list[float | BaseException]:
        """One call of a batch function, with lists. Where it fails as a whole, all of its rows have failed."""
        if not rows:
            return []
        lists = {name: [row[name] for row in rows] for name in rows[0]}

        def ask(numbers: Sequence[int]) -> list[Any]:
            del numbers  # the one call
            row = replace(self._rows(batch.take([0]))[0], rows=len(rows))
            if (times := self._notes.count_deaths(row)) >= DEATHS:
                return [Died(times)]
            how: dict[str, Any] = {"concurrency": 1, "timeout": self.timeout, "notes": self._notes}
            how["loops"] = self._loops
            [outcome] = run_rows(self.fn, [lists], **how, at=lambda place: row)
            return [outcome if isinstance(outcome, BaseException) else numbers_of(outcome, len(batch))]

        [outcome] = ask_again(ask, 1, self.failing)
        if isinstance(outcome, BaseException):
            return [outcome] * len(batch)
        return [number_of(value) for value in outcome]

    @property
    def _title(self) -> str:
        return f"{self.name or 'reward'}.score"

    @cached_property
    def _code(self) -> str:
        return code_of(self.fn)


def _listed(given: Any) -> str:
    """What was given in the place of a function, without where it lies in memory."""
    if isinstance(given, (list, tuple)):
        return f"a list of {', '.join(_called(one) for one in cast('Sequence[Any]', given))}"
    return described(given)


def _called(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
