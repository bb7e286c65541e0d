"""How many tokens the rows of a call have: as was said, as in a run, as the script's data say, else assumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any

from ..graph.tracing.trace_records import HandleLike
from ..placement.cost.continuous_batch import Turns
from ..placement.cost.length_distribution import Lengths
from ..placement.cost.work import Role
from ..schedule.fly_program import Made
from .data_lengths import CHARACTERS, Texts, texts_of

PROMPT = 512  # tokens of a prompt, where neither the data nor the command line says
RESPONSE = 1024


@dataclass(frozen=True)
class Tokens:
    """What is said of lengths: ``Tokens(prompt=1024, kind="lognormal", numbers=(800, 1.0))``; None: not said.

    ``source``: the run that they were measured in, where it is one. ``alike``: the correlation of rows to one prompt.
    ``turns``: of episodes, each of which has all of these tokens; where none were said, ``measured_turns`` are those of
    single calls, by node or title, in the run ``turns_source``.
    """

    prompt: float | None = None
    kind: str = "fixed"
    numbers: tuple[float, ...] = ()
    source: str = ""
    alike: float = 0.0
    turns: Turns | None = None
    measured_turns: Mapping[str, Turns] = field(default_factory=dict[str, Turns], hash=False)
    turns_source: str = ""

    def turns_of(self, node: str, title: str) -> Turns | None:
        """Return the turns of the episodes that a call plays; None where nothing is known of them."""
        return self.turns or self.measured_turns.get(node) or self.measured_turns.get(title)


@dataclass(frozen=True)
class RowLengths:
    """Lengths by call: ``RowLengths(Tokens(prompt=1024), handles, roles)``."""

    tokens: Tokens
    handles: Sequence[HandleLike]
    roles: Mapping[str, Role]

    def of(self, made: Made) -> Lengths:
        """How long the rows of a call are: as was said, else as the data say, else the most that may be sampled."""
        prompt, response = self.prompt(made)[0], self.response(made)[0]
        tokens = self.tokens
        if not tokens.numbers:
            return Lengths(prompt, response)
        if tokens.kind == "fixed":
            return Lengths(prompt, max(response, tokens.numbers[0]), tokens.kind, tokens.numbers)
        if tokens.kind == "lognormal" and len(tokens.numbers) == 3:
            return Lengths(prompt, tokens.numbers[2], tokens.kind, tokens.numbers[:2], tokens.alike)
        return Lengths(prompt, self._most(made, tokens.numbers[0]), tokens.kind, tokens.numbers, tokens.alike)

    def _most(self, made: Made, mean: float) -> float:
        """The call's ``max_tokens``; no limit where what was said is longer on average: another model's lengths."""
        most = self._asked(made)
        return most if self.tokens.kind == "lognormal" and most is not None and most > mean else inf

    def prompt(self, made: Made) -> tuple[float, str]:
        """Tokens of a call's average prompt, and in words where that is from."""
        tokens = self.tokens
        if tokens.prompt is not None:
            return tokens.prompt, f"measured: {tokens.source}" if tokens.source else "said"
        texts, vocab = self._texts(made), self._vocabulary(made)
        if texts is not None:
            return texts.tokens(texts.prompt, vocab), texts.basis(vocab)
        return PROMPT, "assumed"

    def response(self, made: Made) -> tuple[float, str]:
        """Tokens of a call's responses where nothing was said of them, and in words where that is from."""
        texts, vocab = self._texts(made), self._vocabulary(made)
        if texts is not None and texts.response is not None:
            return texts.tokens(texts.response, vocab), texts.basis(vocab)
        asked = self._asked(made)
        return (asked, "max_tokens, the most") if asked is not None else (RESPONSE, "assumed")

    def _asked(self, made: Made) -> int | None:
        """The most tokens that a call may sample for a row, where the script says."""
        call = made.call
        most: Any = call.arguments.get("max_tokens")
        names = (*call.serves, call.worker, *(r.name for r in self.roles.values() if r.generates))
        given = {h.name: h.arguments.get("max_tokens") for h in self.handles}
        return most if most is not None else next((m for m in map(given.get, names) if isinstance(m, int)), None)

    def _texts(self, made: Made) -> Texts | None:
        """The texts of the first of a call's sources that says something of them."""
        for source in made.sources:
            if id(source) not in self._looked:  # kept with the source, so that the id stays its own
                self._looked[id(source)] = (source, texts_of(source))
            if self._looked[id(source)][1] is not None:
                return self._looked[id(source)][1]
        return None

    @cached_property
    def _looked(self) -> dict[int, tuple[Any, Texts | None]]:
        return {}

    def _vocabulary(self, made: Made) -> int:
        """Entries of the vocabulary of the model that reads a call's rows: the call's own, else one that generates."""
        known = [self.roles[n] for n in (*made.call.serves, made.call.worker) if n in self.roles]
        models = [r.model for r in (*known, *(r for r in self.roles.values() if r.generates)) if r.model is not None]
        return models[0].vocab if models else CHARACTERS + 1

    def said(self, calls: Mapping[str, Made]) -> Iterator[str]:
        """Tokens of prompts and responses, with where they are from, by the calls of which they are alike."""
        alike: dict[str, list[str]] = {}
        for node, made in calls.items():
            prompt, response = self.prompt(made), self.response(made)
            if self.tokens.numbers:
                basis = f"measured: {self.tokens.source}" if self.tokens.source else "said"
                length = f"{self.of(made).words} ({basis})"
            else:
                length = f"{_plain(response[0])} ({response[1]})"
            text = f"tokens of a prompt: {_plain(prompt[0])} ({prompt[1]}); of a response: {length}"
            alike.setdefault(text, []).append(node)
        for said, nodes in alike.items():
            yield said if len(alike) == 1 else f"{', '.join(nodes)}: {said}"


def _plain(count: float) -> str:
    """A count of tokens: ``1024``, ``5.78``."""
    return f"{count:g}" if count == round(count) else f"{count:.3g}" if count < 100 else f"{count:.0f}"
