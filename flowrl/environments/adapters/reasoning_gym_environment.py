"""A data set of reasoning-gym: a task is a question of it, and the reward of an answer is the data set's score."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import WorkerError, near
from ..environment import Environment
from ..hooks import reward
from ..opened_once import opened_once
from .packages import import_package


class ReasoningGymEnvironment(Environment):
    """Answer questions of reasoning-gym: ``ReasoningGymEnvironment("chain_sum", seed=7, size=1000, max_terms=4)``.

    ``dataset`` and further options are those of ``reasoning_gym.create_dataset``; a subclass may define ``make()``
    instead. The tasks are the entries of the data set, which ``seed`` decides, and the reward is what its
    ``score_answer`` gives: a number from 0 to 1. ``read(text)`` gives the answer within a text of the policy, which is
    what stands between ``<answer>`` and ``</answer>``; a text without them is scored as no answer.

    >>> sums = fl.environments.ReasoningGymEnvironment("chain_sum", size=100)
    >>> sums.dataset, sums.seed, sums.options
    ('chain_sum', 0, {'size': 100})
    """

    turns: int = 1
    system: str | None = "Think first. Then give the answer alone between <answer> and </answer>."

    def __init__(self, dataset: str = "", *, seed: int = 0, **options: Any) -> None:
        self.dataset, self.seed, self.options = dataset, seed, options

    def make(self) -> Any:
        """Make the data set. Raises WorkerError for a name or an option that reasoning-gym does not know."""
        package = import_package("reasoning_gym", extra="reasoning-gym", asks=self)
        known = package.factory.DATASETS
        if self.dataset not in known:
            meant = near(self.dataset, known)
            raise WorkerError(
                f"{type(self).__name__}: reasoning-gym has no data set '{self.dataset}' among its {len(known)}.",
                fix=f"Did you mean '{meant}'?" if meant else "sorted(reasoning_gym.factory.DATASETS) lists them.",
            )
        try:
            return package.create_dataset(self.dataset, seed=self.seed, **self.options)
        except (TypeError, ValueError, AssertionError) as error:
            fix = f"Options are the fields of {known[self.dataset][1].__name__} in reasoning-gym."
            raise WorkerError(f"{type(self).__name__}: '{self.dataset}' refuses: {error}.", fix=fix) from error

    def read(self, text: str) -> str | None:
        """Give the answer within a text of the policy; None where there is none."""
        return import_package("reasoning_gym.utils", extra="reasoning-gym", asks=self).extract_answer(text)

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """The tasks: the question of each entry, and the entry, written as a literal of Python."""
        return [{"prompt": entry["question"], "entry": self._written(entry)} for entry in self._made]

    @reward()
    def score(self, response: str, entry: str) -> float:
        """What the data set gives for the answer."""
        return float(self._made.score_answer(answer=self.read(response), entry=ast.literal_eval(entry)))

    @opened_once
    def _made(self) -> Any:
        return self.make()

    def _written(self, entry: Mapping[str, Any]) -> str:
        """An entry as text. It is not made again where it is scored: some depend on the order of hashes too."""
        written = repr(_plain(entry))
        try:
            ast.literal_eval(written)
        except (ValueError, SyntaxError) as error:
            raise WorkerError(
                f"{type(self).__name__}: an entry of '{self.dataset}' holds more than plain values: {error}.",
                fix="Keep texts, numbers, lists, tuples, sets and dicts in entries.",
            ) from error
        return written


def _plain(value: Any) -> Any:
    """A value with the scalars of numpy as those of Python."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    import numpy as np  # with the package alone: to import flowrl.environments takes no numpy

    return value.item() if isinstance(value, np.generic) else value
