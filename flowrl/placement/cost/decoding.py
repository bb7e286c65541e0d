"""How an engine reads prompts and draws tokens: what of it costs less than a plain token for each row at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..backends import backend

#: What a plan says beside an engine, as pairs of a name and a value.
Said = tuple[tuple[str, float | bool | str], ...]


@dataclass(frozen=True)
class Decoding:
    """``Decoding(reads_once=True, keeps_once=True, chunk=2048, speculative=3, accepted=0.7, draft=0.05)``.

    ``reads_once``: a prompt is computed once for all rows to it, ``keeps_once``: and its keys and values are there
    once. ``chunk``: so many tokens of prompts are read in a step beside its decode; 0 where a step does one or the
    other. ``speculative``: tokens that are drafted for each row in a step, and judged in one pass of the model;
    ``accepted`` is the probability that one is kept, ``draft`` what drafting one takes, as a part of a plain step.
    """

    reads_once: bool = False
    keeps_once: bool = False
    chunk: int = 0
    speculative: int = 0
    accepted: float = 0.0
    draft: float = 0.0

    @staticmethod
    @lru_cache(maxsize=256)
    def of(name: str, said: Said = ()) -> Decoding:
        """Return that of an engine, with what a plan says beside it."""
        row, options = backend(name), dict(said)
        known = {option.name: options.get(option.name, option.default) for option in row.options}
        cached = bool(known.get("prefix_cache", True))
        return Decoding(
            row.reads_prompts_once and cached,
            row.keeps_prompts_once and cached,
            int(known.get("prefill_chunk") or 0),
            int(known.get("speculative") or 0),
            float(known.get("accepted") or 0.0),
            float(known.get("draft") or 0.0),
        )

    @property
    def kept(self) -> float:
        """Tokens of a row that a step keeps on average: ``(1 - a^(k+1)) / (1 - a)``, one of them the model's own.

        Leviathan et al. 2023 (arXiv:2211.17192), equation 1: those up to the first that is not accepted.
        """
        return sum(self.accepted**i for i in range(self.speculative + 1))

    def prompts_read(self, rows: float, group: int) -> float:
        """Return how many whole prompts are computed for so many rows, ``group`` of them to one prompt."""
        return -(-rows // group) if self.reads_once else rows

    def prompt_kept(self, prompt: float, group: int) -> float:
        """Return tokens of its prompt that a row keeps, its share of those of a group."""
        return prompt / group if self.keeps_once else prompt
