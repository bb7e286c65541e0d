"""The process of one replica of vLLM: it answers what comes over its socket, and ends with the process that began it.

Messages are JSON. ``{"do": "generate", "call": 3, ...}`` is answered by one message for each row as soon as it is
finished, in any order. All others are answered by one: ``submit`` begins a call whose rows go on by a token with each
``step``, which tells of those that have ended; several calls are in one batch. ``abort`` ends rows, ``sleep`` frees
memory until the next ``publish``, which takes the weights that lie in the memory of the other process.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import astuple
from math import isfinite
from multiprocessing.connection import Connection
from typing import Any

from ...errors import DataError
from ...workers.decode_passes import PassMeter
from ...workers.model_options import Sampling
from ...workers.tokens.row_support import CallSupport
from ..continuous import RunningRow, grown_rows
from .row_messages import as_message, from_message
from .versions import adapter
from .weight_memory import open_weights

LOOK = 1.0  # seconds between two looks at whether the other process is there
TELL = 10.0  # seconds between two words that steps are made
GROWN = 0.05  # seconds between two words of what rows have got


class Server:
    """``Server(connection, opened)``: ``opened`` is the first message, which says of what model, how.

    Rows are of calls that are answered whole, which this process steps by itself, or of streamed ones, which go on when
    the other process asks for a step.
    """

    def __init__(self, connection: Connection, opened: dict[str, Any]) -> None:
        self.connection = connection
        self.vllm = adapter(opened["version"])
        self.engine = self.vllm.open_engine(
            opened["folder"],
            dtype=opened["dtype"],
            positions=opened["positions"],
            options=opened["options"],
            ranks=opened["ranks"],
        )
        self.rows: dict[str, RunningRow] = {}  # those that run, by their name in vLLM
        self.resting: list[RunningRow] | None = None  # while it sleeps: those that go on at the next publish
        self.left: dict[int, int] = {}  # by call that is answered whole: its rows that have not ended
        self.ended: list[dict[str, Any]] = []  # of streamed calls, not told yet
        self.told = 0.0  # when the other side was told last that steps are made
        self.grown = 0.0  # when it was told last what rows have got
        self.known: dict[int, dict[int, int]] = {}  # tokens that it knows of the rows of streamed calls
        self.version = 0  # of the weights
        self.begun = 0  # how often rows were begun: a name is not used twice
        self.uncounted: set[str] = set()  # rows that have no token yet
        self.most: int = opened["options"]["rows"]  # in a batch
        self.passes = PassMeter()
        self.asked = self.found = 0  # tokens that rows brought, and those of them that were in the cache
        self.weights: tuple[Any, Any] = (None, None)  # those of the other process, and what was told of them
        self.inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def run(self) -> None:
        """Answer until the other side has said that it is the end."""
        threading.Thread(target=self._read, daemon=True).start()
        while True:
            while not self.left or not self.inbox.empty():
                asked = self.inbox.get()
                if asked["do"] == "close":
                    return
                self._handle(asked)
            self._step()
            self._say_that_it_goes_on()

    def _read(self) -> None:
        """Take in what comes; end this process where nothing can come any more."""
        try:
            while True:
                self.inbox.put(json.loads(self.connection.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)

    def send(self, **said: Any) -> None:
        """Tell the other side."""
        self.connection.send_bytes(json.dumps(said).encode())

    def _handle(self, asked: dict[str, Any]) -> None:
        try:
            getattr(self, asked["do"])(asked)
        except Exception as error:
            if asked["do"] in ("generate", "submit"):
                self.forget(asked["call"])
            self.send(call=asked["call"], error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())

    # -- rows ---------------------------------------------------------------------------------------------------------

    def generate(self, asked: dict[str, Any]) -> None:
        """Begin the rows of a call that is answered by one message for each."""
        self._begin_call(asked)
        if asked["seeds"]:
            self.left[asked["call"]] = len(asked["seeds"])

    def submit(self, asked: dict[str, Any]) -> None:
        """Begin the rows of a streamed call, whose number is that of this message."""
        self.known[asked["call"]] = {row["row"]: len(row["ids"]) for row in asked["kept"]}
        self._begin_call(asked)
        self._close(asked["call"])
        self.send(call=asked["call"])

    def step(self, asked: dict[str, Any]) -> None:
        """Go on by a token of each row, under the version that is told, unless there is something to tell."""
        self.version = asked["version"]
        if not self.ended:
            self._step()
        ended, self.ended = self.ended, []
        self.send(call=asked["call"], left=ended, grown=self._grown())

    def _grown(self) -> list[dict[str, Any]]:
        """Return now and then what streamed rows have got: who asks goes on from it where this process is lost."""
        now = time.monotonic()
        if now - self.grown < GROWN:
            return []
        self.grown = now
        found = grown_rows(self.rows.values(), self.known)
        for row in found:
            of_call = self.known[row.call]
            of_call[row.row] = of_call.get(row.row, 0) + len(row.ids)
        return [as_message(row) for row in found]

    def abort(self, asked: dict[str, Any]) -> None:
        """End rows of a streamed call, or all of them; say what they have."""
        of_call = {row.row: name for name, row in self.rows.items() if row.call == asked["of"]}
        resting = {row.row: row for row in self.resting or () if row.call == asked["of"]}
        wanted = dict.fromkeys([*of_call, *resting] if asked["rows"] is None else asked["rows"])
        rested = [resting[row] for row in wanted if row in resting]
        gone = [*self._withdraw([of_call[row] for row in wanted if row in of_call]), *rested]
        if self.resting is not None:
            self.resting = [row for row in self.resting if row not in rested]
        self._close(asked["of"])
        self.send(call=asked["call"], rows=[as_message(row.ended("aborted")) for row in gone])

    def again(self, asked: dict[str, Any]) -> None:
        """Have all rows begin again from the tokens that they have, and nothing be found in the cache."""
        running = self._withdraw(self.rows)
        self.vllm.forget_prefixes(self.engine)
        for row in running:
            self._begin(row)
        self.send(call=asked["call"])

    def prefix_tokens(self, asked: dict[str, Any]) -> None:
        """Say how many tokens rows have brought, and how many of them were not computed."""
        self.send(call=asked["call"], asked=self.asked, found=self.found)

    def _begin_call(self, asked: dict[str, Any]) -> None:
        from .draw import SAMPLING

        said, call, n = asked["sampling"], asked["call"], asked["n"]
        sampling = SAMPLING[call] = Sampling(**{**said, "stop": tuple(said["stop"])})
        stops, prompts = frozenset(asked["stops"]), [tuple(prompt) for prompt in asked["prompts"]]
        recorded = CallSupport(len(asked["seeds"])) if sampling.support else None
        kept = {row.row: row for row in map(from_message, asked.get("kept", ()))}
        for row, (seed, start, limit) in enumerate(zip(asked["seeds"], asked["starts"], asked["limits"], strict=True)):
            made = RunningRow(call, row, prompts[row // n], seed, start, limit, sampling, stops, recorded)
            if (had := kept.get(row)) is not None:
                if had.reason != "aborted":
                    continue
                made.go_on_from(had)
            try:
                self._begin(made)
            except Exception as error:
                raise ValueError(f"row {row}: {error}") from error

    def _begin(self, row: RunningRow) -> None:
        """Have vLLM go on with a row, from the tokens that it has."""
        from .draw import DRAWN

        self.begun += 1
        self.asked += len(row.tokens)
        name, done = f"{row.call}.{self.begun}.{row.row}", len(row.ids)
        DRAWN[name], self.rows[name] = {}, row
        self.uncounted.add(name)
        drawn = {"row": name, "call": row.call, "seed": row.seed, "start": row.start + done}
        self.vllm.add_row(self.engine, name, list(row.tokens), row.limit - done, sorted(row.stops), drawn)

    def _withdraw(self, names: Iterable[str]) -> list[RunningRow]:
        """Take rows out of vLLM; return them with the tokens that they have."""
        from .draw import DRAWN

        names = list(names)
        with contextlib.suppress(Exception):  # of a row that was never begun
            self.engine.abort_request(names)
        for name in names:
            del DRAWN[name]
        self.uncounted.difference_update(names)
        return [self.rows.pop(name) for name in names]

    def take_passes(self, asked: dict[str, Any]) -> None:
        """Say how long passes took since this was asked last."""
        self.send(call=asked["call"], passes=[astuple(passes) for passes in self.passes.take()])

    def _step(self) -> None:
        if self.uncounted and len(self.rows) - len(self.uncounted) < self.most:  # others find no place
            self.passes.rest()  # prompts may be computed in it
        outputs = [output for output in self.engine.step() if output.request_id in self.rows]
        these = {output.request_id: self.rows[output.request_id] for output in outputs}
        context = sum(len(row.prompt) + len(row.ids) for row in these.values())
        for output in outputs:
            if output.request_id in self.rows:  # those of a call that has failed meanwhile are not
                self._take(output)
        self.passes.note(these, context, time.perf_counter(), goes_on=bool(self.rows))

    def _take(self, output: Any) -> None:
        """Take the tokens that a row has got, and tell of it where it has ended."""
        from .draw import DRAWN

        name, made = output.request_id, output.outputs[0]
        row, drawn = self.rows[name], DRAWN[name]
        if name in self.uncounted:
            self.uncounted.remove(name)
            self.found += self.vllm.found_tokens(output)
        for token in made.token_ids:
            plain, sampled, support = drawn.pop(min(drawn))
            row.add(token, plain, sampled, self.version)
            if row.call not in self.left and not isfinite(plain):
                self.ended.append({"call": row.call, "row": row.row, "token": len(row.ids) - 1})
                self.forget(row.call)
                return
            try:
                row.record(support)
            except DataError as error:
                failed = {"call": row.call, "row": row.row, "what": error.what, "fix": error.fix}
                self.ended.append(failed) if row.call not in self.left else self.send(**failed)
                self.forget(row.call)
                return
        if output.finished:
            del self.rows[name], DRAWN[name]
            self._tell(row, as_message(row.ended("stop" if made.finish_reason == "stop" else "length")))

    def _say_that_it_goes_on(self) -> None:
        """Let the other side know now and then that steps are made, although no row has ended."""
        if (now := time.monotonic()) - self.told >= TELL:
            self.told = now
            self.send(call=0)  # of which nobody takes the answer

    def _tell(self, row: RunningRow, said: dict[str, Any]) -> None:
        if row.call not in self.left:
            self.ended.append(said)
        else:
            self.send(**said)
            self.left[row.call] -= 1
        self._close(row.call)

    def _close(self, call: int) -> None:
        """Forget a call that has no rows any more."""
        if not any(row.call == call for row in (*self.rows.values(), *(self.resting or ()))):
            self.forget(call)

    def forget(self, call: int) -> None:
        """End what is left of a call."""
        from .draw import SAMPLING

        self._withdraw([name for name, row in self.rows.items() if row.call == call])
        self.left.pop(call, None)
        self.known.pop(call, None)
        SAMPLING.pop(call, None)

    # -- weights ------------------------------------------------------------------------------------------------------

    def publish(self, asked: dict[str, Any]) -> None:
        """Load the weights that lie in the memory of the other process, and say what they are and what they give.

        Rows that run begin again after it, from the tokens that they have: no row is in a forward pass of two weights.
        """
        running = [*(self.resting or ()), *self._withdraw(self.rows)]
        try:
            self._publish(asked)
        finally:
            if self.resting is None:  # it is awake, whatever has gone wrong
                for row in running:
                    self._begin(row)

    def sleep(self, asked: dict[str, Any]) -> None:
        """Free what holds keys, values and weights, until the next publish; rows go on after it.

        It may sleep already: what wakes the other side brings nothing back here.
        """
        if self.resting is not None:
            self.send(call=asked["call"], freed=0)
            return
        self.resting = self._withdraw(self.rows)
        _, parameters, _ = self._weights(asked["weights"])
        self.send(call=asked["call"], freed=self.vllm.sleep(self.engine, parameters))

    def _publish(self, asked: dict[str, Any]) -> None:
        from ...workers.weights.weight_boxes import sums
        from .columns import differing

        if running := self.vllm.running_rows(self.engine):
            raise RuntimeError(f"{running} rows are still being sampled: a forward pass would be of two weights")
        number = asked["number"]
        if self.resting is None:
            before = self.vllm.computed(self.engine, number)
        else:
            self.vllm.wake(self.engine)
            before, self.resting = {}, None
        began = time.monotonic()
        memory, parameters, boxes = self._weights(asked["weights"])
        self.vllm.hold(self.engine, memory)
        lacking = self.vllm.load_weights(self.engine, parameters)
        if not self.vllm.forget_prefixes(self.engine):
            raise RuntimeError("the prefix cache could not be emptied")
        loaded = time.monotonic()
        there = self.vllm.computed(self.engine, number)
        here = self.vllm.wanted(self.engine, parameters, {box.name: box.tensor for box in boxes}, number)
        self.send(
            call=asked["call"],
            sums=sums(boxes),
            lacking=sorted(lacking),
            differing=differing(there, here, before),
            seen=len(there),
            prefixes=self.vllm.kept_prefixes(self.engine),
            probe=[self._probe(f"probe.{row}", tokens) for row, tokens in enumerate(asked["probe"])],
            load=loaded - began,
        )

    def _weights(self, told: Any) -> Any:
        """Return what lies in the memory of the other process, which is opened once."""
        if self.weights[1] != told:
            self.weights = open_weights(told), told
        return self.weights[0]

    def _probe(self, name: str, tokens: list[int]) -> list[float]:
        self.vllm.add_probe(self.engine, name, tokens)
        while True:
            for output in self.engine.step():
                if output.finished:
                    return self.vllm.probed(output)


def watch_parent(parent: int) -> None:
    """End this process soon after the one that began it, however that ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Serve the socket whose number is the first argument, for the process of the second one."""
    connection = Connection(int(sys.argv[1]))
    watch_parent(int(sys.argv[2]))
    opened = json.loads(connection.recv_bytes())
    try:
        server = Server(connection, opened)
        server.send(ready=opened["version"])
        server.run()
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            connection.send_bytes(json.dumps({"ended": f"{type(error).__name__}: {error}"}).encode())
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # nothing of it is to be kept, and its threads may not end by themselves


if __name__ == "__main__":
    main()
