"""A mixture of sources: each row is drawn from one of them, by chance or in turn, as weights say."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any, cast

from ..batch import Batch, Column
from ..errors import DataError, did_you_mean, near
from ..graph.ops.allowed import check_values, flag, text
from ..graph.ops.field_types import FieldType
from ..graph.script.site import caller
from .source import OPTIONS, BadRow, Source

#: The option of a source that adds a field, for what is said where another one lacks it.
_OPTIONS = {"response_ids": "response", "tokens": "response", "response_mask": "response", "preferred": "rejected"}
_FORM = 'Write fl.data.mix({"math": math, "code": code}, weights={"math": 3, "code": 1}, batch=16).'
Drawn = tuple[str, Any]  # the name of a source, and a row of it


class Mixture:
    """Rows of several sources, made by :func:`flowrl.data.mix`. A source itself, with the column that says which.

    Every source goes on in its own order, with its own options; ``batch`` of the parts is not used. The mixture ends
    where it draws from a part that has ended.

    >>> easy, hard = (fl.data.rows([{"prompt": text}], batch=1) for text in ("1+1=", "97+58="))
    >>> list(fl.data.mix({"easy": easy, "hard": hard}, batch=8).schema())
    ['prompt', 'prompt_ids', 'source']
    """

    def __init__(
        self,
        parts: Mapping[str, Source | Mixture],
        weights: Mapping[str, float] | None,
        batch: int,
        seed: int,
        column: str | None,
        exact: bool = False,
    ) -> None:
        self.made_at = caller()
        named: Any = parts if isinstance(cast("Any", parts), Mapping) else {}  # a list has no names
        self.parts: dict[str, Source | Mixture] = dict(named)
        self.batch, self.seed, self.column, self.exact = batch, seed, column, exact
        self._check()
        self.weights = self._shares(dict.fromkeys(self.parts, 1.0) if weights is None else weights)
        self._limits = list(accumulate(self.weights.values()))
        self._whole = whole_weights(self.weights)
        self._schema: dict[str, FieldType] | None = None

    def __repr__(self) -> str:
        return f"<a mixture of {', '.join(self.parts)}, {self.batch} rows a step>"

    @property
    def tokenizer(self) -> Any:
        """What the parts were given, which is the same for all; None asks for the tokenizer of the actor."""
        return next(iter(self.parts.values())).tokenizer

    @property
    def dropped(self) -> int:
        """How many prompts the parts have left out with ``overlong="drop"``."""
        return sum(part.dropped for part in self.parts.values())

    @property
    def skipped(self) -> int:
        """How many rows the parts have left out with ``on_bad="skip"``."""
        return sum(part.skipped for part in self.parts.values())

    def schema(self) -> dict[str, FieldType]:
        """Return columns of the batches and their types: those of every part, and ``column``.

        Raises DataError for a part that lacks a column of another one.
        """
        if self._schema is None:
            schemas = {name: part.schema() for name, part in self.parts.items()}
            for name, columns in schemas.items():
                for other, others in schemas.items():
                    self._compare((name, columns), (other, others))
            [first, *_] = schemas.values()
            if self.column is None:
                self._schema = dict(first)
                return self._schema
            if self.column in first:
                raise DataError(
                    f"The sources of this mixture have a column '{self.column}', and it adds one that says the source.",
                    at=self.made_at,
                    fix='Give it another name: fl.data.mix(..., column="drawn_from").',
                )
            self._schema = {**first, self.column: FieldType("any")}
        return self._schema

    def cursor(self) -> MixtureCursor:
        """Return a place at the beginning of the mixture."""
        return MixtureCursor(self)

    def to_batch(self, rows: Sequence[Drawn], first_uid: int, tokenizer: Any) -> Batch:
        """Return the batch of drawn rows, with the keys (first_uid,), (first_uid + 1,), ... Raises DataError.

        Raises DataError also where all were too long.
        """
        batch, bad = self.read(rows, first_uid, tokenizer)
        if bad and not len(batch):
            with bad[0].source.placing():
                raise bad[0].error
        if rows and not len(batch):
            raise DataError(
                f"All {len(rows)} prompts of a step are longer than max_prompt_tokens.",
                at=self.made_at,
                fix="Raise max_prompt_tokens of the sources.",
            )
        for row in bad:
            row.skip()
        return batch

    def read(self, rows: Sequence[Drawn], first_uid: int, tokenizer: Any) -> tuple[Batch, list[BadRow]]:
        """The same, of which nothing may be left, and the rows that cannot be read, which are not counted yet."""
        self.schema()
        read, bad = list[Batch](), list[BadRow]()
        for name, part in self.parts.items():
            uids = [first_uid + i for i, (drawn, _) in enumerate(rows) if drawn == name]
            if uids:
                batch, more = part.read([row for drawn, row in rows if drawn == name], 0, tokenizer)
                bad += more
                if not len(batch):
                    continue
                keys = [(uids[first], *rest) for first, *rest in batch.keys]
                said = {} if self.column is None else {self.column: Column.of([name] * len(keys), dtype="any")}
                read.append(Batch(keys, {**batch.columns, **said}))
        return read[0].concat(*read[1:]).sort() if read else Batch([], {}), bad

    def picks(self, first: int, n: int, owed: dict[str, int]) -> list[str]:
        """The parts that give the rows of n draws from the first one on; ``owed`` is brought up to date.

        ``owed`` is what each part lacks of its share so far, in rows times the sum of the whole weights. The part that
        lacks most gives the next row (smooth weighted round robin). What one lacks is above minus a row, and the sum is
        0: after a number of draws of which every share is whole, none lacks anything.
        """
        if not self.exact:
            return [self.pick(first + i) for i in range(n)]
        total, found = sum(self._whole.values()), list[str]()
        for _ in range(n):
            for name, weight in self._whole.items():
                owed[name] += weight
            name = max(owed, key=lambda name: owed[name])
            owed[name] -= total
            found.append(name)
        return found

    def pick(self, draw: int) -> str:
        """The part that gives the row of that draw by chance."""
        number = int.from_bytes(hashlib.blake2b(repr((self.seed, draw)).encode(), digest_size=8).digest(), "little")
        place = bisect_right(self._limits, number / 2**64 * self._limits[-1])
        return list(self.parts)[min(place, len(self.parts) - 1)]

    # -- what cannot be mixed ---------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise DataError for parts that are no sources, or whose tokens would be of different tokenizers."""
        given: Mapping[Any, Any] = self.parts
        wrong = next(
            (k for k, v in given.items() if not isinstance(k, str) or not isinstance(v, (Source, Mixture))), None
        )
        if wrong is not None or not given:
            raise DataError("A mixture is made of sources by name.", at=self.made_at, fix=_FORM)
        given = {"batch": self.batch, "seed": self.seed, "column": self.column, "exact": self.exact}
        allowed = {**{n: OPTIONS[n] for n in ("batch", "seed")}, "column": text() | None, "exact": flag()}
        check_values("A mixture", given, allowed, DataError)
        (first, one), *others = self.parts.items()
        for name, part in others:
            if part.tokenizer is not one.tokenizer and part.tokenizer != one.tokenizer:
                raise DataError(
                    f"The sources '{first}' and '{name}' of a mixture have different tokenizers.",
                    at=self.made_at,
                    fix="Give both the same tokenizer=, or none, for that of the actor.",
                )

    def _shares(self, weights: Mapping[str, float]) -> dict[str, float]:
        """The weights in the order of the parts. DataError for a name without one, or one that is no weight."""
        if not isinstance(cast("Any", weights), Mapping):
            raise DataError(f"weights= takes a weight by name, not {weights!r}.", at=self.made_at, fix=_FORM)
        for name in weights:
            if name not in self.parts:
                what = f"weights= names '{name}', which is no source of this mixture."
                raise DataError(what, at=self.made_at, have=self.parts, fix=did_you_mean(name, self.parts))
        for name in self.parts:
            weight: Any = weights.get(name)
            if name not in weights:
                raise DataError(
                    f"weights= gives none to '{name}'.", at=self.made_at, have=weights, fix="Give every source one."
                )
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
                raise DataError(
                    f"The weight of '{name}' is {weight!r}.",
                    at=self.made_at,
                    fix="Give a number above 0; leave out a source that is not to be drawn from.",
                )
        return {name: float(weights[name]) for name in self.parts}

    def _compare(self, one: tuple[str, Mapping[str, Any]], other: tuple[str, Mapping[str, Any]]) -> None:
        """Raise DataError where the second source lacks a column of the first."""
        (name, columns), (lacking, others) = one, other
        for column in columns:
            if column in others:
                continue
            meant = near(column, others.keys() - columns.keys())
            if column in _OPTIONS:
                fix = f"Give '{lacking}' {_OPTIONS[column]}= too."
            elif column == "messages":
                fix = "Give both prompts of one kind: text, or lists of messages."
            elif meant:
                fix = f"Call '{meant}' of '{lacking}' '{column}' too."
            else:
                fix = f"Add it to '{lacking}', or leave it out of '{name}' with columns=[...]."
            raise DataError(
                f"The source '{lacking}' of a mixture has no column '{column}', which '{name}' has.",
                at=self.made_at,
                have=others,
                fix=fix,
            )


class MixtureCursor:
    """A place in a mixture: how many rows were drawn, and a place in each part."""

    def __init__(self, source: Mixture) -> None:
        self.source = source
        self.draws = 0
        self._owed = dict.fromkeys(source.parts, 0)
        self._cursors = {name: part.cursor() for name, part in source.parts.items()}

    def state(self) -> dict[str, Any]:
        """The place, as a JSON record: ``{"draws": 32, "weights": {"math": 3.0}, "parts": {"math": {...}}}``."""
        parts = {name: cursor.state() for name, cursor in self._cursors.items()}
        owed = {"owed": dict(self._owed)} if self.source.exact else {}
        return {"draws": self.draws, "weights": dict(self.source.weights), "parts": parts, **owed}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to a place that :meth:`state` gave. DataError where it is one in another mixture."""
        weights = state.get("weights")
        if weights != self.source.weights:
            raise DataError(
                f"This place is in a mixture of {weights}, and now it is one of {self.source.weights}.",
                at=self.source.made_at,
                fix="Resume with the mixture that the run began with.",
            )
        if ("owed" in state) != self.source.exact:
            now, then = ("exact", "by chance") if self.source.exact else ("by chance", "exact")
            raise DataError(
                f"This place is in a mixture that is {then}, and now it is {now}.",
                at=self.source.made_at,
                fix="Resume with the mixture that the run began with.",
            )
        self.draws = state["draws"]
        self._owed |= state.get("owed", {})
        for name, cursor in self._cursors.items():
            cursor.load_state(state["parts"][name])

    def draw(self, n: int | None = None) -> list[Drawn]:
        """The next n rows (a step's, if None); fewer, and then none, once a part has ended."""
        wanted = self.source.batch if n is None else n
        owed = dict(self._owed)
        picks = self.source.picks(self.draws, wanted, self._owed)
        before = {name: cursor.state() for name, cursor in self._cursors.items()}
        rows = self._rows(picks)
        if len(rows) < len(picks):  # a part has ended: what others gave for draws after that one goes back
            for name, cursor in self._cursors.items():
                cursor.load_state(before[name])
            rows = self._rows(picks[: len(rows)])
            self._owed = owed
            self.source.picks(self.draws, len(rows), self._owed)
        self.draws += len(rows)
        return rows

    def _rows(self, picks: Sequence[str]) -> list[Drawn]:
        """A row for each pick, up to the first that its part has none for."""
        drawn = {name: iter(cursor.draw(picks.count(name))) for name, cursor in self._cursors.items()}
        rows: list[Drawn] = []
        for name in picks:
            row = next(drawn[name], None)
            if row is None:
                break
            rows.append((name, row))
        return rows


def whole_weights(weights: Mapping[str, float]) -> dict[str, int]:
    """Weights as whole numbers in the same proportion: of 0.1, 0.2 and 0.7 they are 1, 2 and 7.

    >>> whole_weights({"a": 0.1, "b": 0.25})
    {'a': 2, 'b': 5}
    """
    fractions = {name: Fraction(repr(weight)) for name, weight in weights.items()}
    common = math.lcm(*(fraction.denominator for fraction in fractions.values()))
    return {name: int(fraction * common) for name, fraction in fractions.items()}
