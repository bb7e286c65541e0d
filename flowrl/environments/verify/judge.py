"""Grades answers by asking a language model at an endpoint that speaks OpenAI's protocol."""

from __future__ import annotations

import http.client
import inspect
import json
import os
import re
import string
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...errors import UsageError
from ..interruptible import Interruptible
from .known_answers import KnownAnswers, name_of
from .verdict import VerifierFailed

QUESTION = """A question was answered.

Question: {prompt}

Answer: {response}

Grade the answer from 0 (worthless) to 10 (right and complete). Give reasons briefly, then a last line: Score: N"""
_SCORE = re.compile(r"score\W{0,4}(\d+(?:\.\d+)?)", re.IGNORECASE)
_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)
_LARGEST = 4 << 20  # bytes of an answer
_LONGEST_PAUSE = 30.0


def score_of_ten(said: str) -> float | None:
    """The last ``Score: N`` of a text as a part of ten, at most 1; None without one.

    >>> fl.environments.verify.score_of_ten("It is nearly right. Score: 7")
    0.7
    """
    found = _SCORE.findall(said)
    return min(float(found[-1]) / 10, 1.0) if found else None


class Judge:
    """A reward function that asks a model: ``judge(prompt=..., response=..., **columns)`` is a number.

    ``question`` is filled in by what it is called with, as Python formats text, and sent as the user's message to
    ``base_url + "/chat/completions"``; a reward asks for the columns that it names. ``read`` makes a number of what the
    model says, or None where it says none. ``key_variable`` names the environment variable that holds the key of the
    endpoint. ``concurrency`` requests are under way at once; each may take ``seconds`` in all. What fails is asked
    again ``retries`` times, after a second and twice as many each further time, or as many as the server says.

    What was answered is kept by the content of the request, so that equal answers are asked for once; with ``cache`` in
    a file, for later runs too.

    Raises VerifierFailed, an OSError, where the endpoint cannot be reached or refuses, and ValueError where the model
    says no number: both are failures of the row, and no reward.

    >>> judge = fl.environments.verify.Judge("http://127.0.0.1:8000/v1", "judge-8b", seconds=30)
    >>> reward = fl.Flow("judged").worker(fl.FunctionReward, judge, concurrency=32, timeout=None)
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        question: str = QUESTION,
        system: str | None = None,
        read: Callable[[str], float | None] = score_of_ten,
        key_variable: str | None = None,
        concurrency: int = 8,
        seconds: float = 60.0,
        retries: int = 3,
        cache: str | Path | None = None,
        **more: Any,
    ) -> None:
        address = urlsplit(base_url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise UsageError(f"{base_url!r} is no address of an endpoint.", fix="Write http://HOST:PORT/v1.")
        if concurrency < 1 or seconds <= 0 or retries < 0:
            raise UsageError(
                f"concurrency={concurrency}, seconds={seconds}, retries={retries} are no limits.",
                fix="Give concurrency 1 or more, seconds above 0, retries 0 or more.",
            )
        self.__signature__ = _signature(question)
        self._given = {"base_url": base_url, "model": model, "question": question, "system": system, "read": read}
        self._given |= {"key_variable": key_variable, "concurrency": concurrency, "seconds": seconds}
        self._given |= {"retries": retries, "cache": cache, **more}
        self.base_url, self.model, self.question, self.system, self.read = base_url, model, question, system, read
        self.key_variable, self.seconds, self.retries = key_variable, seconds, retries
        self._more = more
        self._room = threading.BoundedSemaphore(concurrency)
        self._answers = KnownAnswers(None if cache is None else Path(cache))

    def __getstate__(self) -> dict[str, Any]:
        """As it is sent to another process: what it was made with."""
        return self._given

    def __setstate__(self, given: dict[str, Any]) -> None:
        self.__init__(**given)

    def __call__(self, prompt: str = "", response: str = "", **columns: Any) -> float:
        """The grade of a response."""
        body = self._body(self.question.format(prompt=prompt, response=response, **columns))
        return self._answers.read(name_of([self.base_url, body]), lambda: self._ask(body), self._read)

    def _body(self, question: str) -> dict[str, Any]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [*system, {"role": "user", "content": question}]
        return {"model": self.model, "messages": messages, "temperature": 0, **self._more}

    def _read(self, said: str) -> float:
        number = self.read(said)
        if number is None:
            raise ValueError(f"the judge said no number: {said[-300:]!r}")
        return float(number)

    def _ask(self, body: Mapping[str, Any]) -> str:
        """What the model says. Raises VerifierFailed."""
        pause = 1.0
        for attempt in range(self.retries + 1):
            wait: float | None = None
            try:
                with self._room:
                    status, after, said = self._send(json.dumps(body).encode())
                if status == 200:
                    return _content(said)
                why = f"status {status}: {said[:300].decode(errors='replace')}"
                if status not in _AGAIN:
                    raise VerifierFailed(f"the judge at {self.base_url} refused: {why}")
                wait = after
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, VerifierFailed):
                    raise
                why = f"{type(error).__name__}: {error}"
            if attempt < self.retries:
                time.sleep(min(pause if wait is None else wait, _LONGEST_PAUSE))
                pause = min(2 * pause, _LONGEST_PAUSE)
        raise VerifierFailed(f"the judge at {self.base_url} has not answered {self.retries + 1} times: {why}")

    def _send(self, body: bytes) -> tuple[int, float | None, bytes]:
        """Status, seconds to wait if the server says so, and the body. Raises OSError, also where time is up."""
        address, headers = urlsplit(self.base_url), self._headers()
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        assert address.hostname is not None, "it was looked at as the judge was made"
        connection = kind(address.hostname, address.port, timeout=self.seconds)
        request = Interruptible(connection)
        timer = threading.Timer(self.seconds, request.interrupt)
        timer.daemon = True
        timer.start()
        try:
            request.connect()
            connection.request("POST", address.path.rstrip("/") + "/chat/completions", body, headers)
            response = connection.getresponse()
            found = response.read(_LARGEST + 1)
            if request.is_interrupted:
                raise TimeoutError(f"it took longer than {self.seconds} s")
            if len(found) > _LARGEST:
                raise OSError(f"the answer is longer than {_LARGEST} bytes")
            after = response.getheader("Retry-After", "")
            return response.status, float(after) if re.fullmatch(r"\d+(\.\d+)?", after) else None, found
        except (OSError, http.client.HTTPException) as error:
            raise TimeoutError(f"it took longer than {self.seconds} s") if request.is_interrupted else error from None
        finally:
            timer.cancel()
            connection.close()

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.key_variable is not None:
            key = os.environ.get(self.key_variable)
            if not key:
                raise VerifierFailed(f"the environment variable {self.key_variable} has no key for {self.base_url}")
            headers["Authorization"] = f"Bearer {key}"
        return headers


def _signature(question: str) -> inspect.Signature:
    """What a reward is called with that fills in this text: ``prompt``, ``response``, and the columns that it names."""
    try:
        named = [name for _, name, _, _ in string.Formatter().parse(question) if name is not None]
        names = dict.fromkeys(re.split(r"[.[]", name)[0] for name in named)
        if wrong := [name for name in names if not name.isidentifier()]:
            raise ValueError(f"{{{wrong[0]}}} names no column")
    except ValueError as error:
        raise UsageError(
            f"The question of a judge is no text to fill in: {error}.",
            fix="Name columns as {answer}, and write {{ and }} for braces that are to be sent.",
        ) from None
    own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default="") for name in ("prompt", "response")]
    others = [name for name in names if name not in ("prompt", "response")]
    return inspect.Signature([*own, *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in others)])


def _content(said: bytes) -> str:
    """The text of an answer. Raises OSError for what is none: another server's page, say."""
    try:
        content = json.loads(said)["choices"][0]["message"]["content"]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise OSError(f"it is no chat completion: {said[:300].decode(errors='replace')}") from error
    return content if isinstance(content, str) else ""
