"""How long the responses to each prompt were in earlier steps: by it prompts are divided among replicas."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from ..values.call import Call
from ..values.remote_batch import RemoteBatch
from .protocol import Reply

#: Prompts that are remembered, about: a prompt that came longer ago than so many others is as a new one.
REMEMBERED = 20_000


class ExpectedLengths:
    """The mean length of the responses to a prompt, by worker, program, prompt and step.

    A call of step ``k`` sees those of steps up to ``k - 1 - staleness`` alone. They are committed when it begins, so
    what it expects does not depend on which calls have ended by then, nor on whether the run was resumed.
    """

    def __init__(self, staleness: int = 0) -> None:
        self._staleness = staleness
        self._known: dict[str, dict[str, dict[int, float]]] = {}
        self._lock = threading.Lock()

    def sizes(self, call: Call, main: RemoteBatch, n: Any = 1) -> list[int] | None:
        """Return for each row of a call that generates what it is expected to take, in tokens; None where no prompt is
        known.

        That is its prompt, and ``n`` responses of the length that it had last. A prompt that is not
        known counts as the mean of the others.
        """
        groups = main.groups()
        prompts = [prompt_of(main, rows[0]) for rows in groups]
        last = call.info.step - 1 - self._staleness
        first = last - max(1, REMEMBERED // max(1, len(groups)))
        with self._lock:
            known = self._known.get(_title(call), {})
            steps = [known.get(prompt, {}) for prompt in prompts]
            latest = [max((s for s in by_step if first < s <= last), default=None) for by_step in steps]
            found = [None if at is None else by_step[at] for at, by_step in zip(latest, steps, strict=True)]
        there = [length for length in found if length is not None]
        if not there:
            return None
        mean = sum(there) / len(there)
        sizes = main.sizes()
        for rows, length in zip(groups, found, strict=True):
            for row in rows:
                sizes[row] += round((n if isinstance(n, int) else 1) * (mean if length is None else length))
        return sizes

    def note(self, call: Call, main: RemoteBatch, replies: Mapping[int, Reply]) -> None:
        """Keep how long the responses of a call that is done were."""
        of: dict[int, list[int]] = {}
        for reply in replies.values():
            for key, length in zip(reply.keys or (), reply.sizes.get("response_ids", ()), strict=False):
                of.setdefault(key[0], []).append(length)
        groups = main.groups() if of else []
        step = call.info.step
        with self._lock:
            known = self._known.setdefault(_title(call), {})
            for rows in groups:
                prompt, lengths = prompt_of(main, rows[0]), of.get(main.keys[rows[0]][0])
                if prompt and lengths:
                    by_step = known.setdefault(prompt, {})
                    by_step[step] = max(by_step.get(step, 0.0), sum(lengths) / len(lengths))
                    while len(by_step) > 2 * self._staleness + 2:  # as many steps may come to be asked for
                        del by_step[min(by_step)]
            if len(known) > 2 * REMEMBERED:
                oldest = step - 2 * self._staleness - 2 - REMEMBERED // max(1, len(groups))
                for prompt in [p for p, by_step in known.items() if max(by_step) < oldest]:
                    del known[prompt]

    def to_json(self) -> dict[str, Any]:
        """Return what is known, for a manifest."""
        with self._lock:
            return {title: {p: sorted(steps.items()) for p, steps in of.items()} for title, of in self._known.items()}

    def restore(self, said: Mapping[str, Any]) -> None:
        """Know what :meth:`to_json` has returned, and nothing else."""
        with self._lock:
            self._known = {
                title: {prompt: {int(s): float(n) for s, n in steps} for prompt, steps in known.items()}
                for title, known in said.items()
            }


def prompt_of(main: RemoteBatch, row: int) -> str:
    """Return what tells the prompt of a row from others, whenever it is drawn; empty where the driver lacks it."""
    source = main.columns.get("prompt_ids")
    if source is None:
        return ""
    stored, at = source.at(main.keys[row])
    if stored.batch is None:
        return ""
    ids = stored.batch["prompt_ids"][at]
    return blake2b(ids.numpy().tobytes(), digest_size=8).hexdigest()


def _title(call: Call) -> str:
    return f"{call.program}.{call.worker}"
