"""Rewards by function: user code, plain or async, run concurrently, with a time limit, its failures named by row."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from ..errors import ProgramError, WorkerError
from ..graph.allowed import number, takes, whole
from ..graph.habits import meant_column
from ..graph.op import CallShape, described, op
from ..graph.provenance import FIRST
from ..graph.types import STANDARD
from ..marks import other_ids, values, vocabulary
from .base import Opening, Worker
from .failures import Late, Policy, ask_again, settle

if TYPE_CHECKING:
    from ..batch import Batch

_GIVEN = ("prompt", "response")


def _row_by_row(shape: CallShape) -> bool | str:
    return False if shape.init.get("batched", False) else "row"


def _columns(shape: CallShape) -> str:
    """What a reward function asks for, by its parameters."""
    wanted = ["response_ids", "prompt" if "prompt" in shape.have else "prompt_ids"]
    parameters = inspect.signature(shape.init["fn"]).parameters.values()
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            wanted += sorted(name for name in shape.have if name not in STANDARD)
        elif parameter.name not in _GIVEN and (parameter.default is parameter.empty or parameter.name in shape.have):
            _expect_column(shape, parameter.name)
            wanted.append(parameter.name)
    return ", ".join(dict.fromkeys(wanted))


def _expect_column(shape: CallShape, name: str) -> None:
    """Refuse a parameter that no column has the name of, where another library's signature is meant."""
    meant = meant_column(name)
    if name in shape.have or meant is None:
        return
    fn, lists = _called(shape.init["fn"]), name in ("completions", "responses", "outputs", "prompts", "queries")
    raise ProgramError(
        f"{fn} takes '{name}', which is no column of the batch: a reward is fn(prompt, response, **columns) -> float.",
        have=[*_GIVEN, *sorted(n for n in shape.have if n not in STANDARD and n not in _GIVEN)],
        fix=f"Write {meant} for {name}: it is called once for each row"
        + (", or with lists where FunctionReward has batched=True." if lists else "."),
    )


def _adds(shape: CallShape) -> str:
    return "rewards: f32[], failed: bool[]" if shape.init.get("on_error") == "mark" else "rewards: f32[]"


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
            stops the run, naming the row. ``"mark"`` adds ``failed`` bool[], and the row's reward is nan: leave it out
            with ``batch.filter(~batch.failed)`` before advantages, which are then over the other rows of its prompt.
            A number is its reward. Failures of a call are one warning in the run's events.
        retries: how often rows that failed are asked again. A pure function that fails fails again.
        backoff: seconds before the first time, twice as many before each further one, at most 30.
        max_failed: the share of the rows of a call above which failures, 8 or more, stop the run whatever
            ``on_error`` says: a service that is down is no reward.
        tokenizer: what decodes ``response_ids``; None takes that of the flow's actor.
    """

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

    @classmethod
    def check_declaration(cls, arguments: Mapping[str, Any]) -> None:
        cls(**arguments)

    @classmethod
    def declared_tokenizer(cls, arguments: Mapping[str, Any]) -> Any:
        parameters = inspect.signature(arguments["fn"]).parameters
        asked = any(p.kind is p.VAR_KEYWORD or n == "response" for n, p in parameters.items())
        return (arguments.get("tokenizer") or FIRST) if asked else None

    def open(self, opening: Opening) -> None:
        self._tokenizer = cache(lambda: opening.tokenizer(self.said_tokenizer))
        self._warn = opening.warn

    @op(reads=_columns, adds=_adds, cost="external", pieces=_row_by_row)
    def score(self, batch: Batch) -> Mapping[str, Any]:
        """Adds ``rewards``, one per row, and with ``on_error="mark"`` ``failed``. Raises RewardError as it says."""
        rows = self._arguments(batch)
        rewards, failures = self._whole(batch, rows) if self.batched else self._by_row(batch, rows)
        failed = [math.isnan(r) for r in rewards]
        settle(self._title(), failures, sum(failed), len(rewards), self.failing, self._warn)
        found = [self.failing.reward if f else r for f, r in zip(failed, rewards, strict=True)]
        return {"rewards": found, "failed": failed} if self.failing.marks else {"rewards": found}

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

    def _by_row(self, batch: Batch, rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], dict[str, BaseException]]:
        """The reward of each row, nan where it failed, and why those failed."""

        def ask(numbers: Sequence[int]) -> list[Any]:
            asked = [rows[i] for i in numbers]
            outcomes = run_rows(self.fn, asked, concurrency=self.concurrency, timeout=self.timeout)
            return [_number(outcome) for outcome in outcomes]

        return _apart(batch, ask_again(ask, len(rows), self.failing))

    def _whole(self, batch: Batch, rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], dict[str, BaseException]]:
        """One call of a batch function, with lists. Where it fails as a whole, all of its rows have failed."""
        if not rows:
            return [], {}
        lists = {name: [row[name] for row in rows] for name in rows[0]}

        def ask(numbers: Sequence[int]) -> list[Any]:
            del numbers  # the one call
            [outcome] = run_rows(self.fn, [lists], concurrency=1, timeout=self.timeout)
            return [outcome if _failed(outcome) else _listed_rewards(outcome, len(batch))]

        [outcome] = ask_again(ask, 1, self.failing)
        if not _failed(outcome):
            return _apart(batch, [_number(value) for value in outcome])
        first, last = named_row(batch.keys[0]), named_row(batch.keys[-1])
        which = f"row {first}" if len(batch) == 1 else f"all {len(batch)} rows, {first} to {last}"
        return [math.nan] * len(batch), {which: outcome}

    def _title(self) -> str:
        return f"{self.name or 'reward'}.score: {_called(self.fn)}"


def _failed(outcome: Any) -> bool:
    return isinstance(outcome, BaseException)


def _apart(batch: Batch, outcomes: Sequence[float | BaseException]) -> tuple[list[float], dict[str, BaseException]]:
    """Rewards, nan where a row failed, and the errors by the names of their rows."""
    why = {f"row {named_row(batch.keys[i])}": o for i, o in enumerate(outcomes) if isinstance(o, BaseException)}
    return [math.nan if isinstance(o, BaseException) else o for o in outcomes], why


def _number(outcome: Any) -> float | BaseException:
    """What a function returned as a reward; the error where it is none."""
    if isinstance(outcome, BaseException):
        return outcome
    try:
        number = float(outcome)
    except (TypeError, ValueError):
        return TypeError(f"it returned {outcome!r}, which is no number")
    return number if math.isfinite(number) else ValueError(f"it returned {number}")


def _listed_rewards(outcome: Any, rows: int) -> list[Any] | BaseException:
    """What a function of all rows returned; the error where it is no list of so many."""
    try:
        values = list(outcome)
    except TypeError:
        return TypeError(f"it returned {outcome!r}, not a list with a reward for each row")
    return values if len(values) == rows else ValueError(f"it returned {len(values)} rewards for {rows} rows")


def named_row(key: tuple[int, ...]) -> str:
    """A row in a message: ``3``, or ``3, sample 2`` for one of several of a prompt."""
    return f"{key[0]}" + "".join(f", sample {k}" for k in key[1:2]) + "".join(f".{k}" for k in key[2:])


def _listed(given: Any) -> str:
    """What was given in the place of a function, without where it lies in memory."""
    if isinstance(given, (list, tuple)):
        return f"a list of {', '.join(_called(one) for one in cast('Sequence[Any]', given))}"
    return described(given)


def _called(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def run_rows(
    fn: Callable[..., Any], rows: Sequence[Mapping[str, Any]], *, concurrency: int, timeout: float | None
) -> list[Any]:
    """Call ``fn(**row)`` for every row, ``concurrency`` at a time; results, or the exceptions, in the order of rows.

    A plain function runs in threads; one that runs out of time is left behind with a TimeoutError as its result.
    """
    if not (inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)):
        return _run_threads(fn, rows, concurrency, timeout)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run_async(fn, rows, concurrency, timeout)
    with ThreadPoolExecutor(1, "flowrl-reward") as thread:  # a thread runs one event loop; here a notebook's runs
        return thread.submit(_run_async, fn, rows, concurrency, timeout).result()


def _run_async(fn: Any, rows: Sequence[Mapping[str, Any]], concurrency: int, timeout: float | None) -> list[Any]:
    async def one(gate: asyncio.Semaphore, row: Mapping[str, Any]) -> Any:
        async with gate:
            limit = asyncio.timeout(timeout)
            try:
                async with limit:
                    return await fn(**row)
            except Exception as error:
                return Late(timeout) if limit.expired() and isinstance(error, TimeoutError) else error

    async def all_rows() -> list[Any]:
        gate = asyncio.Semaphore(concurrency)
        return list(await asyncio.gather(*(one(gate, row) for row in rows)))

    return asyncio.run(all_rows())


def _run_threads(fn: Any, rows: Sequence[Mapping[str, Any]], concurrency: int, timeout: float | None) -> list[Any]:
    results: list[Any] = [None] * len(rows)
    done = [False] * len(rows)
    waiting = deque(range(len(rows)))
    started: dict[int, float] = {}  # row -> when
    change = threading.Condition()

    def work() -> None:
        while True:
            with change:
                if not waiting:
                    return
                i = waiting.popleft()
                started[i] = time.monotonic()
            try:
                result = fn(**rows[i])
            except BaseException as error:  # also an exit that user code asks for: nobody else is told of it here
                result = error
            with change:
                if done[i]:  # timed out meanwhile; another thread took this one's place
                    return
                results[i], done[i] = result, True
                started.pop(i, None)
                if not started and not waiting:
                    change.notify()

    def spawn() -> None:
        threading.Thread(target=work, daemon=True, name="flowrl-reward").start()

    for _ in range(min(concurrency, len(rows))):
        spawn()
    with change:
        while not all(done):
            now = time.monotonic()
            late = [i for i, t in started.items() if timeout is not None and now - t >= timeout]
            for i in late:
                results[i], done[i] = Late(timeout), True
                started.pop(i)
                spawn()
            if late:
                continue
            wait = None if timeout is None else min((t + timeout - now for t in started.values()), default=timeout)
            change.wait(wait)
    return results
