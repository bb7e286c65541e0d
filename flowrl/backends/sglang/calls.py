"""The calls that a server answers: sent, read as their rows come, ended, and named where they go wrong."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NoReturn

from ...errors import EngineLost, FlowError, RunError
from ...workers.headway import make_headway
from ...workers.streaming import FailedCall, SampledRow
from .answers import AskedRow, NotFiniteRow, WrongRow
from .client import Client, Refused, Stream, told

TOLD = 32  # tokens of a row from one part of its answer to the next, at least
PARTS = 16  # and of a long row about so many parts: each has all tokens so far
LOOK = 0.05  # seconds that a step waits for rows
AGAIN = 0.25  # seconds until a server is told once more what to end: it may not have had the row before
HEALTH = 30.0  # seconds in which a server says whether it goes on; its own bound is 20
#: The processor of each row, as SGLang reads one: a pickle that names a class of its own Python, and has nothing else.
PROCESSOR = json.dumps({"callable": b"cflowrl.backends.sglang.draw\nDraw\n.".hex()})


class Calls:
    """``Calls(client, ended, vocab=...)``: ``ended(seconds)`` says how the server's process ended, or None.

    Rows run on the server by themselves; a thread for each call reads its answer, and one thread at a time takes what
    has come. ``labels`` are those of the published weights and their versions, the last one the newest; the first is
    the oldest that an open row has tokens of. ``ours``: the server was started here, so that it may be again.
    """

    def __init__(self, client: Client, ended: Callable[[float], str | None], vocab: int, *, ours: bool = False) -> None:
        self.client, self.vocab, self.ours = client, vocab, ours
        self.labels: dict[str, int] = {}
        self.rows: dict[tuple[int, int], AskedRow] = {}  # those that have not left, in the order of calls and rows
        self.not_finite: Callable[[str], FlowError] = RunError
        self._ended = ended
        self._events: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._asked: dict[int, list[AskedRow]] = {}  # by call under way: its rows as they were sent
        self._streams: dict[int, Stream] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._heard = time.monotonic()

    def note_publish(self, label: str, version: int) -> None:
        """Know of weights that were published, and forget those that no open row can have tokens of."""
        self.labels[label] = version
        begun = {row.label for row in self.rows.values()} | {label}
        while (oldest := next(iter(self.labels))) not in begun:
            del self.labels[oldest]

    def begin(self, rows: Sequence[AskedRow]) -> None:
        """Send the rows of one call."""
        if not rows:
            return
        call, said, newest = rows[0].call, asdict(rows[0].sampling), next(reversed(self.labels))
        for row in rows:
            row.label = newest
        body = {
            "input_ids": [row.prompt for row in rows],
            "rid": [row.rid for row in rows],
            "stream": True,
            "custom_logit_processor": PROCESSOR,
            "extra_key": newest,  # no row takes keys and values of other weights
            "sampling_params": [
                {
                    "temperature": 0.0,  # the processor leaves one token
                    "max_new_tokens": row.limit,
                    "stop_token_ids": sorted(row.stops),
                    "stream_interval": max(TOLD, row.limit // PARTS),
                    "custom_params": {"seed": row.seed, "start": row.start, "sampling": said},
                }
                for row in rows
            ],
        }
        self._asked[call] = list(rows)
        self._heard = time.monotonic()
        threading.Thread(target=self._read, args=(call, body), daemon=True).start()

    def _read(self, call: int, body: Any) -> None:
        """Put what is answered into the line, and what went wrong behind it."""
        try:
            stream = self.client.stream("/generate", body)
            with self._lock:
                self._streams[call] = stream
                if self._closed:  # the server had not begun to answer until then
                    stream.close()
            for said in stream:
                self._events.put((call, said))
            self._events.put((call, None))
        except Exception as error:
            self._events.put((call, error))
        finally:
            with self._lock:
                self._streams.pop(call, None)

    def take(self, seconds: float = LOOK) -> list[SampledRow | FailedCall]:
        """Return what has ended, waiting so long for the first. Raises RunError where the server is of no more use."""
        found: list[SampledRow | FailedCall] = []
        with suppress(queue.Empty):
            event = self._events.get(timeout=seconds)
            while True:
                self._heard = time.monotonic()
                make_headway()
                found += self._handle(*event)
                event = self._events.get_nowait()
        if self.rows and time.monotonic() - self._heard > self.client.patience:
            self._check_health()
        return found

    def _handle(self, call: int, said: Any) -> list[SampledRow | FailedCall]:
        """Take a part of the answer to a call; one that is forgotten has none."""
        asked = self._asked.get(call)
        if asked is None:
            return []
        if isinstance(said, Refused):
            return [self._fail(call, RunError(f"Call {call}: {said.what}"))]
        if isinstance(said, Exception):
            if any((call, row.row) in self.rows for row in asked):
                self.lost(said)
            said = None  # all rows were answered before it ended
        if said is None:
            del self._asked[call]
            missing = [row.row for row in asked if (call, row.row) in self.rows]
            if not missing:
                return []
            what = f"SGLang answered {len(asked) - len(missing)} of the {len(asked)} rows of call {call}"
            return [self._fail(call, RunError(f"{what}; row {missing[0]} is the first without an answer."))]
        index = said.get("index") if isinstance(said, dict) else None
        row = asked[index] if type(index) is int and 0 <= index < len(asked) else None
        if row is None:  # a row that is refused is told without its place
            return [self._fail(call, RunError(f"SGLang refuses a row of call {call}: {told(said)}"))]
        if (call, row.row) not in self.rows and row.reason is None:
            return []  # it was given up here
        try:
            row.take(said, vocab=self.vocab, labels=self.labels)
        except NotFiniteRow as error:
            what = f"Log-probabilities of row {row.row} of call {call}, token {error}, are not finite"
            return [self._fail(call, self.not_finite(what))]
        except WrongRow as error:
            return [self._fail(call, RunError(f"SGLang: row {row.row} of call {call} {error}."))]
        if row.reason is None:
            return []
        del self.rows[call, row.row]
        return [row.left(self.labels, row.reason)]

    def _fail(self, call: int, error: FlowError) -> FailedCall:
        """End a call that cannot go on."""
        gone = [self.rows.pop(key) for key in list(self.rows) if key[0] == call]
        self.forget(call)
        with suppress(OSError, RunError):
            for row in gone:
                self._tell_abort(row)
        return FailedCall(call, error)

    def forget(self, call: int) -> None:
        """Take nothing more of a call."""
        self._asked.pop(call, None)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def abort(self, rows: Iterable[AskedRow]) -> list[SampledRow | FailedCall]:
        """Have the server end rows; return what has ended until they have, which may be others too."""
        wanted = [row for row in rows if (row.call, row.row) in self.rows]
        found: list[SampledRow | FailedCall] = []
        last, end = -AGAIN, time.monotonic() + self.client.patience
        while left := [row for row in wanted if self.rows.get((row.call, row.row)) is row]:
            now = time.monotonic()
            if now > end:
                self.lost(TimeoutError(f"row {left[0].row} of call {left[0].call} was to end"))
            if now - last > AGAIN:
                last = now
                for row in left:
                    row.aborting = True
                    self._tell_abort(row)
            found += self.take()
        return found

    def settle(self) -> list[SampledRow | FailedCall]:
        """Return what still comes, until all that the server was asked for is answered: then it has no rows."""
        found: list[SampledRow | FailedCall] = []
        end = time.monotonic() + self.client.patience
        while self._asked:
            if time.monotonic() > end:
                self.lost(TimeoutError(f"call {next(iter(self._asked))} was to end"))
            found += self.take()
        return found

    def release_memory(self) -> None:
        """Have a server that was asked for nothing more give its memory back.

        It dies of that while it is still at its last row, so its cache is emptied first, which it only refuses then.
        """
        end = time.monotonic() + self.client.patience
        while True:
            try:
                self.ask("/flush_cache", {})
                break
            except Refused:
                if time.monotonic() > end:
                    raise
                time.sleep(LOOK)
        self.ask("/release_memory_occupation", {})

    def give_up(self, row: AskedRow, *, sent: bool) -> SampledRow:
        """Take a row out with the tokens that are known here; the server ends it when it goes on."""
        del self.rows[row.call, row.row]
        if sent:
            self._tell_abort(row)
        return row.cut(self.labels)

    def tokens_since(self, known: Mapping[int, Mapping[int, int]]) -> list[SampledRow]:
        """Return rows that have more tokens than are known, by call and row, as far as their weights are known."""
        found: list[SampledRow] = []
        for (call, number), row in self.rows.items():
            if (of_call := known.get(call)) is not None and row.certain > (before := of_call.get(number, 0)):
                found.append(row.cut(self.labels).since(before))
        return found

    def _tell_abort(self, row: AskedRow) -> None:
        self.ask("/abort_request", {"rid": row.rid})

    # -- the server ---------------------------------------------------------------------------------------------------

    def ask(self, path: str, said: Any = None) -> Any:
        """Return what the server answers. Raises RunError where it refuses, or is gone, or hangs."""
        try:
            return self.client.ask(path, said)
        except OSError as error:
            self.lost(error)

    def lost(self, error: Exception) -> NoReturn:
        """Raise RunError of a server that is gone, or does not answer: with its last lines, and rows that it had.

        It is EngineLost where the server was started here.
        """
        how = self._ended(2.0) or ""
        what = f"does not answer within {self.client.patience:g} s" if isinstance(error, TimeoutError) else "is gone"
        rows = [f"{call}.{row}" for call, row in self.rows]
        had = f" It had rows (call.row) {', '.join(rows[:20])}." if rows else ""
        kind = EngineLost if self.ours else RunError
        raise kind(f"The server of SGLang at {self.client.url} {what} ({error}).{had} {how}".rstrip()) from error

    def _check_health(self) -> None:
        """Raise RunError where a server of which nothing was heard does not go on."""
        try:
            self.client.ask("/health_generate", seconds=HEALTH)
        except (OSError, RunError) as error:
            self.lost(TimeoutError(f"nothing came of its rows, and of its health: {error}"))
        self._heard = time.monotonic()

    def close(self) -> None:
        """Read nothing more."""
        self._asked.clear()
        self.rows.clear()
        with self._lock:
            self._closed, streams = True, dict(self._streams)
        for stream in streams.values():
            stream.close()
