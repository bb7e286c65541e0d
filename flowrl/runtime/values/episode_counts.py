"""What a run counts of the episodes of a rollout, without being asked: how they ended, and what became of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...batch import Batch, Key
from ...workers.episodes import OUTCOMES
from .remote_batch import COUNTED, OUTCOME, RemoteBatch, counted_of


@dataclass
class EpisodeCounts:
    """How many episodes ended how, and sums over them.

    >>> counts = EpisodeCounts(Counter(finished=3, truncated_turns=1), Counter(sampled_tokens=40, delivered_tokens=30))
    >>> counts.metrics()["delivered_fraction"], counts.metrics()["truncated"]
    (0.75, 1)
    """

    ended: Counter[str] = field(default_factory=Counter[str])
    sums: Counter[str] = field(default_factory=Counter[str])

    def add(self, other: EpisodeCounts) -> None:
        """Count other episodes too."""
        self.ended.update(other.ended)
        self.sums.update(other.sums)

    def metrics(self) -> dict[str, float]:
        """Numbers of each outcome, of all that were cut off and of all failures, the turns of an average episode, and
        the share of sampled tokens that rows have: 1 where nothing was sampled."""
        sampled, episodes = self.sums["sampled_tokens"], self.ended.total()
        return {
            **{name: self.ended[name] for name in OUTCOMES},
            "truncated": sum(self.ended[name] for name in OUTCOMES if name.startswith("truncated")),
            "failures": sum(self.ended[name] for name in OUTCOMES if is_failure(name)),
            "turns": self.sums["turns"] / episodes if episodes else 0.0,
            "delivered_fraction": self.sums["delivered_tokens"] / sampled if sampled else 1.0,
            **{name: self.sums[name] for name in ("retries", "replaced", "forks", "repairs")},
        }


def is_failure(outcome: str) -> bool:
    """Return whether an outcome is a failure of the environment, of what grades, or of the machine."""
    return outcome.endswith("failure")


def count_episodes(rows: Any) -> EpisodeCounts | None:
    """Return what is counted of episodes; None of other rows."""
    found = _reported(rows)
    if not found:
        return None
    ended = Counter(OUTCOMES[place] for place in found[OUTCOME])
    return EpisodeCounts(ended, Counter({name: sum(found[name]) for name in COUNTED}))


def failed_episodes(rows: Any) -> dict[Key, str]:
    """Return the outcomes of episodes that failed, by their rows."""
    found = _reported(rows)
    if not found:
        return {}
    ended = zip(rows.keys, (OUTCOMES[place] for place in found[OUTCOME]), strict=True)
    return {key: outcome for key, outcome in ended if is_failure(outcome)}


def _reported(rows: Any) -> Mapping[str, list[int]]:
    """Return the counts of each row, also of rows that lie on ranks, which report them."""
    if isinstance(rows, Batch):
        return counted_of(rows)
    if not isinstance(rows, RemoteBatch) or any(name not in rows.fields for name in (OUTCOME, *COUNTED)):
        return {}
    found = {name: rows.columns[name].sizes(rows.keys) for name in (OUTCOME, *COUNTED)}
    return {name: counts for name, counts in found.items() if counts is not None} if None not in found.values() else {}
