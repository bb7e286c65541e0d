"""What a server answers for a row, held against what it was asked: a row that is not right is named with its fault."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from math import isfinite
from typing import Any

from ...workers.model_options import Sampling
from ...workers.streaming import Reason, SampledRow
from .client import told
from .draw import LOGPROBS


class WrongRow(Exception):
    """An answer that cannot be taken: ``WrongRow("has 3 tokens and 2 log-probabilities")``."""


class NotFiniteRow(Exception):
    """A row with a log-probability that is no number: ``NotFiniteRow(4)`` names the token."""


@dataclass(eq=False)
class AskedRow:
    """A row that a server is asked for: ``AskedRow(1, 0, (5, 6), seed=7, start=0, limit=64, stops={2}, sampling=...)``.

    ``ids`` and ``logprobs`` are what is known of it so far, and ``aborting`` says that it was asked to end. ``label``
    is that of the weights with which it began, empty until it was sent, and ``sure``, where others came meanwhile, how
    many tokens are of these. ``kept``: what another engine had of it, whose tokens stand behind its prompt here.
    """

    call: int
    row: int
    prompt: tuple[int, ...]
    seed: int
    start: int
    limit: int
    stops: frozenset[int]
    sampling: Sampling
    ids: tuple[int, ...] = ()
    logprobs: list[tuple[float, float]] = field(default_factory=list)
    spans: tuple[tuple[str, int], ...] = ()
    reason: Reason | None = None
    aborting: bool = False
    label: str = ""
    sure: int | None = None
    kept: SampledRow | None = None

    @property
    def rid(self) -> str:
        """Its name on the server. None of them begins with another: an abort takes all that begin with what it says."""
        return f"{self.call}.{self.row}."

    def take(self, said: Mapping[str, Any], *, vocab: int, labels: Iterable[str]) -> None:
        """Take an answer. Raises WrongRow or NotFiniteRow.

        ``labels``: those of the weights that were published, in their order.
        """
        meta = said.get("meta_info")
        if not isinstance(meta, dict):
            raise WrongRow(f"was refused: {told(said)}")
        if self.reason is not None:
            raise WrongRow("was answered twice")
        ids, pairs = said.get("output_ids"), meta.get(LOGPROBS) or []
        if not isinstance(ids, list) or not all(type(t) is int and 0 <= t < vocab for t in ids):
            raise WrongRow("has tokens that are not of the vocabulary")
        if tuple(ids[: len(self.ids)]) != self.ids or len(ids) > self.limit:
            raise WrongRow(f"has {len(ids)} tokens, which do not go on from the {len(self.ids)} before")
        if len(pairs) != len(ids):
            raise WrongRow(
                f"has {len(ids)} tokens and {len(pairs)} log-probabilities: flowrl's processor did not draw them"
            )
        for token, pair in enumerate(pairs[len(self.ids) :], len(self.ids)):
            if pair is None or not all(isinstance(p, float | int) and isfinite(p) for p in pair):
                raise NotFiniteRow(token)
        ended = meta.get("finish_reason")
        if ended is not None:
            self._end(ended, ids, meta, labels)
        self.ids, self.logprobs = tuple(ids), [(plain, sampled) for plain, sampled in pairs]

    def _end(self, ended: Mapping[str, Any], ids: list[int], meta: Mapping[str, Any], labels: Iterable[str]) -> None:
        kind = ended.get("type")
        if kind == "abort" and not self.aborting:
            raise WrongRow(f"was ended by the server: {told(ended)}")
        if kind == "stop" and (not ids or ids[-1] not in self.stops):
            raise WrongRow(f"was stopped at token {ids[-1] if ids else None}, which is no stop token here")
        if kind == "length" and len(ids) != self.limit:
            raise WrongRow(f"was ended after {len(ids)} of {self.limit} tokens: the server has no room for it")
        if kind not in ("abort", "stop", "length"):
            raise WrongRow(f"ended for a reason that is not known: {told(ended)}")
        spans = [(str(s["version"]), s["end"] - s["start"]) for s in meta.get("weight_versions") or []]
        spans = [(label, tokens) for label, tokens in spans if tokens]
        if sum(tokens for _, tokens in spans) != len(ids):
            raise WrongRow(f"has {len(ids)} tokens, and versions of {sum(tokens for _, tokens in spans)}")
        known = set(dropwhile(lambda label: label != self.label, labels))
        if wrong := [label for label, _ in spans if label not in known]:
            raise WrongRow(f"was made by weights '{wrong[0]}'; it began with '{self.label}', published from here")
        if kind == "abort":  # which a server also says of a row that ended with its last token
            kind = "stop" if ids and ids[-1] in self.stops else "length" if len(ids) == self.limit else "aborted"
        self.spans, self.reason = tuple(spans), kind

    @property
    def certain(self) -> int:
        """How many tokens it has of which the weights are known, those that are kept too."""
        here = len(self.ids) if self.sure is None else self.sure
        return here + (0 if self.kept is None else len(self.kept.ids))

    def again(self, had: SampledRow) -> AskedRow:
        """Return the row as it is asked for once more, to go on from the tokens that it had."""
        new = had.ids[0 if self.kept is None else len(self.kept.ids) :]
        place = (*self.prompt, *new), self.seed, self.start + len(new), self.limit - len(new)
        return AskedRow(self.call, self.row, *place, self.stops, self.sampling, kept=had)

    def cut(self, versions: Mapping[str, int]) -> SampledRow:
        """Return the row as it would end now, with the tokens of which the weights are known."""
        tokens = len(self.ids) if self.sure is None else self.sure
        spans = ((self.label, tokens),) if tokens else ()
        part = replace(self, ids=self.ids[:tokens], logprobs=self.logprobs[:tokens], spans=spans)
        return part.left(versions, "aborted")

    def left(self, versions: Mapping[str, int], reason: Reason) -> SampledRow:
        """Return the row as it leaves; ``versions`` are those of labels."""
        spans = [] if self.kept is None else list(self.kept.versions)
        for label, tokens in self.spans:
            if spans and spans[-1][0] == versions[label]:
                spans[-1] = versions[label], spans[-1][1] + tokens
            else:
                spans.append((versions[label], tokens))
        plain, sampled = tuple(p for p, _ in self.logprobs), tuple(s for _, s in self.logprobs)
        ids = self.ids
        if (kept := self.kept) is not None:
            ids, plain = (*kept.ids, *ids), (*kept.rollout_logprobs, *plain)
            sampled = (*kept.sampling_logprobs, *sampled)
        return SampledRow(self.call, self.row, ids, plain, sampled, tuple(spans), reason)
