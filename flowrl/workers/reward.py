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

from ..errors import ProgramError, RewardError, WorkerError
from ..graph.allowed import number, takes, whole
from ..graph.habits import meant_column
from ..graph.op import CallShape, described, op
from ..graph.provenance import FIRST
from ..graph.types import STANDARD
from ..marks import other_ids, values, vocabulary
from .base import Opening, Worker

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


class FunctionReward(Worker):
    """A reward by function: ``fn(prompt: str, response: str, **columns) -> float``.

    ``fn`` takes ``prompt``, ``response`` and the columns of the batch that its parameters name (all of them with
    ``**columns``). With ``batched=True`` it takes lists and returns a list. It may be ``async``.

    Args:
        fn: the function, a pure one or one that touches the world; it is never called twice for the same row of a run.
        batched: it takes all rows at once.
        concurrency: rows in flight at once (threads of plain functions, tasks of async ones).
        timeout: seconds for one row (for the whole call when ``batched``); None waits for ever.
        on_error: ``"raise"`` stops the run, naming the row; a number is the reward of a row that failed or timed
            out, and the failure is written to the run's events.
        tokenizer: what decodes ``response_ids``; None takes that of the flow's actor.
    """

    @takes(concurrency=whole(least=1), timeout=number(above=0, fix="Give seconds, or None to wait for ever.") | None)
    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        batched: bool = False,
        concurrency: int = 8,
        timeout: float | None = 60.0,
        on_error: str | float = "raise",
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
        if isinstance(on_error, str) and on_error != "raise":
            raise WorkerError(
                f"on_error={on_error!r} is neither 'raise' nor a number.", fix="Write on_error='raise' or on_error=0.0."
            )
        self.init_arguments = {"fn": fn}  # the op's reads depend on it, also where no flow made this worker
        self.fn, self.batched, self.concurrency = fn, batched, concurrency
        self.timeout, self.on_error, self.said_tokenizer = timeout, on_error, tokenizer
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

    @op(reads=_columns, adds="rewards: f32[]", cost="external", pieces=_row_by_row)
    def score(self, batch: Batch) -> Mapping[str, Any]:
        """Adds ``rewards``, one per row. Raises RewardError naming the row, unless ``on_error`` says otherwise."""
        rows = self._arguments(batch)
        if self.batched:
            return {"rewards": self._whole(batch, rows)}
        outcomes = run_rows(self.fn, rows, concurrency=self.concurrency, timeout=self.timeout)
        return {"rewards": [self._number(batch.keys[i], outcome) for i, outcome in enumerate(outcomes)]}

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

    def _whole(self, batch: Batch, rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """One call of a batch function, with lists. Where it fails as a whole, all of its rows have failed."""
        if not rows:
            return []
        lists = {name: [row[name] for row in rows] for name in rows[0]}
        [outcome] = run_rows(self.fn, [lists], concurrency=1, timeout=self.timeout)
        if not isinstance(outcome, BaseException):
            try:
                values = list(outcome)
            except TypeError:
                outcome = TypeError(f"it returned {outcome!r}, not a list with a reward for each row")
            else:
                if len(values) == len(batch):
                    return [self._number(batch.keys[i], v) for i, v in enumerate(values)]
                outcome = ValueError(f"it returned {len(values)} rewards for {len(batch)} rows")
        first, last = named_row(batch.keys[0]), named_row(batch.keys[-1])
        which = f"row {first}" if len(batch) == 1 else f"all {len(batch)} rows, {first} to {last}"
        return [self._failed(which, outcome)] * len(batch)

    def _title(self) -> str:
        return f"{self.name or 'reward'}.score: {_called(self.fn)}"

    def _number(self, key: tuple[int, ...], outcome: Any) -> float:
        """The reward of one row, or the error that names it."""
        why: BaseException | None = outcome if isinstance(outcome, BaseException) else None
        said: Any = outcome
        if why is None:
            try:
                number = float(said)
                if math.isfinite(number):
                    return number
                why = ValueError(f"it returned {number}")
            except (TypeError, ValueError):
                why = TypeError(f"it returned {outcome!r}, which is no number")
        return self._failed(f"row {named_row(key)}", why)

    def _failed(self, rows: str, why: BaseException) -> float:
        """The reward of rows that failed; RewardError where there is none."""
        said = str(why) if isinstance(why, _Late) else f"{type(why).__name__}: {why}"
        what = f"{self._title()} failed for {rows}: {said}"
        if isinstance(self.on_error, str):
            raise RewardError(
                what + ".", fix="Mend the function, or give on_error=0.0 to FunctionReward to go on with that reward."
            ) from why
        self._warn(what)
        return float(self.on_error)


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


class _Late(TimeoutError):
    """A row ran out of the time that it had. One that user code raises says something else."""

    def __init__(self, timeout: float | None) -> None:
        super().__init__(f"it took longer than {timeout} s")


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
                return _Late(timeout) if limit.expired() and isinstance(error, TimeoutError) else error

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
                results[i], done[i] = _Late(timeout), True
                started.pop(i)
                spawn()
            if late:
                continue
            wait = None if timeout is None else min((t + timeout - now for t in started.values()), default=timeout)
            change.wait(wait)
    return results
