"""The server of one engine: started in a Python with SGLang, or that of ``url:``; looked at, ended, started again."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ...errors import ModelError, RunError
from .client import Client
from .process import ServerProcess, free_port
from .versions import check_version

START_SECONDS = 900.0
#: The environment variable with the key of a server of ``url:``.
KEY = "FLOWRL_SGLANG_KEY"
#: What a server of ``url:`` has to be started with, by its name among the server's arguments.
NEEDED = {
    "enable_custom_logit_processor": "--enable-custom-logit-processor",
    "disable_overlap_schedule": "--disable-overlap-schedule",
    "skip_tokenizer_init": "--skip-tokenizer-init",
}


class Serving:
    """``Serving(options, {"folder": ..., "dtype": "float32", ...}, kind="Qwen2ForCausalLM")``, not started yet.

    ``options`` are those of the engine. ``opened`` is what a process is told that is started, but for its address and
    its key. ``kind`` is the class of the model. ``info`` is what the server says of itself.
    """

    def __init__(self, options: Mapping[str, Any], opened: Mapping[str, Any], kind: str) -> None:
        self.options, self.opened, self.kind = options, opened, kind
        self.process: ServerProcess | None = None
        self.info: Mapping[str, Any] = {}

    @property
    def url(self) -> str:
        """The address of a server that somebody has started; empty for one that is started here."""
        return self.options["url"]

    @property
    def gives_memory_back(self) -> bool:
        """Whether it can."""
        return bool(self.info.get("enable_memory_saver"))

    def start(self) -> Client:
        """Start a server, or find that of ``url:``; return what it is asked by."""
        patience = float(self.options["patience"])
        if self.url:
            return Client(self.url, os.environ.get(KEY, ""), patience)
        key, port = secrets.token_hex(16), free_port()
        opened = {**self.opened, "host": "127.0.0.1", "port": port, "key": key}
        self.process = ServerProcess(self.options["python"] or sys.executable, opened)
        return Client(f"http://127.0.0.1:{port}", key, patience)

    def look(self, client: Client) -> None:
        """Wait until the server is there, and see that it does what is needed. Raises ModelError where it does not."""
        if self.process is not None:
            self._wait(self.process, client)
        where = f"The server of SGLang at {client.url}"
        try:
            self.info = client.ask("/server_info")
            model = client.ask("/model_info")
        except (OSError, RunError) as error:
            how = error.what if isinstance(error, RunError) else str(error)
            raise ModelError(f"{where} does not answer: {how}", fix=f"Start it, and put its key into {KEY}.") from error
        check_version(str(self.info.get("version")))
        if lacking := [flag for name, flag in NEEDED.items() if not self.info.get(name)]:
            raise ModelError(f"{where} runs without what flowrl needs.", fix=f"Start it with {' '.join(lacking)}.")
        if model.get("architectures") != [self.kind]:
            what = f"{where} has a model of {model.get('architectures')}; here it is {[self.kind]}."
            raise ModelError(what, fix="Start it with the model of the worker.")

    @staticmethod
    def _wait(process: ServerProcess, client: Client) -> None:
        """Wait until a server that was started answers."""
        end = time.monotonic() + START_SECONDS
        while True:
            if how := process.ended(0.5):
                raise ModelError(f"SGLang does not start. {how}", fix="See what it says above.")
            with suppress(OSError, RunError):
                client.ask("/model_info", seconds=5)
                return
            if time.monotonic() > end:
                what = f"SGLang does not start in {START_SECONDS:g} s.{process.written()}"
                raise ModelError(what, fix="See what it says above.")

    def ended(self, seconds: float) -> str | None:
        """Return how its process ended, where it does so in so many seconds; None of one that was not started here."""
        return None if self.process is None else self.process.ended(seconds)

    def close(self) -> None:
        """End it, where it was started here."""
        if self.process is not None:
            self.process.close()
