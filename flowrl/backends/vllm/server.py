"""The process of one replica of vLLM: it answers what comes over its socket, and ends with the process that began it.

Messages are JSON. ``{"do": "generate", "call": "3", ...}`` is answered by one message for each row as soon as it is
finished, in any order; several calls are in one batch. ``{"do": "publish", ...}`` is answered by one.
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
from multiprocessing.connection import Connection
from typing import Any

from ...workers.model_options import Sampling
from .versions import adapter
from .weight_memory import open_weights

LOOK = 1.0  # seconds between two looks at whether the other process is there


class Server:
    """``Server(connection, opened)``: ``opened`` is the first message, which says of what model, how."""

    def __init__(self, connection: Connection, opened: dict[str, Any]) -> None:
        self.connection = connection
        self.vllm = adapter(opened["version"])
        self.engine = self.vllm.open_engine(
            opened["folder"], dtype=opened["dtype"], positions=opened["positions"], options=opened["options"]
        )
        self.rows: dict[str, tuple[str, int]] = {}  # by name: the call, and which of its rows
        self.left: dict[str, int] = {}  # by call: the rows that are not finished
        self.inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def run(self) -> None:
        """Answer until the other side has said that it is the end."""
        threading.Thread(target=self._read, daemon=True).start()
        while True:
            while not self.rows or not self.inbox.empty():
                asked = self.inbox.get()
                if asked["do"] == "close":
                    return
                self._handle(asked)
            self._step()

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
            self.forget(asked["call"])
            self.send(call=asked["call"], error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())

    # -- rows ---------------------------------------------------------------------------------------------------------

    def generate(self, asked: dict[str, Any]) -> None:
        """Begin the rows of a call."""
        from .draw import LOGPROBS, SAMPLING

        call, n = asked["call"], asked["n"]
        said = asked["sampling"]
        SAMPLING[call] = Sampling(**{**said, "stop": tuple(said["stop"])})
        self.left[call] = len(asked["seeds"])
        for row, (seed, start, tokens) in enumerate(zip(asked["seeds"], asked["starts"], asked["limits"], strict=True)):
            name = f"{call}.{row}"
            LOGPROBS[name], self.rows[name] = {}, (call, row)
            drawn = {"row": name, "call": call, "seed": seed, "start": start}
            try:
                self.vllm.add_row(self.engine, name, asked["prompts"][row // n], tokens, asked["stops"], drawn)
            except Exception as error:
                raise ValueError(f"row {row}: {error}") from error

    def _step(self) -> None:
        for output in self.engine.step():
            if output.finished and output.request_id in self.rows:
                self._finish(output)

    def _finish(self, output: Any) -> None:
        from .draw import LOGPROBS

        name, made = output.request_id, output.outputs[0]
        call, row = self.rows.pop(name)
        drawn = LOGPROBS.pop(name)
        ids = list(made.token_ids)
        plain, sampled = zip(*(drawn[t] for t in range(len(ids))), strict=True)
        self.send(call=call, row=row, ids=ids, plain=plain, sampled=sampled, stopped=made.finish_reason == "stop")
        self.left[call] -= 1
        if not self.left[call]:
            self.forget(call)

    def forget(self, call: str) -> None:
        """End what is left of a call."""
        from .draw import LOGPROBS, SAMPLING

        names = [name for name, (whose, _) in self.rows.items() if whose == call]
        with contextlib.suppress(Exception):  # of rows that were never begun
            self.engine.abort_request(names)
        for name in names:
            del self.rows[name]
            LOGPROBS.pop(name, None)
        self.left.pop(call, None)
        SAMPLING.pop(call, None)

    # -- weights ------------------------------------------------------------------------------------------------------

    def publish(self, asked: dict[str, Any]) -> None:
        """Load the weights that lie in the memory of the other process, and say what they are and what they give."""
        from ...workers.weights.weight_boxes import digest, sums
        from .proof import whole

        if self.rows:
            raise RuntimeError(f"{len(self.rows)} rows are being sampled")
        began = time.monotonic()
        weights = open_weights(asked["weights"])
        lacking = self.vllm.load_weights(self.engine, weights)
        if not self.vllm.forget_prefixes(self.engine):
            raise RuntimeError("the prefix cache could not be emptied")
        loaded = time.monotonic()
        found = digest([sums(whole(weights))])
        rows = [self._probe(f"probe.{row}", tokens) for row, tokens in enumerate(asked["probe"])]
        times = {"load": loaded - began, "proof": time.monotonic() - loaded}
        self.send(call=asked["call"], digest=found, lacking=sorted(lacking), probe=rows, seconds=times)

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
