"""Arguments on the command line: ``--arg actor.lr=2e-6`` of a worker, ``--arg level=2`` of an environment."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Any

from ...errors import At, FlowError, UsageError
from ...flow import Flow
from ...worker_arguments import shown_arguments
from ...yaml_values import read_value

_WIDTH = 100  # of a line of help


def read_argument(word: str) -> tuple[str, Any]:
    """Return the name and the value of ``level=2``, whose value is YAML. Raises UsageError where it has none.

    A text is what it was given as, with colons and all: ``prompt=What: now``.
    """
    return _read(word, r"[^\W\d]\w*", "NAME=VALUE", "level=2", plain_texts=True)


def _read(word: str, pattern: str, form: str, example: str, *, plain_texts: bool = False) -> tuple[str, Any]:
    """Return what stands before the first = of a word, which the pattern describes, and the value behind it."""
    name, equals, text = word.partition("=")
    if not equals or not re.fullmatch(pattern, name):
        raise UsageError(f"--arg {word} is no {form}.", fix=f"Write --arg {example}.")
    if not text.strip():
        fix = f"Write --arg {name}=null for None, --arg {name}='\"\"' for an empty text."
        raise UsageError(f"--arg {word}: the value is empty, as of a variable of the shell that is not set.", fix=fix)
    return name, read_value(text, f"--arg {word}", plain_texts=plain_texts)


def use_said_arguments(flow: Flow, words: Sequence[str]) -> None:
    """Give the workers of a flow the arguments of ``--arg WORKER.NAME=VALUE``; later ones win.

    Those of a worker are looked at together. Raises UsageError, or the error of the worker's class, at these words.
    """
    by_worker: dict[str, dict[str, tuple[str, Any]]] = {}
    for word in words:
        path, value = _read(word, r"[\w-]+(\.\w+)+", "WORKER.NAME=VALUE", "actor.lr=2e-6")
        worker, _, name = path.partition(".")
        if "." in name:
            whole, _, field = name.rpartition(".")
            fix = f"Give it whole: --arg '{worker}.{whole}={{{field}: {word.partition('=')[2]}}}'."
            raise UsageError(f"--arg {word}: '{name}' is no argument of a worker.", fix=fix)
        by_worker.setdefault(worker, {})[name] = (word, value)
    for worker, given in by_worker.items():
        try:
            flow.use_arguments(worker, **{name: value for name, (_, value) in given.items()})
        except FlowError as error:
            error.at = At(" ".join(f"--arg {word}" for word, _ in given.values()), 0)
            raise


def help_on_arguments(flow: Flow) -> str:
    """Return what ``--help`` says of the arguments of workers: their names and values."""
    texts = {h.name: ", ".join(f"{n}={v}" for n, v in shown_arguments(h).items()) for h in flow.handles}
    wide = max(map(len, texts), default=0) + 2
    return "\n".join(
        textwrap.fill(text, _WIDTH - 2, initial_indent=name.ljust(wide), subsequent_indent=" " * wide)
        for name, text in texts.items()
        if text
    )
